"""Batch size for an epoch: the user's function, checked and clamped; built-in schedules."""

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from typing import TypeAlias, cast

from torchtune_adaptive.errors import InputError, as_integer, quote, reason_of, require_integer
from torchtune_adaptive.noise_scale import MeasuredSchedule, gradient_noise_scale

__all__ = [
    "BatchIncreaseFunction",
    "Growth",
    "at_epochs",
    "check_function",
    "function_name",
    "geometric",
    "gradient_noise_scale",
    "linear",
    "next_batch_size",
    "rehearse",
]

# f(epoch, current_batch_size) -> increment, asked at the start of every epoch, epoch 0 included.
BatchIncreaseFunction: TypeAlias = Callable[[int, int], int]


@dataclass(frozen=True)
class Growth:
    """What the schedule decided for one epoch: ``batch_size`` (samples) holds from the start of ``epoch`` on."""

    epoch: int
    batch_size: int
    increment: int
    granted: bool
    reason: str


def function_name(function: object) -> str:
    """A readable name for logs and reports: the dotted name, with the arguments if it is a built-in schedule."""
    if isinstance(function, functools.partial):
        return function_name(function.func)
    if isinstance(function, MeasuredSchedule) or (is_dataclass(function) and not isinstance(function, type)):
        return f"{type(function).__module__}.{quote(function)}"
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__ or 'builtins'}.{named.__qualname__}"  # pyright: ignore[reportAttributeAccessIssue]


def check_function(function: object, *, name: str | None = None) -> BatchIncreaseFunction:
    """The function itself, which can be called as ``f(epoch, current_batch_size)``; ``name`` is for the sentence.

    A function whose signature cannot be read (some are written in C) is taken as it is.

    Raises:
        InputError: it is not callable, is a class, or does not take two positional arguments.
    """
    if not callable(function):
        value = f"{name} is {quote(function)}" if name else f"is {quote(function)}"
        raise InputError(f"`batch_increase_function` must be callable, but {value} instead.")
    name = name or function_name(function)
    if isinstance(function, type):
        raise InputError(
            f"`batch_increase_function` must be a function, but {name} is a class instead; "
            "a class is named by `_component_`, next to its arguments."
        )
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # written in C, without a signature to read
        return cast(BatchIncreaseFunction, function)
    try:
        signature.bind(0, 1)
    except TypeError as error:
        raise InputError(
            "`batch_increase_function` must take two positional arguments (epoch, current_batch_size), "
            f"but {name} takes {signature} instead."
        ) from error
    return cast(BatchIncreaseFunction, function)


def next_batch_size(function: BatchIncreaseFunction, *, epoch: int, batch_size: int, maximum: int) -> Growth:
    """Batch size of ``epoch``: ``batch_size`` plus the function's increment, if the sum is at most ``maximum``.

    An increase that would pass the maximum is refused as a whole, that of a ``MeasuredSchedule`` cut to it; the reason
    carries the figures. All sizes are in the unit of the size that the config names.

    Raises:
        InputError: the function raised, or its answer is no integer or is negative.

    >>> next_batch_size(linear(8), epoch=2, batch_size=16, maximum=20).reason
    'epoch 2: increase of 8 refused, 16 + 8 = 24 is above the maximum of 20'
    """
    increment = _ask(function, epoch=epoch, batch_size=batch_size)
    if isinstance(function, MeasuredSchedule):
        increment = max(0, min(increment, maximum - batch_size))
    wanted = batch_size + increment
    if not increment:
        return Growth(epoch, batch_size, 0, False, f"epoch {epoch}: no increase, batch_size stays {batch_size}")
    if wanted <= maximum:
        reason = f"epoch {epoch}: increase of {increment} granted, batch_size {batch_size} -> {wanted}"
        return Growth(epoch, wanted, increment, True, reason)
    reason = f"epoch {epoch}: increase of {increment} refused, {batch_size} + {increment} = {wanted} "
    return Growth(epoch, batch_size, increment, False, reason + f"is above the maximum of {maximum}")


def rehearse(
    function: BatchIncreaseFunction,
    *,
    first_epoch: int = 0,
    total_epochs: int,
    batch_size: int,
    maximum: int | None = None,
) -> list[Growth]:
    """Every epoch's growth from ``first_epoch`` to the run's end, so that a bad answer is found before training.

    ``maximum=None``: no bound is known yet; rehearse again once it is, because a refused increase changes what the
    function is asked. A deep copy is played, so that a stateful object is undisturbed (the object itself if it cannot
    be copied); state outside of it (globals, closures, random generators) is not put back.

    Raises:
        InputError: as `next_batch_size`, for the first epoch with a bad answer.

    >>> [growth.batch_size for growth in rehearse(linear(8), total_epochs=4, batch_size=8, maximum=24)]
    [8, 16, 24, 24]
    """
    try:
        played = copy.deepcopy(function)
    except Exception:  # a user's object may refuse to be copied in any way; playing it is better than not checking
        played = function
    bound = sys.maxsize if maximum is None else maximum  # a number, so that unbounded doubling cannot overflow
    growths: list[Growth] = []
    for epoch in range(first_epoch, total_epochs):
        growths.append(next_batch_size(played, epoch=epoch, batch_size=batch_size, maximum=bound))
        batch_size = growths[-1].batch_size
    return growths


def _ask(function: BatchIncreaseFunction, *, epoch: int, batch_size: int) -> int:
    name, where = function_name(function), f"at epoch {epoch} with batch size {batch_size}"
    try:
        answer: object = function(epoch, batch_size)
    except Exception as error:  # the user's own code: whatever it raises is reported as its answer
        raise InputError(
            f"`batch_increase_function` must return an integer, but {name} raised an error {where} instead: "
            f"{reason_of(error)}."
        ) from error
    increment = as_integer(answer)
    if increment is None or increment < 0:
        rule = "an integer" if increment is None else "at least 0"
        raise InputError(
            f"`batch_increase_function` must return {rule}, but {name} returned {quote(answer)} {where} instead."
        )
    return increment


@dataclass(frozen=True)
class at_epochs:
    """Grows by ``increases[epoch]`` samples; epochs count from 0. Anything but integers of at least 0 is refused.

    >>> at_epochs({1: 8, "3": 16})(3, 24)
    16
    """

    increases: Mapping[int, int]

    def __post_init__(self) -> None:
        if not isinstance(self.increases, Mapping) or not self.increases:
            raise InputError(f"`increases` must map epochs to increases, but is {quote(self.increases)} instead.")
        checked: dict[int, int] = {}
        for key, value in self.increases.items():
            number: object = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key
            epoch = require_integer("epoch of increases", number, minimum=0)
            if epoch in checked:
                raise InputError(f"`increases` must name epoch {epoch} once, but is {quote(self.increases)} instead.")
            checked[epoch] = require_integer(f"increases[{epoch}]", value, minimum=0)
        object.__setattr__(self, "increases", checked)

    def __call__(self, epoch: int, current_batch_size: int) -> int:
        return self.increases.get(epoch, 0)


@dataclass(frozen=True)
class geometric:
    """Multiplies the batch size by ``factor``, 2 or more, after every ``every_epochs`` epochs, never at epoch 0.

    >>> [geometric(factor=2, every_epochs=2)(epoch, 8) for epoch in range(5)]
    [0, 0, 8, 0, 8]
    """

    factor: int = 2
    every_epochs: int = 1

    def __post_init__(self) -> None:
        require_integer("factor", self.factor, minimum=2)
        require_integer("every_epochs", self.every_epochs, minimum=1)

    def __call__(self, epoch: int, current_batch_size: int) -> int:
        return (self.factor - 1) * current_batch_size if epoch > 0 and epoch % self.every_epochs == 0 else 0


@dataclass(frozen=True)
class linear:
    """Adds ``increment`` samples after every ``every_epochs`` epochs, never at epoch 0."""

    increment: int
    every_epochs: int = 1

    def __post_init__(self) -> None:
        require_integer("increment", self.increment, minimum=0)
        require_integer("every_epochs", self.every_epochs, minimum=1)

    def __call__(self, epoch: int, current_batch_size: int) -> int:
        return self.increment if epoch > 0 and epoch % self.every_epochs == 0 else 0
