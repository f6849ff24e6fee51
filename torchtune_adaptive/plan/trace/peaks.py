"""Peak memory of a train step as a function of the batch size, by phase and by kind of memory."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torchtune_adaptive.engine.memory.timeline import (
    Line,
    Timeline,
    lines_between,
    operation_lines,
    sum_of,
    upper_envelope,
)
from torchtune_adaptive.plan.host_memory import HostFigures


@dataclass(frozen=True)
class Moment:
    """An operation that holds the peak of ``phase`` at some batch size, with a line for each kind of bytes."""

    phase: str
    operation: str
    lines: dict[str, Line]

    @property
    def total(self) -> Line:
        """The sum of the lines of all kinds."""
        return sum_of(self.lines.values())

    def at(self, batch_size: int) -> dict[str, float]:
        """Bytes of each kind at ``batch_size``."""
        return {kind: line.at(batch_size) for kind, line in self.lines.items()}

    def as_json(self) -> dict[str, Any]:
        """The moment as JSON values."""
        lines = {kind: [line.intercept_bytes, line.slope_bytes] for kind, line in self.lines.items()}
        return {"phase": self.phase, "operation": self.operation, "lines": lines}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Moment":
        """The moment from the value of ``as_json``."""
        lines = {kind: Line(*numbers) for kind, numbers in content["lines"].items()}
        return cls(content["phase"], content["operation"], lines)


@dataclass(frozen=True)
class StepLines:
    """Memory as a function of the batch size, for every operation of a step with rows of ``seq_len`` tokens.

    Attributes:
        seq_len: 0 if the step is that of a user's loop, whose samples need not be rows of tokens.
        phases, operations: phase and name of each operation, in order.
        by_kind: for each kind of bytes, the line of each operation.
    """

    seq_len: int
    phases: tuple[str, ...]
    operations: tuple[str, ...]
    by_kind: dict[str, list[Line]]

    @classmethod
    def from_timelines(
        cls, small: Mapping[str, Timeline], large: Mapping[str, Timeline], *, seq_len: int
    ) -> "StepLines | None":
        """Fit the lines to timelines at two batch sizes, by kind; None if the two steps ran different operations."""
        by_kind: dict[str, list[Line]] = {}
        for kind in small:
            lines = operation_lines(small[kind], large[kind])
            if lines is None:
                return None
            by_kind[kind] = lines
        timeline = next(iter(large.values()))
        return cls(seq_len, timeline.phases, timeline.operations, by_kind)

    def interpolated(self, seq_len: int, other: "StepLines", *, with_images: bool = False) -> "StepLines | None":
        """The lines for rows of ``seq_len`` tokens, interpolated between these and those of another length.

        None if the two steps ran different operations.

        Args:
            with_images: whether rows have images beside their text.
        """
        if self.operations != other.operations:
            return None
        by_kind = {
            kind: lines_between(
                seq_len, (self.seq_len, lines), (other.seq_len, other.by_kind[kind]), with_images=with_images
            )
            for kind, lines in self.by_kind.items()
        }
        return StepLines(seq_len, self.phases, self.operations, by_kind)


@dataclass(frozen=True)
class StepPeaks:
    """Peaks of a step with rows of ``seq_len`` tokens.

    A batch of one row has its own moments, because PyTorch runs different operations on dimensions of size 1. For a
    user's loop ``seq_len`` is 0, and a row is a sample.
    """

    seq_len: int
    moments: tuple[Moment, ...]
    single_row: tuple[Moment, ...]

    @classmethod
    def from_lines(cls, lines: StepLines, *, single_row: Mapping[str, Timeline]) -> "StepPeaks":
        """The peaks of steps of several rows, by ``lines``, and of a step of one row, by its timeline of each kind."""
        constant = {kind: [Line(live, 0.0) for live in timeline.live_bytes] for kind, timeline in single_row.items()}
        timeline = next(iter(single_row.values()))
        single_row_lines = StepLines(lines.seq_len, timeline.phases, timeline.operations, constant)
        return cls(lines.seq_len, _highest_moments(lines), _highest_moments(single_row_lines))

    def moment(self, batch_size: int, phase: str | None = None) -> Moment:
        """The operation with the peak at ``batch_size``, of the step or of ``phase``."""
        moments = [moment for moment in self._moments(batch_size) if phase in (None, moment.phase)]
        return max(moments, key=lambda moment: moment.total.at(batch_size))

    def peak_bytes(self, batch_size: int) -> float:
        """The peak at ``batch_size``."""
        return self.moment(batch_size).total.at(batch_size)

    def phases(self, batch_size: int) -> dict[str, float]:
        """Peak bytes of each phase at ``batch_size``, in order."""
        phases = dict.fromkeys(moment.phase for moment in self._moments(batch_size))
        return {phase: self.moment(batch_size, phase).total.at(batch_size) for phase in phases}

    def as_json(self) -> dict[str, Any]:
        """The peaks as JSON values."""
        return {
            "seq_len": self.seq_len,
            "moments": [moment.as_json() for moment in self.moments],
            "single_row": [moment.as_json() for moment in self.single_row],
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "StepPeaks":
        """The peaks from the value of ``as_json``."""
        moments, single_row = (tuple(map(Moment.from_json, content[name])) for name in ("moments", "single_row"))
        return cls(content["seq_len"], moments, single_row)

    def _moments(self, batch_size: int) -> tuple[Moment, ...]:
        return self.single_row if batch_size == 1 else self.moments


@dataclass(frozen=True)
class TracedStep:
    """Peaks of a config's step by row length, with figures of the model.

    Attributes:
        num_layers: the trained model's layers.
        traced_layers: number of layers of each traced model: two small models, or the whole model.
        num_parameters: parameters of all models, over all ranks.
        paged_bytes: a rank's optimizer state in paged memory, which is not counted in the peaks.
        attention_width: heads times head dimension, of the widest model.
        num_frozen_parameters: the part of ``num_parameters`` in models that are not trained (reference or teacher).
        sequences: sequences per row of the batch; two for a pair of answers.
        images, tiles: images of a row, and tiles of an image.
        host: figures for host memory.
    """

    peaks: tuple[StepPeaks, ...]
    num_layers: int
    traced_layers: tuple[int, ...]
    num_parameters: int
    paged_bytes: int
    attention_width: int
    num_frozen_parameters: int = 0
    sequences: int = 1
    images: int = 0
    tiles: int = 0
    host: HostFigures = field(default_factory=HostFigures)

    def as_json(self) -> dict[str, Any]:
        """The step as JSON values."""
        return vars(self) | {"peaks": [peaks.as_json() for peaks in self.peaks], "host": asdict(self.host)}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "TracedStep":
        """The step from the value of ``as_json``."""
        peaks = tuple(StepPeaks.from_json(peaks) for peaks in content["peaks"])
        host = HostFigures(**content["host"])
        return cls(**content | {"peaks": peaks, "traced_layers": tuple(content["traced_layers"]), "host": host})


def _highest_moments(step: StepLines) -> tuple[Moment, ...]:
    """The operations that hold their phase's peak at some batch size."""
    first_index: dict[str, dict[Line, int]] = {}  # by phase and line: the first operation with that line
    for index, (phase, *lines) in enumerate(zip(step.phases, *step.by_kind.values(), strict=True)):
        first_index.setdefault(phase, {}).setdefault(sum_of(lines), index)
    return tuple(
        Moment(phase, step.operations[index], {kind: lines[index] for kind, lines in step.by_kind.items()})
        for phase, index_of in first_index.items()
        for index in (index_of[line] for line in upper_envelope(index_of))
    )
