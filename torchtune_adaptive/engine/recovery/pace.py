"""Whether retries of the allocator cost more time than smaller micro-batches would."""

from collections import defaultdict, deque
from dataclasses import dataclass, field
from functools import partial
from statistics import mean, median

# What half the micro-batch is taken to cost until it has been timed. On an H200, halves of 16 and 8 rows of 2048 tokens
# took 3 to 8 % more time per token, and halves of 4 and 2 rows 18 to 102 % (benchmarks/results/gpu_nvidia_h200.md).
SHRINKING_COSTS = 0.10
_FEWEST_STEPS = 4  # before a median says something
STEPS_TO_TIME = _FEWEST_STEPS + 2  # a new size: its first step is not timed, and a time is known in the next step
_KEPT_STEPS = 16
_last = partial(deque[float], maxlen=_KEPT_STEPS)


@dataclass
class _Times:
    """Seconds per unit of work in the last steps of one size."""

    without_retries: deque[float] = field(default_factory=_last)
    with_retries: deque[float] = field(default_factory=_last)
    had_retries: deque[float] = field(default_factory=_last)  # each of the last steps, of both kinds

    @property
    def usual(self) -> float | None:
        """The time of a step without retries; None if there were too few."""
        return median(self.without_retries) if len(self.without_retries) >= _FEWEST_STEPS else None

    @property
    def average(self) -> float:
        """The average of both kinds of steps, as frequent as they are now."""
        share = mean(self.had_retries)
        kinds = (share, self.with_retries), (1 - share, self.without_retries)
        return sum(weight * median(times) for weight, times in kinds if weight)


class Pace:
    """The times of steps, by the size of their micro-batches, and with and without retries of the allocator.

    In a retry the allocator waits for the device and frees its cache, to make an allocation possible. Ranks that note
    the same get the same answers.

    >>> pace = Pace()
    >>> for seconds, had_retries in [(1.0, False)] * 4 + [(1.3, True)] * 4:
    ...     pace.note(8, seconds, work=1, had_retries=had_retries)
    >>> f"{pace.slowdown(8):.0%}", pace.is_slow(8)
    ('15%', True)
    """

    def __init__(self) -> None:
        self._times: defaultdict[int, _Times] = defaultdict(_Times)

    def note(self, size: int, seconds: float, *, work: int, had_retries: bool) -> None:
        """Note a step with micro-batches of ``size``, which took ``seconds`` for ``work``, in any unit."""
        times = self._times[size]
        kind = times.with_retries if had_retries else times.without_retries
        kind.append(seconds / max(work, 1))
        times.had_retries.append(had_retries)

    def slowdown(self, size: int) -> float | None:
        """How much longer steps of ``size`` take because of retries, on average, as a part; None if it is not known."""
        usual = self._times[size].usual
        return None if usual is None else self._times[size].average / usual - 1

    def is_slow(self, size: int) -> bool | None:
        """Whether smaller micro-batches would be faster than ``size`` with its retries; None if it is not known.

        If all of many steps had retries and no smaller size was timed, the answer is yes, so that one is timed.
        """
        times = self._times[size]
        if len(times.with_retries) < _FEWEST_STEPS:
            return None
        smaller = self._with_smaller(size)
        if smaller is None:
            return True if sum(times.had_retries) == _KEPT_STEPS else None
        return times.average > smaller

    def _with_smaller(self, size: int) -> float | None:
        """The time of steps with smaller micro-batches: of the next size that was timed, or as it is taken to be."""
        timed = [one for one, times in self._times.items() if one < size and len(times.had_retries) >= _FEWEST_STEPS]
        if timed:
            return self._times[max(timed)].average
        usual = self._times[size].usual
        return None if usual is None else usual * (1 + SHRINKING_COSTS)
