"""The learning rate: along a schedule at the place that a horizon tells, and scaled with the batch.

Scaling rules: linear (Goyal et al. 2017, https://arxiv.org/abs/1706.02677) keeps what a sample contributes, for plain
SGD well below the gradient noise scale; the square root (Krizhevsky 2014, https://arxiv.org/abs/1404.5997) keeps the
gradient noise of a step, and is the rule for Adam (Malladi et al. 2022, https://arxiv.org/abs/2205.10343).
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from torchtune_adaptive.errors import InputError
from torchtune_adaptive.settings import LearningRateScaling
from torchtune_adaptive.training.horizon import Horizon


def scale_of(rule: LearningRateScaling, *, samples: int, reference_samples: int) -> float:
    """What the rate is multiplied with where a step has ``samples`` and the config was written for other ones.

    >>> [scale_of(rule, samples=64, reference_samples=16) for rule in ("none", "sqrt", "linear")]
    [1.0, 2.0, 4.0]
    """
    ratio = samples / reference_samples
    return {"none": 1.0, "sqrt": math.sqrt(ratio), "linear": ratio}[rule]


def follow(scheduler: Any, horizon: Horizon, *, step: int, scale: Callable[[], float] = lambda: 1.0) -> None:
    """From now on ``scheduler`` counts the run's optimizer steps, ``step`` of them done, and asks ``horizon`` where
    on its schedule each of them lies, and ``scale`` what to multiply the rate there with.

    Raises:
        InputError: the scheduler cannot follow.
    """
    refuse_unfollowing(scheduler)
    scheduler.lr_lambdas = [_at_place(rate, horizon, scale) for rate in scheduler.lr_lambdas]
    scheduler.last_epoch = step


def set_rates(optimizer: torch.optim.Optimizer, scheduler: Any, scale: float) -> None:
    """Set the rate of the next step where ``scale`` has changed between two: by a scheduler that follows, if there is
    one, else as the config's rate times ``scale``.
    """
    if scheduler is not None:
        pairs = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        rates = [base * rate(scheduler.last_epoch) for base, rate in pairs]
    else:
        rates = [group.setdefault("initial_lr", float(group["lr"])) * scale for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(float(rate))
        else:
            group["lr"] = rate


def refuse_unfollowing(scheduler: Any) -> None:
    """Refuse a scheduler that can be asked for the rate of whole steps only, in order.

    Raises:
        InputError: it is no ``LambdaLR``, as torchtune's are.
    """
    if not isinstance(scheduler, LambdaLR):
        raise InputError(
            "`lr_scheduler` must make a torch.optim.lr_scheduler.LambdaLR for the batch size to grow or the rate to"
            f" scale with it, but makes a {type(scheduler).__name__} instead."
        )


def _at_place(rate: Callable[[Any], float], horizon: Horizon, scale: Callable[[], float]) -> Callable[[int], float]:
    return lambda step: scale() * rate(horizon.schedule_step(step))
