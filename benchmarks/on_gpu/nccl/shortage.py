"""Make one rank's allocator run out of memory for real, at a chosen place of a step."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch

from torchtune_adaptive.testing import Fault, out_of_memory

PHASES = ("forward", "loss", "backward")
_PLACE = 2  # of the operation in a phase before which memory goes
_SMALLEST_BYTES = 512  # of a block of CUDA's allocator


def shortage(phase: str, *, rank: int, device: torch.device) -> AbstractContextManager[Any]:
    """Context of a micro-step: in this ``phase`` memory goes on ``rank``, and is back when the micro-step has ended."""
    if phase == "backward":
        return _in_backward(lambda: Shortage(None, rank, device))
    return Shortage(phase, rank, device)


class Shortage(Fault):
    """From an early operation on, CUDA's allocator gives no more memory on ``rank``.

    It is limited to what it has reserved, and all of that is taken. The next operation that needs memory then fails in
    the allocator itself. A CPU has no such allocator: there the operation raises its error.
    """

    def __init__(self, phase: str | None, rank: int, device: torch.device) -> None:
        super().__init__(_PLACE, ranks=[rank], phase=phase, strike=self._take_all)
        self._device = device
        self._taken: list[torch.Tensor] = []

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self._device.type == "cuda":
            self._taken.clear()
            torch.cuda.set_per_process_memory_fraction(1.0, self._device)

    def _take_all(self) -> None:
        if self._device.type == "cpu":
            out_of_memory()
        total_bytes = torch.cuda.mem_get_info(self._device)[1]
        reserved_bytes = torch.cuda.memory_reserved(self._device)
        torch.cuda.set_per_process_memory_fraction(reserved_bytes / total_bytes, self._device)
        self._taken = take_all(reserved_bytes, self._device)


def take_all(most_bytes: int, device: torch.device, *, smallest_bytes: int = _SMALLEST_BYTES) -> list[torch.Tensor]:
    """Tensors that take all memory which CUDA's allocator still gives, in blocks of at most ``most_bytes``."""
    taken: list[torch.Tensor] = []
    num_bytes = most_bytes
    while num_bytes >= smallest_bytes:
        try:
            taken.append(torch.empty(num_bytes, dtype=torch.uint8, device=device))
        except torch.OutOfMemoryError:
            num_bytes //= 2
    return taken


@contextmanager
def _in_backward(make: Callable[[], Fault]) -> Iterator[None]:
    """Context: backward passes run under a fault."""
    backward = torch.autograd.backward

    def with_fault(*args: Any, **kwargs: Any) -> Any:
        with make():
            return backward(*args, **kwargs)

    with mock.patch.object(torch.autograd, "backward", with_fault):
        yield
