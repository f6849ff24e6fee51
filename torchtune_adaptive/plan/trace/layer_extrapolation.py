"""Extrapolate a step's timeline to a model of many layers from two models of few layers.

All layers between the first and the last are equal. So live bytes at the n-th operation of a phase grow linearly with
the number of layers, and so do those at the n-th operation from the phase's end. Every inner layer adds the same
number of bytes. Memory therefore rises or falls steadily between both ends, and the peak is near one of them. Its
operation can be counted from the start or from the end of its phase.

A phase that loops over all parameters several times, each time with one operation, is treated as several phases.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby

from torchtune_adaptive.engine.memory.timeline import Timeline


def extrapolate_layers(few: Timeline, more: Timeline, *, layers: tuple[int, int], num_layers: int) -> Timeline | None:
    """Return the operations of a step with ``num_layers`` layers that can hold its peak, in order.

    Args:
        few: a timeline with ``layers[0]`` layers.
        more: a timeline of the same batch size with ``layers[1]`` layers. If layers of different kinds alternate, the
            difference is a whole period of them.
    Returns:
        None if the operations do not repeat layer by layer.

    >>> few = Timeline(2, ("in", "layer", "layer", "out"), (1, 2, 3, 4), ("forward",) * 4)
    >>> more = Timeline(2, ("in", "layer", "layer", "layer", "out"), (1, 2, 3, 4, 5), ("forward",) * 5)
    >>> extrapolate_layers(few, more, layers=(2, 3), num_layers=10).live_bytes
    (1, 2, 11, 12)
    """
    pairs = _aligned_operations(few.operations, few.phases, more.operations, more.phases)
    if pairs is None:
        return None
    periods, rest = divmod(num_layers - layers[0], layers[1] - layers[0])
    assert rest == 0, (layers, num_layers)
    return Timeline(
        batch_size=few.batch_size,
        operations=tuple(few.operations[index] for index, _ in pairs),
        live_bytes=tuple(
            few.live_bytes[index] + periods * (more.live_bytes[other] - few.live_bytes[index]) for index, other in pairs
        ),
        phases=tuple(few.phases[index] for index, _ in pairs),
    )


@lru_cache(maxsize=4)  # all kinds of bytes of two steps are extrapolated one after the other
def _aligned_operations(
    few: tuple[str, ...], few_phases: tuple[str, ...], more: tuple[str, ...], more_phases: tuple[str, ...]
) -> tuple[tuple[int, int], ...] | None:
    """Index pairs of the same operation in both steps; None if the operations do not repeat layer by layer.

    In each phase the first operations are counted from its start, the others from its end.

    Args:
        few, more: names of the operations.
        few_phases, more_phases: the phase of each.
    """
    few_runs, more_runs = list(_runs(few_phases)), list(_runs(more_phases))
    if [phase for phase, _ in few_runs] != [phase for phase, _ in more_runs]:
        return None
    pairs: list[tuple[int, int]] = []
    for (_, few_phase), (_, more_phase) in zip(few_runs, more_runs, strict=True):
        for short, long in _split_phase(few, few_phase, more, more_phase):
            num_from_start = _num_from_start([few[index] for index in short], [more[index] for index in long])
            if num_from_start is None:
                return None
            num_from_end = len(short) - num_from_start
            pairs += zip(short[:num_from_start], long[:num_from_start], strict=True)
            pairs += zip(short[num_from_start:], long[len(long) - num_from_end :], strict=True)
    return tuple(pairs)


def _num_from_start(short: list[str], long: list[str]) -> int | None:
    """How many operations of ``short`` to count from the start; None if the operations do not repeat layer by layer.

    Operations of inner layers match both when counted from the start and when counted from the end. The number
    returned ends in the middle of them. There must be at least one period of layers of them, which is by how many
    operations ``long`` is longer than ``short``.
    """
    num_same_from_start = _num_same(short, long)
    first_same_from_end = len(short) - _num_same(short[::-1], long[::-1])
    num_same_from_both = num_same_from_start - first_same_from_end
    if not 0 <= len(long) - len(short) <= num_same_from_both:
        return None
    return (first_same_from_end + num_same_from_start) // 2


def _num_same(short: list[str], long: list[str]) -> int:
    """How many operations are the same in both before the first that differs."""
    same = (one == other for one, other in zip(short, long, strict=False))
    return next((index for index, is_same in enumerate(same) if not is_same), len(short))


def _split_phase(
    few: tuple[str, ...], few_phase: range, more: tuple[str, ...], more_phase: range
) -> Iterator[tuple[range, range]]:
    """The index ranges of a phase in both steps.

    A phase in which each operation is repeated over all parameters before the next begins is split by operation.
    """
    few_repeats, more_repeats = (
        list(_runs(operations[phase.start : phase.stop], start=phase.start))
        for operations, phase in ((few, few_phase), (more, more_phase))
    )
    if [name for name, _ in few_repeats] == [name for name, _ in more_repeats]:
        yield from zip((indices for _, indices in few_repeats), (indices for _, indices in more_repeats), strict=True)
    else:
        yield few_phase, more_phase


def _runs(names: tuple[str, ...], *, start: int = 0) -> Iterator[tuple[str, range]]:
    """Runs of equal names in order, each with its range of indices. The first index is ``start``."""
    for name, run in groupby(names):
        length = len(list(run))
        yield name, range(start, start + length)
        start += length
