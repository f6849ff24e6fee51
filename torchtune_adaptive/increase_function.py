"""Load and check the function of the config key ``batch_increase_function``."""

import functools
import inspect
import os
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any, TypeAlias

from torchtune_adaptive.errors import InputError, quote, reason_of
from torchtune_adaptive.schedule import MeasuredSchedule

# f(epoch, current_batch_size) -> increment, called at the start of every epoch, including epoch 0.
BatchIncreaseFunction: TypeAlias = Callable[[int, int], int]


def load_function(value: object) -> BatchIncreaseFunction | None:
    """The function at the dotted path ``value``, or created by the `_component_` of ``value``; None for null.

    Raises:
        InputError: it cannot be imported or created, or is not a function of two arguments.
    """
    if value is None:
        return None
    if isinstance(value, str):
        function = _import(value)
        _check(function, name=quote(value))
        return function
    if not isinstance(value, dict) or not isinstance(value.get("_component_"), str):
        raise InputError(
            "`batch_increase_function` must be a dotted path or a mapping with a `_component_`, "
            f"but is {quote(value)} instead."
        )
    arguments = {str(key): argument for key, argument in value.items() if key != "_component_"}
    path = value["_component_"]
    component = _import(path)
    try:
        function = component(**arguments)
    except BaseException as error:  # also what would end the process, with a status that could be taken for the run's
        raise InputError(
            f"`batch_increase_function` cannot be created by {quote(path)} with {quote(arguments)}: {reason_of(error)}."
        ) from error
    _check(function, name=f"the result of {quote(path)}")
    return function


def function_name(function: object) -> str:
    """A readable name for logs and reports: the dotted name, with the arguments if it is a built-in schedule."""
    if isinstance(function, functools.partial):
        return function_name(function.func)
    if isinstance(function, MeasuredSchedule) or (is_dataclass(function) and not isinstance(function, type)):
        return f"{type(function).__module__}.{quote(function)}"
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__ or 'builtins'}.{named.__qualname__}"  # pyright: ignore[reportAttributeAccessIssue]


def _import(path: str) -> Any:
    """Import the dotted ``path``, also from the working directory, as torchtune does for its components."""
    if (directory := os.getcwd()) not in sys.path:
        sys.path.append(directory)
    try:
        return pkgutil.resolve_name(path)
    except BaseException as error:  # importing runs the user's own module
        raise InputError(
            f"`batch_increase_function` cannot be imported from {quote(path)}: {reason_of(error)}."
        ) from error


def _check(function: object, *, name: str) -> None:
    """Check that ``function`` can be called as ``f(epoch, current_batch_size)``."""
    if not callable(function):
        raise InputError(f"`batch_increase_function` must be callable, but {name} is {quote(function)} instead.")
    if isinstance(function, type):
        raise InputError(
            f"`batch_increase_function` must be a function, but {name} is a class instead; give it as `_component_`,"
            " with its arguments."
        )
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # some that are written in C have no signature that can be read
        return
    try:
        signature.bind(0, 1)
    except TypeError as error:
        raise InputError(
            f"`batch_increase_function` must take (epoch, current_batch_size), but {name} takes {signature} instead."
        ) from error
