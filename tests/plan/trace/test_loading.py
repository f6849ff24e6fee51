"""Weights lie where loading them has left them, with any number of layers."""

import pytest

from torchtune_adaptive.plan.allocator import MIB, CachingAllocator, DoesNotFitError
from torchtune_adaptive.plan.replay import OPTIMIZER, STATE, replayed
from torchtune_adaptive.plan.trace.events import BEFORE, Event, Events
from torchtune_adaptive.plan.trace.loading import arranged, load, with_more_layers, without_loops
from torchtune_adaptive.plan.trace.step_events import StepEvents

UNPACKED, PACKED = 32 * MIB, 8 * MIB


def weights(*sizes: int, kind: str = "parameters") -> Events:
    return tuple(Event(BEFORE, "mark 1", kind, num_bytes) for num_bytes in sizes)


def step_with(taken: int) -> Events:
    """A step that takes so many bytes, and gives back the first thing that existed before it."""
    return Event("forward", "mm", "activations", taken), Event("backward", "mm", "activations", 0, taken=0)


def reserved_after(events: Events) -> int:
    return replayed(events, state_exists=False).reserved_bytes


def test_a_weight_that_is_packed_on_the_device_leaves_the_memory_of_the_unpacked_one_to_later_ones() -> None:
    sizes = [PACKED] * 3
    loads = [load([PACKED], temporary=[UNPACKED])] * 3
    allocator = CachingAllocator()
    for _ in sizes:
        unpacked = allocator.allocate(UNPACKED)
        allocator.allocate(PACKED)
        allocator.free(unpacked)
    assert (
        reserved_after(arranged(weights(*sizes), loads)) == allocator.reserved_bytes > reserved_after(weights(*sizes))
    )


def test_what_the_step_gives_back_is_still_what_it_was() -> None:
    events = (*weights(3, 5, 7), *step_with(taken=11))
    found = arranged(events, [load([7], temporary=[2]), load([5])])
    assert [event.num_bytes for event in found] == [2, 7, 0, 5, 3, 11, 0]
    assert found[-1].taken == 4  # the weight of 3 bytes


def test_a_weight_that_is_not_on_the_device_is_left_out_of_the_order() -> None:
    """Weights may be in host memory; a loaded one may be packed into tensors that no step has."""
    events = (*weights(3), Event(BEFORE, "mark 2", STATE, 5))
    assert arranged(events, [load([5]), load([3])]) == events


def test_frozen_models_have_weights_too() -> None:
    events = (*weights(3), *weights(5, kind="frozen models"))
    assert [event.num_bytes for event in arranged(events, [load([5]), load([3])])] == [5, 3]


def test_without_loads_weights_come_in_the_order_of_the_model() -> None:
    events = (*weights(3, 5), *step_with(taken=11))
    assert arranged(events, []) is events


def test_loads_of_few_layers_grow_as_the_step_does() -> None:
    ends, layer = (load([1]), load([2])), [load([3]), load([4], temporary=[5])]
    few, more = ([ends[0], *layer * number, ends[1]] for number in (2, 3))
    traced = {1: (weights(1, *(3, 4) * 2, 2), weights(1, *(3, 4) * 3, 2))}
    step = StepEvents(8, traced, periods=4, loads=(few, more))
    assert step.at(1) == arranged(weights(1, *(3, 4) * 6, 2), [ends[0], *layer * 6, ends[1]])
    assert StepEvents.from_json(step.as_json()).at(1) == step.at(1)
    assert with_more_layers(few, more, 0) == few


@pytest.mark.parametrize("passes", [1, 2, 5])
def test_of_a_loop_one_pass_is_left(passes: int) -> None:
    def a_loop(passes: int) -> Events:
        found = [Event(BEFORE, "loading", "temporaries", 64)]
        for _ in range(passes):
            start = len(found)
            found += [Event(BEFORE, "loading", "temporaries", num_bytes) for num_bytes in (8, 2)]
            found += [Event(BEFORE, "loading", "temporaries", 0, taken=place) for place in (start + 1, start)]
        kept = Event(BEFORE, "loading", "temporaries", 4)
        return (*found, kept, Event(BEFORE, "loading", "temporaries", 0, taken=0))

    assert without_loops(a_loop(passes)) == a_loop(1)


def test_what_is_kept_again_and_again_is_no_loop() -> None:
    assert without_loops(load([8] * 4)) == load([8] * 4)


def test_the_state_is_made_beside_gradients_after_which_the_cache_is_emptied() -> None:
    """A gradient of 7 MiB takes what later is the first hole. So all of the step fits in two segments of 20 MiB."""
    sizes = 3 * MIB, 7 * MIB
    state = [Event(BEFORE, "mark 2", STATE, num_bytes) for num_bytes in sizes for _ in range(2)]
    gradients = [Event("backward", "mm", "gradients", num_bytes) for num_bytes in sizes]
    events = (*weights(*sizes), *state, *gradients)
    given_back = (Event(OPTIMIZER, "zero", "", 0, taken=index) for index in range(6, 8))
    allocator = CachingAllocator()
    held = [allocator.allocate(num_bytes) for num_bytes in (*sizes, *sizes)]
    for event in state:
        allocator.allocate(event.num_bytes)
    for block in held[2:]:
        allocator.free(block)
    allocator.empty_cache()
    for num_bytes in sizes:
        allocator.allocate(num_bytes)
    assert replayed((*events, *given_back)).reserved_bytes == allocator.reserved_bytes == 40 * MIB


def test_an_optimizer_in_backward_never_has_all_gradients_with_which_its_state_was_made() -> None:
    state = [Event(BEFORE, "mark 2", STATE, 64 * MIB)] * 2
    step = Event("forward", "mm", "activations", 12 * MIB), Event("backward", "mm", "activations", 0, taken=3)
    events = (*weights(64 * MIB), *state, *step)
    assert replayed(events).reserved_bytes == (3 * 64 + 12) * MIB
    assert replayed(events, limit_bytes=(3 * 64 + 12) * MIB).reserved_bytes == (3 * 64 + 12) * MIB


def test_a_state_that_does_not_fit_beside_the_weights_is_refused() -> None:
    """Also if the step itself takes nothing that is new."""
    events = (*weights(64 * MIB), *[Event(BEFORE, "mark 2", STATE, 64 * MIB)] * 2)
    with pytest.raises(DoesNotFitError, match="of weights and optimizer state do not fit"):
        replayed(events, limit_bytes=3 * 64 * MIB - 1)


def test_gradients_with_which_the_state_was_made_leave_no_room_for_activations() -> None:
    """Else those of 50 MiB would take the place of the gradient of 64 MiB, which then needs another segment."""
    state = [Event(BEFORE, "mark 2", STATE, 64 * MIB)] * 2
    taken = Event("forward", "mm", "activations", 50 * MIB), Event("backward", "mm", "gradients", 64 * MIB)
    given_back = (Event(OPTIMIZER, "zero", "", 0, taken=index) for index in (3, 4))
    assert replayed((*weights(64 * MIB), *state, *taken, *given_back)).reserved_bytes == (3 * 64 + 50 + 64) * MIB
