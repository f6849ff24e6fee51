"""Faults at many operations of a step, as many as there is time for."""

import random
import time
from collections.abc import Iterator

import torch.distributed as dist

from benchmarks.on_gpu.nccl import group
from benchmarks.on_gpu.stage import Section, Stage
from tests.support.recovery_trials import Case, Tally, Trials, every

HEADER = ["training", "ranks", "operations of a micro-step", "every 7th", "tried", "struck", "results that differ"]
HEADER += ["left behind", "seconds"]
CASES = {"FSDP2": Case(), "FSDP2, reduced once": Case(reduce="last"), "DDP": Case(ddp=True)}
_STRIDE, _AT_ONCE = 7, 6
_LEAST_S = 10.0  # another training is not begun with less


def measure(stage: Stage) -> Iterator[list[Section]]:
    """One training after the other, each with faults in an order that soon covers all phases."""
    group.start(stage)
    rows: list[list[str]] = []
    text = [
        f"An out-of-memory error instead of every {_STRIDE}th operation of a micro-step, on either rank in turn or on"
        " both, in random order while there is time. *Results that differ*, bit for bit, from a run that was told the"
        " smaller micro-batches. Figures of rank 0 and of the worst rank."
    ]
    for name, case in CASES.items():
        if not _is_time_left(stage, _LEAST_S):
            break
        started, trials = time.perf_counter(), Trials(case)
        places = trials.operations(0)
        points = every(places, "turns", _STRIDE)
        random.Random(0).shuffle(points)
        total = Tally()
        row: list[str] = []
        rows.append(row)
        for first in range(0, len(points), _AT_ONCE):
            total = _sum(total, trials.tally(points[first : first + _AT_ONCE]))
            row[:] = [name, str(dist.get_world_size()), str(places), str(len(points))]
            row += [*_cells(total, has_values=stage.has_values), f"{time.perf_counter() - started:.1f}"]
            if dist.get_rank() == 0:
                title = "Injected faults at every 7th operation"
                yield [Section(title=title, header=HEADER, rows=rows, text=text)]
            seconds_for_one = (time.perf_counter() - started) / total.points
            if not _is_time_left(stage, 2 * _AT_ONCE * seconds_for_one):
                break
    dist.barrier()


def _is_time_left(stage: Stage, seconds: float) -> bool:
    """Whether all ranks have so much time. A collective."""
    return all(group.of_all_ranks(stage.seconds_left > seconds))


def _sum(one: Tally, other: Tally) -> Tally:
    return Tally(
        points=one.points + other.points,
        struck=one.struck + other.struck,
        wrong=one.wrong + other.wrong,
        left_behind=one.left_behind + other.left_behind,
    )


def _cells(tally: Tally, *, has_values: bool) -> list[str]:
    """Figures of all ranks: the fewest faults that struck, the most results that differ. A collective."""
    struck, wrong, left = zip(
        *group.of_all_ranks((tally.struck, len(tally.wrong), len(tally.left_behind))), strict=True
    )
    return [str(tally.points), str(min(struck)), str(max(wrong)) if has_values else "not computed", str(max(left))]
