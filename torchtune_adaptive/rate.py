"""Let a learning rate scheduler follow a horizon instead of its own count of steps."""

from collections.abc import Callable
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from torchtune_adaptive.errors import InputError
from torchtune_adaptive.horizon import Horizon


def follow(scheduler: Any, horizon: Horizon, *, step: int) -> None:
    """From now on ``scheduler`` counts the run's optimizer steps, ``step`` of them done, and asks ``horizon`` where
    on its schedule each of them lies.

    Raises:
        InputError: the scheduler cannot follow.
    """
    refuse_unfollowing(scheduler)
    scheduler.lr_lambdas = [_at_place(rate, horizon) for rate in scheduler.lr_lambdas]
    scheduler.last_epoch = step


def refuse_unfollowing(scheduler: Any) -> None:
    """Refuse a scheduler that can be asked for the rate of whole steps only, in order.

    Raises:
        InputError: it is no ``LambdaLR``, as torchtune's are.
    """
    if not isinstance(scheduler, LambdaLR):
        raise InputError(
            "`lr_scheduler` must make a torch.optim.lr_scheduler.LambdaLR for the batch size to grow,"
            f" but makes a {type(scheduler).__name__} instead."
        )


def _at_place(rate: Callable[[Any], float], horizon: Horizon) -> Callable[[int], float]:
    return lambda step: rate(horizon.schedule_step(step))
