"""Build a config's model with only a few of its layers, and with tensors that take no memory."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchtune.config._errors import InstantiationError
from torchtune.config._utils import _get_component_from_path

from torchtune_adaptive.errors import InputError, quote, reason_of, require_integer

_NEEDS_TORCHVISION = "`pip install torchvision` provides it, but models that take images are not planned"


@contextmanager
def layers_limited_to(num_layers: int | None, component: str) -> Iterator[list[int]]:
    """Context: ``component`` builds only ``num_layers`` layers (None: all). Yields a list that gets the true number.

    A config names a whole model, such as ``llama3_1_70b``, which calls one of torchtune's builders with its number of
    layers. In this context each builder appends that number to the list and builds ``num_layers`` instead.
    """
    _import_builders(component)
    true_counts: list[int] = []
    replaced: list[tuple[dict[str, Any], str, Any]] = []

    def limited(builder: Callable[..., Any], signature: inspect.Signature) -> Callable[..., Any]:
        @functools.wraps(builder)
        def build(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            true_counts.append(require_integer("num_layers", bound.arguments["num_layers"], minimum=1))
            bound.arguments["num_layers"] = num_layers or bound.arguments["num_layers"]
            return builder(*bound.args, **bound.kwargs)

        return build

    try:
        for names, key, builder in list(_builders()):
            replaced.append((names, key, builder))
            names[key] = limited(builder, inspect.signature(builder))
        yield true_counts
    finally:
        for names, key, builder in replaced:
            names[key] = builder


def _builders() -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Each function in torchtune's imported models that takes ``num_layers``, with its module's namespace and name."""
    for module_name, module in sys.modules.items():
        if module_name.startswith("torchtune.models."):
            for key, value in vars(module).items():
                if inspect.isfunction(value) and "num_layers" in inspect.signature(value).parameters:
                    yield vars(module), key, value


def _import_builders(component: str) -> None:
    """Import the modules of a torchtune ``component``.

    Raises:
        InputError: the import fails; the message says why.
    """
    try:
        _get_component_from_path(component)
    except InstantiationError as error:
        cause = error.__cause__ or error
        needs_torchvision = isinstance(cause, ModuleNotFoundError) and cause.name == "torchvision"
        raise InputError(
            f"`model` must be one that can be imported, but {quote(component)} is not: {reason_of(cause)}"
            + (f"; {_NEEDS_TORCHVISION}." if needs_torchvision else ".")
        ) from error


def make_fake(model: nn.Module) -> None:
    """Replace parameters and buffers by fake tensors. Call it in the fake mode. Shared tensors stay shared."""
    made: dict[int, tuple[Any, Any]] = {}  # by id of the real tensor; keeping the tensor prevents reuse of its id
    for module in model.modules():
        for tensors, wrap in ((module._parameters, _fake_parameter), (module._buffers, fake_like)):
            for name, tensor in tensors.items():
                if tensor is not None:
                    if id(tensor) not in made:
                        made[id(tensor)] = tensor, wrap(tensor)  # pyright: ignore[reportArgumentType]
                    tensors[name] = made[id(tensor)][1]


def _fake_parameter(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(fake_like(parameter), requires_grad=parameter.requires_grad)


def fake_like(tensor: Any) -> Any:
    """A fake CPU tensor with the layout of ``tensor``, which is real or meta and may wrap other tensors."""
    if isinstance(tensor, DTensor):
        return DTensor(fake_like(tensor._local_tensor), tensor._spec, requires_grad=False)
    if hasattr(tensor, "__tensor_flatten__"):
        names, context = tensor.__tensor_flatten__()
        if "tensor_meta" in context:  # NF4 keeps its device there
            context = context | {"tensor_meta": replace(context["tensor_meta"], device=torch.device("cpu"))}
        parts = {name: fake_like(getattr(tensor, name)) for name in names}
        return type(tensor).__tensor_unflatten__(parts, context, tensor.shape, tensor.stride())
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
