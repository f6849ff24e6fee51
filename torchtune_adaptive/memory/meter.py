"""Live and peak bytes of one rank's device, with a limit above which an allocation fails.

CUDA is metered by its caching allocator (``cuda_meter.py``), the CPU by watching every operation
(``cpu_meter.py``): a CPU with a limit behaves like a small GPU, the same on every machine, so that tests
and demo run the code that a GPU runs.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch

from torchtune_adaptive.errors import InputError
from torchtune_adaptive.memory.timeline import Timeline


class MemoryMeter(ABC):
    """Meters what happens inside ``with meter:``.

    Args:
        exact: for probes; figures are as exact as the device allows, at the price of time and, on CUDA, of the
            device's own peak statistics, which are reset at every phase. Without it the meter only watches.
    """

    def __init__(self, *, exact: bool = True) -> None:
        self._limit_bytes: int | None = None
        self._exact = exact
        self._phase = ""
        self._phase_peak_bytes: dict[str, int] = {}
        self._retries_at_reset = 0
        self._recording: list[tuple[str, int]] | None = None

    @property
    def limit_bytes(self) -> int | None:
        """Above this many live bytes an allocation inside ``with meter:`` raises ``torch.OutOfMemoryError``.

        None: there is no limit but the device's own.
        """
        return self._limit_bytes

    def set_limit(self, limit_bytes: int | None) -> None:
        """Set ``limit_bytes``."""
        self._limit_bytes = limit_bytes

    @contextmanager
    def exactly(self) -> Iterator[None]:
        """Inside, figures are exact. Afterwards the limit and the exactness are as before."""
        before = self._limit_bytes, self._exact
        self._exact = True
        try:
            yield
        finally:
            self._limit_bytes, self._exact = before

    @property
    @abstractmethod
    def available_bytes(self) -> int:
        """The most that this process could use on its device now, what it uses already included."""

    @property
    @abstractmethod
    def peak_bytes(self) -> int:
        """Peak since ``reset``: live bytes on the CPU, bytes reserved by the caching allocator on CUDA."""

    @property
    def total_retries(self) -> int:
        """How often the allocator has had to give back its cache to find room. 0 without a caching one."""
        return 0

    @property
    def allocator_retries(self) -> int:
        """``total_retries`` since ``reset``."""
        return self.total_retries - self._retries_at_reset

    @property
    def phase_peak_bytes(self) -> dict[str, int]:
        """Peak of live bytes in each phase entered since ``reset``, in order."""
        return dict(self._phase_peak_bytes)

    def reset(self) -> None:
        """Forget peaks and phases; what is live stays counted."""
        self._phase = ""
        self._phase_peak_bytes = {}
        self._retries_at_reset = self.total_retries

    def enter_phase(self, name: str) -> None:
        """What follows counts as phase ``name``, for example "forward"."""
        self._phase = name

    def start_timeline(self) -> None:
        """Record live bytes after every operation until ``stop_timeline``."""
        self._recording = []

    def stop_timeline(self, batch_size: int) -> Timeline:
        """The operations since ``start_timeline`` as the timeline of a step at ``batch_size``."""
        recording, self._recording = self._recording or [], None
        return Timeline(batch_size, tuple(name for name, _ in recording), tuple(live for _, live in recording))

    @abstractmethod
    def count(self, values: Any) -> None:
        """Count the tensors in ``values`` (any nest of containers), which were made outside of ``with meter:``."""

    @abstractmethod
    def __enter__(self) -> "MemoryMeter": ...

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def _note(self, live_bytes: int) -> None:
        """Take ``live_bytes`` into the present phase's peak."""
        if live_bytes > self._phase_peak_bytes.get(self._phase, -1):
            self._phase_peak_bytes[self._phase] = live_bytes


def device_memory_bytes(device: torch.device) -> int:
    """Bytes of memory that ``device`` has in all: the card's, or the machine's if it is the CPU.

    Raises:
        InputError: the device is neither the CPU nor CUDA.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    if device.type != "cpu":
        raise InputError(f"`device` must be the CPU or CUDA for its memory to be metered, but is '{device}' instead.")
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
