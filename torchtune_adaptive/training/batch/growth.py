"""How the batch size grows over a run: the user's function, called on rank 0 for all ranks."""

import json
import sys
from dataclasses import KW_ONLY, dataclass
from typing import Any

from torch.distributed.checkpoint.stateful import Stateful

from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.errors import InputError, quote, reason_of
from torchtune_adaptive.training.batch.increase_function import (
    BatchIncreaseFunction,
    Growth,
    next_batch_size,
    plan_growth,
)
from torchtune_adaptive.training.batch.noise_scale import GradientNorms, MeasuredSchedule


@dataclass(eq=False)
class BatchGrowth:
    """Owns the user's function and the maximum batch size.

    Attributes:
        function: the user's function; None if the batch does not grow.
        samples_per_unit: samples of an optimizer step over all ranks, per unit of the batch size.
        maximum: the largest batch size; a finite number, so that unbounded doubling cannot overflow.
    Raises:
        InputError: the function has a state that cannot be saved.
    """

    function: BatchIncreaseFunction | None
    _: KW_ONLY
    total_epochs: int
    samples_per_unit: int
    consensus: Consensus
    maximum: int = sys.maxsize

    def __post_init__(self) -> None:
        _check_state(self.function)
        if isinstance(self.function, MeasuredSchedule):
            self.function.samples_per_unit = self.samples_per_unit

    @property
    def grows(self) -> bool:
        """Whether there is a function."""
        return self.function is not None

    def sizes(self, batch_size: int) -> list[int]:
        """The batch size of every epoch of a run that starts with ``batch_size``. A collective.

        A copy of the function is called, so that an invalid answer is found before training.
        Raises:
            InputError: the function returns an invalid answer for some epoch.
        """
        function = self.function
        if function is None:
            return [batch_size] * self.total_epochs
        return self.consensus.ask_rank_zero(
            lambda: plan_growth(function, total_epochs=self.total_epochs, batch_size=batch_size, maximum=self.maximum)
        )

    def next(self, epoch: int, batch_size: int) -> Growth | None:
        """The function's decision for ``epoch``; None without a function. A collective."""
        function = self.function
        if function is None:
            return None
        return self.consensus.ask_rank_zero(
            lambda: next_batch_size(function, epoch=epoch, batch_size=batch_size, maximum=self.maximum)
        )

    def measures(self, step: int) -> bool:
        """Whether the function needs the gradient norms of optimizer step ``step``, counted from 0."""
        return isinstance(self.function, MeasuredSchedule) and step % self.function.every_steps == 0

    def observe(self, norms: GradientNorms | None) -> None:
        """Pass gradient norms to the function; None if nothing could be measured."""
        if norms is not None and isinstance(self.function, MeasuredSchedule):
            self.function.observe(norms)

    def figures(self) -> dict[str, float]:
        """Figures that the function has measured in training so far, by their names in the log."""
        return self.function.figures() if isinstance(self.function, MeasuredSchedule) else {}

    def state_dict(self) -> dict[str, Any]:
        """The function's own state, None if it has none."""
        return {"schedule": self.function.state_dict() if isinstance(self.function, Stateful) else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from ``state_dict``.

        Raises:
            InputError: the function does not accept the state, for example because another function saved it.
        """
        saved = state["schedule"]
        if saved is None or not isinstance(self.function, Stateful):
            return
        try:
            self.function.load_state_dict(saved)
        except Exception as error:  # the user's own code can raise any error
            raise InputError(
                f"`batch_increase_function` must accept the state of the resumed run, but does not accept"
                f" {quote(saved)}: {reason_of(error)}."
            ) from error


def _check_state(function: object) -> None:
    """Check that the function's state, if it has one, can be saved as JSON and loaded again."""
    if not isinstance(function, Stateful):
        return
    rule = "`batch_increase_function.state_dict()` must return JSON values"
    try:
        state = function.state_dict()
        read_again = json.loads(json.dumps(state))
    except Exception as error:  # the user's own code can raise any error
        raise InputError(f"{rule}, but fails: {reason_of(error)}.") from error
    if read_again != state:
        raise InputError(f"{rule}, but returns {quote(state)}, which is loaded as {quote(read_again)}.")
