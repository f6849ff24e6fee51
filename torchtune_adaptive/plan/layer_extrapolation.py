"""Timelines of a step with few layers -> the timeline with many, of which all between first and last are alike.

Live bytes at the n-th operation of a phase are a line in the number of layers, and so are those at the n-th from its
end. In between every layer adds the same, so that what lies there is never above both of its neighbours: the peak is
at an operation that can be counted from one of the ends. A phase that goes through the parameters several times, by
one operation each time, is as many phases.
"""

from collections.abc import Iterator
from itertools import groupby

from torchtune_adaptive.memory.timeline import Timeline


def of_more_layers(few: Timeline, more: Timeline, *, layers: tuple[int, int], num_layers: int) -> Timeline | None:
    """The operations of a step with ``num_layers`` layers that can hold its peak, in order.

    Args:
        few: a timeline with ``layers[0]`` layers.
        more: one of the same batch size with ``layers[1]``; between the two lies a whole period of different layers.

    Returns:
        None if operations do not repeat as layers do.

    >>> few = Timeline(2, ("in", "layer", "layer", "out"), (1, 2, 3, 4), ("forward",) * 4)
    >>> more = Timeline(2, ("in", "layer", "layer", "layer", "out"), (1, 2, 3, 4, 5), ("forward",) * 5)
    >>> of_more_layers(few, more, layers=(2, 3), num_layers=10).live_bytes
    (1, 2, 11, 12)
    """
    places = _aligned_places(few, more)
    if places is None:
        return None
    periods, rest = divmod(num_layers - layers[0], layers[1] - layers[0])
    assert rest == 0, (layers, num_layers)
    return Timeline(
        batch_size=few.batch_size,
        operations=tuple(few.operations[place] for place, _ in places),
        live_bytes=tuple(
            few.live_bytes[place] + periods * (more.live_bytes[other] - few.live_bytes[place])
            for place, other in places
        ),
        phases=tuple(few.phases[place] for place, _ in places),
    )


def _aligned_places(few: Timeline, more: Timeline) -> list[tuple[int, int]] | None:
    """Pairs of places of the same operation in both: in each phase first from its start, then from its end."""
    runs_of_few, runs_of_more = list(_runs(few.phases)), list(_runs(more.phases))
    if [phase for phase, _ in runs_of_few] != [phase for phase, _ in runs_of_more]:
        return None
    places: list[tuple[int, int]] = []
    for run, longer in _stretches(few, runs_of_few, more, runs_of_more):
        operations = [few.operations[place] for place in run], [more.operations[place] for place in longer]
        middle = _middle(*operations)
        if middle is None:
            return None
        places += zip(run[:middle], longer[:middle], strict=True)
        places += zip(run[middle:], longer[len(longer) - len(run) + middle :], strict=True)
    return places


def _middle(run: list[str], longer: list[str]) -> int | None:
    """Up to where operations of ``run``, the shorter one, are counted from the start; None if layers do not repeat.

    It is in the midst of those that are alike counted from either end: layers with others like them on both sides.
    They are a period of layers at least, as many operations as ``longer`` has more.
    """
    alike = _num_alike(run, longer)
    begin = len(run) - _num_alike(run[::-1], longer[::-1])
    return (begin + alike) // 2 if 0 <= len(longer) - len(run) <= alike - begin else None


def _num_alike(some: list[str], others: list[str]) -> int:
    """How many operations the two have in common before they differ."""
    return next(
        (place for place, (one, other) in enumerate(zip(some, others, strict=False)) if one != other), len(some)
    )


def _stretches(
    few: Timeline, runs_of_few: list[tuple[str, range]], more: Timeline, runs_of_more: list[tuple[str, range]]
) -> Iterator[tuple[range, range]]:
    """Each phase's places in both; one by one where both repeat the same operations in the same order."""
    for (_, run), (_, longer) in zip(runs_of_few, runs_of_more, strict=True):
        repeats, more_repeats = (
            list(_runs(timeline.operations[places.start : places.stop], start=places.start))
            for timeline, places in ((few, run), (more, longer))
        )
        if [name for name, _ in repeats] == [name for name, _ in more_repeats]:
            yield from zip((places for _, places in repeats), (places for _, places in more_repeats), strict=True)
        else:
            yield run, longer


def _runs(names: tuple[str, ...], *, start: int = 0) -> Iterator[tuple[str, range]]:
    """The names in the order in which they come, each with the places at which it is repeated, from ``start``."""
    for name, repeated in groupby(names):
        length = len(list(repeated))
        yield name, range(start, start + length)
        start += length
