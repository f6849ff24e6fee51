"""The metrics that a run logs, and a logger whose failures do not end the run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchtune import utils

from torchtune_adaptive.errors import reason_of

log = utils.get_logger("DEBUG")


@dataclass(frozen=True)
class Metric:
    """What a logged number means, and where it is logged."""

    unit: str
    meaning: str
    where: str = "always"


_PAIRS, _MEMORY = "DPO", "`log_peak_memory_stats`, on a GPU"
# Every name that a recipe logs, but for PPO, whose loop is torchtune's. Names do not change.
METRICS = {
    "loss": Metric("per predicted token; of DPO per pair", "mean over the step's samples on all ranks"),
    "lr": Metric("1", "learning rate of the next step"),
    "tokens_per_second_per_gpu": Metric(
        "tokens / s", "predicted tokens of the step over all ranks, by its seconds and ranks"
    ),
    "global_batch_size": Metric("samples", "of the optimizer step, over all ranks"),
    "batch_size": Metric("samples", "per rank and micro-step", "without `adaptive.global_batch_size`"),
    "micro_batch_size": Metric("samples", "largest micro-batch per rank, at present", "without a token budget"),
    "max_tokens_per_micro_batch": Metric(
        "tokens", "largest micro-batch per rank, at present, with padding", "with a token budget"
    ),
    "padding": Metric("fraction", "padded tokens among all tokens of rank 0 since the last logged step"),
    "oom_retries": Metric("count", "times that a step was run again, since this process started"),
    "grad_norm": Metric("1", "before clipping", "with `clip_grad_norm`"),
    "peak_memory_bytes": Metric(
        "bytes",
        "highest of rank 0 so far in this run's training",
        "on a GPU; on a CPU with `adaptive.memory_limit`",
    ),
    "host_memory_bytes": Metric("bytes", "anonymous resident memory of rank 0's process", "on Linux"),
    "gradient_noise_scale": Metric(
        "samples", "measured so far", "with `gradient_noise_scale`, after its first measurements"
    ),
    "rewards/chosen": Metric("1", "mean reward of chosen answers", _PAIRS),
    "rewards/rejected": Metric("1", "mean reward of rejected answers", _PAIRS),
    "rewards/accuracies": Metric("fraction", "pairs whose chosen answer has the larger reward", _PAIRS),
    "rewards/margins": Metric("1", "mean of chosen minus rejected reward", _PAIRS),
    "log_probs/chosen": Metric("nats", "mean log-probability of chosen answers", _PAIRS),
    "log_probs/rejected": Metric("nats", "mean log-probability of rejected answers", _PAIRS),
    "logits/chosen": Metric("1", "mean logit of chosen answers", _PAIRS),
    "logits/rejected": Metric("1", "mean logit of rejected answers", _PAIRS),
    "class_loss": Metric("per predicted token", "the student's own loss", "distillation"),
    "kd_loss": Metric("per predicted token", "the student's distance to its teacher", "distillation"),
    "peak_memory_active": Metric("GiB", "torchtune's: most bytes in active tensors of rank 0 so far", _MEMORY),
    "peak_memory_alloc": Metric("GiB", "torchtune's: most bytes allocated so far", _MEMORY),
    "peak_memory_reserved": Metric("GiB", "torchtune's: most bytes that the allocator held so far", _MEMORY),
}


def metrics_table() -> str:
    """The metrics as a table in Markdown.

    >>> metrics_table().splitlines()[3]
    '| `lr` | 1 | learning rate of the next step | always |'
    """
    rows = [f"| `{name}` | {one.unit} | {one.meaning} | {one.where} |" for name, one in METRICS.items()]
    return "\n".join(["| name | unit | meaning | logged |", "|---|---|---|---|", *rows])


class TolerantLogger:
    """A metric logger of torchtune whose failures cost metrics, but not the run.

    It warns of the first step that is not logged, and says when logging works again.

    Args:
        logger: torchtune's, or the user's own.
    """

    def __init__(self, logger: Any) -> None:
        self._logger = logger
        self._lost_steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger, name)

    def log_dict(self, payload: Mapping[str, Any], step: int) -> None:
        """As torchtune; an error is logged."""
        try:
            self._logger.log_dict(payload, step=step)
        except Exception as error:  # of any service or file system
            if not self._lost_steps:
                log.warning(f"Metrics of step {step} are not logged: {reason_of(error)}. Training continues.")
            self._lost_steps += 1
            return
        if self._lost_steps:
            log.warning(f"Metrics are logged again from step {step} on; {self._lost_steps} steps are missing.")
            self._lost_steps = 0

    def close(self) -> None:
        """As torchtune; an error is logged."""
        try:
            self._logger.close()
        except Exception as error:  # the run is complete
            log.warning(f"The metric logger could not be closed: {reason_of(error)}.")
