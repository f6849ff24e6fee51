"""The memory of Inductor's code of a graph: which buffers its kernels allocate, in order, and when they are freed.

Inductor fuses chains of element-wise operations and reductions into one kernel. Its intermediate values take no memory.
These values have a buffer of their own here: inputs and outputs of the graph; inputs and outputs of operations with
their own kernels (matrix products, attention); results of reductions; and values that are read several times and
computed from many buffers.
"""

import math
from collections import Counter
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from torchtune_adaptive.plan.trace.fused_kernels import Kernel, Part, fused

# Operations without the tag "pointwise" whose elements a kernel computes where they are read. `scatter` into a
# constant, as in the backward pass of cross entropy, is a comparison with the index.
_INLINED = {"arange", "bernoulli", "cat", "constant_pad_nd", "copy", "embedding", "empty", "full", "full_like"}
_INLINED |= {"gather", "getitem", "index", "iota", "rand"}
_INLINED |= {"scalar_tensor", "scatter", "select_scatter", "slice_scatter"}
_REDUCTIONS = {"all", "amax", "amin", "any", "argmax", "argmin", "max", "mean", "min", "prod", "sum", "var", "var_mean"}
# A value that is used several times is kept if it is computed from more buffers than this: `realize_reads_threshold` of
# torch._inductor.config.
_MOST_READS = 4


@dataclass(frozen=True)
class _Geometry:
    """A tensor within its storage. ``offset`` counts elements from the tensor for which the buffer was made."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of a dense tensor of this size."""
        return math.prod(self.size) * self.dtype.itemsize

    def view_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This view of the buffer ``tensor``."""
        if (tuple(tensor.shape), tensor.stride(), self.offset) == (self.size, self.stride, 0):
            return tensor
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


@dataclass(frozen=True)
class _Step:
    """Allocates buffers. Takes over the memory of ``reused`` buffers, and frees ``freed`` ones afterwards."""

    reused: tuple[int, ...]
    made: tuple[tuple[int, _Geometry], ...]
    freed: tuple[int, ...]


class CompiledGraph:
    """Allocates and frees the same buffers as the compiled code of a graph. Buffers are numbered, inputs first.

    A call takes a list of inputs, empties it, and returns outputs of the graph's shapes without content.

    Args:
        graph: in functional form; its nodes' ``meta["val"]`` are fake tensors.
    """

    _boxed_call = True  # AOTAutograd then passes inputs as a list, and keeps no reference to them

    def __init__(self, graph: fx.Graph) -> None:
        buffers = _Buffers(graph)
        self._steps = _steps(buffers)
        self._outputs = buffers.outputs

    def __call__(self, inputs: list[Any]) -> list[Any]:
        held = dict(enumerate(inputs))
        inputs.clear()
        for step in self._steps:
            for number in step.reused:
                del held[number]
            for number, geometry in step.made:
                held[number] = torch.empty_strided(geometry.size, geometry.stride, dtype=geometry.dtype)
            for number in step.freed:
                del held[number]
        return [None if output is None else output[1].view_of(held[output[0]]) for output in self._outputs]


class _Buffers:
    """The buffers of a graph, and the kernels that make them.

    Attributes:
        nbytes: bytes of each buffer, inputs first.
        geometries: the geometry of each buffer that is allocated here, by number.
        kernels: in order, before fusion.
        outputs: for each output of the graph its buffer and its geometry in it; None if it is not a tensor.
    """

    def __init__(self, graph: fx.Graph) -> None:
        made_at_once, made_at_end = _nodes_with_buffers(graph)
        # By storage: number, and the tensor for which it was made.
        self._buffer_of: dict[int, tuple[int, torch.Tensor]] = {}
        self.nbytes: list[int] = []
        self.geometries: dict[int, _Geometry] = {}
        self.kernels: list[Kernel] = []
        reads: dict[fx.Node, frozenset[int]] = {}
        for node in graph.nodes:
            if node.op == "placeholder":
                reads[node] = frozenset([self._add_input(_tensors(node))])
        for node in graph.nodes:
            if node.op == "call_function":
                reads[node] = frozenset().union(*(reads[source] for source in node.all_input_nodes))
                if node in made_at_once:
                    reads[node] = self._add_kernel(node, reads[node])
        for node in made_at_end:
            self._add_kernel(node, reads[node])
        outputs: Any = graph.output_node().args[0]
        self.outputs = [self._output(node) for node in outputs]

    def _add_input(self, values: list[torch.Tensor]) -> int:
        number = len(self.nbytes)
        self.nbytes.append(sum(value.nbytes for value in values))
        for value in values:
            self._buffer_of.setdefault(_storage(value), (number, value))
        return number

    def _add_kernel(self, node: fx.Node, read: frozenset[int]) -> frozenset[int]:
        made: list[int] = []
        for value in _tensors(node):
            if _storage(value) not in self._buffer_of:
                made.append(len(self.nbytes))
                self._buffer_of[_storage(value)] = made[-1], value
                self.geometries[made[-1]] = geometry = _Geometry(tuple(value.shape), value.stride(), value.dtype)
                self.nbytes.append(geometry.nbytes)
        self.kernels.append(Kernel((Part(len(self.kernels), read, frozenset(made)),), _elements(node)))
        return frozenset(made)

    def _output(self, node: Any) -> tuple[int, _Geometry] | None:
        if not isinstance(node, fx.Node) or not isinstance(value := node.meta["val"], torch.Tensor):
            return None
        number, base = self._buffer_of[_storage(value)]
        offset = int(value.storage_offset() - base.storage_offset())
        return number, _Geometry(tuple(value.shape), value.stride(), value.dtype, offset)


def _steps(buffers: _Buffers) -> list[_Step]:
    """What each kernel allocates and frees. A value that is read only by its own kernel has no buffer."""
    kernels = fused(buffers.kernels, buffers.nbytes)
    outputs = {output[0] for output in buffers.outputs if output is not None}
    last_read = {number: index for index, kernel in enumerate(kernels) for number in kernel.read}
    to_come = Counter(number for kernel in kernels for part in kernel.parts for number in part.read)
    reusable: set[int] = set()  # without the inputs, which are not overwritten
    steps: list[_Step] = []
    for index, kernel in enumerate(kernels):
        unread = kernel.made - last_read.keys() if kernel.elements is None else set[int]()
        dying = ({number for number in kernel.read if last_read[number] == index} | unread) - outputs
        made, reused = [], set[int]()
        for part in kernel.parts:
            to_come.subtract(part.read)
            has_buffers = part.made if kernel.elements is None else part.made & (last_read.keys() | outputs)
            for number in sorted(has_buffers):
                made.append((number, buffers.geometries[number]))
                if kernel.elements is not None:
                    ended = (old for old in part.read & dying & reusable - reused if to_come[old] == 0)
                    reused |= {*islice((old for old in ended if buffers.nbytes[old] == buffers.nbytes[number]), 1)}
                reusable.add(number)
        steps.append(_Step(tuple(reused), tuple(made), tuple(dying - reused)))
    return steps


def _nodes_with_buffers(graph: fx.Graph) -> tuple[set[fx.Node], list[fx.Node]]:
    """The nodes whose values have buffers: those that other kernels read, and those that are only outputs.

    The latter are written at the end, unless a kernel that computes them anyway can write them.
    """
    makers: dict[int, fx.Node] = {}  # by storage: the first node whose value is in it
    readers: dict[fx.Node, set[fx.Node]] = {}  # nodes that read a node's value, or a view of it
    made_at_once: set[fx.Node] = set()
    made_at_end: list[fx.Node] = []

    def made_from(node: fx.Node) -> set[fx.Node]:
        return {makers[_storage(value)] for source in node.all_input_nodes for value in _tensors(source)}

    for node in graph.nodes:
        values = _tensors(node)
        is_view = all(_storage(value) in makers for value in values)
        for value in values:
            makers.setdefault(_storage(value), node)
        if node.op == "output" or (node.op == "call_function" and not is_view):
            for maker in made_from(node):
                readers.setdefault(maker, set()).add(node)
    num_read: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in graph.nodes:
        if node.op != "call_function" or node not in readers:
            continue
        sources = frozenset[fx.Node]().union(*(num_read.get(maker, frozenset([maker])) for maker in made_from(node)))
        is_costly = len(readers[node]) > 1 and len(sources) > _MOST_READS
        is_read_whole = any(map(_has_own_kernel, readers[node]))
        if is_costly or is_read_whole or _has_own_kernel(node) or _name(node) in _REDUCTIONS:
            made_at_once.add(node)
            continue
        num_read[node] = sources
        if graph.output_node() in readers[node]:
            made_at_end.append(node)
    return made_at_once, made_at_end


def _has_own_kernel(node: fx.Node) -> bool:
    """Whether the operation is not fused with others."""
    is_fused = _name(node) in _INLINED | _REDUCTIONS or torch.Tag.pointwise in getattr(node.target, "tags", ())
    return node.op == "call_function" and not is_fused


def _name(node: fx.Node) -> str:
    """The operation's name, without those of its library and of its overload."""
    return getattr(node.target, "__name__", "").partition(".")[0]


def _elements(node: fx.Node) -> int | None:
    """How many elements a node's kernel loops over; None if the node has a kernel of its own."""
    if _has_own_kernel(node):
        return None
    values = _tensors(node.all_input_nodes[0]) if _name(node) in _REDUCTIONS else _tensors(node)
    return values[0].numel()


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    """The values of a node that are tensors."""
    return [value for value in tree_leaves(node.meta.get("val")) if isinstance(value, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
