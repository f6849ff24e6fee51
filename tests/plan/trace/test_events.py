"""A step's allocations: made from the changes of its storages, summed over the step, and the same after JSON."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.step_events import EVENTS, drawn_events
from torchtune_adaptive.plan.trace.events import (
    BEFORE_STEP,
    KINDS,
    Change,
    Operation,
    StepEvents,
    allocations_of,
)

properties = settings(max_examples=80)


@properties
@given(
    st.lists(st.tuples(st.integers(BEFORE_STEP, 12), st.integers(0, 3), st.integers(0, 9)), max_size=30),
    st.lists(st.sampled_from([*KINDS, "on the host"]), min_size=4, max_size=4),
)
def test_the_allocations_are_live_as_the_storages_change(sizes: list[tuple[int, int, int]], kinds: list[str]) -> None:
    """Each storage has a size from an operation until its next size; operation 10 and later are after the step."""
    now, changes = dict.fromkeys(range(4), 0), []
    live: dict[str, list[int]] = {kind: [0] * 10 for kind in KINDS}
    for operation, storage, size in sorted(sizes, key=lambda one: one[0]):
        if size != now[storage]:
            changes.append(Change(operation, storage, size - now[storage]))
            for later in range(max(operation, 0), 10) if kinds[storage] in live else ():
                live[kinds[storage]][later] += size - now[storage]
            now[storage] = size
    found = allocations_of(
        changes, kinds=dict(enumerate(kinds)), modules=dict.fromkeys(range(4), "output"), num_operations=10
    )
    events = StepEvents(1, 1, (Operation("mm", "forward", "output"),) * 10, tuple(found))
    assert events.live_bytes == {kind: values for kind, values in live.items() if any(values)}
    assert all(one.num_bytes > 0 and one.made < (10 if one.freed is None else one.freed) for one in found)
    assert [one.made for one in found] == sorted(one.made for one in found)


@properties
@given(drawn_events())
def test_the_peak_is_what_is_live_after_its_operation(events: StepEvents) -> None:
    after = [sum(one.num_bytes for one in events.live_after(number)) for number in range(len(events.operations))]
    assert events.total_bytes == after
    assert events.peak_bytes == max(after) == after[events.peak_at]
    assert events.peak_at == after.index(max(after))  # the first peak


def test_events_are_the_same_after_json() -> None:
    assert StepEvents.from_json(json.loads(json.dumps(EVENTS.as_json()))) == EVENTS
