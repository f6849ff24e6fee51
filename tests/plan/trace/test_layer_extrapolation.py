"""Peaks of a model with many layers, extrapolated from two small models, compared with its own timeline."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtune_adaptive.engine.memory.timeline import Timeline, sum_of_timelines
from torchtune_adaptive.plan.trace.layer_extrapolation import extrapolate_layers

FEWEST_LAYERS, PERIOD = 4, 2  # as in a plan, where two sorts of layers may alternate
properties = settings(max_examples=60)


class Bytes(NamedTuple):
    """Live bytes after an operation, linear in the model's layers and in the layers that the phase has finished."""

    constant: int
    per_layer: int
    per_layer_done: int = 0

    def at(self, num_layers: int, done: int = 0) -> int:
        return self.constant + self.per_layer * num_layers + self.per_layer_done * done


class Stretch(NamedTuple):
    """The operations of a phase: before the layers, of each layer, and after the layers.

    Attributes:
        sorts: the operations of each sort of layer; layer n is of sort n modulo their number.
        more_at_first, more_at_last: bytes that the first and the last layer hold beyond the others, by operation.
    """

    before: list[Bytes]
    sorts: list[list[Bytes]]
    after: list[Bytes]
    more_at_first: list[int]
    more_at_last: list[int]

    def live_bytes(self, num_layers: int) -> list[int]:
        live = [moment.at(num_layers) for moment in self.before]
        for layer in range(num_layers):
            for index, moment in enumerate(self.sorts[layer % len(self.sorts)]):
                at_first = self.more_at_first[index] if layer == 0 else 0
                at_last = self.more_at_last[index] if layer == num_layers - 1 else 0
                live.append(moment.at(num_layers, layer) + at_first + at_last)
        return live + [moment.at(num_layers) for moment in self.after]

    def operations(self, num_layers: int) -> list[str]:
        parts = {"before": self.before, "layer": self.sorts[0], "after": self.after}
        before, layer, after = ([f"{name} {index}" for index in range(len(moments))] for name, moments in parts.items())
        return before + layer * num_layers + after


Step = dict[str, list[Stretch]]  # by phase; a phase is one stretch, or several with one operation each


def timeline(step: Step, num_layers: int) -> Timeline:
    operations: list[str] = []
    live_bytes: list[int] = []
    phases: list[str] = []
    for phase, stretches in step.items():
        for number, stretch in enumerate(stretches):
            live = stretch.live_bytes(num_layers)
            names = stretch.operations(num_layers) if len(stretches) == 1 else [f"over all {number}"] * len(live)
            operations += names
            live_bytes += live
            phases += [phase] * len(live)
    return Timeline(2, tuple(operations), tuple(live_bytes), tuple(phases))


def peaks(step: Timeline) -> dict[str, int]:
    highest: dict[str, int] = {}
    for phase, live in zip(step.phases, step.live_bytes, strict=True):
        highest[phase] = max(live, highest.get(phase, live))
    return highest


moments = st.builds(Bytes, st.integers(0, 300), st.integers(-20, 20))
moments_of_layers = st.builds(Bytes, st.integers(0, 300), st.integers(-20, 20), st.integers(-20, 20))


@st.composite
def stretches(draw: st.DrawFn, *, fewest: int) -> Stretch:
    """A phase whose middle is far enough from the first and the last of ``fewest`` layers.

    The distance is two layers if two sorts alternate or the ends may hold less than other layers, else one layer.
    """
    size = draw(st.integers(1, 4))
    kind = draw(st.sampled_from(["sorts alternate", "ends hold less or more", "off the middle"]))
    sorts = [draw(st.lists(moments_of_layers, min_size=size, max_size=size)) for _ in range(PERIOD)]
    before = draw(st.lists(moments, max_size=5))
    apart = 1 if kind == "off the middle" else 2
    longer_after = draw(st.integers((2 * apart - fewest) * size, (fewest - 2 * apart) * size + 1))
    before += [Bytes(0, 0)] * max(0, -longer_after - len(before))
    num_after = len(before) + longer_after
    more = st.integers(-200 if kind == "ends hold less or more" else 0, 200)
    return Stretch(
        before=before,
        sorts=sorts if kind == "sorts alternate" else sorts[:1],
        after=draw(st.lists(moments, min_size=num_after, max_size=num_after)),
        more_at_first=draw(st.lists(more, min_size=size, max_size=size)),
        more_at_last=draw(st.lists(more, min_size=size, max_size=size)),
    )


@st.composite
def over_all_layers(draw: st.DrawFn) -> Stretch:
    """One operation for each of a layer's parameters, layer by layer, as an optimizer goes through them."""
    size = draw(st.integers(1, 3))
    return Stretch(
        before=[],
        sorts=[draw(st.lists(moments_of_layers, min_size=size, max_size=size))],
        after=[],
        more_at_first=draw(st.lists(st.integers(0, 200), min_size=size, max_size=size)),
        more_at_last=draw(st.lists(st.integers(0, 200), min_size=size, max_size=size)),
    )


class Model(NamedTuple):
    """A step, the numbers of layers of the two small models, and that of the whole model."""

    step: Step
    layers: tuple[int, int]
    num_layers: int

    @property
    def extrapolated(self) -> Timeline | None:
        few, more = (timeline(self.step, count) for count in self.layers)
        return extrapolate_layers(few, more, layers=self.layers, num_layers=self.num_layers)


@st.composite
def models(draw: st.DrawFn) -> Model:
    fewest = FEWEST_LAYERS + draw(st.integers(0, PERIOD - 1))
    step = {
        "forward": [draw(stretches(fewest=fewest))],
        "backward": [draw(stretches(fewest=fewest))],
        "optimizer": draw(st.lists(over_all_layers(), min_size=2, max_size=4)),
    }
    periods = draw(st.integers(0, 40))
    return Model(step, (fewest, fewest + PERIOD), fewest + periods * PERIOD)


@properties
@given(models())
def test_the_extrapolated_peak_of_every_phase_is_that_of_the_whole_model(model: Model) -> None:
    extrapolated = model.extrapolated
    assert extrapolated is not None
    assert peaks(extrapolated) == peaks(timeline(model.step, model.num_layers))


@properties
@given(models(), st.integers(2, 4))
def test_kinds_of_bytes_extrapolated_apart_add_up_to_the_extrapolated_sum(model: Model, num_kinds: int) -> None:
    few, more = (timeline(model.step, count) for count in model.layers)

    def kind_of(of: Timeline, number: int) -> Timeline:
        """A share of the bytes; all shares add up to the whole."""
        return replace(of, live_bytes=tuple((live + number) // num_kinds for live in of.live_bytes))

    kinds = [
        extrapolate_layers(
            kind_of(few, number), kind_of(more, number), layers=model.layers, num_layers=model.num_layers
        )
        for number in range(num_kinds)
    ]
    assert sum_of_timelines(kind for kind in kinds if kind is not None) == model.extrapolated


def without(indices: slice) -> Callable[[Timeline], Timeline]:
    """A function that leaves operations out of a timeline."""

    def leave_out(of: Timeline) -> Timeline:
        left = sorted(set(range(len(of.operations))) - set(range(len(of.operations))[indices]))
        return Timeline(
            of.batch_size,
            tuple(of.operations[index] for index in left),
            tuple(of.live_bytes[index] for index in left),
            tuple(of.phases[index] for index in left),
        )

    return leave_out


@pytest.mark.parametrize(
    "change",
    {
        "another operation in the last layer": lambda of: replace(
            of, operations=(*of.operations[:-2], "another", "after 0")
        ),
        "an operation less at the start": without(slice(1)),
        "an operation less at the end": without(slice(-1, None)),
        "fewer operations than with fewer layers": without(slice(2, -2)),
        "another phase": lambda of: replace(of, phases=("loss",) * len(of.phases)),
    }.items(),
    ids=lambda change: change[0],
)
def test_operations_that_do_not_repeat_as_layers_do_are_not_extrapolated(
    change: tuple[str, Callable[[Timeline], Timeline]],
) -> None:
    moment = Bytes(1, 2, 3)
    step = {"forward": [Stretch([moment], [[moment, moment]], [moment], [0, 0], [0, 0])]}
    few, more = timeline(step, 4), timeline(step, 6)
    assert extrapolate_layers(few, more, layers=(4, 6), num_layers=32) is not None
    assert extrapolate_layers(few, change[1](more), layers=(4, 6), num_layers=32) is None
