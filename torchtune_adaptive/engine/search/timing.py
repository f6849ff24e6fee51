"""Times of train steps that are alternatives to each other, and the choice among them. Plain arithmetic, no torch."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

Key = TypeVar("Key")
_AS_GOOD_AS_BEST = 0.02


@dataclass(frozen=True)
class Timing:
    """The times of a few rounds of the same optimizer steps.

    Attributes:
        seconds: of each round, on the slowest rank.
        num_tokens: of a round, over all ranks.
    """

    seconds: tuple[float, ...]
    num_tokens: int

    @property
    def median_s(self) -> float:
        """The seconds of the median round."""
        return statistics.median(self.seconds)

    @property
    def rate(self) -> float:
        """Tokens per second, by the median round."""
        return self.num_tokens / self.median_s

    @property
    def spread(self) -> float:
        """By how much rounds differ from the median one, in the median, as a fraction of it.

        >>> Timing((2.0, 2.2, 1.9), 100).spread.__round__(2)
        0.05
        """
        return statistics.median(abs(one - self.median_s) for one in self.seconds) / self.median_s


def simplest_near_best(timings: Mapping[Key, Timing]) -> Key:
    """The first alternative whose rate is within 2 % of the best, or within the spread of the two.

    However much its rounds vary, none is taken that is slower than the first one.

    >>> simplest_near_best({4: Timing((1.0,), 800), 8: Timing((1.0,), 990), 16: Timing((1.0,), 1000)})
    8
    """
    first, best = next(iter(timings.values())), max(timings.values(), key=lambda one: one.rate)
    return next(key for key, one in timings.items() if one.rate >= first.rate and is_as_good(one, best))


def is_as_good(one: Timing, other: Timing) -> bool:
    """Whether ``one`` is not slower than ``other`` by more than 2 % and by more than their spread."""
    return one.rate >= (1 - max(_AS_GOOD_AS_BEST, one.spread, other.spread)) * other.rate
