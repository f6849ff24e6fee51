"""The learning rate as a function of the fraction of training done, whatever the steps per epoch become.

A schedule such as torchtune's cosine is built once, for the steps per epoch that the run starts with.
When the batch size changes, the optimizer makes fewer or more steps per epoch; each of them then moves
along that same schedule by more or less than one of its steps. Warm-up, decay and end stay where they
were as fractions of the training, and the rate has no jump where the batch size changes.
"""

from dataclasses import dataclass, field


@dataclass
class Horizon:
    """Maps the optimizer steps of a run to steps of the schedule it started with.

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
        """From optimizer step ``step`` on, which opens ``epoch`` (0-based), an epoch has ``steps_per_epoch`` steps."""
        self._origin = (epoch, step, steps_per_epoch)

    def schedule_step(self, step: int) -> int | float:
        """The place of optimizer step ``step`` on the schedule, in steps of the schedule; whole where that is exact."""
        if self._origin is None:
            return step
        epoch, first_step, steps_per_epoch = self._origin
        # One exact fraction, rounded once: a resumed run, which counts from another epoch, gets the same bits.
        numerator = epoch * self.steps_per_epoch * steps_per_epoch + (step - first_step) * self.steps_per_epoch
        whole, rest = divmod(numerator, steps_per_epoch)
        return whole if rest == 0 else numerator / steps_per_epoch
