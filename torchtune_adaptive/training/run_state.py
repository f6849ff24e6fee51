"""The state beside torchtune's recipe state: with it a resumed run goes on as if it had never ended."""

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, get_origin

from torchtune_adaptive.errors import InputError, quote, reason_of
from torchtune_adaptive.files import write_whole

STATE_NAME = "adaptive_state.json"


@dataclass(frozen=True, kw_only=True)
class AdaptiveState:
    """Of a run after ``epochs_run`` epochs. Batch sizes are in the unit of the key that the config gives them by.

    Attributes:
        schedule_steps: per epoch, that the learning rate schedule was built for.
        is_global: whether batch sizes count the samples of an optimizer step over all ranks.
        reference_samples: samples per optimizer step of the batch that the config was written for.
        samples_per_step: over all ranks, at ``batch_size``.
        global_step: optimizer steps done.
        micro_batch: the largest micro-batch since memory ran out, in ``micro_batch_unit``; None if it did not.
        longest_row_tokens: of the rows that were trained with.
        left_over: the places of a rank's samples in its order of the last epoch that open the next one.
        dataset_samples, ranks, memory_limit_bytes: what the run had; of the ranks' limits the least, None without one.
        schedule: what a measured schedule gave, or the user's function if it has a ``state_dict``.
        history: of the report.
    """

    epochs_run: int
    schedule_steps: int
    batch_size: int
    is_global: bool
    reference_samples: int
    samples_per_step: int
    global_step: int
    micro_batch: int | None
    micro_batch_unit: str
    longest_row_tokens: int
    left_over: tuple[int, int]
    dataset_samples: int
    ranks: int
    memory_limit_bytes: int | None
    schedule: Any = None
    history: list[dict[str, Any]] = field(default_factory=list)

    def check(self) -> None:
        """Refuse values of other types, as a file may have them.

        Raises:
            TypeError: a value is of another type than its field.
        """
        for one in fields(self):
            value: Any = getattr(self, one.name)
            origin = get_origin(one.type)
            kind: Any = one.type if origin in (None, UnionType) else origin
            if kind is not Any and not isinstance(value, kind):
                raise TypeError(f"{one.name} is {quote(value)}")
        if [type(place) for place in self.left_over] != [int, int]:
            raise TypeError(f"left_over is {quote(self.left_over)}")

    def changes(self, other: "AdaptiveState") -> list[str]:
        """What differs in ``other``, as parts of a sentence: ranks, data, memory, and the samples of a step.

        What is None in one of them is left out.
        """
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
        return changes


def state_path(checkpoint_dir: str | Path) -> Path:
    """Where the state lies: beside torchtune's recipe state, in the directory that checkpoints are written to."""
    return Path(checkpoint_dir) / "recipe_state" / STATE_NAME


def read_state(path: Path, *, epochs_run: int) -> AdaptiveState | None:
    """The state after ``epochs_run`` epochs, or None where there is none, as after a stock recipe.

    Raises:
        InputError: the file is not what ``write_state`` writes.
    """
    try:
        content = json.loads(path.read_text())[str(epochs_run)]
    except (FileNotFoundError, KeyError):
        return None
    except (OSError, ValueError, TypeError) as error:
        raise _unreadable(path, error) from error
    try:
        state = AdaptiveState(**content | {"left_over": tuple(content["left_over"])})
        state.check()
    except (TypeError, KeyError) as error:
        raise _unreadable(path, error) from error
    return state


def write_state(path: Path, state: AdaptiveState) -> Path:
    """Add ``state`` to those of the epochs before it, and return ``path``. A reader never sees half of it.

    Write it before torchtune's recipe state: then a killed run has a state for whichever recipe state it leaves.
    """
    try:
        kept = {epochs: one for epochs, one in json.loads(path.read_text()).items() if int(epochs) < state.epochs_run}
    except (OSError, ValueError, AttributeError):  # none yet, or another program's
        kept = {}
    return write_whole(path, json.dumps(kept | {str(state.epochs_run): asdict(state)}, indent=2) + "\n")


def _unreadable(path: Path, error: Exception) -> InputError:
    return InputError(
        f"{path} must be as a run wrote it for its checkpoint to be resumed, but failed: {reason_of(error)}."
    )
