"""Measure one CUDA device by the statistics of its caching allocator.

The limit is the allocator's own (``torch.cuda.set_per_process_memory_fraction``). It limits reserved bytes: above
it the allocator frees its cache, retries and then raises, as it would on a smaller GPU. Memory outside the
allocator (the CUDA context, NCCL, other processes) reduces ``available_bytes``.
"""

from typing import Any

import torch

from torchtune_adaptive.engine.memory.meter import MemoryMeter
from torchtune_adaptive.engine.memory.storages import WatchOperations


class CudaMeter(MemoryMeter):
    """Measures the peak of reserved bytes on ``device``, and the peak of allocated bytes in each phase."""

    def __init__(self, device: torch.device, *, exact: bool = True) -> None:
        super().__init__(exact=exact)
        self._device = device
        self._total_bytes = torch.cuda.mem_get_info(device)[1]
        self._fraction_before = 1.0
        self._mode: WatchOperations | None = None

    @property
    def available_bytes(self) -> int:
        free_bytes, _ = torch.cuda.mem_get_info(self._device)
        return free_bytes + torch.cuda.memory_reserved(self._device)

    @property
    def peak_bytes(self) -> int:
        self._read_peaks()
        return self._peak_bytes

    @property
    def total_retries(self) -> int:
        return torch.cuda.memory_stats_as_nested_dict(self._device).get("num_alloc_retries", 0)

    @property
    def phase_peak_bytes(self) -> dict[str, int]:
        self._read_peaks()
        return super().phase_peak_bytes

    def reset(self) -> None:
        super().reset()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._peak_bytes = 0

    def enter_phase(self, name: str) -> None:
        if self._exact:
            self._read_peaks()
        super().enter_phase(name)

    def count(self, values: Any) -> None:
        """Do nothing: the allocator counts everything on the device."""

    def __enter__(self) -> "CudaMeter":
        if self.limit_bytes is not None:
            # Without a limit, the backend cudaMallocAsync returns far more than 1, which the setter refuses.
            self._fraction_before = min(1.0, torch.cuda.get_per_process_memory_fraction(self._device))
            fraction = min(self._fraction_before, self.limit_bytes / self._total_bytes)
            torch.cuda.set_per_process_memory_fraction(fraction, self._device)
        if self._recording is not None:
            self._mode = WatchOperations(self._after_operation, lambda _: None)
            self._mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._mode is not None:
            self._mode.__exit__(*error)
            self._mode = None
        if self.limit_bytes is not None:
            torch.cuda.set_per_process_memory_fraction(self._fraction_before, self._device)

    def _after_operation(self, func: Any, inputs: Any, outputs: Any) -> None:
        """Record the peak during the operation ``func``. It includes the workspaces of its kernels."""
        allocated_bytes = self._read_peaks()
        if self._recording is not None:
            self._recording.append((str(func), allocated_bytes))

    def _read_peaks(self) -> int:
        """Read the allocator's peaks into those of this meter; return the peak of allocated bytes.

        An exact meter then resets the allocator's peaks, so that the next reading covers only what follows.
        """
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)  # the flat one takes ten times as long
        allocated_bytes = stats["allocated_bytes"]["all"]["peak"] if stats else 0
        self._peak_bytes = max(self._peak_bytes, stats["reserved_bytes"]["all"]["peak"] if stats else 0)
        self._update_phase_peak(allocated_bytes)
        if self._exact:
            torch.cuda.reset_peak_memory_stats(self._device)
        return allocated_bytes
