"""A replacement for activation offloading, which needs CUDA: it holds the same memory on fake tensors."""

from collections import deque
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks


class OffloadedActivations(saved_tensors_hooks):
    """Holds the tensors that torchtune's ``OffloadActivations``, with streams and defaults, holds on the device.

    The forward pass keeps the last saved tensors, whose copies to the host may still be running. The backward pass
    keeps the tensors copied back for the last operation until the next operation is done. They are taken in a stream of
    their own.

    Attributes:
        host_bytes: the bytes of each tensor that the last forward pass has copied to the host.
    """

    _STASHED, _SMALLEST_BYTES = 5, 1024

    def __init__(self) -> None:
        self._stash: deque[tuple[int, torch.Tensor]] = deque(maxlen=self._STASHED)
        self._brought_back: deque[torch.Tensor] = deque(maxlen=2)
        self._last = 0
        self._in_backward = False
        self.host_bytes: list[int] = []
        self._stream = torch.cpu.Stream()  # stands for the one of copies, in which their memory is taken
        super().__init__(self._pack, self._unpack)

    def _pack(self, saved: torch.Tensor) -> Any:
        self._last += 1
        self._brought_back.clear()
        if saved.nbytes < self._SMALLEST_BYTES or isinstance(saved, nn.Parameter | nn.Buffer):
            return saved
        if self._in_backward:
            self._in_backward, self.host_bytes = False, []
        self.host_bytes.append(saved.nbytes)
        self._stash.append((self._last, saved))
        return self._last, saved.shape, saved.stride(), saved.dtype

    def _unpack(self, packed: Any) -> torch.Tensor:
        self._in_backward = True
        if isinstance(packed, torch.Tensor):
            return packed
        number, shape, stride, dtype = packed
        tensor = dict(self._stash).get(number)
        self._stash.clear()
        if tensor is None:
            with torch.cpu.stream(self._stream):
                tensor = torch.empty_strided(shape, stride, dtype=dtype)
        self._brought_back.append(tensor)
        return tensor
