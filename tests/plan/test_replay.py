"""What the allocator makes of a step: figures by phase and by kind, steps one after the other, a limit."""

import pytest

from tests.support.plans import MIB, STEP
from torchtune_adaptive.plan.allocator import DoesNotFitError
from torchtune_adaptive.plan.replay import exact, replayed
from torchtune_adaptive.plan.trace.events import BEFORE, MADE, Event, Events
from torchtune_adaptive.plan.trace.libraries import PRODUCT


def take(phase: str, mib: float, kind: str = "activations", stream: int = 0) -> Event:
    return Event(phase, "mm", kind, round(mib * MIB), stream)


def give(phase: str, taken: int, kind: str = "activations") -> Event:
    return Event(phase, "mm", kind, 0, taken=taken)


STEPS: Events = (take(BEFORE, 30, "parameters"), take("forward", 12), take("backward", 40, "gradients"))
STEPS += (give("backward", 1), give("optimizer", 2, "gradients"))


def test_on_a_cpu_tensors_take_their_own_bytes() -> None:
    assert STEP.phases == {"forward": 12 * MIB, "loss": 20 * MIB, "backward": 17 * MIB, "optimizer": 12 * MIB}
    assert STEP.allocated_bytes == STEP.reserved_bytes == 20 * MIB
    kinds = {"parameters": 2, "optimizer state": 4, "activations": 14, "gradients": 0}
    assert STEP.kinds() == {kind: mib * MIB for kind, mib in kinds.items()}
    assert STEP.kinds("backward") == STEP.kinds() | {"activations": 6 * MIB, "gradients": 5 * MIB}
    odd = exact((Event("forward", "mm", "activations", 1000),))
    assert (odd.allocated_bytes, odd.live_bytes) == (1000, [1000])


def test_the_allocator_rounds_up_and_keeps_what_it_has() -> None:
    memory = replayed(STEPS)
    assert memory.phases == {"forward": 42 * MIB, "backward": 82 * MIB, "optimizer": 30 * MIB}
    assert memory.reserved_bytes == 82 * MIB
    small = replayed((Event("forward", "mm", "activations", 1000),))
    assert (small.allocated_bytes, small.reserved_bytes) == (1024, 2 * MIB)


def test_workspaces_are_there_before_the_step() -> None:
    memory = replayed(STEPS, workspaces=(8 * MIB, 8 * MIB))
    assert memory.allocated_bytes == (82 + 16) * MIB
    assert memory.kinds()["workspaces"] == 16 * MIB
    assert memory.reserved_bytes == 82 * MIB + 20 * MIB  # both lie in one segment


def test_workspaces_come_with_the_first_product_of_forward_and_of_backward() -> None:
    """If there was no step before, in which they were taken."""
    product = Event("forward", PRODUCT, "temporaries", 1)
    taken = (take(BEFORE, 12, "parameters"), take("forward", 9), product, take("forward", 9), take("backward", 4))
    step = (*taken, product._replace(phase="backward"), *(give("backward", index) for index in (1, 2, 3, 4, 5)))
    workspaces = (8 * MIB, 8 * MIB)
    without, late = replayed(step), replayed(step, workspaces=workspaces, state_exists=False)
    early = replayed(step, workspaces=workspaces)
    assert without.reserved_bytes == (12 + 20 + 20) * MIB
    assert early.allocated_bytes == late.allocated_bytes == without.allocated_bytes + 16 * MIB
    assert early.reserved_bytes == (12 + 20 + 20) * MIB
    assert late.reserved_bytes == (12 + 20 + 20 + 20) * MIB


def test_the_figures_are_those_after_several_steps() -> None:
    """The first has 9 and 11 MiB in one segment. The second takes the 9 MiB from the segment that had 16."""
    step = (take("forward", 9), take("forward", 16), take("forward", 11), *(give("backward", one) for one in (1, 2, 0)))
    assert replayed(step).reserved_bytes == (16 + 20 + 12) * MIB


def test_a_stream_does_not_use_the_free_memory_of_another() -> None:
    step = (take("forward", 30), give("forward", 0), take("forward", 30))
    assert replayed(step).reserved_bytes == 30 * MIB
    assert replayed((*step[:2], step[2]._replace(stream=1))).reserved_bytes == 60 * MIB


def test_a_step_that_replaces_what_it_found_finds_it_again_in_the_next() -> None:
    step = (take(BEFORE, 30, "optimizer state"), take("optimizer", 30), give("optimizer", 0, "optimizer state"))
    memory = replayed(step)
    assert memory.allocated_bytes == memory.reserved_bytes == 60 * MIB


def test_state_that_the_first_step_makes_lies_in_what_activations_have_left() -> None:
    step = (take(BEFORE, 30, "optimizer state"), take("forward", 40), give("backward", 1), take("optimizer", 0))
    assert replayed(step).reserved_bytes == (30 + 40) * MIB
    late = replayed(step, state_exists=False)
    assert late.reserved_bytes == (40 + 40) * MIB  # the second step finds the first 40 MiB taken in part
    assert late.allocated_bytes == 70 * MIB


@pytest.mark.parametrize("kind", ["gradients", "other tensors"])
def test_what_steps_leave_behind_is_not_there_before_the_first_one(kind: str) -> None:
    """Gradients that the next step clears, or averages that the first one makes, lie where they were made."""
    left = Event(BEFORE, MADE, kind, 30 * MIB)
    step: Events = (take(BEFORE, 12, "parameters"), left, take("forward", 32), give("forward", 2))
    if kind == "gradients":
        step += (give("backward", 1, kind), take("backward", 30, kind))
    memory = replayed(step)
    assert memory.reserved_bytes == (12 + 32 + 32) * MIB  # the first step's activations have made room for it
    assert memory.allocated_bytes == (12 + 30 + 32) * MIB
    assert memory.kinds() == {"parameters": 12 * MIB, kind: 30 * MIB, "activations": 32 * MIB}


def test_below_a_limit_the_allocator_empties_its_cache_or_the_step_does_not_fit() -> None:
    step = (take("forward", 30), give("forward", 0), take("backward", 40), give("backward", 2))
    assert replayed(step).reserved_bytes == 70 * MIB
    assert replayed(step, limit_bytes=50 * MIB).reserved_bytes == 40 * MIB
    with pytest.raises(DoesNotFitError):
        replayed(step, limit_bytes=39 * MIB)
