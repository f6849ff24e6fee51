"""Two timelines of one train step -> lines of memory over batch size -> the largest batch size.

Live bytes after each operation are a line in the batch size, ``intercept + slope * batch_size``; the
peak of the step is the upper envelope of these lines. The peak itself is no line: at small sizes it
sits in the optimizer step, at large ones in the loss or in backward, so a line through two peaks can be
wrong by 80 %. Two timelines give each operation's line, and thereby the envelope.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Timeline:
    """Live bytes of one rank after every operation of one train step at ``batch_size``, in order.

    ``phases`` names each operation's phase of the step, or is empty.
    """

    batch_size: int
    operations: tuple[str, ...]
    live_bytes: tuple[int, ...]
    phases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Line:
    """Live bytes at one operation: ``intercept_bytes + slope_bytes * batch_size``."""

    intercept_bytes: float
    slope_bytes: float

    def at(self, batch_size: float) -> float:
        """Bytes at ``batch_size``."""
        return self.intercept_bytes + self.slope_bytes * batch_size


@dataclass(frozen=True)
class Forecast:
    """Peak of a train step over the batch size, as the upper envelope of its operations' lines."""

    envelope: tuple[Line, ...]

    @classmethod
    def from_timelines(cls, small: Timeline, large: Timeline) -> "Forecast | None":
        """The forecast from one step each at two different batch sizes, or None if they ran different operations."""
        lines = operation_lines(small, large)
        return None if lines is None else cls(upper_envelope(lines))

    def peak_bytes(self, batch_size: int) -> float:
        """Forecast peak in bytes at ``batch_size``."""
        return max(line.at(batch_size) for line in self.envelope)

    def largest_batch_size(self, limit_bytes: float) -> int | None:
        """Largest batch size whose forecast peak is at most ``limit_bytes``; None if memory does not grow with it."""
        if any(line.slope_bytes == 0 and line.intercept_bytes > limit_bytes for line in self.envelope):
            return 0
        crossing = self.crossing(limit_bytes)
        if crossing is None:
            return None
        largest = math.floor(crossing)
        # Bytes are whole: half of one is rounding. An operation whose memory falls may still be above the limit here.
        return largest if largest > 0 and self.peak_bytes(largest) <= limit_bytes + 0.5 else 0

    def crossing(self, limit_bytes: float) -> float | None:
        """Where, in rows and parts of one, the first growing line reaches ``limit_bytes``; None if none grows."""
        growing = [line for line in self.envelope if line.slope_bytes > 0]
        if not growing:
            return None
        return min((limit_bytes - line.intercept_bytes) / line.slope_bytes for line in growing)


def operation_lines(small: Timeline, large: Timeline) -> list[Line] | None:
    """The line of every operation, in order, from two batch sizes; None if their steps ran different operations."""
    if small.operations != large.operations:
        return None
    sizes = large.batch_size - small.batch_size
    slopes = [(high - low) / sizes for low, high in zip(small.live_bytes, large.live_bytes, strict=True)]
    return [Line(low - slope * small.batch_size, slope) for low, slope in zip(small.live_bytes, slopes, strict=True)]


def lines_between(seq_len: int, short: tuple[int, Sequence[Line]], long: tuple[int, Sequence[Line]]) -> list[Line]:
    """Every operation's line for rows of ``seq_len`` tokens, from those for two other lengths.

    With rows of s tokens an operation's live bytes are ``c + e * s**2 + batch_size * (a * s + d * s**2)``. Without a
    dense mask and dense attention the squares are 0, and what counts is the number of tokens.

    Args:
        short, long: the length, and the lines of the same operations.

    >>> lines_between(4, (2, [Line(14, 8)]), (8, [Line(74, 80)]))  # c = 10, e = 1, a = 2, d = 1
    [Line(intercept_bytes=26.0, slope_bytes=24.0)]
    """
    (short_len, short_lines), (long_len, long_lines) = short, long
    told: list[Line] = []
    for low, high in zip(short_lines, long_lines, strict=True):
        per_pair = (high.slope_bytes / long_len - low.slope_bytes / short_len) / (long_len - short_len)
        per_token = low.slope_bytes / short_len - per_pair * short_len
        per_square = (high.intercept_bytes - low.intercept_bytes) / (long_len**2 - short_len**2)
        intercept_bytes = low.intercept_bytes + per_square * (seq_len**2 - short_len**2)
        told.append(Line(intercept_bytes, per_token * seq_len + per_pair * seq_len**2))
    return told


def sum_of_timelines(timelines: Iterable[Timeline]) -> Timeline:
    """The timeline whose live bytes are those of all ``timelines`` of the same step together."""
    some, *others = timelines
    live_bytes = (sum(live) for live in zip(some.live_bytes, *(other.live_bytes for other in others), strict=True))
    return Timeline(some.batch_size, some.operations, tuple(live_bytes), some.phases)


def sum_of(lines: Iterable[Line]) -> Line:
    """The line whose bytes are those of all ``lines`` together."""
    lines = list(lines)
    return Line(sum(line.intercept_bytes for line in lines), sum(line.slope_bytes for line in lines))


def upper_envelope(lines: Iterable[Line]) -> tuple[Line, ...]:
    """The lines that are the highest at some batch size >= 0, by rising slope. At most a handful in practice.

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
    """Whether the last line of ``hull`` is nowhere above both its predecessor and the steeper ``line``."""
    return len(hull) > 1 and _crossing(hull[-2], line) <= _crossing(hull[-2], hull[-1])


def _crossing(flat: Line, steep: Line) -> float:
    return (flat.intercept_bytes - steep.intercept_bytes) / (steep.slope_bytes - flat.slope_bytes)
