"""The memory that a train step takes and gives back, in order: with more layers and more rows than were traced.

A step with more layers, or with more passes of a loop over rows, repeats a period of its events. Two steps, one with a
period more than the other, tell where it is, how many bytes grow by the way, and which memory is given back.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple, TypeAlias, TypeVar

BEFORE = ""  # the phase of what exists before the step
REBUILT = "rebuilt"  # the name of what changes once, before the second step
MADE = "made by a step"  # the name of what the step before has left, such as its gradients
WEIGHTS = ("parameters", "frozen models")  # kinds of memory
_SQUARES_TOLERANCE = 0.01  # what grows by a line from 2 to 4 rows has 0.025
_SAME_AFTER_LOOP = 8  # events, before which another loop may not begin


class Event(NamedTuple):
    """Memory is taken, or given back.

    Attributes:
        phase: of the step, such as "forward"; ``BEFORE`` the step.
        operation: its name, such as "aten.mm.default"; before the step, tensors of the same sort have the same name.
        kind: of memory, such as "activations".
        num_bytes: that are taken, not rounded; 0 if memory is given back.
        stream: in which it is taken, as a number; 0 is the default stream.
        taken: index of the event that took what is given back; -1 if memory is taken.
    """

    phase: str
    operation: str
    kind: str
    num_bytes: int
    stream: int = 0
    taken: int = -1


Events: TypeAlias = tuple[Event, ...]
Labels: TypeAlias = list[tuple[object, ...]]
Key = TypeVar("Key")


class _Run(NamedTuple):
    """Events that belong together, such as those of a phase, in a step with few and in one with more periods.

    Attributes:
        few, more: index of its first event in either step.
        length: its events in the step with few periods.
        head: events before the first copy of the period; all of them if it has none.
        period: events of a period; 0 if it has none.
    """

    few: int
    more: int
    length: int
    head: int
    period: int

    def length_with(self, periods: int) -> int:
        """Its events with so many periods more than few."""
        return self.length + periods * self.period


def with_setup(events: Events, setup: Events) -> Events:
    """The events of a step, with those of a set-up after the weights."""
    if not setup:
        return events
    place = sum(event.phase == BEFORE and event.kind in WEIGHTS for event in events)

    def moved(event: Event, places: int) -> Event:
        return event._replace(taken=event.taken + places) if event.taken >= 0 else event

    later = (moved(event, len(setup) if event.taken >= place else 0) for event in events[place:])
    return (*events[:place], *(moved(event, place) for event in setup), *later)


def extended(few: Events, more: Events, periods: int) -> Events | None:
    """The events of a step with ``periods`` periods more than ``few``. ``more`` has one more.

    None if the events of the two steps do not follow from each other.

    >>> def layers(n):
    ...     kept = [Event("forward", "mm", "activations", 8) for _ in range(n)]
    ...     freed = [Event("backward", "mm", "activations", 0, taken=n - 1 - i) for i in range(n)]
    ...     return (*kept, *freed)
    >>> extended(layers(3), layers(4), 7) == layers(10)
    True
    """
    if periods == 0:
        return few
    if len(few) == len(more):
        return _with_more_bytes(few, more, periods)
    runs = _runs(few, more)
    if runs is None:
        return None
    if _Extension(few, more, runs, 1).events() != more:
        return None
    return more if periods == 1 else _Extension(few, more, runs, periods).events()


def _with_more_bytes(few: Events, more: Events, periods: int) -> Events | None:
    """The events of a step without loops: their bytes grow by the same with each row."""
    if _shape(few) != _shape(more):
        return None
    found = list(few)
    for index, (event, other) in enumerate(zip(few, more, strict=True)):
        if grown := other.num_bytes - event.num_bytes:
            num_bytes = event.num_bytes + periods * grown
            if num_bytes < 0:
                return None
            found[index] = event._replace(num_bytes=num_bytes)
    return tuple(found)


def with_bytes_of(changed: Events, few: Events, more: Events) -> Events | None:
    """The events of a step with a period more than ``changed``, which has the events of ``few`` with other bytes.

    ``more`` has a period more than ``few``. None if ``changed`` has other events, or if the bytes of an event depend on
    the periods as well.
    """
    runs = _runs(few, more)
    if runs is None or _shape(changed) != _shape(few):
        return None
    found: list[Event] = []
    for run in runs:
        for place in range(run.length_with(1)):
            index = run.few + place - (run.period if place >= run.head + run.period else 0)
            event, added = more[run.more + place], changed[index].num_bytes - few[index].num_bytes
            if added and event.num_bytes != few[index].num_bytes:
                return None
            found.append(event._replace(num_bytes=event.num_bytes + added))
    return tuple(found)


def with_squares(whole: Events, steps: Sequence[Events], rows: int) -> Events:
    """The events ``whole`` of a step with so many ``rows`` more than the second of three, as they follow from a line.

    Adds what grows with the square of the rows, as a matrix of all pairs of samples. The three ``steps`` differ by a
    row each.
    """
    if any(_shape(step) != _shape(whole) for step in steps):
        return whole
    pairs = rows * (rows - 1) // 2
    return tuple(
        event._replace(num_bytes=event.num_bytes + pairs * _bend(*(one.num_bytes for one in of_steps)))
        for event, *of_steps in zip(whole, *steps, strict=True)
    )


def _bend(first: int, second: int, third: int) -> int:
    """The second difference of three sizes, if they are squares; else 0: others bend where they are rounded up."""
    roots = math.sqrt(first), math.sqrt(second), math.sqrt(third)
    are_squares = abs(roots[0] - 2 * roots[1] + roots[2]) <= _SQUARES_TOLERANCE * roots[2]
    return first - 2 * second + third if are_squares else 0


class _Extension:
    """Builds the events with ``periods`` more periods than ``few``.

    In ``more``, a run is: head, period, period, tail. In what is built, it has ``periods + 1`` copies of the period.
    """

    def __init__(self, few: Events, more: Events, runs: list[_Run], periods: int) -> None:
        self._few, self._more, self._runs, self._periods = few, more, runs, periods
        self._starts: list[int] = []  # of each run in what is built
        self._run_of: list[int] = []  # by index in ``more``
        start = 0
        for number, run in enumerate(runs):
            self._starts.append(start)
            self._run_of += [number] * run.length_with(1)
            start += run.length_with(periods)

    def events(self) -> Events | None:
        """The events; None if it is not regular which memory they give back."""
        built: list[Event] = []
        given: set[int] = set()
        for run in self._runs:
            for place in range(run.length_with(self._periods)):
                event = self._event(run, place)
                if event is None or event.num_bytes < 0:
                    return None
                if event.taken >= 0:
                    if event.taken >= len(built) or built[event.taken].taken >= 0 or event.taken in given:
                        return None
                    given.add(event.taken)
                built.append(event)
        return tuple(built)

    def _event(self, run: _Run, place: int) -> Event | None:
        """The event at a place of a run."""
        copy, offset = divmod(place - run.head, run.period) if run.period else (-1, 0)
        if 0 <= copy <= self._periods:
            return self._repeated(run, copy, run.head + offset)
        is_tail = place >= run.head
        in_more = self._more[run.more + place - (self._periods - 1) * run.period * is_tail]
        if in_more.taken >= 0:
            return in_more._replace(taken=self._moved(in_more.taken))
        in_few = self._few[run.few + place - self._periods * run.period * is_tail]
        return in_more._replace(num_bytes=in_few.num_bytes + self._periods * (in_more.num_bytes - in_few.num_bytes))

    def _repeated(self, run: _Run, copy: int, place: int) -> Event | None:
        """An event in a copy of the period; ``place`` is that of its equal in the first copy."""
        first, second = self._more[run.more + place], self._more[run.more + run.period + place]
        if first.taken < 0:
            small = self._few[run.few + place].num_bytes
            num_bytes = small + self._periods * (first.num_bytes - small) + copy * (second.num_bytes - first.num_bytes)
            return first._replace(num_bytes=num_bytes)
        number = self._run_of[first.taken]
        taken_in = self._runs[number]
        if self._run_of[second.taken] != number or not taken_in.period:
            return None
        target = self._between_copies(taken_in, first.taken - taken_in.more, second.taken - taken_in.more, copy)
        return first._replace(taken=self._starts[number] + target)

    def _between_copies(self, run: _Run, first: int, second: int, copy: int) -> int:
        """The place in a run of what a copy gives back, from the places for the first and the second copy of ``more``.

        The places go through the run in order, or in the opposite order, as backward frees what forward has kept. One
        of the two may be that of a layer at the edge, which has other events than those between.
        """
        last, period = self._periods, run.period
        if second > first:
            if first < run.head:
                return first if copy == 0 else second + (copy - 1) * period
            return first + copy * period if copy < last else second + (last - 1) * period
        if second < run.head:
            return second if copy == last else first + (last - 1 - copy) * period
        return first + (last - 1) * period if copy == 0 else second + (last - copy) * period

    def _moved(self, index: int) -> int:
        """The index, in what is built, of the event of ``more`` at ``index``, which a single event refers to."""
        number = self._run_of[index]
        run = self._runs[number]
        place = index - run.more
        if run.period and place >= run.head + run.period:  # counted from the end
            place += (self._periods - 1) * run.period
        return self._starts[number] + place


def _runs(few: Events, more: Events) -> list[_Run] | None:
    """The runs of two steps; None if one is not the other with periods inserted.

    A period repeats events with the same labels and bytes, as layers do. Where there is none, it repeats labels alone:
    passes over rows differ in bytes.
    """
    labels = _labels(few), _labels(more)
    exact = _with_bytes(labels[0], few), _with_bytes(labels[1], more)
    found: list[_Run] = []
    for short, long in _pairs(few, more, *labels):
        runs = _runs_of([exact], short, long) or _runs_of([exact, labels], short, long)
        if not runs:
            return None
        found += runs
    return found if _cover(found, len(few), len(more)) else None


def _runs_of(labels: Sequence[tuple[Labels, Labels]], short: range, long: range) -> list[_Run]:
    """The runs of two ranges of events: one, or several with a loop each; none if these do not cover the ranges.

    Args:
        labels: pairs of labels for both steps. For each run the first pair that fits counts; the last separates loops.
    """

    def run(short: range, long: range) -> _Run | None:
        runs = (_run(_part_of(few, short), _part_of(more, long), short.start, long.start) for few, more in labels)
        return next((run for run in runs if run is not None), None)

    if whole := run(short, long):
        return [whole]
    few, more = labels[-1]
    parts = _split(_part_of(few, short), _part_of(more, long))
    found = [one for part, longer in parts if (one := run(short[part], long[longer])) is not None]
    return found if _cover(found, len(short), len(long)) else []


def _cover(runs: list[_Run], few: int, more: int) -> bool:
    """Whether the runs have so many events in the step with few and in that with more periods."""
    return (sum(run.length for run in runs), sum(run.length_with(1) for run in runs)) == (few, more)


def _part_of(labels: Labels, indices: range) -> Labels:
    return labels[indices.start : indices.stop]


def _run(one: Labels, other: Labels, few: int, more: int) -> _Run | None:
    """The run with these labels, which begin at ``few`` and at ``more``; None if more than a period was inserted."""
    period = len(other) - len(one)
    if period == 0:
        return _Run(few, more, len(one), len(one), 0) if one == other else None
    # Where both are the same, from the start and from the end, the period repeats.
    first, last = len(one) - _num_same(one[::-1], other[::-1]), _num_same(one, other)
    return _Run(few, more, len(one), (first + last - period) // 2, period) if 0 < period <= last - first else None


def _split(one: Labels, other: Labels) -> Iterator[tuple[slice, slice]]:
    """Parts of the labels of a run, each with one loop: ``other`` has a pass more of each, equal to that before it."""
    start = i = 0
    other_start = j = 0
    while True:
        same = _num_same(one[i:], other[j:])
        i, j = i + same, j + same
        if i == len(one) and j == len(other):
            yield slice(start, i), slice(other_start, j)
            return
        left = len(other) - j - (len(one) - i)  # what all other passes have
        for length in range(1, min(left, j) + 1):
            end = j + length
            is_pass = other[j:end] == other[j - length : j]
            if is_pass and other[end : end + _SAME_AFTER_LOOP] == one[i : i + _SAME_AFTER_LOOP]:
                break
        else:
            return
        j = end
        yield slice(start, i), slice(other_start, j)
        start, other_start = i, j


def _pairs(few: Events, more: Events, labels: Labels, other_labels: Labels) -> Iterator[tuple[range, range]]:
    """The index ranges of each run in both steps: of a phase, or of each operation that lists of tensors go through."""
    phases = (grouped([_part(event) for event in events]) for events in (few, more))
    for (phase, short), (other_phase, long) in zip(*phases, strict=False):
        if phase != other_phase:
            return
        parts, other_parts = (
            [(name, range(run.start + part.start, run.start + part.stop)) for name, part in grouped(names)]
            for run, names in ((short, _part_of(labels, short)), (long, _part_of(other_labels, long)))
        )
        if len(short) != len(long) and [name for name, _ in parts] == [name for name, _ in other_parts]:
            yield from zip((part for _, part in parts), (part for _, part in other_parts), strict=True)
        else:
            yield short, long


def grouped(keys: Sequence[Key]) -> Iterator[tuple[Key, range]]:
    """Equal keys in a row, each with their indices."""
    start = 0
    for key, group in groupby(keys):
        length = sum(1 for _ in group)
        yield key, range(start, start + length)
        start += length


def _part(event: Event) -> object:
    return event.phase, event.operation if event.phase == BEFORE else ""


def _labels(events: Events) -> Labels:
    """What tells events apart from their neighbours, but not layers from each other."""
    given = (events[event.taken].operation if event.taken >= 0 else None for event in events)
    return [(event.operation, event.kind, event.stream, one) for event, one in zip(events, given, strict=True)]


def _with_bytes(labels: Labels, events: Events) -> Labels:
    return [(*label, event.num_bytes) for label, event in zip(labels, events, strict=True)]


def _num_same(one: Labels, other: Labels) -> int:
    """How many are the same in both before the first that differs."""
    same = (first == second for first, second in zip(one, other, strict=False))
    return next((index for index, is_same in enumerate(same) if not is_same), min(len(one), len(other)))


def _shape(events: Events) -> list[object]:
    """The events without their bytes."""
    return [(*event[:3], *event[4:]) for event in events]
