"""What our dispatch modes have to know about an operation that comes by."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)
_COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional")


def is_on_wrappers(types: Iterable[type]) -> bool:
    """Whether an operation is on tensors that wrap others, such as DTensor.

    A mode returns ``NotImplemented`` for it: the wrapper then takes it apart, and its operations on plain
    tensors, collectives among them, come by one by one. Calling it instead would hide them, because a mode is
    off within its own handler.
    """
    return any(kind not in _PLAIN and not issubclass(kind, FakeTensor) for kind in types)


def is_collective(func: Any) -> bool:
    """Whether the operation ``func`` issues a collective, or waits for one."""
    return func.namespace in _COLLECTIVE_NAMESPACES


def is_wait(func: Any) -> bool:
    """Whether the collective operation ``func`` only waits for one that was issued before."""
    return "wait" in func.__name__
