"""Live bytes of a train step over fake tensors, operation by operation, and what they hold."""

from collections import defaultdict
from types import TracebackType
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch.utils._pytree import tree_leaves

from torchtune_adaptive.memory.operations import plain_parts
from torchtune_adaptive.memory.storages import Storages, WatchOperations
from torchtune_adaptive.memory.timeline import Timeline

Kind: TypeAlias = Literal[
    "parameters", "gradients", "optimizer state", "gathered parameters", "activations", "temporaries"
]
KINDS: tuple[Kind, ...] = get_args(Kind)
CUDA_GRANULARITY_BYTES = 512  # of its caching allocator (kMinBlockSize in c10/core/AllocatorConfig.h of torch 2.13)
ON_HOST = "on the host"  # marks what is not on the device, and not counted
Mark: TypeAlias = Kind | Literal["on the host"]


class StepTrace:
    """Traces what happens inside ``with trace:``; live bytes of every kind are told by ``timelines``.

    A storage is of one kind for all of its life: the one it was last marked with, else activations, or temporaries if
    it was made in clipping or in the optimizer's step. FSDP2's gathered parameters and gradients are told by how it
    makes them: the first are resized, the second concatenated.

    Args:
        granularity_bytes: what the device's allocator rounds an allocation up to.
        steps_on_host: clipping and the optimizer's step are on the host.
        by_gloo: collectives are gloo's, which reduces and scatters in a copy of what it is given.
    """

    def __init__(self, *, granularity_bytes: int = 1, steps_on_host: bool = False, by_gloo: bool = False) -> None:
        self._born_late: Mark = ON_HOST if steps_on_host else "temporaries"
        self._by_gloo = by_gloo
        self._storages = Storages(self._note, granularity_bytes=granularity_bytes)
        self._watch = WatchOperations(self._after_operation, self._after_resize)
        self._changes: list[tuple[int, int, int]] = []  # operation, storage, bytes
        self._operations: list[str] = []
        self._phases: list[str] = []
        self._phase = ""
        self._kinds: dict[int, Mark] = {}

    def mark(self, values: Any, kind: Mark) -> None:
        """Count the storages of the tensors in ``values`` (any nest of containers), as ``kind``."""
        for value in tree_leaves(values):
            for tensor in plain_parts(value):
                self._kinds[self._storages.see(tensor.untyped_storage())] = kind

    def enter_phase(self, name: str) -> None:
        """What follows counts as phase ``name``, for example "forward"."""
        self._phase = name

    def timelines(self, batch_size: int) -> dict[str, Timeline]:
        """Live bytes of each kind on the device after every operation, as timelines of a step at ``batch_size``."""
        live_bytes: dict[str, list[int]] = {kind: [] for kind in KINDS}
        now_bytes: dict[str, int] = defaultdict(int)
        changes = iter([*self._changes, (len(self._operations), 0, 0)])
        at, number, change_bytes = next(changes)
        for index in range(len(self._operations)):
            while at <= index:
                now_bytes[self._kinds[number]] += change_bytes
                at, number, change_bytes = next(changes)
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

    def _note(self, number: int, change_bytes: int) -> None:
        # What is seen after an operation belongs to it, and what dies before the next one is gone by then.
        self._kinds.setdefault(number, self._born_late if self._phase in ("clip", "optimizer") else "activations")
        self._changes.append((len(self._operations), number, change_bytes))

    def _after_operation(self, func: Any, inputs: Any, outputs: Any) -> None:
        if func.namespace == "prim":  # a question to a fake tensor, asked once for each parameter by optimizers
            return
        for leaf in tree_leaves(outputs):
            for tensor in plain_parts(leaf):
                if tensor.device.type == "cpu":
                    self._storages.see(tensor.untyped_storage())
        if func.namespace == "fsdp":
            self._mark_of_fsdp(func.__name__, inputs, outputs)
        self._end_operation(str(func))
        if self._by_gloo and func is torch.ops.c10d._reduce_scatter_base_.default:
            copied = torch.empty_like(inputs[0][1])  # held until this rank has taken its part
            self.mark(copied, "gradients")
            self._end_operation("gloo's copy")

    def _after_resize(self, storage: torch.UntypedStorage) -> None:
        if storage in self._storages:
            self._kinds[self._storages.see(storage)] = "gathered parameters"
            self._end_operation("resize_")

    def _mark_of_fsdp(self, name: str, inputs: Any, outputs: Any) -> None:
        if name.startswith("all_gather_copy_in"):
            self.mark(outputs, "gathered parameters")
        elif name.startswith("chunk_cat"):
            self.mark(inputs, "gradients")

    def _end_operation(self, name: str) -> None:
        self._operations.append(name)
        self._phases.append(self._phase)
