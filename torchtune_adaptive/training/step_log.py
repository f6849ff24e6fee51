"""What rank 0 logs while a run trains: the figures of steps, what happened in them, and a summary at the end."""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torchtune import training, utils
from torchtune.training.lr_schedulers import get_lr

from torchtune_adaptive.engine.memory.resident import anonymous_bytes
from torchtune_adaptive.engine.recovery.step import RecoverableStep
from torchtune_adaptive.engine.recovery.watch import MemoryPressure
from torchtune_adaptive.engine.search.strategies import SearchResult
from torchtune_adaptive.engine.search.tables import rounding_text
from torchtune_adaptive.text import count_text, format_bytes
from torchtune_adaptive.training.batch.growth import BatchGrowth
from torchtune_adaptive.training.batch.loader import StepLoader
from torchtune_adaptive.training.batch.micro_batches import MicroBatcher
from torchtune_adaptive.training.run_log import RunLog
from torchtune_adaptive.training.train_step import StepResult, TrainStep
from torchtune_adaptive.training.utilisation import Utilisation

log = utils.get_logger("DEBUG")

_MEMORY_EVENTS = {MemoryPressure.OUT_OF_MEMORY: "out of memory", MemoryPressure.THRASHING: "thrashing"}
_LONGEST_LIST = 4  # of batch sizes in the summary


@dataclass(eq=False)
class NotFinite:
    """Warns of the first loss or gradient norm that is not finite, and names the last checkpoint from before.

    Attributes:
        checkpoints: those that this process has finished, in order, with their steps; later ones are appended to it.
        resumed: the checkpoint from which the run resumed, with its step.
    """

    run_log: RunLog
    checkpoints: Sequence[tuple[Path, int]]
    resumed: tuple[Path, int] | None = None
    _has_warned: bool = field(default=False, init=False)

    def look(self, step: int, *, loss: float, grad_norm: float | None = None) -> None:
        """Look at the figures of step number ``step``, from 1. Later ones are not looked at after a warning."""
        named = {"loss": loss, "gradient norm": grad_norm}
        odd = [f"{name} {value}" for name, value in named.items() if value is not None and not math.isfinite(value)]
        if self._has_warned or not odd:
            return
        self._has_warned = True
        # The next step's loss shows whether the weights of a checkpoint are good.
        before = step if math.isfinite(loss) else step - 1
        saved = [*([] if self.resumed is None else [self.resumed]), *self.checkpoints]
        good = [one for one in saved if one[1] < before and one[0].exists()]
        last = "No checkpoint is known to give a finite loss."
        if good:
            last = f"The last checkpoint known to give a finite loss is {good[-1][0]} (step {good[-1][1]})."
        figures = ", ".join(odd)
        log.warning(f"Step {step}: {figures}, the first that is not finite. Training continues. {last}")
        self.run_log.append(
            event="not finite", step=step, figures=figures, checkpoint=str(good[-1][0]) if good else None
        )


@dataclass(eq=False)
class StepLog:
    """Writes the figures of steps to torchtune's metric logger and to the run's log, and events to the latter.

    Attributes:
        metric_logger: None on the other ranks, which log nothing.
        checkpoints, resumed: as for ``NotFinite``.
        every_steps: figures are logged of every n-th step.
        device: whose own memory statistics are logged; None: they are not.
        ranks: number of ranks over which tokens are counted.
        memory_limit_bytes: the lowest limit of all ranks; None without a limit.
        found: the search's result; None without a search.
        logs: where the metric logger writes; None if it is not known.
    """

    metric_logger: Any
    run_log: RunLog
    step: TrainStep
    recoverable: RecoverableStep[Any]
    micro_batches: MicroBatcher
    utilisation: Utilisation
    loader: StepLoader
    growth: BatchGrowth
    _: KW_ONLY
    checkpoints: Sequence[tuple[Path, int]]
    resumed: tuple[Path, int] | None = None
    every_steps: int = 1
    device: torch.device | None = None
    ranks: int = 1
    memory_limit_bytes: int | None = None
    found: SearchResult | None = None
    logs: str | None = None

    def __post_init__(self) -> None:
        self._num_memory_events = 0  # that are written
        # Of all steps that this process has trained. The first tokens are those of all ranks that are predicted.
        self._steps, self._num_tokens, self._num_own_tokens, self._seconds = 0, 0, 0, 0.0
        self._not_finite = NotFinite(self.run_log, self.checkpoints, self.resumed)
        self._has_seen_no_target = False

    @property
    def writes(self) -> bool:
        """Whether this rank logs."""
        return self.metric_logger is not None

    def write(self, step: int, result: StepResult, *, samples: int, epoch: int, seconds: float) -> None:
        """Log ``result`` of step number ``step``, from 1, which took ``seconds``, if this rank logs this step.

        ``samples``: over all ranks; the first step of an epoch also has what torchtune's accumulation left over.

        The meter's peak covers all steps so far, and the share of padding those since the last logged one.
        """
        if not self.writes:
            return
        self.write_events()
        self._not_finite.look(step, loss=result.loss, grad_norm=result.grad_norm)
        if not result.weight and not self._has_seen_no_target:
            self._has_seen_no_target = True
            log.warning(
                f"Step {step} has no target: all labels are masked. Its loss and gradient are 0; the optimizer steps"
                " all the same, by momentum and weight decay. Later steps like this are not named."
            )
            self.run_log.append(event="no target", step=step)
        self._steps += 1
        self._num_tokens += result.num_tokens
        self._num_own_tokens += self.micro_batches.step_tokens[0]
        self._seconds += seconds
        if step % self.every_steps:
            return
        figures = self._figures(result, samples=samples, seconds=seconds)
        self.metric_logger.log_dict(figures, step=step)
        self.run_log.append(step=step, epoch=epoch, seconds=seconds, **figures)

    def finish(self, how: str, *, step: int, epochs_run: int) -> None:
        """Log the end of the run, as ``log_end``."""
        if not self.writes:
            return
        self.write_events()
        log_end(
            self.run_log,
            how,
            step=step,
            epochs_run=epochs_run,
            rows=self._summary_rows(),
            checkpoints=self.checkpoints,
            metrics=self.logs,
        )

    def _figures(self, result: StepResult, *, samples: int, seconds: float) -> dict[str, Any]:
        limit = self.micro_batches.limit
        figures: dict[str, Any] = {
            "loss": result.loss,
            "lr": get_lr(self.step.policy.optimizers[0]),
            "tokens_per_second_per_gpu": result.num_tokens / (seconds * self.ranks),
            "global_batch_size": samples,
            limit.key: limit.size,
            "padding": self.micro_batches.take_padding(),
            "oom_retries": self.recoverable.retries,
        }
        figures |= result.metrics | self.growth.figures()
        if not self.loader.is_global:
            figures["batch_size"] = self.loader.batch_size
        if result.grad_norm is not None:
            figures["grad_norm"] = result.grad_norm
        if (share := self.utilisation.share(self.micro_batches.step_tokens[0], seconds)) is not None:
            figures["mfu"] = share
        if (host_bytes := anonymous_bytes()) is not None:
            figures["host_memory_bytes"] = host_bytes
        if (meter := self.step.meter) is not None:
            figures["peak_memory_bytes"] = meter.peak_bytes
        if self.device is not None:
            # torchtune's recipes reset the device's own peaks here. They are the user's, and do not end with a step.
            figures |= training.get_memory_stats(device=self.device, reset_stats=False)
        return figures

    def write_events(self) -> None:
        """Write what has happened since the last call: shortages of memory, and finished checkpoints."""
        if not self.writes:
            return
        events = self.recoverable.events[self._num_memory_events :]
        self._num_memory_events += len(events)
        for event in (one for one in events if one.pressure):
            names = ("step", "phase", "figures", "error", "before", "after", "unit")
            values = {name: getattr(event, name) for name in names}
            if event.slowdown is not None:
                values["slowdown"] = event.slowdown
            self.run_log.append(event=_MEMORY_EVENTS[event.pressure], ranks=list(event.ranks), **values)
        self.run_log.checkpoints(self.checkpoints)  # also those written in the background

    def _summary_rows(self) -> dict[str, str | None]:
        loader, retries, found = self.loader, self.recoverable.retries, self.found
        sizes = [entry["batch_size"] for entry in self.run_log.history] + [loader.batch_size]
        micro_batch = f"at most {self.micro_batches.limit} per rank"
        if found is not None:
            micro_batch += f" (found {found.exact_batch_size}{rounding_text(found)}, by {found.strategy})"
        return {
            loader.key: f"{arrows(sizes)}, {loader.samples_per_step} samples per optimizer step",
            "micro-batch": micro_batch,
            "out of memory": f"{count_text(retries, 'time')}, run again in smaller micro-batches"
            if retries
            else "never",
            "throughput": self._throughput(),
            "utilisation": self._utilisation(),
            "peak memory": self._peak(),
        }

    def _throughput(self) -> str | None:
        if not self._seconds:
            return None
        rate = self._num_tokens / self._seconds / self.ranks
        return f"{rate:,.0f} tokens/s per rank, mean of {count_text(self._steps, 'step')} in {self._seconds:,.1f} s"

    def _utilisation(self) -> str | None:
        share, peak = self.utilisation.share(self._num_own_tokens, self._seconds or math.inf), self.utilisation.peak
        if share is None or peak is None:
            return None
        return f"{share:.1%} of the card's {peak / 1e12:,.0f} TFLOPS by the model's own operations (MFU), on rank 0"

    def _peak(self) -> str:
        meter, limit_bytes = self.step.meter, self.memory_limit_bytes
        if meter is None or not meter.peak_bytes:
            return "not measured (no limit)"  # on a CPU, where it would only cost time
        of = "" if limit_bytes is None else f" of {format_bytes(limit_bytes)}"
        return f"{format_bytes(meter.peak_bytes)}{of} on rank 0"


def log_end(
    run_log: RunLog,
    how: str,
    *,
    step: int,
    epochs_run: int,
    rows: Mapping[str, str | None],
    checkpoints: Sequence[tuple[Path, int]],
    metrics: str | None,
) -> None:
    """Append the end of a run to ``run_log``, and log a summary: ``rows`` that have a text, then where its files are.

    Args:
        how: the run has ended: "complete" or "ended by a signal".
        step, epochs_run: optimizer steps and epochs done.
        checkpoints: those that were written, in order, with their steps.
        metrics: where the metric logger writes; None if it is not known.
    """
    run_log.append(event="ended", step=step, epoch=epochs_run, how=how)
    all_rows = {**rows, "last checkpoint": str(checkpoints[-1][0]) if checkpoints else "none", "metrics": metrics}
    if run_log.is_open:
        folder = shlex.quote(str(run_log.path.parent))
        all_rows |= {"log": str(run_log.path), "report": f"tune-adaptive report {folder}"}
    there = {name: text for name, text in all_rows.items() if text is not None}
    width = max(map(len, there))
    title = f"Run {how}: {count_text(step, 'optimizer step')}, {count_text(epochs_run, 'epoch')}"
    log.info("\n".join([title, *(f"  {name:<{width}}  {text}" for name, text in there.items())]))


def arrows(values: Sequence[Any]) -> str:
    """How a value has changed; where it did so often, the last of it.

    >>> arrows([8, 8, 16]), arrows([1, 2, 3, 4]), arrows([1, 2, 3, 4, 5])
    ('8 -> 16', '1 -> 2 -> 3 -> 4', '1 -> ... -> 3 -> 4 -> 5')
    """
    changes = [str(value) for value, _ in groupby(values)]
    if len(changes) > _LONGEST_LIST:
        changes = [changes[0], "...", *changes[1 - _LONGEST_LIST :]]
    return " -> ".join(changes)
