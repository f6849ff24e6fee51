"""Tensors without memory, and what makes a train step on them run as on a GPU. It needs torch alone.

Fake tensors are on the device "cpu": a fake "cuda" tensor aborts the process on a machine without a GPU.
"""

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.library import Library
from torch.utils._python_dispatch import _disable_current_modes


def make_fake(model: nn.Module) -> None:
    """Replace a model's tensors by fake ones: parameters, buffers and plain attributes. Call it in the fake mode.

    Shared tensors stay shared.
    """
    made: dict[int, tuple[Any, Any]] = {}  # by id of the real tensor; keeping the tensor prevents reuse of its id
    for module in model.modules():
        attributes = {name: value for name, value in vars(module).items() if isinstance(value, torch.Tensor)}
        for tensors in (module._parameters, module._buffers, attributes):
            for name, tensor in tensors.items():
                if tensor is not None:
                    if id(tensor) not in made:
                        made[id(tensor)] = tensor, _fake(tensor)
                    tensors[name] = made[id(tensor)][1]
        vars(module).update(attributes)


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    fake = fake_like(tensor)
    return nn.Parameter(fake, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


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


def device_of(tensor: torch.Tensor) -> torch.device:
    """The tensor's device. That of a fake one is found without an operation."""
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device


@contextmanager
def kernels_replaced(kernels: Iterable[tuple[str, Callable[..., Any]]], key: str) -> Iterator[None]:
    """Context: these kernels run torch's operations of their names for the dispatch key."""
    library = Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that the kernels replace its own
            for name, kernel in kernels:
                library.impl(name, kernel, key)
        yield
    finally:
        library._destroy()


def optimizers_choose_as_on_cuda() -> AbstractContextManager[Any]:
    """By default an optimizer steps over lists of tensors (foreach) on CUDA, and over single tensors on a CPU."""
    module: Any = sys.modules["torch.optim.optimizer"]
    name = "_get_foreach_kernels_supported_devices"
    return mock.patch.object(module, name, return_value=[*getattr(module, name)(), "cpu"])


def shardings_worked_out_unseen() -> AbstractContextManager[Any]:
    """Hide from traces how DTensor derives shardings: on fake tensors of global shapes, which no real step makes.

    Up to torch 2.11 it derives them again in each operation on lists of fake tensors. Delete with torch < 2.12.
    """
    propagator: Any = ShardingPropagator
    propagate = propagator._propagate_tensor_meta_non_cached

    def unseen(*args: Any) -> Any:
        with _disable_current_modes():
            return propagate(*args)

    return mock.patch.object(propagator, "_propagate_tensor_meta_non_cached", unseen)
