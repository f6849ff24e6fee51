"""A scheduler follows a horizon: same rates as long as nothing changes, and no jump where the steps per epoch do."""

import warnings

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, StepLR

from torchtune_adaptive.errors import InputError
from torchtune_adaptive.horizon import Horizon
from torchtune_adaptive.rate import follow


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


def test_a_scheduler_that_cannot_be_asked_between_its_steps_is_refused() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(InputError) as refusal:
        follow(StepLR(optimizer, step_size=5), Horizon(10), step=0)
    assert str(refusal.value) == (
        "`lr_scheduler` must make a torch.optim.lr_scheduler.LambdaLR for the batch size to grow,"
        " but makes a StepLR instead."
    )
