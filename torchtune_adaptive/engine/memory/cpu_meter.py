"""Measure live bytes on the CPU by watching the outputs of every operation until their storages are freed.

PyTorch keeps no statistics of CPU memory. This meter agrees with the memory events of PyTorch's profiler within
0.1 % (``tests/engine/memory/test_meter.py``). It does not see memory that a kernel or compiled code allocates and frees
internally. With a limit, it runs out of memory at the same operation on every machine. That operation has already
run, so the real memory held one more output.

A thread that ran a collective releases its tensors shortly after the wait for the collective is over. Whether they
are counted until then depends on timing. An exact meter therefore sleeps for a moment after each collective, and
every meter does so before it raises an out-of-memory error.
"""

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from torchtune_adaptive.engine.memory.meter import MemoryMeter, device_memory_bytes
from torchtune_adaptive.engine.memory.operations import is_collective, plain_parts
from torchtune_adaptive.engine.memory.storages import Storages, WatchOperations
from torchtune_adaptive.text import format_bytes

_SLEEP_AFTER_COLLECTIVE_S = 0.002
_SLEEP_BEFORE_FAILING_S = 0.02


class CpuMeter(MemoryMeter):
    """Counts the CPU storages that operations within ``with meter:`` return, and those passed to ``count``."""

    def __init__(self, *, exact: bool = True) -> None:
        super().__init__(exact=exact)
        self._live_bytes = 0
        self._changes_bytes: deque[int] = deque()  # any thread appends to it; summed only in `live_bytes`
        self._storages = Storages(lambda _, change_bytes: self._changes_bytes.append(change_bytes))
        self._mode = WatchOperations(self.after_operation, self.after_resize)
        self._after_collective = False

    @property
    def live_bytes(self) -> int:
        """Bytes of the counted storages that are not freed yet."""
        while self._changes_bytes:
            self._live_bytes += self._changes_bytes.popleft()
        return self._live_bytes

    @property
    def available_bytes(self) -> int:
        return device_memory_bytes(torch.device("cpu"))

    def reset(self) -> None:
        super().reset()
        self._peak_bytes = self.live_bytes

    def enter_phase(self, name: str) -> None:
        super().enter_phase(name)
        self._update_phase_peak(self.live_bytes)

    def count(self, values: Any) -> None:
        for storage in _cpu_storages(tree_leaves(values)):
            self._storages.see(storage)
        self._peak_bytes = max(self._peak_bytes, self.live_bytes)

    def __enter__(self) -> "CpuMeter":
        self._storages.see_again()
        self._mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)

    def after_operation(self, func: Any, inputs: Any, outputs: Any) -> None:
        """Count the ``outputs`` of the operation ``func``.

        Raises:
            torch.OutOfMemoryError: live bytes are above the limit.
        """
        leaves = [outputs] if type(outputs) is torch.Tensor else tree_leaves(outputs)  # most operations return one
        if any(isinstance(one, torch.Tensor) and (one.is_meta or isinstance(one, FakeTensor)) for one in leaves):
            return  # DTensor runs each operation once on fake tensors, to derive shardings
        for storage in _cpu_storages(leaves):
            self._storages.see(storage)
        if self._after_collective and self._exact:
            time.sleep(_SLEEP_AFTER_COLLECTIVE_S)
        self._after_collective = is_collective(func)
        if self._recording is not None:
            self._recording.append((str(func), self.live_bytes))
        self._check_limit(func)

    def after_resize(self, storage: torch.UntypedStorage) -> None:
        """As ``after_operation``, for a new size: FSDP2 allocates and frees gathered parameters by resizing."""
        if storage in self._storages:
            self._storages.see(storage)
            self._check_limit("resize_")

    def _check_limit(self, operation: object) -> None:
        live_bytes, limit_bytes = self.live_bytes, math.inf if self.limit_bytes is None else self.limit_bytes
        if live_bytes > limit_bytes:
            time.sleep(_SLEEP_BEFORE_FAILING_S)
            live_bytes = self.live_bytes
        fails = live_bytes > limit_bytes
        if self._exact or not fails:  # on a GPU an allocation that fails takes no memory; a probe shows what it needs
            self._peak_bytes = max(self._peak_bytes, live_bytes)
            self._update_phase_peak(live_bytes)
        if fails:
            raise torch.OutOfMemoryError(
                f"CPU meter out of memory: {format_bytes(live_bytes)} live after {operation}"
                f" in phase {self._phase or 'unnamed'!r}, limit {format_bytes(limit_bytes)}"
            )


def _cpu_storages(values: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
    for value in values:
        for tensor in plain_parts(value):
            if tensor.is_cpu and tensor.layout is torch.strided:
                yield tensor.untyped_storage()
