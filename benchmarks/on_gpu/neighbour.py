"""Memory of the device that is taken past torch's allocator, as another process would take it."""

import ctypes
from pathlib import Path

import torch

_LARGEST, _SMALLEST = 2**30, 2**21  # bytes of a block; CUDA maps no less than the smallest


class Neighbour:
    """Takes memory of the current CUDA device by ``cudaMalloc``. The driver then has less for torch's allocator."""

    def __init__(self) -> None:
        torch.cuda.init()
        maps = Path("/proc/self/maps").read_text().split()
        self._runtime = ctypes.CDLL(next(path for path in maps if "libcudart" in path))
        self._blocks: list[ctypes.c_void_p] = []
        self.num_bytes = 0

    def take(self, *, leave_bytes: int) -> None:
        """Take all free memory but ``leave_bytes``; 0: all that the driver gives."""
        size = _LARGEST
        while size >= _SMALLEST:
            free_bytes, _ = torch.cuda.mem_get_info()
            if (leave_bytes > 0 and free_bytes - size < leave_bytes) or not self._take(size):
                size //= 2

    def leave(self) -> None:
        """Give the memory back."""
        while self._blocks:
            self._runtime.cudaFree(self._blocks.pop())
        self.num_bytes = 0

    def _take(self, size: int) -> bool:
        block = ctypes.c_void_p()
        if self._runtime.cudaMalloc(ctypes.byref(block), ctypes.c_size_t(size)) != 0:
            self._runtime.cudaGetLastError()  # else torch takes it for an error of its own
            return False
        self._blocks.append(block)
        self.num_bytes += size
        return True
