"""Trace the live bytes of a train step on fake tensors, after each operation and by kind."""

from collections import defaultdict, deque
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch.utils._pytree import tree_leaves

from torchtune_adaptive.engine.memory.operations import plain_parts
from torchtune_adaptive.engine.memory.storages import Storages, WatchOperations
from torchtune_adaptive.engine.memory.timeline import Timeline
from torchtune_adaptive.plan.trace.fake_tensors import device_of

CUDA_GRANULARITY_BYTES = 512  # of its caching allocator (kMinBlockSize in c10/core/AllocatorConfig.h of torch 2.13)
Kind: TypeAlias = Literal[
    "parameters",
    "frozen models",
    "gradients",
    "optimizer state",
    "other tensors",
    "gathered parameters",
    "activations",
    "temporaries",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
ON_HOST = "on the host"  # marks tensors that are not on the device and are not counted
Mark: TypeAlias = Kind | Literal["on the host"]


class _Change(NamedTuple):
    """A storage that grows by ``change_bytes`` in operation number ``operation``."""

    operation: int
    storage: int
    change_bytes: int


class StepTrace:
    """Traces the operations within ``with trace:``. ``timelines`` returns the live bytes after each of them.

    A storage has one kind for its whole life: the last one with which it was marked. An unmarked storage counts as
    temporary if it was made during clipping or the optimizer step, and as an activation otherwise. FSDP2's tensors are
    recognised by the operations that make them: gathered parameters are resized, gradients are concatenated.
    Args:
        granularity_bytes: the device's allocator rounds allocations up to a multiple of this.
        steps_on_host: clipping and the optimizer step run on the host.
        by_gloo: collectives run on gloo, whose reduce-scatter copies its input.
    """

    def __init__(self, *, granularity_bytes: int = 1, steps_on_host: bool = False, by_gloo: bool = False) -> None:
        self._kind_after_backward: Mark = ON_HOST if steps_on_host else "temporaries"
        self._by_gloo = by_gloo
        self._granularity_bytes = granularity_bytes
        self._storages = Storages(self._record_change)
        self._watch = _WatchFakes(self._after_operation, self._after_resize)
        self._changes: list[_Change] = []  # not rounded
        self._operations: list[str] = []
        self._phases: list[str] = []
        self._phase = ""
        self._kinds: dict[int, Mark] = {}  # by storage
        self._unused_kinds: set[Mark] = {"frozen models", "other tensors"}

    def mark(self, values: Any, kind: Mark) -> None:
        """Count the storages of the tensors in ``values`` as ``kind``. Containers may be nested."""
        for value in tree_leaves(values):
            for tensor in plain_parts(value):
                self._kinds[self._storages.see(tensor.untyped_storage())] = kind
                self._unused_kinds.discard(kind)

    def mark_others(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Count the storages that are not counted yet as "other tensors"."""
        self._unused_kinds.discard("other tensors")
        for storage in storages:
            if storage not in self._storages:
                self._kinds[self._storages.see(storage)] = "other tensors"

    def enter_phase(self, name: str) -> None:
        """Assign the following operations to phase ``name``, for example "forward"."""
        self._phase = name

    def timelines(self, batch_size: int, *, granularity_bytes: int | None = None) -> dict[str, Timeline]:
        """The timeline of each kind of device memory, for a step with ``batch_size`` rows.

        Allocations are rounded up to ``granularity_bytes``, by default those of the device's allocator. "frozen models"
        and "other tensors" are missing if they were never marked, as with most methods.
        """
        live_bytes: dict[str, list[int]] = {kind: [] for kind in KINDS if kind not in self._unused_kinds}
        now_bytes: dict[str, int] = defaultdict(int)
        changes = deque(self._rounded(granularity_bytes or self._granularity_bytes))
        for index in range(len(self._operations)):
            while changes and changes[0][0] <= index:
                _, storage, change_bytes = changes.popleft()
                now_bytes[self._kinds[storage]] += change_bytes
            for kind, values in live_bytes.items():
                values.append(now_bytes[kind])
        operations, phases = tuple(self._operations), tuple(self._phases)
        return {kind: Timeline(batch_size, operations, tuple(values), phases) for kind, values in live_bytes.items()}

    def __enter__(self) -> "StepTrace":
        self._watch.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._watch.__exit__(kind, error, traceback)

    def _rounded(self, granularity_bytes: int) -> list[_Change]:
        """The changes of storages whose sizes are rounded up."""
        sizes: dict[int, int] = defaultdict(int)
        rounded: list[_Change] = []
        for operation, storage, change_bytes in self._changes:
            before, sizes[storage] = sizes[storage], sizes[storage] + change_bytes
            blocks = -(-sizes[storage] // granularity_bytes) - -(-before // granularity_bytes)
            rounded.append(_Change(operation, storage, blocks * granularity_bytes))
        return rounded

    def _record_change(self, storage: int, change_bytes: int) -> None:
        # A change counts for the next operation to end: outputs are seen before their own operation ends, and memory
        # freed after it is missing from the next one on.
        is_after_backward = self._phase in ("clip", "optimizer")
        self._kinds.setdefault(storage, self._kind_after_backward if is_after_backward else "activations")
        self._changes.append(_Change(len(self._operations), storage, change_bytes))

    def _after_operation(self, func: Any, inputs: Any, outputs: Any) -> None:
        # "prim": optimizers query fake parameters. "profiler": torch 2.9 marks compiled code, but not at every size.
        if func.namespace in ("prim", "profiler"):
            return
        for leaf in tree_leaves(outputs):
            for tensor in plain_parts(leaf):
                if device_of(tensor).type == "cpu":
                    self._storages.see(tensor.untyped_storage())
        if func.namespace == "fsdp":
            self._mark_fsdp_tensors(func.__name__, inputs, outputs)
        self._end_operation(str(func))
        if self._by_gloo and func is torch.ops.c10d._reduce_scatter_base_.default:
            copy = torch.empty_like(inputs[0][1])  # gloo holds it until this rank has copied its part
            self.mark(copy, "gradients")
            self._end_operation("gloo's copy")

    def _after_resize(self, storage: torch.UntypedStorage) -> None:
        if storage in self._storages:
            self._kinds[self._storages.see(storage)] = "gathered parameters"
            self._end_operation("resize_")

    def _mark_fsdp_tensors(self, name: str, inputs: Any, outputs: Any) -> None:
        if name.startswith("all_gather_copy_in"):
            self.mark(outputs, "gathered parameters")
        elif name.startswith("chunk_cat"):
            self.mark(inputs, "gradients")

    def _end_operation(self, name: str) -> None:
        self._operations.append(name)
        self._phases.append(self._phase)


class _WatchFakes(WatchOperations):
    """Waiting for a functional collective returns its tensor. On fake tensors torch would return a new one."""

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is torch.ops.prim.device.default:  # half of all operations: answered here, without further modes
            return device_of(args[0])
        if func is not torch.ops._c10d_functional.wait_tensor.default:
            return super().operation(func, args, kwargs)
        self._after_operation(func, (args, kwargs), args[0])
        return args[0]
