"""Forecast the peak memory of a train step at any batch size, from its timelines at two sizes.

Live bytes after one operation are on a line in the batch size. Two timelines determine this line for every operation.
The peak of the step is that of its highest line. The peak itself is not linear: at small sizes it is in the optimizer
step, at large sizes in the loss or in the backward pass. A line through two peaks can therefore be wrong by 80 %.

Some models loop over the rows of a batch. Bytes in a pass of the loop are linear in the pass and in the batch size. So
a line through any two passes is that of a pass too: of one that keeps its distance from the loop's start, from its end,
or between both.

Some steps hold more than a line, such as the similarities of all rows with each other. Further timelines, at sizes that
fit even if memory grows with the cube of the rows, make a polynomial of each line.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_MOST_ROWS = 2**21  # above any size that is searched
_CLOSEST = 0.99  # sizes closer than this differ by the rounding of an allocator more than by rows
_LONGEST_PASS = 256  # operations
_SAME_AFTER_LOOP = 8  # operations, before which another loop may not begin
_ACCUMULATING = ("aten.add.Tensor", "aten.detach.default")  # gradients: the first pass does not add, the last detaches


@dataclass(frozen=True)
class Timeline:
    """Live bytes of one rank after every operation of a train step at ``batch_size``, in order."""

    batch_size: int
    operations: tuple[str, ...]
    live_bytes: tuple[int, ...]


@dataclass(frozen=True)
class Forecast:
    """The peak of a train step as a function of the batch size: the most bytes after any of its operations.

    After an operation of a step of ``n`` rows they are ``w + (n - a) * (x + (n - b) * (y + (n - c) * z))``. ``sizes``
    are a, b and c; each operation has its coefficients w, x, y and z.
    """

    sizes: tuple[int, int, int]
    coefficients: frozenset[tuple[float, float, float, float]]

    @classmethod
    def along_lines(cls, small: Timeline, large: Timeline) -> "Forecast | None":
        """Make a forecast from two steps with different batch sizes. None if operations differ, but for loops.

        >>> small = Timeline(2, ("in", "row", "row"), (4, 5, 6))
        >>> large = Timeline(3, ("in", "row", "row", "row"), (6, 7, 8, 9))
        >>> Forecast.along_lines(small, large).peak_bytes(4)
        12.0
        """
        live_bytes = _side_by_side([large, small])
        if live_bytes is None:
            return None
        more_rows = large.batch_size - small.batch_size
        lines = frozenset((high, (high - low) / more_rows, 0, 0) for high, low in live_bytes)
        return cls((large.batch_size, 0, 0), lines)

    @classmethod
    def along_curves(cls, timelines: Iterable[Timeline]) -> "Forecast | None":
        """Make a forecast from steps of at least two sizes, if memory grows with a power of the rows, up to their cube.

        Steps of four sizes determine a polynomial. With fewer, growth is taken to be as steep as that of a cube, so
        that a size forecast to fit does fit. So it is, too, if bytes grow with a power between whole ones. They never
        fall in the forecast, and grow at least along the line through the two largest sizes. Of sizes that are very
        close to each other, only the largest counts. None if operations differ, but for loops.
        """
        steps: list[Timeline] = []
        for step in sorted(timelines, key=lambda step: step.batch_size, reverse=True):
            if len(steps) < 4 and (not steps or step.batch_size <= _CLOSEST * steps[-1].batch_size):
                steps.append(step)
        live_bytes = _side_by_side(steps)
        if live_bytes is None:
            return None
        sizes = [step.batch_size for step in steps]
        a, b, c, *_ = [*sizes, 0]
        return cls((a, b, c), frozenset(_curve(sizes, one) for one in live_bytes))

    def peak_bytes(self, batch_size: float) -> float:
        """Return the forecast peak at ``batch_size``."""
        a, b, c = (batch_size - size for size in self.sizes)
        return max(w + a * (x + b * (y + c * z)) for w, x, y, z in self.coefficients)

    def largest_batch_size(self, limit_bytes: float, *, fitted: int) -> int | None:
        """Return the largest batch size with a peak of at most ``limit_bytes``, which that of ``fitted`` has.

        None: memory does not grow with it.
        """
        if not any(x > 0 or y or z for _, x, y, z in self.coefficients):
            return None
        # Half a byte allows for rounding errors.
        return bisect_right(range(_MOST_ROWS), limit_bytes + 0.5, lo=fitted + 1, key=self.peak_bytes) - 1

    def crossing(self, limit_bytes: float, *, fitted: int) -> float | None:
        """As ``largest_batch_size``, with a fraction of a row."""
        largest = self.largest_batch_size(limit_bytes, fitted=fitted)
        if largest is None:
            return None
        peak_bytes = self.peak_bytes(largest)
        row_bytes = max(self.peak_bytes(largest + 1) - peak_bytes, 1)
        return largest + (limit_bytes - peak_bytes) / row_bytes


def _side_by_side(steps: Sequence[Timeline]) -> set[tuple[int, ...]] | None:
    """For each operation of the first step its bytes in all ``steps``, which have fewer and fewer rows.

    None if operations differ, but for passes of loops, or if there are none.
    """
    largest, columns = steps[0], list[list[int]]()
    for step in steps:
        more_rows = largest.batch_size - step.batch_size
        places = _places_in(step.operations, largest.operations, more_rows=more_rows)
        if places is None:
            return None
        columns.append([step.live_bytes[place] for place in places])
    return set(zip(*columns, strict=True)) or None


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
