"""Dispatch modes that see this rank's operations on plain tensors, and recognise collectives."""

from abc import abstractmethod
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)
_COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional")


def plain_parts(tensor: Any) -> Iterator[torch.Tensor]:
    """Yield the plain tensors inside ``tensor``, which share its memory; for a plain tensor, the tensor itself."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from plain_parts(getattr(tensor, name))
    elif isinstance(tensor, torch.Tensor):
        yield tensor  # not every part is a tensor: one part of a DTensor is its device mesh


def can_be_written(part: torch.Tensor) -> bool:
    """Whether a plain tensor has elements of its own to write to: not an expanded, an inference or a meta tensor."""
    is_expanded = part.layout is torch.strided and any(
        stride == 0 and size > 1 for stride, size in zip(part.stride(), part.shape, strict=True)
    )
    return not (is_expanded or part.is_inference() or part.is_meta)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor, in the same memory. Any other tensor is returned as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def is_collective(func: Any) -> bool:
    """Return whether the operation ``func`` issues a collective, or waits for one."""
    return func.namespace in _COLLECTIVE_NAMESPACES and not func.__name__.startswith("_wrap_tensor")


def is_wait(func: Any) -> bool:
    """Return whether the operation ``func`` only waits for a collective."""
    return "wait" in func.__name__


@cache
def _is_wrapper(kind: type) -> bool:
    """Whether tensors of type ``kind`` contain other tensors, as those of DTensor or NF4 do."""
    return kind not in _PLAIN and not issubclass(kind, FakeTensor)


class OperationMode(TorchDispatchMode):
    """Calls ``operation`` instead of every operation on plain tensors of this rank.

    Operations on wrapper tensors (DTensor, NF4, 8-bit optimizer states) are left to the wrapper. It issues operations
    on plain tensors, including collectives, and those arrive here one by one. Code compiled by ``torch.compile``
    stays compiled: only its kernels that are not fused are seen.
    """

    supports_higher_order_operators = True  # flex attention, used for packed data, is one

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # FSDP2's collectives are outside of the compiled layers; torchao's optimizers require compilation

    @abstractmethod
    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace ``func(*args, **kwargs)``. The method calls ``func`` itself."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(_is_wrapper, types)):
            return NotImplemented
        return self.operation(func, args, kwargs or {})
