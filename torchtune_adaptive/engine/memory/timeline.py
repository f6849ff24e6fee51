"""Forecast the peak memory of a train step at any batch size, from its timelines at two sizes.

Live bytes after one operation are linear in the batch size: ``intercept + slope * batch_size``. Two timelines
determine this line for every operation. The peak of the step is the maximum over all lines, their upper envelope. The
peak itself is not linear: at small sizes it is in the optimizer step, at large sizes in the loss or in the backward
pass. A line through two peaks can therefore be wrong by 80 %.

Some models loop over the rows of a batch. Bytes in a pass of the loop are linear in the pass and in the batch size. So
a line through any two passes is that of a pass too: of one that keeps its distance from the loop's start, from its end,
or between both.

Some steps hold more than a line, such as the similarities of all rows with each other. Further timelines, at sizes that
fit even if memory grows with the cube of the rows, make a polynomial of each line.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

_MOST_ROWS = 2**21  # above any size that is searched
_CLOSEST = 0.99  # sizes closer than this differ by the rounding of an allocator more than by rows
_LONGEST_PASS = 256  # operations
_SAME_AFTER_LOOP = 8  # operations, before which another loop may not begin
_ACCUMULATING = ("aten.add.Tensor", "aten.detach.default")  # gradients: the first pass does not add, the last detaches


@dataclass(frozen=True)
class Timeline:
    """Live bytes of one rank after every operation of a train step at ``batch_size``, in order.

    ``phases`` has the phase of each operation, or is empty.
    """

    batch_size: int
    operations: tuple[str, ...]
    live_bytes: tuple[int, ...]
    phases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Line:
    """Live bytes after one operation: ``intercept_bytes + slope_bytes * batch_size``."""

    intercept_bytes: float
    slope_bytes: float

    def at(self, batch_size: float) -> float:
        """Return the bytes at ``batch_size``."""
        return self.intercept_bytes + self.slope_bytes * batch_size


@dataclass(frozen=True)
class Forecast:
    """The peak of a train step as a function of the batch size: the upper envelope of its operations' lines."""

    envelope: tuple[Line, ...]

    @classmethod
    def from_timelines(cls, small: Timeline, large: Timeline) -> "Forecast | None":
        """Make a forecast from two steps with different batch sizes. None if their operations differ."""
        lines = operation_lines(small, large)
        return None if lines is None else cls(upper_envelope(lines))

    def peak_bytes(self, batch_size: int) -> float:
        """Return the forecast peak at ``batch_size``."""
        return max(line.at(batch_size) for line in self.envelope)

    def largest_batch_size(self, limit_bytes: float) -> int | None:
        """Return the largest batch size with a peak of at most ``limit_bytes``. None: memory does not grow with it."""
        if any(line.slope_bytes == 0 and line.intercept_bytes > limit_bytes for line in self.envelope):
            return 0
        crossing = self.crossing(limit_bytes)
        if crossing is None:
            return None
        largest = math.floor(crossing)
        # Half a byte allows for rounding errors. A line with a negative slope may still be above the limit here.
        return largest if largest > 0 and self.peak_bytes(largest) <= limit_bytes + 0.5 else 0

    def crossing(self, limit_bytes: float) -> float | None:
        """Return the fractional batch size where the first line reaches ``limit_bytes``. None: no line grows."""
        growing = [line for line in self.envelope if line.slope_bytes > 0]
        if not growing:
            return None
        return min((limit_bytes - line.intercept_bytes) / line.slope_bytes for line in growing)


@dataclass(frozen=True)
class CurvedForecast:
    """The peak of a train step whose memory grows with a power of the rows, up to their cube.

    The bytes after an operation are a polynomial of the batch size ``n``, written with the largest ``sizes`` a > b > c
    as ``w + (n - a) * (x + (n - b) * (y + (n - c) * z))``. Steps of four sizes determine it. With fewer, growth is
    taken to be as steep as that of a cube, so that a size forecast to fit does fit. So it is, too, if bytes grow with a
    power between whole ones. They never fall in the forecast, and grow at least along the line through a and b.
    """

    sizes: tuple[int, int, int]
    coefficients: frozenset[tuple[float, float, float, float]]

    @classmethod
    def from_timelines(cls, timelines: Iterable[Timeline]) -> "CurvedForecast | None":
        """Make a forecast from steps of at least two sizes, such as 2 and 3. None if operations differ, but for loops.

        Of sizes that are very close to each other, only the largest counts.
        """
        steps: list[Timeline] = []
        for step in sorted(timelines, key=lambda step: step.batch_size, reverse=True):
            if len(steps) < 4 and (not steps or step.batch_size <= _CLOSEST * steps[-1].batch_size):
                steps.append(step)
        columns: list[Iterable[int]] = []
        for step in steps:
            more_rows = steps[0].batch_size - step.batch_size
            places = _places_in(step.operations, steps[0].operations, more_rows=more_rows)
            if places is None:
                return None
            columns.append([step.live_bytes[place] for place in places])
        sizes = [step.batch_size for step in steps]
        a, b, c, *_ = [*sizes, 0]
        return cls((a, b, c), frozenset(_curve(sizes, row) for row in set(zip(*columns, strict=True))))

    def peak_bytes(self, batch_size: float) -> float:
        """Return the forecast peak at ``batch_size``."""
        a, b, c = (batch_size - size for size in self.sizes)
        return max(w + a * (x + b * (y + c * z)) for w, x, y, z in self.coefficients)

    def largest_batch_size(self, limit_bytes: float) -> int | None:
        """Return the largest batch size from the largest step on with a peak of at most ``limit_bytes``.

        None: memory does not grow with it.
        """
        if not any(x or y or z for _, x, y, z in self.coefficients):
            return None
        fitted, failed = self.sizes[0], _MOST_ROWS
        while failed - fitted > 1:
            middle = (fitted + failed) // 2
            fitted, failed = (middle, failed) if self.peak_bytes(middle) <= limit_bytes + 0.5 else (fitted, middle)
        return fitted

    def crossing(self, limit_bytes: float) -> float | None:
        """Return the fractional batch size where the peak reaches ``limit_bytes``. None: memory does not grow."""
        largest = self.largest_batch_size(limit_bytes)
        if largest is None:
            return None
        peak_bytes = self.peak_bytes(largest)
        return largest + (limit_bytes - peak_bytes) / (self.peak_bytes(largest + 1) - peak_bytes)


def _curve(sizes: Sequence[int], live_bytes: Sequence[int]) -> tuple[float, float, float, float]:
    """Return the coefficients of an operation's ``live_bytes`` at ``sizes``, the largest first.

    They are Newton's divided differences. Those not known yet follow from the last one known, as in a cube.

    >>> _curve((5, 3, 2), (125, 27, 8)) == _curve((5, 3, 2, 1), (125, 27, 8, 1))
    True
    """
    a, b, c, *_ = [*sizes, 0]
    found: list[float] = [live_bytes[0]]
    differences: list[float] = list(live_bytes)
    for order in range(1, len(sizes)):
        pairs = zip(differences, differences[1:], sizes, sizes[order:], strict=False)
        differences = [(high - low) / (large - small) for high, low, large, small in pairs]
        found.append(differences[0])
    if len(found) == 2:
        found.append(found[1] * (a + b) / (a * a + a * b + b * b))
    if len(found) == 3:
        found.append(found[2] / (a + b + c))
    w, x, y, z = found
    return w, max(x, 0), max(y, 0), max(z, 0) if y > 0 else 0


def operation_lines(small: Timeline, large: Timeline) -> list[Line] | None:
    """Return the line of every operation of ``large``, in order. None if ``small`` has others, but for passes of loops.

    >>> small = Timeline(2, ("in", "row", "row"), (4, 5, 6))
    >>> large = Timeline(3, ("in", "row", "row", "row"), (6, 7, 8, 9))
    >>> [(line.at(2), line.at(3), line.at(4)) for line in operation_lines(small, large)]
    [(4.0, 6.0, 8.0), (5.0, 7.0, 9.0), (6.0, 8.0, 10.0), (6.0, 9.0, 12.0)]
    """
    sizes = large.batch_size - small.batch_size
    places = _places_in(small.operations, large.operations, more_rows=sizes)
    if places is None:
        return None
    small = replace(small, live_bytes=tuple(small.live_bytes[place] for place in places))
    slopes = [(high - low) / sizes for low, high in zip(small.live_bytes, large.live_bytes, strict=True)]
    return [Line(low - slope * small.batch_size, slope) for low, slope in zip(small.live_bytes, slopes, strict=True)]


@lru_cache(maxsize=4)  # all kinds of bytes of two steps are compared one after the other
def _places_in(few: tuple[str, ...], more: tuple[str, ...], *, more_rows: int) -> Sequence[int] | None:
    """For each operation of ``more`` its place in ``few``. A pass that only ``more`` has takes those of the one before.

    None if the operations differ otherwise.
    """
    if few == more:
        return range(len(more))
    places: list[int] = []
    place = 0
    while len(places) < len(more):
        start = len(places)
        if place < len(few) and few[place] == more[start]:
            places.append(place)
            place += 1
        elif found := _before_pass(few[place : place + _SAME_AFTER_LOOP], more, start, more_rows):
            places += [places[index] for index in found] * more_rows
        else:
            return None
    return places if place == len(few) else None


def _before_pass(rest: tuple[str, ...], more: tuple[str, ...], start: int, more_rows: int) -> list[int] | None:
    """For each operation of the pass that begins at ``start``, its place in the pass before; None if there is none.

    After this pass and equal ones, ``more_rows`` together, ``rest`` must follow.
    """
    for length in range(1, min(_LONGEST_PASS, (len(more) - start) // more_rows) + 1):
        end = start + more_rows * length
        one_pass = more[start : start + length]
        if more[end : end + _SAME_AFTER_LOOP] == rest and more[start:end] == one_pass * more_rows:
            found = _aligned_backwards(one_pass, more[:start])
            if found:
                return found
    return None


def _aligned_backwards(one_pass: tuple[str, ...], before: tuple[str, ...]) -> list[int] | None:
    """For each operation of a pass, the place of its equal at the end of ``before``; None if others are there.

    Only one of the two may accumulate gradients. An operation for it takes the place of the one before it.
    """
    found: list[int] = []
    index = len(before) - 1
    for name in reversed(one_pass):
        while index >= 0 and before[index] != name and before[index] in _ACCUMULATING:
            index -= 1
        is_equal = index >= 0 and before[index] == name
        if index < 0 or not (is_equal or name in _ACCUMULATING):
            return None
        found.append(index)
        index -= is_equal
    return found[::-1]


def upper_envelope(lines: Iterable[Line]) -> tuple[Line, ...]:
    """Return the lines that are the highest at some batch size >= 0, by increasing slope.

    >>> upper_envelope([Line(10, 0), Line(4, 1), Line(0, 2), Line(9, 0), Line(2, 1.5)])
    (Line(intercept_bytes=10, slope_bytes=0), Line(intercept_bytes=0, slope_bytes=2))
    """
    highest: dict[float, float] = {}
    for line in lines:
        highest[line.slope_bytes] = max(line.intercept_bytes, highest.get(line.slope_bytes, -math.inf))
    hull: list[Line] = []
    for slope, intercept in sorted(highest.items()):
        line = Line(intercept, slope)
        while hull and (line.intercept_bytes >= hull[-1].intercept_bytes or _never_highest(hull, line)):
            hull.pop()
        hull.append(line)
    return tuple(hull)


def _never_highest(hull: list[Line], line: Line) -> bool:
    """Return whether the last line of ``hull`` is nowhere above both its predecessor and the steeper ``line``."""
    return len(hull) > 1 and _crossing(hull[-2], line) <= _crossing(hull[-2], hull[-1])


def _crossing(flat: Line, steep: Line) -> float:
    """Return the batch size at which the two lines are equal."""
    return (flat.intercept_bytes - steep.intercept_bytes) / (steep.slope_bytes - flat.slope_bytes)
