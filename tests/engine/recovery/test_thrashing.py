"""A micro-batch shrinks for the allocator's retries only if they cost more time than smaller micro-batches would.

A device and a clock are simulated: how long a step takes follows from the size of its micro-batches and from retries.
"""

from collections.abc import Callable
from typing import TypeAlias
from unittest import mock

import pytest
import torch
from torch import nn

from tests.support.ranks import run_on_ranks
from tests.support.toys import CachingMeter
from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.engine.memory.phases import Phases
from torchtune_adaptive.engine.recovery import watch
from torchtune_adaptive.engine.recovery.pace import SHRINKING_COSTS, Pace
from torchtune_adaptive.engine.recovery.step import RecoverableStep
from torchtune_adaptive.engine.recovery.watch import PressureWatch

Figure: TypeAlias = Callable[[int, int], float]

ROWS, SIZE = 8, 4
SAMPLES = torch.arange(32.0).reshape(ROWS, 4) / 32


class Run:
    """Steps on a simulated device.

    Args:
        seconds: of a step, by its number and by the size of its micro-batches.
        retries: the allocator's in this step.
        fails_in: the number of a step in which large micro-batches do not fit.

    Attributes:
        sizes: of the micro-batches of each step.
        events: what was said, as text.
    """

    def __init__(self, steps: int, seconds: Figure, retries: Figure, *, fails_in: int = 0) -> None:
        torch.manual_seed(0)
        self._model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.sizes: list[int] = []
        self.events: list[str] = []
        self._fails_in = fails_in
        self._clock_s, meter = 0.0, CachingMeter()
        optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)
        watched = PressureWatch(Consensus(), meter, Phases([], None))
        step = RecoverableStep(
            self._model,
            self._micro_step,
            micro_batch_size=SIZE,
            watch=watched,
            on_event=lambda event: self.events.append(str(event)),
        )
        step.dry_run(SAMPLES)
        with mock.patch.object(watch, "perf_counter_ns", self._now_ns):
            for number in range(1, steps + 1):
                step(SAMPLES)
                meter.retries += int(retries(number, self._size))
                self._clock_s += seconds(number, self._size)
                self.sizes.append(self._size)
                optimizer.step()
                optimizer.zero_grad()

    @property
    def seconds_per_step(self) -> float:
        return self._clock_s / len(self.sizes)

    def _now_ns(self) -> int:
        return int(self._clock_s * 1e9)

    def _micro_step(self, samples: torch.Tensor) -> None:
        self._size = len(samples)
        if self._size == SIZE and len(self.sizes) + 1 == self._fails_in:
            raise torch.OutOfMemoryError("too much")
        self._model(samples).square().sum().backward()


def has_retries(number: int, size: int) -> bool:
    """Whether a step has: those with large micro-batches from the sixth one on."""
    return number > 5 and size == SIZE


def device(retry_s: float, half_s: float = 0.0, *, retries: Figure = has_retries) -> tuple[Figure, Figure]:
    """Seconds and retries of steps: one second, and more with retries and with smaller micro-batches."""
    return lambda number, size: 1 + retry_s * retries(number, size) + half_s * (size < SIZE), retries


# ---- one process


@pytest.mark.parametrize("half_s", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("retry_s", [0.0, 0.03, 0.99 * SHRINKING_COSTS])
def test_a_size_stays_if_its_retries_cost_less_than_smaller_micro_batches_may(retry_s: float, half_s: float) -> None:
    run = Run(40, *device(retry_s, half_s))
    assert run.sizes == [SIZE] * 40
    (event,) = run.events  # said once
    assert event.startswith("micro-batch stays at 4 samples, although rank 0 had to free the allocator's cache")


def test_a_size_that_is_slow_by_its_retries_shrinks_and_is_seldom_tried_again() -> None:
    run = Run(200, *device(0.5))
    # Step 10 has seen four steps with retries; then four with smaller micro-batches are timed.
    assert run.sizes[:26] == [SIZE] * 10 + [SIZE // 2] * 5 + [SIZE] * 3 + [SIZE // 2] * 8
    assert run.sizes[100:].count(SIZE) < 10
    assert run.events[0] == (
        "micro-batch 4 -> 2 samples: in step 10 rank 0 had to free the allocator's cache, which makes steps 25.0%"
        " slower (peak 512 B, now 1.0 KiB available)"
    )
    assert run.events[1] == "micro-batch 2 -> 4 samples: fits again in step 16"
    assert run.seconds_per_step < 1.07


@pytest.mark.parametrize(
    "simulated", [device(0.5, 0.6), device(0.5, 0.1, retries=lambda number, size: number > 5)], ids=["slow", "retries"]
)
def test_a_size_that_has_shrunk_in_vain_comes_back_and_stays(simulated: tuple[Figure, Figure]) -> None:
    """Half the size turns out to cost more than what was assumed; or it has the same retries."""
    run = Run(80, *simulated)
    assert SIZE // 2 in run.sizes
    assert set(run.sizes[40:]) == {SIZE}
    assert run.events[-1].startswith("micro-batch stays at 4 samples")


@pytest.mark.parametrize("half_s", [0.0, 0.6])
def test_a_size_that_had_retries_in_each_of_many_steps_is_compared_with_half_of_it(half_s: float) -> None:
    run = Run(200, *device(0.5, half_s, retries=lambda number, size: size == SIZE))
    assert run.sizes[:17] == [SIZE] * 17
    assert "had to free the allocator's cache (peak" in run.events[0]  # at an unknown cost
    share = run.sizes[100:].count(SIZE) / 100
    assert share < 0.1 if half_s == 0 else share == 1.0


def test_rare_retries_do_not_shrink_a_size_however_slow_they_are() -> None:
    run = Run(200, *device(1.0, retries=lambda number, size: number % 20 == 0))
    assert set(run.sizes) == {SIZE}


def test_retries_and_slow_steps_that_do_not_coincide_do_not_shrink_a_size() -> None:
    """Steps with retries vary: half of them are slow, for another reason."""
    pace = Pace()
    for number in range(64):
        pace.note(SIZE, 1.0 + 0.5 * (number % 4 < 2), work=1, had_retries=number % 2 > 0)
    assert pace.is_slow(SIZE) is False


def test_a_longer_step_with_more_work_is_not_slower() -> None:
    pace = Pace()
    for work in (8, 9, 10, 11):
        pace.note(SIZE, float(work), work=work, had_retries=False)
        pace.note(SIZE, 2.0 * work, work=2 * work, had_retries=True)
    assert (pace.slowdown(SIZE), pace.is_slow(SIZE)) == (0.0, False)


def test_nothing_is_said_of_retries_before_there_are_enough_steps_of_both_kinds() -> None:
    assert Run(9, *device(0.5)).events == []
    pace = Pace()
    for had_retries in (False, False, False, True, True, True, True, True):
        pace.note(SIZE, 1.0, work=1, had_retries=had_retries)
    assert (pace.slowdown(SIZE), pace.is_slow(SIZE)) == (None, None)


def test_a_step_of_other_micro_batches_than_the_one_before_is_not_timed() -> None:
    meter = CachingMeter()
    watched = PressureWatch(Consensus(), meter, Phases([], None))
    figures = []
    with (
        mock.patch.object(watch, "perf_counter_ns", iter(range(0, 100, 10)).__next__),
        mock.patch.object(Pace, "note") as note,
    ):
        for size in (4, 4, 4, 2, 2, 2):
            watched.start_step(size)
            figures.append(watched.last_step)
            watched.end_step([torch.ones(size, 3)], watched.last_step)
            meter.retries += 1
        watched.reset()  # the step had to run again
        watched.start_step(2)
        figures.append(watched.last_step)
    timed, not_timed = (lambda work: (10, 1, work)), (0, 0, 0)
    assert [call.args[0] for call in note.call_args_list] == [4, 4, 2]
    assert figures == [not_timed, not_timed, timed(12), timed(12), not_timed, timed(6), not_timed]


def test_a_larger_size_is_judged_by_its_own_steps_not_by_those_of_the_smaller_one_before() -> None:
    run = Run(19, *device(0.5, -0.3, retries=lambda number, size: number > 5))
    assert run.sizes == [SIZE] * 10 + [SIZE // 2] * 5 + [SIZE] * 3 + [SIZE // 2]


def test_an_error_in_the_step_in_which_a_size_is_known_to_be_slow_halves_it_once() -> None:
    run = Run(11, *device(0.5), fails_in=10)
    assert run.sizes == [SIZE] * 9 + [SIZE // 2, SIZE]
    assert [event[:19] for event in run.events] == ["micro-batch 4 -> 2 ", "micro-batch 2 -> 4 "]


# ---- two ranks


def _on_two(rank: int) -> list[tuple[list[int], list[str]]]:
    """Rank 0 has the retries, for which rank 1 waits: only there steps seem to be slower."""
    found = []
    for retry_s in (0.5, 0.03):
        seconds, retries = device(retry_s)
        run = Run(60, seconds if rank == 1 else lambda *_: 0.9, retries if rank == 0 else lambda *_: 0)
        found.append((run.sizes, run.events))
    return found


def test_ranks_of_different_speeds_decide_alike_by_the_slowest() -> None:
    first, second = run_on_ranks(_on_two, 2)
    assert first == second
    assert [SIZE // 2 in sizes for sizes, _ in first] == [True, False]
    assert all("rank 0 had to free the allocator's cache" in events[0] for _, events in first)
