"""The learning rate as a function of the fraction of training done, for any number of steps per epoch.

A schedule such as torchtune's cosine is built once, for the run's first number of steps per epoch. When the batch size
changes, an epoch has fewer or more optimizer steps. Each of them then advances the schedule by more or less than one
step. Warm-up and decay keep their fractions of the training, and the rate does not jump when the batch size changes.
"""

from dataclasses import dataclass, field


@dataclass
class Horizon:
    """Maps the optimizer steps of a run to steps of its first schedule.

    Args:
        steps_per_epoch: optimizer steps per epoch that the schedule was built for.

    >>> horizon = Horizon(steps_per_epoch=100)
    >>> horizon.schedule_step(150)
    150
    >>> horizon.change(epoch=2, step=200, steps_per_epoch=50)
    >>> horizon.schedule_step(200), horizon.schedule_step(225), horizon.schedule_step(250)
    (200, 250, 300)
    """

    steps_per_epoch: int
    _origin: tuple[int, int, int] | None = field(default=None, init=False)

    def change(self, *, epoch: int, step: int, steps_per_epoch: int) -> None:
        """Set ``steps_per_epoch`` from optimizer step ``step`` on, the first one of ``epoch`` (0-based)."""
        self._origin = (epoch, step, steps_per_epoch)

    def schedule_step(self, step: int) -> int | float:
        """The schedule's step at optimizer step ``step``; an integer if it is a whole number."""
        if self._origin is None:
            return step
        epoch, first_step, steps_per_epoch = self._origin
        # One exact fraction, rounded once, so that a run resumed at another epoch gets the same bits.
        numerator = epoch * self.steps_per_epoch * steps_per_epoch + (step - first_step) * self.steps_per_epoch
        whole, rest = divmod(numerator, steps_per_epoch)
        return whole if rest == 0 else numerator / steps_per_epoch
