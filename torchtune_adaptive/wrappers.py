"""Tensors that wrap others (DTensor, NF4, 8-bit optimizer states), and the operations on them."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)


def plain_parts(tensor: Any) -> Iterator[torch.Tensor]:
    """The plain tensors of this rank that ``tensor`` is made of, sharing its memory; itself if it wraps none."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from plain_parts(getattr(tensor, name))
    elif isinstance(tensor, torch.Tensor):
        yield tensor  # DTensor's device mesh, for one, is a part that is none


def is_on_wrappers(types: Iterable[type]) -> bool:
    """Whether an operation is on tensors that wrap others.

    A dispatch mode returns ``NotImplemented`` for it: the wrapper then takes it apart, and its operations on
    plain tensors, collectives among them, come by one by one. Calling it instead would hide them, because a
    mode is off within its own handler.
    """
    return any(kind not in _PLAIN and not issubclass(kind, FakeTensor) for kind in types)
