"""A step's allocations as a memory snapshot of torch, for https://pytorch.org/memory_viz.

The format is that of ``torch.cuda.memory._snapshot()``. Addresses are not those of CUDA's allocator: each allocation
is placed in the lowest gap of a single segment that is large enough.
"""

import pickle
from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Any, NamedTuple

from torchtune_adaptive.plan.trace.events import BEFORE_STEP, Allocation, StepEvents

_PROTOCOL = 4  # the viewer cannot read later ones
_FIRST_ADDRESS = 0x7F0000000000
_POOL = (0, 0)


def snapshot_bytes(events: StepEvents) -> bytes:
    """The content of the snapshot's file."""
    return pickle.dumps(snapshot(events), protocol=_PROTOCOL)


def snapshot(events: StepEvents) -> dict[str, Any]:
    """The snapshot at the step's end, with every allocation and deallocation of the step.

    Allocations at ``time_us`` 0 existed before the step. Later times count the operations. A frame's file is the module
    or the phase, its line the number of the operation, and its name the operation or the kind.
    """
    heap = _Heap()
    trace: list[dict[str, Any]] = []
    live: dict[int, _Block] = {}
    for number, time_us, is_made in _in_order(events.allocations):
        one = events.allocations[number]
        if is_made:
            live[number] = _Block(heap.take(one.num_bytes), one.num_bytes, _frames(one, events))
            trace.append(_entry("alloc", live[number], time_us) | {"category": one.kind})
        else:
            block = live.pop(number)
            heap.give_back(block.address, block.size)
            trace += [_entry(action, block, time_us) for action in ("free_requested", "free_completed")]
    segment = _Block(_FIRST_ADDRESS, heap.end - _FIRST_ADDRESS, [])
    end = _entry("snapshot", _Block(0, 0, []), len(events.operations))
    return {
        "segments": [_segment(segment, sorted(live.values()))],
        # The viewer colours by category only if one of them is "unknown".
        "device_traces": [[_entry("segment_alloc", segment, 0), *trace, end | {"category": "unknown"}]],
    }


class _Block(NamedTuple):
    address: int
    size: int
    frames: list[dict[str, Any]]


class _Heap:
    """Assigns addresses: each allocation gets the lowest gap that is large enough, or else the end.

    Attributes:
        end: the lowest address above all assigned ones.
    """

    def __init__(self) -> None:
        self.end = _FIRST_ADDRESS
        self._gaps: list[tuple[int, int]] = []  # address and size, in order; no two are adjacent

    def take(self, size: int) -> int:
        for place, (address, gap) in enumerate(self._gaps):
            if gap >= size:
                self._gaps[place : place + 1] = [(address + size, gap - size)] if gap > size else []
                return address
        self.end += size
        return self.end - size

    def give_back(self, address: int, size: int) -> None:
        place = bisect_left(self._gaps, (address, 0))
        if place < len(self._gaps) and address + size == self._gaps[place][0]:
            size += self._gaps.pop(place)[1]
        if place and sum(self._gaps[place - 1]) == address:
            address, before = self._gaps.pop(place - 1)
            size += before
        insort(self._gaps, (address, size))


def _in_order(allocations: tuple[Allocation, ...]) -> Iterator[tuple[int, int, bool]]:
    """Each allocation's number, its time, and whether it is made or freed. An operation's frees come first."""
    made = [(one.made + 1, 1, number) for number, one in enumerate(allocations)]
    freed = [(one.freed + 1, 0, number) for number, one in enumerate(allocations) if one.freed is not None]
    for time_us, is_made, number in sorted(made + freed):
        yield number, time_us, bool(is_made)


def _frames(one: Allocation, events: StepEvents) -> list[dict[str, Any]]:
    if one.made == BEFORE_STEP:
        return [_frame("there before the step", one.module, 0), _frame(one.kind, "before the step", 0)]
    operation = events.operations[one.made]
    return [_frame(operation.name, one.module, one.made), _frame(one.kind, operation.phase, one.made)]


def _frame(name: str, filename: str, line: int) -> dict[str, Any]:
    return {"name": name, "filename": filename, "line": line}


def _entry(action: str, block: _Block, time_us: int) -> dict[str, Any]:
    """An entry of the device's trace."""
    return {
        "action": action,
        "addr": block.address,
        "size": block.size,
        "stream": 0,
        "time_us": time_us,
        "frames": block.frames,
        "pool_id": _POOL,
    }


def _segment(segment: _Block, live: list[_Block]) -> dict[str, Any]:
    """The segment with the ``live`` blocks, which are in order, and the free blocks between them."""
    blocks: list[dict[str, Any]] = []
    address = segment.address
    for block in [*live, _Block(segment.address + segment.size, 0, [])]:
        if block.address > address:
            blocks.append(_block(_Block(address, block.address - address, []), "inactive"))
        if block.size:
            blocks.append(_block(block, "active_allocated"))
        address = block.address + block.size
    live_bytes = sum(block.size for block in live)
    return {
        "device": 0,
        "address": segment.address,
        "total_size": segment.size,
        "allocated_size": live_bytes,
        "active_size": live_bytes,
        "requested_size": live_bytes,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": _POOL,
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }


def _block(block: _Block, state: str) -> dict[str, Any]:
    return {
        "address": block.address,
        "size": block.size,
        "requested_size": block.size if state == "active_allocated" else 0,
        "state": state,
        "frames": block.frames,
    }
