"""Retries of the allocator in two optimizer steps in a row are thrashing, in one step they are not."""

from types import SimpleNamespace
from typing import Any

import pytest

from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.engine.memory.phases import Phases
from torchtune_adaptive.engine.recovery.watch import PressureWatch


class Watched:
    """A watch on an allocator that counts retries since the process began."""

    def __init__(self) -> None:
        self.allocator: Any = SimpleNamespace(total_retries=100)
        self.watch = PressureWatch(Consensus(), self.allocator, Phases([], None))

    def after(self, *steps: int) -> list[bool]:
        """Whether the watch reports thrashing after each step; ``steps`` has the number of retries of each."""
        reported = []
        for retries in steps:
            self.allocator.total_retries += retries
            reported.append(self.watch.is_thrashing())
        return reported


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([0, 1, 1], [False, False, True]),  # retries before the watch began do not count
        ([5, 0, 0], [False, False, False]),
        ([0, 3, 1, 0], [False, False, True, False]),
        ([1, 0, 1, 0, 1], [False] * 5),  # a step without retries in between
        ([1, 1, 0, 1, 1], [False, True, False, False, True]),
        ([7, 1, 1, 9, 1], [False, True, True, True, True]),  # as long as it lasts
    ],
)
def test_thrashing_takes_retries_in_two_steps_in_a_row(steps: list[int], expected: list[bool]) -> None:
    assert Watched().after(*steps) == expected


def test_a_reset_drops_the_step_before_and_retries_since_then() -> None:
    watched = Watched()
    assert watched.after(1, 1) == [False, True]
    watched.allocator.total_retries += 10  # by a search between two steps
    watched.watch.reset()
    assert watched.after(0, 1, 0, 1) == [False] * 4
    watched.watch.reset()
    assert watched.after(1, 1) == [False, True]


def test_a_stopped_watch_reports_no_thrashing() -> None:
    watched = Watched()
    assert watched.after(1, 1) == [False, True]
    watched.watch.stop()
    assert watched.after(1, 1, 1) == [False] * 3
    watched.watch.reset()
    assert watched.after(1, 1) == [False] * 2
