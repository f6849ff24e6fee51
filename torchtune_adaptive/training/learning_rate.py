"""The learning rate: a function of the fraction of training done, optionally scaled with the batch.

The linear rule (Goyal et al. 2017, https://arxiv.org/abs/1706.02677) keeps the contribution of a sample. It is for
plain SGD far below the gradient noise scale. The square root rule (Krizhevsky 2014, https://arxiv.org/abs/1404.5997)
keeps the gradient noise of a step, and is the rule for Adam (Malladi et al. 2022, https://arxiv.org/abs/2205.10343).

A schedule such as torchtune's cosine is built once, for the run's first number of steps per epoch. When the batch size
changes, an epoch has fewer or more optimizer steps. Each of them then advances the schedule by more or less than one
step. Warm-up and decay keep their fractions of the training, and the rate does not jump when the batch size changes.
"""

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from torchtune_adaptive.errors import InputError
from torchtune_adaptive.settings import LearningRateScaling

# (number of training steps, index of the last epoch) -> a scheduler; the arguments of `_setup_lr_scheduler`.
BuildScheduler = Callable[[int, int], Any]


@dataclass(frozen=True)
class EpochStart:
    """The last change of the steps per epoch, which ``epoch`` (0-based) began with, at step ``step``."""

    epoch: int
    step: int
    steps_per_epoch: int

    def schedule_step(self, step: int, *, schedule_steps: int) -> int | float:
        """The step of a schedule that was built for ``schedule_steps`` per epoch at optimizer step ``step``.

        An integer if it is a whole number.

        >>> start = EpochStart(epoch=2, step=200, steps_per_epoch=50)
        >>> [start.schedule_step(step, schedule_steps=100) for step in (200, 225, 250)]
        [200, 250, 300]
        """
        # One exact fraction, rounded once, so that a run resumed at another epoch gets the same bits.
        epochs = self.epoch * self.steps_per_epoch + (step - self.step)  # of steps_per_epoch each
        whole, rest = divmod(epochs * schedule_steps, self.steps_per_epoch)
        return whole if rest == 0 else epochs * schedule_steps / self.steps_per_epoch


@dataclass(eq=False)
class LearningRate:
    """Owns the scheduler, the position on its schedule, and the scale for the batch size.

    Until ``begin`` the scheduler is stepped once per optimizer step.

    Attributes:
        scheduler: None for a constant rate.
        optimizers: those that the rate is for. The scheduler changes one of them, as torchtune's does also where every
            parameter has an optimizer.
        build: builds the scheduler again.
        schedule_steps: steps per epoch for which the schedule is built.
        rule: how the rate is scaled with the samples of a step.
        reference_samples: samples per step for which the config's rate was chosen.
    """

    scheduler: Any
    optimizers: Sequence[torch.optim.Optimizer]
    build: BuildScheduler
    _: KW_ONLY
    total_epochs: int
    schedule_steps: int
    rule: LearningRateScaling
    reference_samples: int

    def __post_init__(self) -> None:
        self._epoch_start: EpochStart | None = None
        self._scale = 1.0

    def begin(self, *, epoch: int, step: int, steps_per_epoch: int, grows: bool, epoch_steps: int = 0) -> None:
        """Build the schedule, and move to the position of ``epoch`` on it.

        Args:
            step: optimizer steps done.
            epoch_steps: the part of these in ``epoch``.
            steps_per_epoch: steps per epoch at the current batch size.
            grows: whether the batch may grow, which requires a scheduler that can be evaluated at any position.

        Raises:
            InputError: the scheduler cannot be evaluated at any position, but must be.
        """
        self._epoch_start = EpochStart(epoch, step - epoch_steps, steps_per_epoch)
        follows = grows or self.rule != "none" or steps_per_epoch != self.schedule_steps
        if follows:
            check_follows(self.scheduler)
        if self.scheduler is not None:
            for group in self.scheduler.optimizer.param_groups:
                # A copy, because a tensor is changed in place.
                group["lr"] = copy.deepcopy(group.get("initial_lr", group["lr"]))
            done = epoch * self.schedule_steps + epoch_steps
            # Schedulers other than LambdaLR may compute a rate from the last one, so each step is replayed.
            replayed = 0 if isinstance(self.scheduler, LambdaLR) else done
            self.scheduler = self.build(self.total_epochs * self.schedule_steps, done - replayed - 1)
            if isinstance(self.scheduler, LambdaLR):
                replayed = done - self.scheduler.last_epoch  # 0, unless a builder of one's own ignores `last_epoch`
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that the optimizer has not stepped
                for _ in range(replayed):
                    self.scheduler.step()
            if follows:  # it counts the run's optimizer steps, each of which is mapped to the schedule
                self.scheduler.lr_lambdas = [self._on_schedule(rate) for rate in self.scheduler.lr_lambdas]
                self.scheduler.last_epoch = step
                self._set_rates()
            elif step:
                self._follow(self.scheduler.get_last_lr())
            return
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                if "initial_lr" in group:  # the run that is resumed had a scheduler, or scaled the rate
                    _set_rate(group, group["initial_lr"])

    def change(self, *, epoch: int, step: int, steps_per_epoch: int) -> None:
        """Set ``steps_per_epoch`` from optimizer step ``step`` on, the first one of ``epoch``."""
        self._epoch_start = EpochStart(epoch, step, steps_per_epoch)

    def scale(self, samples: int) -> str:
        """Scale the rate to a step of ``samples`` over all ranks. Returns a text for the log, "" without a change."""
        if self.rule == "none":
            return ""
        ratio = samples / self.reference_samples
        self._scale = math.sqrt(ratio) if self.rule == "sqrt" else ratio
        self._set_rates()
        return (
            f"learning rate * {self._scale:.6g}: {self.rule} scaling to {samples} samples per optimizer step,"
            f" from the config's {self.reference_samples}"
        )

    def step(self) -> None:
        """Advance by one optimizer step."""
        if self.scheduler is not None:
            self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """The state for a resumed run, beside the optimizer's own state."""
        return {"schedule_steps": self.schedule_steps, "reference_samples": self.reference_samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state."""
        self.reference_samples = state["reference_samples"]
        self.schedule_steps = state["schedule_steps"]

    def _on_schedule(self, rate: Callable[[Any], float]) -> Callable[[int], float]:
        def rate_at(step: int) -> float:
            assert self._epoch_start is not None, "`begin` comes first"
            return self._scale * rate(self._epoch_start.schedule_step(step, schedule_steps=self.schedule_steps))

        return rate_at

    def _set_rates(self) -> None:
        """Set the next step's rate: by the scheduler if there is one, else the config's rate times the scale."""
        if self.scheduler is not None:
            pairs = zip(self.scheduler.base_lrs, self.scheduler.lr_lambdas, strict=True)
            self._follow([base * rate(self.scheduler.last_epoch) for base, rate in pairs])
            return
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                _set_rate(group, group.setdefault("initial_lr", float(group["lr"])) * self._scale)

    def _follow(self, rates: Sequence[Any]) -> None:
        """Give every optimizer the ``rates`` of the scheduler's parameter groups."""
        for optimizer in self.optimizers:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                _set_rate(group, rate)


def _set_rate(group: dict[str, Any], rate: Any) -> None:
    """Set a parameter group's rate, in place if it is a tensor."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(float(rate))
    else:
        group["lr"] = rate


def check_follows(scheduler: Any) -> None:
    """Check that a scheduler can be evaluated at any position of its schedule.

    Raises:
        InputError: it is neither None nor a ``LambdaLR``, as torchtune's schedulers are.
    """
    if scheduler is not None and not isinstance(scheduler, LambdaLR):
        raise InputError(
            "A batch that grows, a learning rate that scales with it, or a resumed run with other steps per epoch needs"
            f" an `lr_scheduler` that creates a torch.optim.lr_scheduler.LambdaLR, not a {type(scheduler).__name__}."
        )
