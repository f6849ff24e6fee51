"""Cut the samples of an optimizer step into micro-batches: fixed rows, or rows of like length within a token budget.

A micro-batch is padded to its longest row, so that it has ``rows * longest row`` tokens. Here it is a list of indices
into the samples of a step: nothing in this module knows what a sample is.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

Limit = TypeVar("Limit", bound="MicroBatchLimit")
Places = list[list[int]]

# A micro-step has a cost beside its tokens: kernels are launched and parameters gathered. It is assumed to be
# this share of a full micro-batch. A lower cost means more micro-steps and less padding.
_COST_OF_MICRO_STEP = 1 / 32


@dataclass(frozen=True)
class MicroBatchLimit(ABC):
    """How large a micro-batch may be: ``size``, in ``unit``; ``key`` names it in logs."""

    size: int
    unit = ""
    key = ""

    @abstractmethod
    def cut(self, lengths: Sequence[int]) -> Places:
        """The micro-batches of rows that have ``lengths`` tokens; every row is in exactly one."""

    @abstractmethod
    def rows_of(self, length: int) -> int:
        """The number of rows of ``length`` tokens that a micro-batch may have."""

    def of_size(self: Limit, size: int) -> Limit:
        """The same kind of limit with another size."""
        return replace(self, size=size)

    def __str__(self) -> str:
        return f"{self.size} {self.unit}"


class RowLimit(MicroBatchLimit):
    """At most ``size`` rows; they keep their order.

    >>> RowLimit(2).cut([7, 9, 8])
    [[0, 1], [2]]
    """

    unit = "rows"
    key = "micro_batch_size"

    def cut(self, lengths: Sequence[int]) -> Places:
        places = list(range(len(lengths)))
        return [places[start : start + self.size] for start in range(0, len(places), self.size)]

    def rows_of(self, length: int) -> int:
        return self.size


class TokenLimit(MicroBatchLimit):
    """At most ``size`` tokens with padding, in rows of like length. A longer row is a micro-batch of its own.

    Of all ways to cut the rows, sorted by length, the cheapest is taken: tokens with padding, and for each
    micro-step 1/32 of the limit.

    >>> TokenLimit(16).cut([2, 8, 8, 3, 3])
    [[1, 2], [3, 4], [0]]
    """

    unit = "tokens"
    key = "max_tokens_per_micro_batch"

    def cut(self, lengths: Sequence[int]) -> Places:
        order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
        longest = np.array([lengths[place] for place in order], dtype=np.int64)
        least_cost = np.zeros(len(order) + 1)
        starts = np.zeros(len(order) + 1, dtype=np.int64)
        first = 0
        for end in range(1, len(order) + 1):
            while first < end - 1 and (end - first) * longest[first] > self.size:
                first += 1
            candidates = np.arange(first, end)
            costs = least_cost[first:end] + (end - candidates) * longest[first:end]
            best = int(costs.argmin())
            least_cost[end], starts[end] = costs[best] + self.size * _COST_OF_MICRO_STEP, first + best
        cuts: Places = []
        end = len(order)
        while end:
            cuts.insert(0, order[starts[end] : end])
            end = int(starts[end])
        return cuts

    def rows_of(self, length: int) -> int:
        return max(1, self.size // length)


def spread(micro_batches: Places, count: int) -> Places:
    """Cut ``micro_batches`` further into ``count``, so that every rank has as many.

    The largest are halved; where only single rows are left, empty micro-batches are added. ``count`` is at least the
    present number.

    >>> spread([[0, 1, 2], [3]], 3), spread([[0]], 2)
    ([[0, 1], [2], [3]], [[0], []])
    """
    cuts = list(micro_batches)
    while len(cuts) < count and any(len(cut) > 1 for cut in cuts):
        largest = max(range(len(cuts)), key=lambda index: len(cuts[index]))
        middle = -(-len(cuts[largest]) // 2)
        cuts[largest : largest + 1] = [cuts[largest][:middle], cuts[largest][middle:]]
    return cuts + [[] for _ in range(count - len(cuts))]


def halvings(size: int, *, above: int) -> list[int]:
    """``size``, its half, its quarter and so on, rounded down, as long as they are above ``above``.

    >>> halvings(12, above=1)
    [12, 6, 3]
    """
    sizes = []
    while size > above:
        sizes.append(size)
        size //= 2
    return sizes
