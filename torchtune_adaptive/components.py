"""The user's function, from what a config says of it."""

import importlib
import os
import sys
import types
from typing import Any

from torchtune_adaptive.errors import InputError, quote, reason_of
from torchtune_adaptive.schedule import BatchIncreaseFunction, check_function


def load_function(value: object) -> BatchIncreaseFunction | None:
    """The function whose dotted path is ``value``, or that the `_component_` of ``value`` makes; None for null.

    Raises:
        InputError: it cannot be imported or made, or is no function of two arguments.
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
    except Exception as error:  # the user's own code and arguments: whatever it raises is reported
        raise InputError(
            f"`batch_increase_function` must be made by its `_component_`, but {quote(path)} "
            f"with {quote(arguments)} failed instead: {reason_of(error)}."
        ) from error
    return check_function(made, name=f"what {quote(path)} makes")


def _import(path: str) -> Any:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # as stock does for its components: a user's module lies beside the config
    found: Any = None
    try:
        for end, part in enumerate(path.split("."), start=1):
            if end > 1 and (hasattr(found, part) or not isinstance(found, types.ModuleType)):
                found = getattr(found, part)
            else:
                found = importlib.import_module(".".join(path.split(".")[:end]))
    except Exception as error:  # importing runs the user's own module: whatever it raises is reported
        raise InputError(
            f"`batch_increase_function` must be importable, but {quote(path)} is not: {reason_of(error)}."
        ) from error
    return found
