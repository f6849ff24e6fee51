"""Peak of a train step over its batch size, by phase and by what the bytes hold."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchtune_adaptive.memory.timeline import (
    Forecast,
    Line,
    Timeline,
    lines_between,
    operation_lines,
    sum_of,
    upper_envelope,
)


@dataclass(frozen=True)
class Moment:
    """An operation of ``phase`` that is that phase's highest at some batch size, with a line for each kind of bytes."""

    phase: str
    operation: str
    lines: dict[str, Line]

    @property
    def total(self) -> Line:
        """The line of all kinds together."""
        return sum_of(self.lines.values())

    def at(self, batch_size: int) -> dict[str, float]:
        """Bytes of each kind at ``batch_size``."""
        return {kind: line.at(batch_size) for kind, line in self.lines.items()}


@dataclass(frozen=True)
class Lines:
    """The line of each kind of bytes at every operation of a step, with its phase and its name, in order."""

    phases: tuple[str, ...]
    operations: tuple[str, ...]
    of_kind: dict[str, list[Line]]

    @classmethod
    def from_timelines(cls, small: Mapping[str, Timeline], large: Mapping[str, Timeline]) -> "Lines | None":
        """From the timelines of each kind at two batch sizes; None if their steps ran different operations."""
        of_kind = {kind: operation_lines(small[kind], large[kind]) for kind in small}
        some = next(iter(small.values()))
        found = {kind: lines for kind, lines in of_kind.items() if lines is not None}
        return cls(some.phases, some.operations, found) if len(found) == len(of_kind) else None

    def between(self, seq_len: int, *, own_len: int, other: "Lines", other_len: int) -> "Lines | None":
        """Those for rows of ``seq_len`` tokens, from these and those of another length; None if operations differ."""
        if self.operations != other.operations:
            return None
        of_kind = {
            kind: lines_between(seq_len, (own_len, lines), (other_len, other.of_kind[kind]))
            for kind, lines in self.of_kind.items()
        }
        return Lines(self.phases, self.operations, of_kind)


@dataclass(frozen=True)
class StepPeaks:
    """Peaks of a step with rows of ``seq_len`` tokens.

    A batch of a single row has moments of its own: dimensions of size 1 take other operations.
    """

    seq_len: int
    moments: tuple[Moment, ...]
    single_row: tuple[Moment, ...]

    @classmethod
    def from_lines(cls, seq_len: int, *, single: Mapping[str, Timeline], growing: "Lines") -> "StepPeaks":
        """From the timelines of each kind at a batch of one row, and the lines of each at more."""
        flat = {kind: [Line(live, 0.0) for live in timeline.live_bytes] for kind, timeline in single.items()}
        some = next(iter(single.values()))
        alone = Lines(some.phases, some.operations, flat)
        return cls(seq_len, _highest(growing), _highest(alone))

    def moment(self, batch_size: int, phase: str | None = None) -> Moment:
        """The operation that holds the peak at ``batch_size``; of ``phase`` if one is given."""
        moments = [moment for moment in self._moments(batch_size) if phase in (None, moment.phase)]
        return max(moments, key=lambda moment: moment.total.at(batch_size))

    def peak_bytes(self, batch_size: int) -> float:
        """The peak at ``batch_size``."""
        return self.moment(batch_size).total.at(batch_size)

    def phases(self, batch_size: int) -> dict[str, float]:
        """Peak of each phase at ``batch_size``, in order."""
        phases = dict.fromkeys(moment.phase for moment in self._moments(batch_size))
        return {phase: self.moment(batch_size, phase).total.at(batch_size) for phase in phases}

    def largest_batch_size(self, limit_bytes: float) -> int | None:
        """Largest batch size whose peak is at most ``limit_bytes``; 0 if none is, None if all are."""
        largest = Forecast(upper_envelope(moment.total for moment in self.moments)).largest_batch_size(limit_bytes)
        if largest is not None and largest < 2:
            return int(self.peak_bytes(1) <= limit_bytes)
        return largest

    def as_json(self) -> dict[str, Any]:
        """The peaks as what JSON can hold."""
        return {
            "seq_len": self.seq_len,
            "moments": [_moment_as_json(moment) for moment in self.moments],
            "single_row": [_moment_as_json(moment) for moment in self.single_row],
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "StepPeaks":
        """The peaks that ``as_json`` gave."""
        moments, single_row = (
            tuple(_moment_from_json(moment) for moment in content[name]) for name in ("moments", "single_row")
        )
        return cls(content["seq_len"], moments, single_row)

    def _moments(self, batch_size: int) -> tuple[Moment, ...]:
        return self.single_row if batch_size == 1 else self.moments


@dataclass(frozen=True)
class TracedStep:
    """Peaks of a config's step by the length of its rows, and what they rest on.

    Attributes:
        num_layers: the model's layers.
        traced_layers: layers of the models that were traced: those of two small ones, or of the whole.
        num_parameters: the model's parameters, over all ranks.
        paged_bytes: optimizer state in memory that gives way to other allocations, and is not counted.
        attention_width: heads times head dimension.
    """

    peaks: tuple[StepPeaks, ...]
    num_layers: int
    traced_layers: tuple[int, ...]
    num_parameters: int
    paged_bytes: int
    attention_width: int

    def as_json(self) -> dict[str, Any]:
        """The step as what JSON can hold."""
        return vars(self) | {"peaks": [peaks.as_json() for peaks in self.peaks]}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "TracedStep":
        """The step that ``as_json`` gave."""
        peaks = tuple(StepPeaks.from_json(peaks) for peaks in content["peaks"])
        return cls(**content | {"peaks": peaks, "traced_layers": tuple(content["traced_layers"])})


def _highest(lines: Lines) -> tuple[Moment, ...]:
    """Each phase's operations that are its highest at some batch size."""
    places: dict[str, dict[Line, int]] = {}
    for place, (phase, *kinds) in enumerate(zip(lines.phases, *lines.of_kind.values(), strict=True)):
        places.setdefault(phase, {}).setdefault(sum_of(kinds), place)
    return tuple(
        Moment(phase, lines.operations[place], {kind: lines.of_kind[kind][place] for kind in lines.of_kind})
        for phase, place_of in places.items()
        for place in (place_of[line] for line in upper_envelope(place_of))
    )


def _moment_as_json(moment: Moment) -> dict[str, Any]:
    lines = {kind: [line.intercept_bytes, line.slope_bytes] for kind, line in moment.lines.items()}
    return {"phase": moment.phase, "operation": moment.operation, "lines": lines}


def _moment_from_json(content: dict[str, Any]) -> Moment:
    lines = {kind: Line(*numbers) for kind, numbers in content["lines"].items()}
    return Moment(content["phase"], content["operation"], lines)
