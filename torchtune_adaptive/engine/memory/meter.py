"""Measure the memory of one rank's device, and set a limit above which allocations fail.

``CudaMeter`` reads the statistics of CUDA's caching allocator, ``CpuMeter`` watches every operation. A CPU with
a limit behaves like a small GPU, the same on every machine, so tests and demos run the code that a GPU runs.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from torchtune_adaptive.engine.memory.timeline import Timeline
from torchtune_adaptive.errors import InputError


class MemoryMeter(ABC):
    """Measures memory within ``with meter:``.

    Args:
        exact: measure as exactly as the device allows, for probes. This takes time, and on CUDA it resets the
            device's own peak statistics at every phase. Training uses False, and resets them once, when it begins.

    Attributes:
        limit_bytes: above it, allocations within ``with meter:`` raise ``torch.OutOfMemoryError``. None: not limited.
    """

    def __init__(self, *, exact: bool = True) -> None:
        self.limit_bytes: int | None = None
        self._exact = exact
        self._peak_bytes = 0
        self._phase = ""
        self._phase_peak_bytes: dict[str, int] = {}
        self._retries_at_reset = 0
        self._recording: list[tuple[str, int]] | None = None

    @contextmanager
    def exactly(self) -> Iterator[None]:
        """Context: measure exactly. On exit, restore the limit, the exactness and the peak."""
        before, peak_bytes = (self.limit_bytes, self._exact), self.peak_bytes
        self._exact = True
        try:
            yield
        finally:
            self.limit_bytes, self._exact = before
            self.reset()
            self._peak_bytes = max(self._peak_bytes, peak_bytes)

    @property
    @abstractmethod
    def available_bytes(self) -> int:
        """The most that this process can use on its device now, including what it already uses."""

    @property
    def peak_bytes(self) -> int:
        """Peak since ``reset``: live bytes on the CPU, bytes reserved by the caching allocator on CUDA."""
        return self._peak_bytes

    @property
    def total_retries(self) -> int:
        """How often the allocator has freed its cache to make an allocation possible. 0 without a cache."""
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
        """Forget peaks, phases and retries. Live tensors stay counted. On CUDA it resets the device's own peaks."""
        self._phase = ""
        self._phase_peak_bytes = {}
        self._retries_at_reset = self.total_retries

    def enter_phase(self, name: str) -> None:
        """Start phase ``name``, for example "forward"."""
        self._phase = name

    def start_timeline(self) -> None:
        """Record live bytes after every operation until ``stop_timeline``."""
        self._recording = []

    def stop_timeline(self, batch_size: int) -> Timeline:
        """Return the operations since ``start_timeline`` as the timeline of a step at ``batch_size``."""
        recording, self._recording = self._recording or [], None
        return Timeline(batch_size, tuple(name for name, _ in recording), tuple(live for _, live in recording))

    @abstractmethod
    def count(self, values: Any) -> None:
        """Count the tensors in ``values`` (any nested containers), which were made outside ``with meter:``."""

    @abstractmethod
    def __enter__(self) -> "MemoryMeter": ...

    @abstractmethod
    def __exit__(self, *error: Any) -> None: ...

    def _update_phase_peak(self, live_bytes: int) -> None:
        if live_bytes > self._phase_peak_bytes.get(self._phase, -1):
            self._phase_peak_bytes[self._phase] = live_bytes


def device_memory_bytes(device: torch.device) -> int:
    """Return the total memory of ``device`` in bytes: the GPU's, or the machine's if it is the CPU.

    Raises:
        InputError: the device is neither the CPU nor CUDA.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    if device.type != "cpu":
        raise InputError(f"`device` must be the CPU or CUDA, but is '{device}' instead.")
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
