"""Backoff: when a micro-batch that was reduced is tried larger again."""

from collections.abc import Callable

import pytest

from torchtune_adaptive.engine.recovery.backoff import NOT_IN_THIS_EPOCH, Backoff

WHOLE = 8


def run(fits: Callable[[int, int], bool], *, steps: int, size: int = WHOLE) -> tuple[list[int], int]:
    """The size with which each step succeeds, and how many steps were repeated; ``fits(step, size)`` says what fits."""
    backoff, sizes, repeated = Backoff(), [], 0
    for step in range(1, steps + 1):
        if backoff.next_trial is not None and step >= backoff.next_trial:
            size = min(2 * size, WHOLE)
            backoff.grew(step, is_whole=size == WHOLE)
        while not fits(step, size):
            backoff.failed(size, step=step)
            size, repeated = size // 2, repeated + 1
        backoff.fitted(size)
        sizes.append(size)
    return sizes, repeated


@pytest.mark.parametrize("stays", [1, 3, 50, 1000])
def test_after_a_neighbour_has_left_the_old_size_is_back_within_twice_its_time(stays: int) -> None:
    sizes, repeated = run(lambda step, size: not 100 < step <= 100 + stays or size <= 4, steps=200 + 3 * stays)
    assert sizes[:100] == [WHOLE] * 100
    assert set(sizes[100 : 100 + stays]) == {4}
    assert sizes[100 + 2 * stays :] == [WHOLE] * (100 + stays)
    assert repeated <= stays.bit_length()


def test_a_step_in_many_that_needs_more_costs_itself_alone() -> None:
    sizes, repeated = run(lambda step, size: step % 200 != 0 or size <= 2, steps=2100)
    assert repeated == 2 * 10  # halved twice
    assert sum(size < WHOLE for size in sizes) == 10 * 3  # the step itself, and two with half of the size


def test_a_size_that_never_fitted_is_not_tried_before_it_is_asked_for() -> None:
    sizes, repeated = run(lambda _, size: size <= 2, steps=1000)
    assert (set(sizes), repeated) == ({2}, 2)
    backoff = Backoff()
    backoff.try_now()
    assert backoff.next_trial is None  # nothing was reduced
    backoff.failed(WHOLE, step=1)
    assert backoff.next_trial == NOT_IN_THIS_EPOCH
    backoff.try_now()
    assert backoff.next_trial is not None
    assert backoff.next_trial <= 2


def test_memory_that_is_gone_for_good_costs_few_steps() -> None:
    sizes, repeated = run(lambda step, size: step <= 10 or size <= 4, steps=10_000)
    assert repeated <= (10_000).bit_length()
    assert set(sizes[10:]) == {4}


def test_a_resumed_run_tries_in_the_same_step() -> None:
    backoff, resumed = Backoff(), Backoff()
    backoff.fitted(WHOLE)
    for step in (5, 6, 8):
        backoff.failed(WHOLE, step=step)
    resumed.load_state_dict(backoff.state_dict())
    for one in (backoff, resumed):
        one.failed(4, step=10)
    assert resumed.state_dict() == backoff.state_dict()
    assert resumed.next_trial == 18
