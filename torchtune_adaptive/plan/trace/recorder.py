"""Record the memory that a train step on fake tensors takes and gives back, by kind."""

import math
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import groupby, pairwise
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch.utils._pytree import tree_leaves

from torchtune_adaptive.engine.memory.operations import plain_parts
from torchtune_adaptive.engine.memory.storages import Storages, WatchOperations
from torchtune_adaptive.plan.allocator import ceil_to
from torchtune_adaptive.plan.trace.events import BEFORE, Event, Events
from torchtune_adaptive.plan.trace.fake_tensors import device_of
from torchtune_adaptive.plan.trace.libraries import INPUTS, OUTPUTS, PRODUCT, VECTOR

Kind: TypeAlias = Literal[
    "parameters",
    "frozen models",
    "gradients",
    "optimizer state",
    "other tensors",
    "gathered parameters",
    "activations",
    "temporaries",
    "on the host",
]
ON_HOST = "on the host"  # marks tensors that are not on the device and are not counted
_END = "end of the step"  # in the place of an operation
# In a backward pass torch changes the first operand of these where it can, but not on fake tensors: sums of gradients
# (InputBuffer.cpp), and gradients of selected elements (`index_backward` in FunctionsManual.cpp).
_IN_PLACE = (torch.ops.aten.add.Tensor, torch.ops.aten.index_put.default)
# Operations that sum, by which of their arguments names the dimensions.
_DIMENSIONS = {
    torch.ops.aten.sum.dim_IntList: 1,
    torch.ops.aten.mean.dim: 1,
    torch.ops.aten.linalg_vector_norm.default: 2,
}
_PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm)


class _Change(NamedTuple):
    """A storage that grows by ``change_bytes`` in operation number ``operation``."""

    operation: int
    storage: int
    change_bytes: int
    stream: int


class StepTrace(WatchOperations):
    """Traces the operations within ``with trace:``. ``events`` returns the memory that they take and give back.

    A storage has one kind for its whole life: the last one with which it was marked. An unmarked storage counts as
    temporary if it was made during clipping or the optimizer step, and as an activation otherwise. FSDP2's tensors are
    recognised by the operations that make them: gathered parameters are resized, gradients are concatenated.

    Args:
        like_cuda: trace what CUDA would run: sums of gradients in place, the scratch memory of attention, and events
            for what the replay adds (``libraries.py``). On a CPU, gloo's reduce-scatter copies its input.
        steps_on_host: clipping and the optimizer step run on the host.
    """

    def __init__(self, *, like_cuda: bool = False, steps_on_host: bool = False) -> None:
        super().__init__(self._after_each, self._resized)
        self._kind_after_backward: Kind = ON_HOST if steps_on_host else "temporaries"
        self._like_cuda = like_cuda
        self._storages = Storages(self._record_change)
        self._streams = {torch.cpu.current_stream(): 0}  # their numbers. FSDP2 uses stand-ins on a CPU, too
        self._donors: dict[int, int] = {}  # by operation: the storage that CUDA would change in place
        self._multiplied: set[bool] = set()  # whether forward and backward had a product of matrices
        self._num_before = 0  # changes
        self._changes: list[_Change] = []  # not rounded
        self._operations: list[str] = []
        self._phases: list[str] = []
        self._phase = ""
        self._kinds: dict[int, Kind] = {}  # by storage
        self._num_marks = 0
        self._mark = ""  # the name of the last one
        self._marked: list[str] = []  # for each change before the step: the mark that it belongs to

    def mark(self, values: Any, kind: Kind, *, name: str = "") -> None:
        """Count the storages of the tensors in ``values`` as ``kind``. Containers may be nested.

        Before the step, ``name`` stands in the place of an operation; "": one of this call alone.
        """
        self._begin_mark(name)
        for value in tree_leaves(values):
            for tensor in plain_parts(value):
                self._kinds[self._storages.see(tensor.untyped_storage())] = kind

    def mark_others(self, storages: Iterable[torch.UntypedStorage], *, name: str = "") -> None:
        """Count the storages that are not counted yet as "other tensors"; ``name`` is as for ``mark``."""
        self._begin_mark(name)
        for storage in storages:
            if storage not in self._storages:
                self._kinds[self._storages.see(storage)] = "other tensors"

    def enter_phase(self, name: str) -> None:
        """Assign the following operations to phase ``name``, for example "forward"."""
        self._phase = name

    def events(self) -> Events:
        """Memory of the device in order: first what existed before the step.

        A phase whose first operation takes nothing begins with an event of 0 bytes, as it has memory all the same. What
        is given back before that operation belongs to the phase before.
        """
        found: list[Event] = []
        taken: dict[int, int] = {}  # by storage that is live: the event that took it
        sizes: dict[int, int] = {}
        starts = deque(index for index, pair in enumerate(pairwise(("", *self._phases))) if pair[0] != pair[1])
        for index, (operation, storage, change_bytes, stream) in enumerate(_in_order(self._in_place())):
            if self._kinds[storage] == ON_HOST:
                continue
            if index >= self._num_before:
                found += self._entered(starts, before=operation)
            phase, name = (BEFORE, self._marked[index]) if index < self._num_before else self._place(operation)
            if index >= self._num_before and starts and starts[0] == operation:
                if change_bytes > 0:
                    starts.popleft()
                elif operation:
                    phase = self._phases[operation - 1]
            if storage in taken:
                at = taken.pop(storage)
                found.append(Event(phase, name, found[at].kind, 0, taken=at))
            sizes[storage] = sizes.get(storage, 0) + change_bytes
            if sizes[storage] > 0:
                taken[storage] = len(found)
                found.append(Event(phase, name, self._kinds[storage], sizes[storage], stream))
        return (*found, *self._entered(starts, before=len(self._operations)))

    def _begin_mark(self, name: str) -> None:
        self._num_marks += 1
        self._mark = name or f"mark {self._num_marks}"

    def _entered(self, starts: deque[int], *, before: int) -> Iterator[Event]:
        """An event for each phase whose first operation comes before the one of that number."""
        while starts and starts[0] < before:
            phase, name = self._place(starts.popleft())
            yield Event(phase, name, "", 0)

    def _place(self, operation: int) -> tuple[str, str]:
        """Phase and name of the operation with that number, or of the end of the step."""
        if operation < len(self._operations):
            return self._phases[operation], self._operations[operation]
        return self._phases[-1], _END

    def _in_place(self) -> list[_Change]:
        """The changes; where CUDA works in place, a result has the storage of its first operand if that ends then."""
        changes, renamed = list(self._changes), dict[int, int]()
        index = self._num_before
        while index < len(changes):
            change = changes[index]
            donor = self._donors.get(change.operation)
            donor = renamed.get(donor, donor) if donor is not None else None
            if donor is not None and change.change_bytes > 0 and (end := self._end_of(donor, changes, index, renamed)):
                renamed[change.storage] = donor
                self._kinds[donor] = self._kinds[change.storage]
                del changes[end], changes[index]
                continue
            changes[index] = change._replace(storage=renamed.get(change.storage, change.storage))
            index += 1
        return changes

    def _end_of(self, storage: int, changes: list[_Change], index: int, renamed: dict[int, int]) -> int | None:
        """The index of the change that frees the storage, if nothing of the device is taken before."""
        for place in range(index + 1, len(changes)):
            change = changes[place]
            if change.change_bytes > 0 and self._kinds[change.storage] != ON_HOST:
                return None
            if renamed.get(change.storage, change.storage) == storage:
                return place if change.change_bytes == -changes[index].change_bytes else None
        return None

    def __enter__(self) -> "StepTrace":
        self._num_before = len(self._changes)
        super().__enter__()
        return self

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is torch.ops.prim.device.default:  # half of all operations: answered here, without further modes
            return device_of(args[0])
        if func is not torch.ops._c10d_functional.wait_tensor.default:
            return super().operation(func, args, kwargs)
        # Waiting for a functional collective returns its tensor. On fake tensors torch would return a new one.
        self._after_each(func, (args, kwargs), args[0])
        return args[0]

    def _record_change(self, storage: int, change_bytes: int) -> None:
        # A change counts for the next operation to end: outputs are seen before their own operation ends, and memory
        # freed after it is missing from the next one on.
        is_after_backward = self._phase in ("clip", "optimizer")
        self._kinds.setdefault(storage, self._kind_after_backward if is_after_backward else "activations")
        if not self._operations:
            self._marked.append(self._mark)
        stream = self._streams.setdefault(torch.cpu.current_stream(), len(self._streams))
        self._changes.append(_Change(len(self._operations), storage, change_bytes, stream))

    def _after_each(self, func: Any, inputs: Any, outputs: Any) -> None:
        # "prim": optimizers query fake parameters. "profiler": torch 2.9 marks compiled code, but not at every size.
        if func.namespace in ("prim", "profiler"):
            return
        leaves = tree_leaves(outputs)
        if func is torch.ops.aten.native_dropout.default:
            leaves.reverse()  # CUDA takes the mask first (aten/src/ATen/native/cuda/Dropout.cu)
        if self._like_cuda and func is torch.ops.aten._safe_softmax.default:
            # Rows that are masked whole are replaced afterwards (aten/src/ATen/native/SoftMax.cpp).
            self.mark([torch.empty_like(inputs[0][0]), torch.empty_like(inputs[0][0], dtype=torch.bool)], "temporaries")
        for leaf in leaves:
            for tensor in plain_parts(leaf):
                if device_of(tensor).type == "cpu":
                    self._storages.see(tensor.untyped_storage())
        if func.namespace == "fsdp":
            self._mark_fsdp_tensors(func.__name__, inputs, outputs)
        is_backward = torch._C._current_graph_task_id() != -1  # whatever the phase is: autograd runs it
        if self._like_cuda and is_backward:
            self._follow_cuda(func, inputs[0])
        self._end_operation(str(func))
        if self._like_cuda:
            self._note_for_replay(func, inputs[0], is_backward=is_backward)
        elif func is torch.ops.c10d._reduce_scatter_base_.default:
            copy = torch.empty_like(inputs[0][1])  # gloo holds it until this rank has copied its part
            self.mark(copy, "gradients")
            self._end_operation("gloo's copy")

    def _follow_cuda(self, func: Any, args: Any) -> None:
        """Note what CUDA does within an operation of the backward pass."""
        if func in _IN_PLACE and not torch.is_grad_enabled():
            operand = next(iter(plain_parts(args[0])), None)
            if operand is not None and not operand._is_view() and operand.untyped_storage() in self._storages:
                self._donors[len(self._operations)] = self._storages.see(operand.untyped_storage())
        elif func.__name__.startswith("_scaled_dot_product_flash_attention") and "backward" in func.__name__:
            query, key = args[1:3]
            batch, heads, tokens, head_dim = query.shape
            # float32 sums for the softmax and for the queries' gradient (flash_attn/flash_api.cpp)
            tokens, head_dim = ceil_to(tokens, 128), ceil_to(head_dim, 32)
            scratch = [torch.empty(batch, heads, tokens), torch.empty(batch, tokens, heads, head_dim)]
            if key.shape[1] < heads:  # gradients of keys and of values for each query head, before they are summed
                scratch += [query.new_empty(batch, key.shape[2], heads, query.shape[3]) for _ in range(2)]
            self.mark(scratch, "temporaries")
        elif func is torch.ops.aten._softmax_backward_data.default:
            self.mark(args[0] * args[1], "temporaries")  # aten/src/ATen/native/cuda/SoftMax.cu

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if storage in self._storages:
            self._kinds[self._storages.see(storage)] = "gathered parameters"
            self._end_operation("resize_")

    def _mark_fsdp_tensors(self, name: str, inputs: Any, outputs: Any) -> None:
        if name.startswith("all_gather_copy_in"):
            self.mark(outputs, "gathered parameters")
        elif name.startswith("chunk_cat"):
            self.mark(inputs, "gradients")

    def _note_for_replay(self, func: Any, args: Any, *, is_backward: bool) -> None:
        if (sizes := size_of_sum(func, args)) is not None:
            self._note(OUTPUTS, sizes[0])
            self._note(INPUTS, sizes[1])
        if func.overloadpacket in _PRODUCTS and is_backward not in self._multiplied:
            self._multiplied.add(is_backward)
            self._note(PRODUCT, 1)

    def _note(self, name: str, number: int) -> None:
        """Record an event that the replay reads: its bytes are a number."""
        self.mark(torch.empty(number, dtype=torch.uint8), "temporaries")
        self._end_operation(name)

    def _end_operation(self, name: str) -> None:
        self._operations.append(name)
        self._phases.append(self._phase)


def _in_order(changes: Iterable[_Change]) -> Iterator[_Change]:
    """The changes, but what is given back together in the order in which it was taken.

    The order makes no difference to an allocator, and is that of addresses where autocast forgets the weights it cast.
    """
    for _, together in groupby(changes, lambda change: (change.operation, change.change_bytes > 0)):
        of_group = list(together)
        yield from of_group if of_group[0].change_bytes > 0 else sorted(of_group, key=lambda change: change.storage)


def size_of_sum(func: Any, args: Any) -> tuple[int, int] | None:
    """The numbers of outputs and of inputs of a sum that may need scratch memory; None for any other operation.

    Whether it is one depends on nothing that grows with the rows of a batch. Sums over the dimension whose elements are
    neighbours take next to none.
    """
    place = _DIMENSIONS.get(func)
    if place is None or len(args) <= place or not args[place] or not args[0].is_floating_point() or not args[0].dim():
        return None
    tensor = args[0]
    summed = {dim % tensor.dim() for dim in args[place]}
    *others, fastest = sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride(dim), dim))
    if fastest in summed or tensor.stride(fastest) != 1:
        return None
    if tensor.shape[fastest] % VECTOR or any(tensor.stride(dim) % VECTOR for dim in others):
        return None
    return math.prod(size for dim, size in enumerate(tensor.shape) if dim not in summed), tensor.numel()
