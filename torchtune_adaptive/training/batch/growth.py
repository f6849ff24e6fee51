"""How the batch size grows over a run: the user's function, called on rank 0 for all ranks."""

import copy
import json
import sys
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from torch.distributed.checkpoint.stateful import Stateful

from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.errors import InputError, as_integer, quote, reason_of
from torchtune_adaptive.increase_function import BatchIncreaseFunction, function_name
from torchtune_adaptive.schedule import GradientNorms, MeasuredSchedule
from torchtune_adaptive.training.batch.rank_shares import small_samples


@dataclass(frozen=True)
class Growth:
    """The decision for one epoch: its ``batch_size``, and the ``increment`` that was granted or refused."""

    batch_size: int
    increment: int
    reason: str


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
                f"`batch_increase_function` cannot load the resumed run's state {quote(saved)}: {reason_of(error)}."
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


def gradient_norms(sums: Sequence[float], *, weight: float, samples: int, ranks: int) -> GradientNorms | None:
    """The norms of mean gradients, per unit of weight as in training; None if the small batch has no weight.

    Args:
        sums: the small batch's squared norm, its weight, and the whole squared norm, each summed over all ranks.
    """
    small_squared, small_weight, squared = sums
    if not small_weight:
        return None
    # FSDP2 divides gradients by the number of ranks; this multiplies them back.
    return GradientNorms(
        small_samples=small_samples(samples, ranks=ranks),
        small_norm_squared=small_squared * (ranks / small_weight) ** 2,
        samples=samples,
        norm_squared=squared * (ranks / weight) ** 2,
    )


def next_batch_size(function: BatchIncreaseFunction, *, epoch: int, batch_size: int, maximum: int) -> Growth:
    """Batch size of ``epoch``: ``batch_size`` plus the function's increment, if the sum is at most ``maximum``.

    An increase above the maximum is refused. An increase of a ``MeasuredSchedule`` is instead reduced to the maximum.
    The reason contains the figures. All sizes are in the unit of the config's key.

    Raises:
        InputError: the function raised an error, or its answer is not an integer or is negative.

    >>> def adds_eight(epoch, current_batch_size):
    ...     return 8
    >>> next_batch_size(adds_eight, epoch=2, batch_size=16, maximum=20).reason
    'epoch 2: increase of 8 refused, 16 + 8 = 24 is above the maximum of 20'
    """
    increment = _ask(function, epoch=epoch, batch_size=batch_size)
    if isinstance(function, MeasuredSchedule):
        increment = max(0, min(increment, maximum - batch_size))
    wanted = batch_size + increment
    if not increment:
        return Growth(batch_size, 0, f"epoch {epoch}: no increase, batch_size stays {batch_size}")
    if wanted <= maximum:
        reason = f"epoch {epoch}: increase of {increment} granted, batch_size {batch_size} -> {wanted}"
        return Growth(wanted, increment, reason)
    reason = f"epoch {epoch}: increase of {increment} refused, {batch_size} + {increment} = {wanted} "
    return Growth(batch_size, increment, reason + f"is above the maximum of {maximum}")


def plan_growth(function: BatchIncreaseFunction, *, total_epochs: int, batch_size: int, maximum: int) -> list[int]:
    """The batch size of every epoch, computed in advance, so that an invalid answer is found before training.

    A deep copy of the function is called, or the function itself if it cannot be copied. State outside of it (globals,
    closures, random generators) is not restored.

    Raises:
        InputError: as `next_batch_size`, for the first epoch with an invalid answer.

    >>> plan_growth(lambda epoch, size: 8, total_epochs=4, batch_size=8, maximum=30)
    [16, 24, 24, 24]
    """
    try:
        asked = copy.deepcopy(function)
    except Exception:  # copying a user's object can raise any error; calling the original is better than no check
        asked = function
    sizes: list[int] = []
    for epoch in range(total_epochs):
        batch_size = next_batch_size(asked, epoch=epoch, batch_size=batch_size, maximum=maximum).batch_size
        sizes.append(batch_size)
    return sizes


def _ask(function: BatchIncreaseFunction, *, epoch: int, batch_size: int) -> int:
    name, where = function_name(function), f"at epoch {epoch} with batch size {batch_size}"
    try:
        answer: object = function(epoch, batch_size)
    except Exception as error:  # the user's own code can raise any error, which is reported as its answer
        raise InputError(f"`batch_increase_function` {name} failed {where}: {reason_of(error)}.") from error
    increment = as_integer(answer)
    if increment is None or increment < 0:
        rule = "an integer" if increment is None else "at least 0"
        raise InputError(
            f"`batch_increase_function` must return {rule}, but {name} returned {quote(answer)} {where} instead."
        )
    return increment
