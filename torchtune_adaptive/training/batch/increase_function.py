"""Growth of the batch size: load and check the user's function, and compute its decision for each epoch."""

import copy
import functools
import inspect
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from typing import Any, TypeAlias, cast

from torchtune_adaptive.errors import InputError, as_integer, quote, reason_of, require_working_directory
from torchtune_adaptive.training.batch.noise_scale import MeasuredSchedule

# f(epoch, current_batch_size) -> increment, called at the start of every epoch, including epoch 0.
BatchIncreaseFunction: TypeAlias = Callable[[int, int], int]


@dataclass(frozen=True)
class Growth:
    """The decision for one epoch: its ``batch_size``, and the ``increment`` that was granted or refused."""

    batch_size: int
    increment: int
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
    """Return ``function`` if it can be called as ``f(epoch, current_batch_size)``. ``name`` is for error messages.

    A function without a readable signature (some are written in C) is accepted.
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
            "to use a class, give it as `_component_`, with its arguments."
        )
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # written in C, without a readable signature
        return cast(BatchIncreaseFunction, function)
    try:
        signature.bind(0, 1)
    except TypeError as error:
        raise InputError(
            "`batch_increase_function` must take two positional arguments (epoch, current_batch_size), "
            f"but {name} takes {signature} instead."
        ) from error
    return cast(BatchIncreaseFunction, function)


def load_function(value: object) -> BatchIncreaseFunction | None:
    """The function at the dotted path ``value``, or created by the `_component_` of ``value``; None for null.

    Raises:
        InputError: it cannot be imported or created, or is not a function of two arguments.
    """
    if value is None:
        return None
    if isinstance(value, str):
        return check_function(_import(value), name=quote(value))
    if not isinstance(value, dict) or not isinstance(value.get("_component_"), str):
        raise InputError(
            "`batch_increase_function` must be a dotted path or a mapping with a `_component_`, "
            f"but is {quote(value)} instead."
        )
    arguments = {str(key): argument for key, argument in value.items() if key != "_component_"}
    path = value["_component_"]
    component = _import(path)
    try:
        made = component(**arguments)
    except BaseException as error:  # the user's own code can raise anything, also what would end the process
        raise InputError(
            f"`batch_increase_function` must be created by its `_component_`, but {quote(path)} "
            f"with {quote(arguments)} failed instead: {reason_of(error)}."
        ) from error
    return check_function(made, name=f"the result of {quote(path)}")


def _import(path: str) -> Any:
    """Import the dotted ``path``, also from the working directory, as torchtune does for its components."""
    if (directory := require_working_directory()) not in sys.path:
        sys.path.append(directory)
    try:
        return pkgutil.resolve_name(path)
    except BaseException as error:  # importing runs the user's own module
        raise InputError(
            f"`batch_increase_function` must be importable, but {quote(path)} is not: {reason_of(error)}."
        ) from error


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


def plan_growth(
    function: BatchIncreaseFunction, *, total_epochs: int, batch_size: int, maximum: int = sys.maxsize
) -> list[int]:
    """The batch size of every epoch, computed in advance, so that an invalid answer is found before training.

    A deep copy of the function is called, or the function itself if it cannot be copied. State outside of it (globals,
    closures, random generators) is not restored.
    Args:
        maximum: increases above it are refused. If it is not known yet, call this again once it is known, because a
            refused increase changes the batch sizes with which the function is called.
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
    except BaseException as error:  # the user's own code can raise anything, which is reported as its answer
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
