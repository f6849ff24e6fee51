"""A step's peaks against brute force over its operations, and through JSON and back."""

import json
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtune_adaptive.engine.memory.timeline import Line, Timeline
from torchtune_adaptive.engine.search.strategies import NO_BOUND
from torchtune_adaptive.plan.decide import BatchSizes, Device
from torchtune_adaptive.plan.gpu import Overhead
from torchtune_adaptive.plan.trace.peaks import StepLines, StepPeaks, TracedStep

SIZES = range(1, 61)
KINDS = ("parameters", "activations")
PHASES = ("forward", "backward", "optimizer")
properties = settings(max_examples=40)


class Operation(NamedTuple):
    """Live bytes after an operation, by kind: a line over the rows, and other values for a single row."""

    phase: str
    lines: dict[str, Line]
    single_row: dict[str, int]

    def at(self, batch_size: int) -> dict[str, float]:
        grown = {kind: line.at(batch_size) for kind, line in self.lines.items()}
        return dict(self.single_row) if batch_size == 1 else grown

    def total_at(self, batch_size: int) -> float:
        return sum(self.at(batch_size).values())


def timelines(step: list[Operation], batch_size: int) -> dict[str, Timeline]:
    """What a trace of the step gives: a timeline for each kind."""
    names, phases = tuple(f"operation {index}" for index in range(len(step))), tuple(each.phase for each in step)
    return {
        kind: Timeline(batch_size, names, tuple(int(each.at(batch_size)[kind]) for each in step), phases)
        for kind in KINDS
    }


def peaks_of(step: list[Operation]) -> StepPeaks:
    return StepPeaks.from_lines(lines_of(step), single_row=timelines(step, 1))


def lines_of(step: list[Operation], seq_len: int = 128) -> StepLines:
    found = StepLines.from_timelines(timelines(step, 2), timelines(step, 3), seq_len=seq_len)
    assert found is not None
    return found


# Few different values, so that equal lines and lines through one point do occur.
lines = st.builds(Line, st.integers(0, 60) | st.integers(0, 10**9), st.integers(0, 6) | st.integers(0, 10**7))
amounts = st.integers(0, 100) | st.integers(0, 10**9)
operations = st.builds(
    Operation,
    st.sampled_from(PHASES),
    st.fixed_dictionaries(dict.fromkeys(KINDS, lines)),
    st.fixed_dictionaries(dict.fromkeys(KINDS, amounts)),
)
steps = st.lists(operations, min_size=1, max_size=6).map(
    lambda step: sorted(step, key=lambda each: PHASES.index(each.phase))
)


@properties
@given(steps)
def test_the_peak_and_that_of_every_phase_are_those_of_the_highest_operations(step: list[Operation]) -> None:
    peaks = peaks_of(step)
    for size in SIZES:
        assert peaks.peak_bytes(size) == max(each.total_at(size) for each in step)
        highest = {
            phase: max(each.total_at(size) for each in step if each.phase == phase)
            for phase in dict.fromkeys(each.phase for each in step)
        }
        assert list(peaks.phases(size).items()) == list(highest.items())


@properties
@given(steps)
def test_the_kinds_at_the_peak_are_those_of_an_operation_that_holds_it(step: list[Operation]) -> None:
    peaks = peaks_of(step)
    for size in SIZES:
        moment = peaks.moment(size)
        held = step[int(moment.operation.removeprefix("operation "))]
        assert (moment.phase, moment.at(size)) == (held.phase, held.at(size))
        assert sum(moment.at(size).values()) == moment.total.at(size) == peaks.peak_bytes(size)


@properties
@given(steps, st.lists(st.integers(0, 2000) | st.integers(0, 2 * 10**9), min_size=1, max_size=10))
def test_the_largest_size_is_that_of_exhaustive_search(step: list[Operation], limits_bytes: list[int]) -> None:
    peaks = peaks_of(step)
    limits_bytes += [int(peaks.peak_bytes(size)) + off for size in (1, 2, 3, 40) for off in (-1, 0)]
    for limit_bytes in limits_bytes:
        device = Device(name="any", memory_bytes=limit_bytes, margin=0, overhead=Overhead.none())
        found = BatchSizes(peaks, device).largest
        fitting = [size for size in SIZES if max(each.total_at(size) for each in step) <= limit_bytes]
        if found is None:
            assert fitting[-len(SIZES) + 1 :] == list(SIZES)[1:]  # a single row is a step of its own
            assert max(each.total_at(NO_BOUND) for each in step) <= limit_bytes
        else:
            assert min(found, SIZES[-1]) == max(fitting, default=0)


def operation(phase: str, intercept_bytes: int, slope_bytes: int, *, single_row: int) -> Operation:
    """An operation that holds only activations."""
    return Operation(
        phase,
        dict.fromkeys(KINDS, Line(0, 0)) | {"activations": Line(intercept_bytes, slope_bytes)},
        dict.fromkeys(KINDS, 0) | {"activations": single_row},
    )


def test_a_single_row_has_the_peak_of_its_own_step() -> None:
    step = [operation("forward", 10, 10, single_row=25)]
    assert peaks_of(step).peak_bytes(1) == 25


def test_steps_of_two_sizes_with_different_operations_have_no_lines() -> None:
    step = [operation("forward", 10, 10, single_row=25), operation("backward", 20, 5, single_row=9)]
    assert StepLines.from_timelines(timelines(step, 2), timelines(step[:1], 3), seq_len=128) is None


def test_a_single_row_may_run_other_operations() -> None:
    step = [operation("forward", 10, 10, single_row=25), operation("backward", 20, 5, single_row=9)]
    peaks = StepPeaks.from_lines(lines_of(step), single_row=timelines(step[:1], 1))
    assert peaks.seq_len == 128
    assert (peaks.peak_bytes(1), peaks.phases(1), peaks.peak_bytes(2)) == (25, {"forward": 25}, 30)


@properties
@given(steps, st.integers(1, 30).map(lambda eighths: 8 * eighths))
def test_lines_for_a_length_between_two_others_are_interpolated_for_every_kind(
    step: list[Operation], seq_len: int
) -> None:
    def of_length(length: int) -> StepLines:
        """The rows' bytes grow with their tokens, the rest does not grow."""
        by_kind = {
            kind: [Line(each.lines[kind].intercept_bytes, each.lines[kind].slope_bytes * length) for each in step]
            for kind in KINDS
        }
        phases, names = tuple(each.phase for each in step), tuple(f"{index}" for index in range(len(step)))
        return StepLines(length, phases, names, by_kind)

    short, long = of_length(8), of_length(256)
    found = short.interpolated(seq_len, long)
    assert found is not None
    assert (found.seq_len, found.phases, found.operations) == (seq_len, short.phases, short.operations)
    for kind, lines in of_length(seq_len).by_kind.items():
        for line, true in zip(found.by_kind[kind], lines, strict=True):
            assert (line.intercept_bytes, line.slope_bytes) == pytest.approx((true.intercept_bytes, true.slope_bytes))


def test_lengths_with_different_operations_are_not_interpolated() -> None:
    step = [operation("forward", 10, 10, single_row=25), operation("backward", 20, 5, single_row=9)]
    assert lines_of(step, 8).interpolated(64, lines_of(step[:1], 256)) is None


@properties
@given(st.lists(steps, min_size=1, max_size=3), st.lists(amounts, min_size=4, max_size=4))
def test_a_traced_step_is_the_same_through_json_and_back(some: list[list[Operation]], figures: list[int]) -> None:
    num_layers, num_parameters, paged_bytes, attention_width = figures
    step = TracedStep(
        tuple(map(peaks_of, some)), num_layers, (4, 6), num_parameters, paged_bytes, attention_width=attention_width
    )
    assert TracedStep.from_json(json.loads(json.dumps(step.as_json()))) == step
