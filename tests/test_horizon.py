"""The place on the schedule is a continuous function of the fraction of training done."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtune_adaptive.training.horizon import Horizon

properties = settings(derandomize=True, deadline=None, max_examples=150)
steps_of_epochs = st.lists(st.integers(1, 400), min_size=1, max_size=12)


class Run:
    """A run whose epochs have ``steps_of_epochs`` optimizer steps; it changes its horizon as the recipes do."""

    def __init__(self, steps_of_epochs: list[int]) -> None:
        self.horizon = Horizon(steps_of_epochs[0])
        self.places: list[list[float]] = []  # of every step, by epoch
        self.first_steps: list[int] = []
        self.step, present = 0, steps_of_epochs[0]
        for epoch, steps in enumerate(steps_of_epochs):
            if steps != present:
                self.horizon.change(epoch=epoch, step=self.step, steps_per_epoch=steps)
                present = steps
            self.first_steps.append(self.step)
            self.places.append([self.horizon.schedule_step(self.step + index) for index in range(steps)])
            self.step += steps


def resumed_places(run: Run, steps: list[int], epoch: int) -> list[float]:
    """The places in ``epoch`` of a run that is resumed at the start of this epoch."""
    resumed = Horizon(steps[0])
    resumed.change(epoch=epoch, step=run.first_steps[epoch], steps_per_epoch=steps[epoch])
    return [resumed.schedule_step(run.first_steps[epoch] + index) for index in range(steps[epoch])]


@given(st.integers(1, 10**6), st.integers(0, 10**9))
@properties
def test_without_a_change_the_place_of_a_step_is_its_number_as_an_int(steps_per_epoch: int, step: int) -> None:
    place = Horizon(steps_per_epoch).schedule_step(step)
    assert place == step
    assert type(place) is int


@given(st.integers(1, 10**4), st.integers(0, 50), st.integers(0, 10**6))
@properties
def test_a_change_to_the_same_steps_per_epoch_changes_no_bit(steps_per_epoch: int, epoch: int, further: int) -> None:
    horizon = Horizon(steps_per_epoch)
    first_step = epoch * steps_per_epoch
    horizon.change(epoch=epoch, step=first_step, steps_per_epoch=steps_per_epoch)
    place = horizon.schedule_step(first_step + further)
    assert place == first_step + further
    assert type(place) is int


@given(steps_of_epochs)
@properties
def test_an_epoch_starts_and_ends_at_the_same_places_for_any_number_of_steps(steps: list[int]) -> None:
    run = Run(steps)
    assert [places[0] for places in run.places] == [epoch * steps[0] for epoch in range(len(steps))]
    end = run.horizon.schedule_step(run.step)
    assert end == len(steps) * steps[0]
    assert type(end) is int


@given(steps_of_epochs)
@properties
def test_the_place_moves_evenly_within_an_epoch_and_without_a_jump_between_epochs(steps: list[int]) -> None:
    run = Run(steps)
    for epoch, places in enumerate(run.places):
        stride = Fraction(steps[0], steps[epoch])
        exact = [epoch * steps[0] + index * stride for index in range(steps[epoch])]
        assert places == pytest.approx([float(place) for place in exact], rel=1e-12)
        following = run.places[epoch + 1][0] if epoch + 1 < len(steps) else len(steps) * steps[0]
        assert following - places[-1] == pytest.approx(float(stride), rel=1e-9)


@given(steps_of_epochs)
@properties
def test_a_schedule_ends_exactly_at_its_end(steps: list[int]) -> None:
    run = Run(steps)
    total = len(steps) * steps[0]
    rates = [1 - place / total for places in run.places for place in places]
    assert rates[0] == 1
    assert rates == sorted(rates, reverse=True)
    assert 1 - run.horizon.schedule_step(run.step) / total == 0


@given(steps_of_epochs, st.data())
@properties
def test_a_resumed_run_has_the_same_places(steps: list[int], data: st.DataObject) -> None:
    run = Run(steps)
    epoch = data.draw(st.integers(0, len(steps) - 1), label="resumed at epoch")
    assert resumed_places(run, steps, epoch) == pytest.approx(run.places[epoch], rel=1e-14)


@given(steps_of_epochs, st.data())
@properties
def test_a_resumed_run_has_the_same_places_bit_for_bit(steps: list[int], data: st.DataObject) -> None:
    run = Run(steps)
    epoch = data.draw(st.integers(0, len(steps) - 1), label="resumed at epoch")
    places = resumed_places(run, steps, epoch)
    assert places == run.places[epoch]
    assert [type(place) for place in places] == [type(place) for place in run.places[epoch]]
