"""A scheduler follows a horizon: same rates as long as nothing changes, and no jump where the steps per epoch do.

Where the batch scales the rate, each step has that of its place on the schedule times the scale of its batch.
"""

import math
import warnings
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim.lr_scheduler import LambdaLR, StepLR

from torchtune_adaptive.errors import InputError
from torchtune_adaptive.rate import follow, refuse_unfollowing, scale_of, set_rates
from torchtune_adaptive.settings import LearningRateScaling
from torchtune_adaptive.training.horizon import Horizon

RULES: tuple[LearningRateScaling, ...] = get_args(LearningRateScaling)


def _scheduler(total_steps: int) -> LambdaLR:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    return LambdaLR(optimizer, lambda step: 1 - step / total_steps)


def _rates(scheduler: LambdaLR, steps: int) -> list[float]:
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no optimizer steps here
        for _ in range(steps):
            scheduler.step()
            rates.append(scheduler.get_last_lr()[0])
    return rates


def test_without_a_change_the_rates_are_the_same_bits() -> None:
    followed = _scheduler(40)
    follow(followed, Horizon(10), step=0)
    assert _rates(followed, 40) == _rates(_scheduler(40), 40)


def test_half_the_steps_go_along_the_schedule_twice_as_fast_without_a_jump() -> None:
    scheduler, horizon = _scheduler(40), Horizon(10)
    follow(scheduler, horizon, step=0)
    first = _rates(scheduler, 20)
    horizon.change(epoch=2, step=20, steps_per_epoch=5)
    assert first[-1] == pytest.approx(0.5)
    assert _rates(scheduler, 10) == pytest.approx([0.45, 0.4, 0.35, 0.3, 0.25, 0.2, 0.15, 0.1, 0.05, 0.0])


@pytest.mark.parametrize("refuse", [refuse_unfollowing, lambda scheduler: follow(scheduler, Horizon(10), step=0)])
def test_a_scheduler_that_cannot_be_asked_between_its_steps_is_refused(refuse: Any) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(InputError) as refusal:
        refuse(StepLR(optimizer, step_size=5))
    assert str(refusal.value) == (
        "`lr_scheduler` must make a torch.optim.lr_scheduler.LambdaLR for the batch size to grow or the rate to"
        " scale with it, but makes a StepLR instead."
    )
    refuse_unfollowing(_scheduler(40))


# ---- scaled with the batch


@settings(derandomize=True, deadline=None, max_examples=100)
@given(samples=st.integers(1, 10**6), reference=st.integers(1, 10**6), times=st.integers(1, 1000))
def test_a_rule_scales_with_the_ratio_of_samples_alone(samples: int, reference: int, times: int) -> None:
    for rule, power in zip(RULES, (0, 0.5, 1), strict=True):
        scale = scale_of(rule, samples=samples, reference_samples=reference)
        assert scale == pytest.approx((samples / reference) ** power)
        assert scale_of(rule, samples=times * samples, reference_samples=times * reference) == pytest.approx(scale)
        assert scale_of(rule, samples=reference, reference_samples=reference) == 1


def _optimizer(*rates: float, tensors: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [
            {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": torch.tensor(rate) if tensors else rate}
            for rate in rates
        ],
        foreach=False,
    )


def _rates_of(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def _step(scheduler: LambdaLR) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no optimizer steps here
        scheduler.step()


@pytest.mark.parametrize("tensors", [False, True], ids=["numbers", "tensors"])
def test_every_step_has_the_rate_of_its_place_times_the_scale_of_its_batch(tensors: bool) -> None:
    """Also the first step after the scale has changed, which the scheduler had set before; groups keep their ratio."""
    optimizer = _optimizer(1.0, 0.25, tensors=tensors)
    scheduler, horizon, scale = LambdaLR(optimizer, lambda step: 1 - step / 40), Horizon(10), 1.0
    follow(scheduler, horizon, step=0, scale=lambda: scale)
    groups = [group["lr"] for group in optimizer.param_groups]
    taken: list[list[float]] = []
    for step in range(30):
        if step == 20:  # twice the samples: half the steps
            scale = math.sqrt(2)
            horizon.change(epoch=2, step=20, steps_per_epoch=5)
            set_rates(optimizer, scheduler, scale)
        taken.append(_rates_of(optimizer))
        _step(scheduler)
    expected = [1 - step / 40 for step in range(20)] + [math.sqrt(2) * (1 - (20 + 2 * step) / 40) for step in range(10)]
    assert [rates[0] for rates in taken] == pytest.approx(expected, rel=1e-6)
    assert [rates[1] for rates in taken] == pytest.approx([0.25 * rate for rate in expected], rel=1e-6)
    if tensors:  # what compiled code or a graph has hold of
        assert all(group["lr"] is before for group, before in zip(optimizer.param_groups, groups, strict=True))


@pytest.mark.parametrize("tensors", [False, True], ids=["numbers", "tensors"])
def test_without_a_scheduler_the_rate_is_the_configs_times_the_scale_however_often_it_is_set(tensors: bool) -> None:
    optimizer = _optimizer(0.1, 0.3, tensors=tensors)
    for scale in (2.0, 2.0, 0.5, 4.0):
        set_rates(optimizer, None, scale)
        assert _rates_of(optimizer) == pytest.approx([0.1 * scale, 0.3 * scale])


@pytest.mark.parametrize("tensors", [False, True], ids=["numbers", "tensors"])
def test_with_a_scheduler_setting_the_rates_twice_does_not_compound(tensors: bool) -> None:
    optimizer = _optimizer(0.1, tensors=tensors)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    follow(scheduler, Horizon(10), step=3, scale=lambda: 2.0)
    for _ in range(2):
        set_rates(optimizer, scheduler, 2.0)
        assert _rates_of(optimizer) == pytest.approx([2 * 0.1 / 4])


def test_without_a_scheduler_the_configs_rate_is_saved_with_the_optimizer() -> None:
    optimizer, resumed = _optimizer(0.1, tensors=False), _optimizer(0.1, tensors=False)
    set_rates(optimizer, None, 2.0)
    resumed.load_state_dict(optimizer.state_dict())
    set_rates(resumed, None, 3.0)
    assert _rates_of(resumed) == pytest.approx([0.3])
