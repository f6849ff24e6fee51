"""torch's own readers can read a step's snapshot, and find the step's bytes in it."""

import pickle
import pickletools
from typing import Any

import pytest
from hypothesis import given, settings
from torch.cuda import _memory_viz

from tests.support.step_events import EVENTS, MIB, drawn_events
from torchtune_adaptive.plan.show.snapshot import snapshot, snapshot_bytes
from torchtune_adaptive.plan.trace.events import BEFORE_STEP, Allocation, Operation, StepEvents
from torchtune_adaptive.text import format_bytes

# The opcodes that the viewer in a browser can unpickle.
READ_BY_VIEWER = {
    *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT"),
    *("APPEND", "APPENDS", "LIST", "EMPTY_LIST", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_TUPLE"),
    *("DICT", "EMPTY_DICT", "SETITEM", "SETITEMS", "NEWFALSE", "NEWTRUE", "NONE"),
    *("BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINUNICODE", "BINUNICODE"),
}


@pytest.fixture
def read() -> Any:
    return pickle.loads(snapshot_bytes(EVENTS))


@settings(max_examples=80)
@given(drawn_events())
def test_live_blocks_never_overlap_and_their_highest_sum_is_the_peak(events: StepEvents) -> None:
    content = snapshot(events)
    (segment,), (trace,) = content["segments"], content["device_traces"]
    live: dict[int, int] = {}
    after: dict[int, int] = {}  # by time
    for entry in trace[1:-1]:
        if entry["action"] == "alloc":
            overlapping = [
                a for a, size in live.items() if a < entry["addr"] + entry["size"] and entry["addr"] < a + size
            ]
            assert overlapping == []
            live[entry["addr"]] = entry["size"]
        elif entry["action"] == "free_completed":
            assert live.pop(entry["addr"]) == entry["size"]
        assert sum(live.values()) <= events.peak_bytes
        assert max(address + size for address, size in live.items()) <= segment["address"] + segment["total_size"]
        after[entry["time_us"]] = sum(live.values())
    assert [after[time_us] for time_us in sorted(after) if time_us] == [
        total for number, total in enumerate(events.total_bytes) if number + 1 in after
    ]
    assert max(after.values()) == events.peak_bytes
    active = {block["address"]: block["size"] for block in segment["blocks"] if block["state"] == "active_allocated"}
    assert active == live


@pytest.mark.parametrize("freed", [(1, 2, 3), (3, 2, 1), (1, 3, 2)])
def test_adjacent_freed_blocks_are_one_gap_for_a_larger_block(freed: tuple[int, ...]) -> None:
    sizes = [20, 30, 40]
    small = [Allocation(size, "activations", "norm", BEFORE_STEP, end) for size, end in zip(sizes, freed, strict=True)]
    rest = Allocation(10, "parameters", "norm", BEFORE_STEP, None), Allocation(90, "activations", "norm", 4, None)
    events = StepEvents(1, 8, (Operation("mm", "forward", "norm"),) * 5, (*small, *rest))
    assert snapshot(events)["segments"][0]["total_size"] == 100


def test_torchs_readers_find_the_bytes_of_the_step(read: Any) -> None:
    held = EVENTS.total_bytes[-1]
    assert held == 9 * MIB
    summary = _memory_viz.segsum(read)
    assert f"total_allocated: {format_bytes(held).replace(' ', '')}\n" in summary
    assert f"total_reserved: {format_bytes(EVENTS.peak_bytes).replace(' ', '')}\n" in summary
    lines = _memory_viz.memory(read, format_flamegraph=lambda lines: lines).splitlines()
    assert sum(int(line.rpartition(" ")[2]) for line in lines if ";active_allocated;" in line) == held
    assert any("parameters;layers.0.mlp.w1:0:there before the step" in line for line in lines)
    printed = _memory_viz.trace(read)
    assert "\na = cudaMalloc(139637976727552, 20.0MiB)\nb = a[0:2.0MiB]\nc = a[2097152:4.0MiB]\n" in printed
    assert printed.count("# free completed for ") == 3
    assert '"snapshot.pickle"' in _memory_viz.trace_plot(read)


def test_the_viewer_in_a_browser_can_unpickle_it_and_colour_by_kind(read: Any) -> None:
    content = snapshot_bytes(EVENTS)
    opcodes = list(pickletools.genops(content))
    assert opcodes[0][1] == 4
    assert {opcode.name for opcode, _, _ in opcodes} <= READ_BY_VIEWER
    assert read["device_traces"][0][-1]["category"] == "unknown"
