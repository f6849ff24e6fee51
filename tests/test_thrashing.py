"""Retries in two optimizer steps in a row are thrashing, in one step they are not."""

from collections.abc import Iterator

import pytest

from torchtune_adaptive.memory.allocator_retries import RetryWatch


class Allocator:
    """Counts retries as an allocator does: all since the process began."""

    def __init__(self, *, retries_before: int = 0) -> None:
        self.retries = retries_before

    def thrashing(self, watch: RetryWatch, steps: list[int]) -> Iterator[bool]:
        """The answers of ``watch`` after each step; ``steps`` has the number of retries of each."""
        for retries in steps:
            self.retries += retries
            yield watch.is_thrashing()


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([0, 0, 0], [False, False, False]),
        ([5, 0, 0], [False, False, False]),
        ([1, 1], [False, True]),
        ([0, 3, 1, 0], [False, False, True, False]),
        ([1, 0, 1, 0, 1], [False] * 5),  # a step without retries in between
        ([1, 1, 0, 1, 1], [False, True, False, False, True]),
        ([7, 1, 1, 9, 1], [False, True, True, True, True]),  # as long as it lasts
    ],
)
def test_thrashing_takes_retries_in_two_steps_in_a_row(steps: list[int], expected: list[bool]) -> None:
    allocator = Allocator()
    watch = RetryWatch(lambda: allocator.retries)
    assert list(allocator.thrashing(watch, steps)) == expected


def test_retries_before_the_watch_began_do_not_count() -> None:
    allocator = Allocator(retries_before=100)
    watch = RetryWatch(lambda: allocator.retries)
    assert list(allocator.thrashing(watch, [0, 1, 1])) == [False, False, True]


def test_a_reset_forgets_the_step_before() -> None:
    allocator = Allocator()
    watch = RetryWatch(lambda: allocator.retries)
    assert list(allocator.thrashing(watch, [1, 1])) == [False, True]
    watch.reset()
    assert list(allocator.thrashing(watch, [1, 1])) == [False, True]


def test_a_reset_forgets_retries_since_the_last_call() -> None:
    allocator = Allocator()
    watch = RetryWatch(lambda: allocator.retries)
    assert list(allocator.thrashing(watch, [1])) == [False]
    allocator.retries += 10  # by a search between two steps
    watch.reset()
    assert list(allocator.thrashing(watch, [0, 1, 0])) == [False, False, False]
    assert list(allocator.thrashing(watch, [1, 1])) == [False, True]


def test_a_stopped_watch_reports_no_thrashing() -> None:
    allocator = Allocator()
    watch = RetryWatch(lambda: allocator.retries)
    assert list(allocator.thrashing(watch, [1, 1])) == [False, True]
    watch.stop()
    assert list(allocator.thrashing(watch, [1, 1, 1])) == [False, False, False]
    watch.reset()
    assert list(allocator.thrashing(watch, [1, 1])) == [False, False]
