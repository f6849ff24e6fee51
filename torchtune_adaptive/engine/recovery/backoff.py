"""When a micro-batch that was reduced may grow again."""

import sys
from dataclasses import asdict, dataclass
from typing import Any

NOT_IN_THIS_EPOCH = sys.maxsize
_STEPS_TO_NOTICE = 2  # that a size is slow: its first step is not timed


@dataclass
class Backoff:
    """The optimizer step in which a reduced micro-batch is tried larger again, by exponential backoff.

    If micro-batches of this size have fitted before, the error may be a passing one: the first trial is in the next
    step. If memory soon runs out again, the next trial waits for twice as many steps. An error after more than about
    twice the last wait is a new matter: the wait is one step again. A size that has never fitted is tried only when
    ``try_now`` asks for it. A size that was too slow waits at first until smaller ones have been timed.

    Attributes:
        next_trial: the number of that step; None if the micro-batch is not reduced.
        last_failure: the number of the last step in which memory ran out.
        wait_steps: from that step to the next trial.
        largest_fitted: the largest size of micro-batches that has fitted.

    >>> backoff = Backoff()
    >>> backoff.fitted(8)
    >>> for step in (10, 11, 13, 500):
    ...     backoff.failed(8, step=step)
    ...     print(backoff.next_trial)
    11
    13
    17
    501
    """

    next_trial: int | None = None
    last_failure: int | None = None
    wait_steps: int = 1
    largest_fitted: int = 0

    def fitted(self, size: int) -> None:
        """A step with micro-batches of ``size`` has fitted."""
        self.largest_fitted = max(size, self.largest_fitted)

    def failed(self, size: int, *, step: int, first_wait: int = 1) -> None:
        """Micro-batches of ``size`` have not fitted in ``step``; maybe smaller ones did not either, in the same one.

        Args:
            first_wait: the steps to the next trial, if this is a new matter.
        """
        if self.last_failure is None or step - self.last_failure > 2 * self.wait_steps + _STEPS_TO_NOTICE:
            self.wait_steps = first_wait
        elif step > self.last_failure:
            self.wait_steps = max(2 * self.wait_steps, first_wait)
        self.last_failure = step
        self.next_trial = step + self.wait_steps if size <= self.largest_fitted else NOT_IN_THIS_EPOCH

    def grew(self, step: int, *, is_whole: bool) -> None:
        """A larger micro-batch is tried in ``step``. If it is not the whole one yet, the next size is tried soon.

        Not at once, but after the steps in which its slowness would show.
        """
        self.next_trial = None if is_whole else step + _STEPS_TO_NOTICE

    def try_now(self) -> None:
        """Try a larger micro-batch in the next step, if it is reduced."""
        if self.next_trial is not None:
            self.next_trial = 0

    def state_dict(self) -> dict[str, Any]:
        """The state for a resumed run."""
        return {"backoff": asdict(self)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state."""
        vars(self).update(state["backoff"])
