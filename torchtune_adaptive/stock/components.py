"""The components that a config names, and the values that it gives them."""

import difflib
import inspect
import os
import sys
from types import NoneType
from typing import Any, get_args

import torch
from omegaconf import DictConfig
from torchtune.config._utils import _get_component_from_path

from torchtune_adaptive.errors import InputError, quote, reason_of
from torchtune_adaptive.stock.configs import resolved


def check_components(cfg: DictConfig) -> None:
    """Import the component of each block, and refuse values that its signature does not take.

    Raises:
        InputError: a component cannot be imported, has no such argument, or takes a number or a flag instead of a text.
    """
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # as torchtune, before it creates a component
    for name, block in resolved(cfg).items():
        path = block.get("_component_") if isinstance(block, dict) else None
        if isinstance(path, str):
            arguments = {key: value for key, value in block.items() if key != "_component_"}
            _check_arguments(name, path, _parameters(_imported(name, path)), arguments)


def _imported(name: str, path: str) -> Any:
    try:
        return _get_component_from_path(path)
    except Exception as error:  # importing runs any code; torchtune wraps some of its errors
        reason = reason_of(error.__cause__ or error)
        raise InputError(f"`{name}._component_` must be importable, but {quote(path)} is not: {reason}.") from error


def _check_arguments(name: str, path: str, parameters: dict[str, inspect.Parameter], arguments: dict[str, Any]) -> None:
    takes_any = not parameters or any(one.kind == one.VAR_KEYWORD for one in parameters.values())
    for key, value in arguments.items():
        if key in parameters:
            wanted = _wanted(parameters[key])
            if wanted and isinstance(value, str | list | dict):
                raise InputError(f"`{name}.{key}` must be {wanted}, but is {quote(value)} instead.")
        elif not takes_any:
            nearest = difflib.get_close_matches(key, parameters, n=1)
            hint = f"; did you mean `{name}.{nearest[0]}`?" if nearest else "."
            raise InputError(f"`{name}.{key}` must be an argument of {path}, but is none{hint}")


def _parameters(component: Any) -> dict[str, inspect.Parameter]:
    """The parameters by name, with their annotations evaluated if that is possible; none if they cannot be read."""
    for evaluates in (True, False):
        try:
            return dict(inspect.signature(component, eval_str=evaluates).parameters)
        except Exception:  # an annotation can be any code; what is written in C may have no signature
            continue
    return {}


def _wanted(parameter: inspect.Parameter) -> str:
    """What a parameter takes, if it is clear: "a number" or "True or False"; otherwise "".

    Of a parameter without an annotation, only a default like 1e-3 is clear.
    """
    annotation = parameter.annotation
    if annotation is parameter.empty:
        return "a number" if isinstance(parameter.default, float) else ""
    types = {*(get_args(annotation) or (annotation,))} - {NoneType, torch.Tensor}
    if types == {bool}:
        return "True or False"
    return "a number" if types and types <= {int, float} else ""
