"""The learning rate is a function of the fraction of training done, for any steps per epoch, times a scale.

Without changes it equals the scheduler's own rate, bit for bit. If the batch scales the rate, each step has the rate of
its place on the schedule times the scale of its batch.
"""

import copy
import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, StepLR

from torchtune_adaptive.errors import InputError
from torchtune_adaptive.settings import LearningRateScaling
from torchtune_adaptive.training.learning_rate import BuildScheduler, EpochStart, LearningRate

RULES: tuple[LearningRateScaling, ...] = get_args(LearningRateScaling)
EPOCHS, STEPS = 4, 10  # of the schedule


def optimizer_of(*rates: float, tensors: bool = False) -> torch.optim.Optimizer:
    """An optimizer with a group for each rate, which is a number or a tensor."""
    groups = [
        {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": torch.tensor(rate) if tensors else rate}
        for rate in rates
    ]
    return torch.optim.AdamW(groups, foreach=False)


def rates_of(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def decay_to_zero(optimizer: torch.optim.Optimizer) -> BuildScheduler:
    """Like torchtune's `_setup_lr_scheduler`; linear over the steps for which it is built."""
    return lambda steps, last: LambdaLR(optimizer, lambda step: 1 - step / steps, last_epoch=last)


def of_steps(optimizer: torch.optim.Optimizer) -> BuildScheduler:
    """A scheduler that cannot be asked for the rate between its steps."""
    return lambda steps, last: StepLR(optimizer, step_size=STEPS, gamma=0.5, last_epoch=last)


class Run:
    """An optimizer that steps, and its rate."""

    def __init__(
        self,
        *rates: float,
        rule: LearningRateScaling = "none",
        tensors: bool = False,
        build: Callable[[torch.optim.Optimizer], BuildScheduler] | None = decay_to_zero,
    ) -> None:
        self.optimizer = optimizer_of(*(rates or (1.0,)), tensors=tensors)
        make: BuildScheduler = (lambda steps, last: None) if build is None else build(self.optimizer)
        self.rate = LearningRate(
            make(EPOCHS * STEPS, -1),
            [self.optimizer],
            make,
            total_epochs=EPOCHS,
            schedule_steps=STEPS,
            rule=rule,
            reference_samples=16,
        )

    def begin(self, **options: Any) -> "Run":
        """Begin at the first step, unless ``options`` say otherwise."""
        start = {"epoch": 0, "step": 0, "epoch_steps": 0, "steps_per_epoch": STEPS, "grows": True}
        self.rate.begin(**start | options)
        return self

    def take(self, steps: int) -> list[list[float]]:
        """The rates of the groups in each of the next steps."""
        taken = []
        for _ in range(steps):
            taken.append(rates_of(self.optimizer))
            self.optimizer.step()
            self.rate.step()
        return taken

    def first(self, steps: int) -> list[float]:
        """The rate of the first group in each of the next steps."""
        return [rates[0] for rates in self.take(steps)]


PLAIN = [1 - step / (EPOCHS * STEPS) for step in range(EPOCHS * STEPS)]  # of a scheduler that steps unchanged


# ---- the place on the schedule


@settings(max_examples=100)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=6))
def test_the_place_is_the_exact_fraction_of_training_and_an_int_where_it_is_whole(steps: list[int]) -> None:
    """For any steps per epoch, whose first are those of the schedule: evenly within an epoch, without a jump."""
    first_step, start = 0, EpochStart(0, 0, steps[0])
    for epoch, steps_per_epoch in enumerate(steps):
        resumed = EpochStart(epoch, first_step, steps_per_epoch)  # a run that is resumed here
        if steps_per_epoch != start.steps_per_epoch:
            start = resumed
        for index in range(steps_per_epoch + 1):  # to the first of the next epoch
            exact = steps[0] * (epoch + Fraction(index, steps_per_epoch))
            place = start.schedule_step(first_step + index, schedule_steps=steps[0])
            assert place == float(exact)
            assert isinstance(place, int) is (exact.denominator == 1)
            assert resumed.schedule_step(first_step + index, schedule_steps=steps[0]) == place
        first_step += steps_per_epoch


# ---- along the schedule


@pytest.mark.parametrize("grows", [True, False], ids=["may grow", "stays"])
@pytest.mark.parametrize("tensors", [False, True], ids=["numbers", "tensors"])
@pytest.mark.parametrize("step", [0, 7, 10, 39])
def test_a_run_resumed_within_an_epoch_has_the_rates_of_an_uninterrupted_one(
    step: int, grows: bool, tensors: bool
) -> None:
    run = Run(tensors=tensors)
    run.take(3)
    epoch, epoch_steps = divmod(step, STEPS)
    run.begin(epoch=epoch, step=step, epoch_steps=epoch_steps, grows=grows)
    rates = PLAIN[step:]
    assert run.first(40 - step) == (pytest.approx(rates, rel=1e-6) if tensors else rates)


@pytest.mark.parametrize("rule", RULES)
def test_a_run_resumed_in_an_epoch_of_other_steps_keeps_its_place_on_the_schedule(rule: LearningRateScaling) -> None:
    whole = Run(rule=rule).begin()
    whole.take(20)
    whole.rate.change(epoch=2, step=20, steps_per_epoch=5)
    whole.rate.scale(32)
    expected = whole.first(10)
    resumed = Run(rule=rule).begin(epoch=2, step=23, epoch_steps=3, steps_per_epoch=5)
    resumed.rate.scale(32)
    assert resumed.first(7) == pytest.approx(expected[3:], rel=1e-6)


# ---- schedulers that do not follow


@pytest.mark.parametrize("tensors", [False, True], ids=["numbers", "tensors"])
@pytest.mark.parametrize("step", [0, 7, 10, 25])
@pytest.mark.parametrize(
    "kind",
    [
        partial(StepLR, step_size=STEPS, gamma=0.5),
        partial(ExponentialLR, gamma=0.9),
        lambda optimizer, last_epoch: LambdaLR(optimizer, lambda step: 0.9**step),  # begins at its first step anyway
    ],
)
def test_a_scheduler_that_goes_from_step_to_step_has_the_rates_of_an_uninterrupted_run_when_resumed(
    kind: Any, step: int, tensors: bool
) -> None:
    def build(optimizer: torch.optim.Optimizer) -> BuildScheduler:
        return lambda steps, last: kind(optimizer, last_epoch=last)

    whole = Run(build=build, tensors=tensors)
    whole.take(step)
    saved = [{key: group[key] for key in ("lr", "initial_lr")} for group in whole.optimizer.param_groups]
    resumed = Run(build=build, tensors=tensors)
    for group, options in zip(resumed.optimizer.param_groups, saved, strict=True):
        group.update(copy.deepcopy(options))
    resumed.begin(epoch=step // STEPS, step=step, epoch_steps=step % STEPS, grows=False)
    assert resumed.first(40 - step) == whole.first(40 - step)


@pytest.mark.parametrize(
    ("rule", "options"),
    [("none", {"grows": True}), ("sqrt", {"grows": False}), ("none", {"grows": False, "steps_per_epoch": 5})],
    ids=["the batch grows", "the rate scales", "the steps are others"],
)
def test_a_scheduler_that_cannot_be_asked_between_its_steps_is_refused(
    rule: LearningRateScaling, options: dict[str, Any]
) -> None:
    run = Run(build=of_steps, rule=rule)
    with pytest.raises(InputError) as refused:
        run.begin(**options)
    assert str(refused.value) == (
        "A batch that grows, a learning rate that scales with it, or a resumed run with other steps per epoch needs an"
        " `lr_scheduler` that creates a torch.optim.lr_scheduler.LambdaLR, not a StepLR."
    )


# ---- scaled with the batch


@pytest.mark.parametrize("tensors", [False, True], ids=["numbers", "tensors"])
def test_every_step_has_the_rate_of_its_place_times_the_scale_of_its_batch(tensors: bool) -> None:
    """Also the first step after a change, whose rate the scheduler had already set; groups keep their ratio."""
    run = Run(1.0, 0.25, rule="sqrt", tensors=tensors).begin()
    rates = [group["lr"] for group in run.optimizer.param_groups]
    taken = run.take(20)
    run.rate.change(epoch=2, step=20, steps_per_epoch=5)  # twice the samples: half the steps
    run.rate.scale(32)
    taken += run.take(10)
    expected = [1 - step / 40 for step in range(20)] + [math.sqrt(2) * (1 - (20 + 2 * step) / 40) for step in range(10)]
    assert [rates[0] for rates in taken] == pytest.approx(expected, rel=1e-6)
    assert [rates[1] for rates in taken] == pytest.approx([0.25 * rate for rate in expected], rel=1e-6)
    if tensors:  # compiled code or a graph refers to these tensors
        assert all(group["lr"] is rate for group, rate in zip(run.optimizer.param_groups, rates, strict=True))


def test_scaling_is_described_with_its_factor_and_reference() -> None:
    assert Run(rule="sqrt").begin().rate.scale(64) == (
        "learning rate * 2: sqrt scaling to 64 samples per optimizer step, from the config's 16"
    )
    assert Run().begin().rate.scale(64) == ""


@pytest.mark.parametrize("build", [None, decay_to_zero], ids=["no scheduler", "scheduler"])
@pytest.mark.parametrize("tensors", [False, True], ids=["numbers", "tensors"])
def test_scaling_again_and_again_does_not_compound(build: Any, tensors: bool) -> None:
    run = Run(0.1, 0.3, rule="linear", tensors=tensors, build=build).begin()
    for samples in (32, 32, 8, 64):
        run.rate.scale(samples)
        assert rates_of(run.optimizer) == pytest.approx([0.1 * samples / 16, 0.3 * samples / 16])


@pytest.mark.parametrize("grows", [True, False], ids=["may grow", "stays"])
def test_a_resumed_run_gives_all_optimizers_the_rate_of_the_one_with_the_scheduler(grows: bool) -> None:
    """As with `optimizer_in_bwd`, resumed with another rate."""
    run = Run(0.1)
    other = optimizer_of(0.1)
    run.rate.optimizers = [run.optimizer, other]
    run.begin(epoch=1, step=10, grows=grows)
    assert rates_of(other) == rates_of(run.optimizer) == [0.1 * PLAIN[10]]


@pytest.mark.parametrize("tensors", [False, True], ids=["numbers", "tensors"])
@pytest.mark.parametrize(
    ("before", "after", "rule", "rates"),
    [
        (None, None, "linear", [0.3] * 3),
        (None, None, "none", [0.1] * 3),
        (decay_to_zero, None, "none", [0.1] * 3),
        (decay_to_zero, decay_to_zero, "linear", [0.3 * rate for rate in PLAIN[10:]]),
    ],
    ids=["scaled", "no longer scaled", "no longer scaled, without its scheduler", "scaled, with a scheduler"],
)
def test_a_resumed_run_has_the_rate_of_its_config_not_that_which_was_saved(
    before: Any, after: Any, rule: LearningRateScaling, rates: list[float], tensors: bool
) -> None:
    run = Run(0.1, rule="linear", build=before, tensors=tensors).begin()
    resumed = Run(0.1, rule=rule, build=after, tensors=tensors)
    run.rate.scale(32)
    run.take(10)
    resumed.optimizer.load_state_dict(run.optimizer.state_dict())
    resumed.begin(epoch=1, step=10).rate.scale(48)
    assert resumed.first(len(rates)) == pytest.approx(rates)


# ---- state


def test_a_resumed_run_keeps_the_schedule_and_the_batch_that_the_rate_was_chosen_for() -> None:
    run = Run(rule="linear")
    assert run.rate.state_dict() == {"schedule_steps": STEPS, "reference_samples": 16}
    run.rate.load_state_dict({"schedule_steps": 20, "reference_samples": 64, "more": 1})
    assert run.rate.state_dict() == {"schedule_steps": 20, "reference_samples": 64}
    run.begin(epoch=1, step=5, steps_per_epoch=5)
    assert run.rate.scale(32).startswith("learning rate * 0.5: ")
    assert run.first(3) == pytest.approx([0.5 * (1 - place / 80) for place in (20, 24, 28)])
