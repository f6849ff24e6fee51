"""The learning rate: a function of the fraction of training done, and scaled with the batch if the user asks for it.

Scaling rules: linear (Goyal et al. 2017, https://arxiv.org/abs/1706.02677) keeps what a sample contributes, for plain
SGD well below the gradient noise scale; the square root (Krizhevsky 2014, https://arxiv.org/abs/1404.5997) keeps the
gradient noise of a step, and is the rule for Adam (Malladi et al. 2022, https://arxiv.org/abs/2205.10343).
"""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from torchtune_adaptive.errors import InputError
from torchtune_adaptive.settings import LearningRateScaling
from torchtune_adaptive.training.horizon import Horizon

# (number of training steps, index of the last epoch) -> a scheduler, as torchtune's `_setup_lr_scheduler` takes them.
BuildScheduler = Callable[[int, int], Any]


class LearningRate:
    """Owns the scheduler, the place on its schedule, and the scale that goes with the batch.

    Until ``begin`` the scheduler is stepped as it is, once for each optimizer step.

    Args:
        scheduler: None for a constant rate.
        build: makes the scheduler anew.
        schedule_steps: per epoch, that the schedule is built for.
        rule: how the rate is scaled with the samples of a step.
        reference_samples: samples per step that the config's rate was chosen for.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: Sequence[torch.optim.Optimizer],
        build: BuildScheduler,
        *,
        total_epochs: int,
        schedule_steps: int,
        rule: LearningRateScaling,
        reference_samples: int,
    ) -> None:
        self._scheduler = scheduler
        self._optimizers = tuple(optimizers)
        self._build = build
        self._total_epochs = total_epochs
        self._rule: LearningRateScaling = rule
        self._reference_samples = reference_samples
        self._schedule_steps = schedule_steps
        self._horizon: Horizon | None = None
        self._scale = 1.0

    def begin(self, *, epoch: int, step: int, steps_per_epoch: int, grows: bool, epoch_steps: int = 0) -> None:
        """Build the schedule, and go to where ``epoch`` is on it.

        Args:
            step: optimizer steps done.
            epoch_steps: of these, in ``epoch``.
            steps_per_epoch: of the present batch size.
            grows: whether the batch may grow, which needs a scheduler that follows.

        Raises:
            InputError: the scheduler would have to follow, and cannot.
        """
        self._horizon = Horizon(self._schedule_steps)
        self._horizon.change(epoch=epoch, step=step - epoch_steps, steps_per_epoch=steps_per_epoch)
        follows = grows or self._rule != "none" or steps_per_epoch != self._schedule_steps
        if follows:
            check_follows(self._scheduler)
        if self._scheduler is not None:
            for group in self._groups():
                group["lr"] = copy.deepcopy(group.get("initial_lr", group["lr"]))  # a tensor is changed in place
            done = epoch * self._schedule_steps + epoch_steps
            self._scheduler = self._make_scheduler(done, following_from=step if follows else None)
            if follows:
                self._set_rates()

    def change(self, *, epoch: int, step: int, steps_per_epoch: int) -> None:
        """From optimizer step ``step`` on, which opens ``epoch``, an epoch has ``steps_per_epoch`` steps."""
        assert self._horizon is not None, "`begin` comes first"
        self._horizon.change(epoch=epoch, step=step, steps_per_epoch=steps_per_epoch)

    def scale(self, samples: int) -> str:
        """Scale the rate to a step of ``samples`` over all ranks; what was done, for the log, "" if nothing."""
        if self._rule == "none":
            return ""
        self._scale = scale_of(self._rule, samples=samples, reference_samples=self._reference_samples)
        self._set_rates()
        return (
            f"learning rate * {self._scale:.6g}: {self._rule} scaling to {samples} samples per optimizer step,"
            f" from the config's {self._reference_samples}"
        )

    def step(self) -> None:
        """Move on by one optimizer step."""
        if self._scheduler is not None:
            self._scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs beside the optimizer's own state."""
        return {"schedule_steps": self._schedule_steps, "reference_samples": self._reference_samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state_dict``; before ``begin``."""
        self._reference_samples = state["reference_samples"]
        self._schedule_steps = state["schedule_steps"]

    def _make_scheduler(self, done: int, *, following_from: int | None) -> Any:
        """The schedule after ``done`` of its steps.

        If it follows, it counts the run's optimizer steps from ``following_from`` on, and the horizon says where on the
        schedule each of them is. Else it counts its own.
        """
        scheduler = self._build(self._total_epochs * self._schedule_steps, done - 1)
        if following_from is not None:
            scheduler.lr_lambdas = [self._at_place(rate) for rate in scheduler.lr_lambdas]
            scheduler.last_epoch = following_from
        return scheduler

    def _at_place(self, rate: Callable[[Any], float]) -> Callable[[int], float]:
        def rate_at(step: int) -> float:
            assert self._horizon is not None
            return self._scale * rate(self._horizon.schedule_step(step))

        return rate_at

    def _set_rates(self) -> None:
        """Set the next step's rate: by the scheduler if there is one, else as the config's rate times the scale."""
        if self._scheduler is not None:
            pairs = zip(self._scheduler.base_lrs, self._scheduler.lr_lambdas, strict=True)
            rates = [base * rate(self._scheduler.last_epoch) for base, rate in pairs]
        else:
            rates = [group.setdefault("initial_lr", float(group["lr"])) * self._scale for group in self._groups()]
        for group, rate in zip(self._groups(), rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(float(rate))
            else:
                group["lr"] = rate

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]


def scale_of(rule: LearningRateScaling, *, samples: int, reference_samples: int) -> float:
    """What the rate is multiplied with where a step has ``samples`` and the config was written for other ones.

    >>> [scale_of(rule, samples=64, reference_samples=16) for rule in ("none", "sqrt", "linear")]
    [1.0, 2.0, 4.0]
    """
    ratio = samples / reference_samples
    return {"none": 1.0, "sqrt": math.sqrt(ratio), "linear": ratio}[rule]


def check_follows(scheduler: Any) -> None:
    """Check that a scheduler can be asked for the rate at any place on its schedule.

    Raises:
        InputError: it is no ``LambdaLR``, as torchtune's are, nor None.
    """
    if scheduler is not None and not isinstance(scheduler, LambdaLR):
        raise InputError(
            "`lr_scheduler` must make a torch.optim.lr_scheduler.LambdaLR for the batch size to grow or the rate to"
            f" scale with it, but makes a {type(scheduler).__name__} instead."
        )
