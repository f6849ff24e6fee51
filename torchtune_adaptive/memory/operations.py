"""Operations as a dispatch mode sees them: on wrapper tensors, on plain ones, and collectives."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)
_COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional")


def plain_parts(tensor: Any) -> Iterator[torch.Tensor]:
    """The plain tensors of this rank that ``tensor`` is made of, sharing its memory; itself if it wraps none."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from plain_parts(getattr(tensor, name))
    elif isinstance(tensor, torch.Tensor):
        yield tensor  # DTensor's device mesh, for one, is a part but no tensor


def is_collective(func: Any) -> bool:
    """Whether the operation ``func`` issues a collective, or waits for one."""
    return func.namespace in _COLLECTIVE_NAMESPACES


def is_wait(func: Any) -> bool:
    """Whether the collective operation ``func`` only waits for one that was issued before."""
    return "wait" in func.__name__


class OperationMode(TorchDispatchMode):
    """While it is active, ``operation`` is called in place of every operation on plain tensors of this rank.

    An operation on tensors that wrap others (DTensor, NF4, 8-bit optimizer states) is left to the wrapper, which takes
    it apart; its operations on plain tensors, collectives among them, then arrive one by one. Code compiled by
    ``torch.compile`` stays compiled: of it only the kernels that are not fused are seen.
    """

    supports_higher_order_operators = True  # flex attention of packed data is one

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # FSDP2's collectives lie outside the compiled layers; torchao's optimizers insist on compiling

    @abstractmethod
    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Stands for ``func(*args, **kwargs)``, which it calls itself."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_on_wrappers(types):
            return NotImplemented
        return self.operation(func, args, kwargs or {})


class CountCollectives(OperationMode):
    """Counts the collectives that this rank issues, by whatever code.

    Attributes:
        issued: how many there were.
    """

    def __init__(self) -> None:
        super().__init__()
        self.issued = 0

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.issued += is_collective(func) and not is_wait(func)
        return func(*args, **kwargs)


def _is_on_wrappers(types: Iterable[type]) -> bool:
    return any(kind not in _PLAIN and not issubclass(kind, FakeTensor) for kind in types)
