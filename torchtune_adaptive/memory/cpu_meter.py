"""Live bytes on the CPU, counted by watching every operation's outputs until their storage dies.

PyTorch keeps no statistics of CPU memory. A dispatch mode that follows storages agrees with the
profiler's allocator events within 0.1 % (``tests/test_meter.py``); what a kernel or compiled code
allocates and frees within itself it cannot see. With a limit it is a device that runs out of memory at
the same operation on every machine. The operation that crosses the limit has run: real memory held one
more output.

A thread that ran a collective gives back its tensors a moment after the wait for it is over. What a rank
holds by then would be counted or not by chance, so an exact meter waits for that moment, and every meter
waits before it says that memory is out.
"""

import time
from collections import deque
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from torchtune_adaptive.memory.meter import MemoryMeter, device_memory_bytes
from torchtune_adaptive.memory.operations import is_collective, plain_parts
from torchtune_adaptive.memory.storages import Storages, WatchOperations
from torchtune_adaptive.text import format_bytes

_MOMENT_S = 0.002
_MOMENT_BEFORE_FAILING_S = 0.02


class CpuMeter(MemoryMeter):
    """Counts bytes of CPU storages that operations inside ``with meter:`` made, and those given to ``count``.

    Attributes:
        cache_limit_bytes: plays a caching allocator that finds no more room in its cache above so many live
            bytes: each time they rise above it counts as a retry. None: there is no cache, and nothing to retry.
    """

    def __init__(self, *, exact: bool = True) -> None:
        self._total_retries = 0
        super().__init__(exact=exact)
        self.cache_limit_bytes: int | None = None
        self._is_above_cache = False
        self._live_bytes = 0
        self._changes_bytes: deque[int] = deque()  # by any thread; added up by the one that meters
        self._peak_bytes = 0
        self._storages = Storages(lambda _, change_bytes: self._changes_bytes.append(change_bytes))
        self._mode = WatchOperations(self.after_operation, self.after_resize)
        self._after_collective = False

    @property
    def live_bytes(self) -> int:
        """Bytes of the storages that are counted and still there."""
        while self._changes_bytes:
            self._live_bytes += self._changes_bytes.popleft()
        return self._live_bytes

    @property
    def available_bytes(self) -> int:
        return device_memory_bytes(torch.device("cpu"))

    @property
    def peak_bytes(self) -> int:
        return self._peak_bytes

    @property
    def total_retries(self) -> int:
        return self._total_retries

    def reset(self) -> None:
        super().reset()
        self._peak_bytes = self.live_bytes

    def enter_phase(self, name: str) -> None:
        super().enter_phase(name)
        self._note(self.live_bytes)

    def count(self, values: Any) -> None:
        self._see(tree_leaves(values))
        self._peak_bytes = max(self._peak_bytes, self.live_bytes)

    def __enter__(self) -> "CpuMeter":
        self._storages.see_again()
        self._mode.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._mode.__exit__(kind, error, traceback)

    def after_operation(self, func: Any, inputs: Any, outputs: Any) -> None:
        """Count the ``outputs`` of the operation ``func``.

        Raises:
            torch.OutOfMemoryError: live bytes are above the limit.
        """
        leaves = tree_leaves(outputs)
        if any(_is_imaginary(leaf) for leaf in leaves):
            return  # DTensor works out shardings on tensors without memory, the first time only
        self._see(leaves)
        if self._after_collective and self._exact:
            time.sleep(_MOMENT_S)
        self._after_collective = is_collective(func)
        if self._recording is not None:
            self._recording.append((str(func), self.live_bytes))
        self._check(func)

    def after_resize(self, storage: torch.UntypedStorage) -> None:
        """Count a storage's new size; FSDP2 allocates and frees its gathered parameters by resizing.

        Raises:
            torch.OutOfMemoryError: live bytes are above the limit.
        """
        if storage in self._storages:
            self._storages.see(storage)
            self._check("resize_")

    def _see(self, values: Iterable[Any]) -> None:
        for value in values:
            for tensor in plain_parts(value):
                if tensor.device.type == "cpu" and tensor.layout is torch.strided:
                    self._storages.see(tensor.untyped_storage())

    def _check(self, operation: object) -> None:
        limit_bytes = self._limit_bytes
        if limit_bytes is not None and self.live_bytes > limit_bytes:
            time.sleep(_MOMENT_BEFORE_FAILING_S)
        self._peak_bytes = max(self._peak_bytes, self.live_bytes)
        self._note(self.live_bytes)
        self._play_cache()
        if limit_bytes is not None and self.live_bytes > limit_bytes:
            raise torch.OutOfMemoryError(
                f"CPU meter out of memory: {format_bytes(self.live_bytes)} live after {operation}"
                f" in phase {self._phase or 'unnamed'!r}, limit {format_bytes(limit_bytes)}"
            )

    def _play_cache(self) -> None:
        was_above = self._is_above_cache
        self._is_above_cache = self.cache_limit_bytes is not None and self.live_bytes > self.cache_limit_bytes
        self._total_retries += self._is_above_cache and not was_above


def _is_imaginary(value: Any) -> bool:
    return isinstance(value, FakeTensor) or (isinstance(value, torch.Tensor) and value.device.type == "meta")
