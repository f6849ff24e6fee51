"""The state of a run: its decisions and its position, with which a resumed run continues exactly."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchtune_adaptive.errors import quote

# Config keys about files and logging, which do not affect what a run trains. Of the weights that a checkpointer reads,
# the content is compared.
_NOT_TRAINED = re.compile(r"\w*checkpointer\b|log_|metric_logger|output_dir|profiler|resume_from_checkpoint")


@dataclass(frozen=True)
class RunIdentity:
    """What stays the same in a run, however often it is resumed.

    Attributes:
        id: a random name.
        method: the stock recipe without its kind of device, as "full_finetune".
        frozen: digests of the files with weights that are not trained, by path, of each checkpointer.
        stock_before: digest of the optimizer state of a stock recipe's run that was in the folder before; "" without.
    """

    id: str
    method: str
    frozen: dict[str, dict[str, str]] = field(default_factory=dict)
    stock_before: str = ""


@dataclass(frozen=True, kw_only=True)
class AdaptiveState:
    """The state of a run after an optimizer step. Batch sizes are in the unit of the config's key.

    Attributes:
        run: the run that this is a state of.
        epochs_run: epochs done.
        epoch_samples: samples over all ranks that the current epoch has trained so far.
        schedule_steps: steps per epoch for which the learning rate schedule was built.
        is_global: whether batch sizes count the samples of an optimizer step over all ranks.
        reference_samples: samples per optimizer step of the config's own batch.
        samples_per_step: samples over all ranks per optimizer step, at ``batch_size``.
        global_step: optimizer steps done.
        micro_batch: the reduced micro-batch after memory ran out, in ``micro_batch_unit``; None if it never did.
        micro_batch_limit: the largest micro-batch before memory runs out.
        left_over: positions of a rank's samples in its order of the last epoch that the next epoch uses first.
        padding: tokens without and with padding on rank 0 since padding was last logged.
        dataset_samples, ranks, memory_limit_bytes: those of the run; the lowest limit of the ranks, None without one.
        optimizer: the optimizers' options and non-tensor state.
        config: the run's config, by dotted keys.
        backoff: when a reduced micro-batch is tried larger again.
        schedule: the state of a measured schedule, or of the user's function if it has a ``state_dict``.
        rank_states: each rank's random generators, and what else differs between ranks. They are tensors, in a file of
            their own, which is read only to resume.
    """

    run: RunIdentity
    epochs_run: int
    epoch_samples: int
    schedule_steps: int
    batch_size: int
    is_global: bool
    reference_samples: int
    samples_per_step: int
    global_step: int
    micro_batch: int | None
    micro_batch_limit: int
    micro_batch_unit: str
    left_over: tuple[int, int]
    padding: tuple[int, int]
    dataset_samples: int
    ranks: int
    memory_limit_bytes: int | None
    optimizer: dict[str, Any]
    config: dict[str, Any]
    backoff: dict[str, Any]
    schedule: Any = None
    rank_states: list[dict[str, Any]] = field(default_factory=list, compare=False)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "AdaptiveState":
        """The state from ``content``, which was read from JSON.

        Its values are those that a run wrote: the file that they are read from has a digest.

        Raises:
            KeyError, TypeError: a field is missing or unknown, as in a state of another version.
        """
        pairs = {name: tuple(content[name]) for name in ("left_over", "padding")}
        return cls(**{**content, **pairs, "run": RunIdentity(**content["run"])})

    def changes(self, other: "AdaptiveState") -> list[str]:
        """The differences to ``other``, as parts of a sentence: ranks, data, memory, samples of a step, the config.

        Values that are None in one of them are left out, except keys of the config. A batch size of the config that
        ``other`` does not use, because a search had found another or the batch had grown, is named with the one used.
        """
        size_key = "adaptive.global_batch_size" if other.is_global else "batch_size"
        stays = (self.is_global, self.batch_size) == (other.is_global, other.batch_size)
        changes: list[str] = []
        for name, words in (
            ("ranks", "ranks"),
            ("dataset_samples", "samples in the data set"),
            ("memory_limit_bytes", "bytes of memory per rank"),
            ("samples_per_step", "samples per optimizer step"),
        ):
            before, after = getattr(self, name), getattr(other, name)
            if before != after and None not in (before, after):
                changes.append(f"{words} {before} -> {after}")
        for key in sorted({*self.config, *other.config}):
            before, after = self.config.get(key), other.config.get(key)
            if before != after and not _NOT_TRAINED.match(key):
                is_unused = key == size_key and stays and after != self.batch_size
                kept = f", but the batch stays {self.batch_size}" if is_unused else ""
                if key == "seed" and self.ranks == other.ranks:
                    kept = ", but random numbers continue as saved"
                changes.append(f"{key} {quote(before)} -> {quote(after)}{kept}")
        return changes
