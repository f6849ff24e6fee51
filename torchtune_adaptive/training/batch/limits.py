"""Cut the samples of an optimizer step into micro-batches: by rows, or by a token budget for rows of similar length.

A micro-batch is padded to its longest row, so that it has ``rows * longest row`` tokens. In this module it is a list of
indices into the samples of a step.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Cuts = list[list[int]]

# The fixed cost of a micro-step, for kernel launches and all-gathers, as a share of a full micro-batch (assumed). A
# lower cost means more micro-steps and less padding.
_COST_OF_MICRO_STEP = 1 / 32


@dataclass(frozen=True)
class MicroBatchLimit(ABC):
    """The largest micro-batch: ``size``, in ``unit``. ``key`` is its name in logs."""

    size: int
    unit = ""
    key = ""

    @abstractmethod
    def cut(self, lengths: Sequence[int]) -> Cuts:
        """The micro-batches of rows with ``lengths`` tokens. Every row is in exactly one."""

    def __str__(self) -> str:
        return f"{self.size} {self.unit.removesuffix('s') if self.size == 1 else self.unit}"


class RowLimit(MicroBatchLimit):
    """At most ``size`` rows, which keep their order.

    >>> RowLimit(2).cut([7, 9, 8])
    [[0, 1], [2]]
    """

    unit = "rows"
    key = "micro_batch_size"

    def cut(self, lengths: Sequence[int]) -> Cuts:
        indices = list(range(len(lengths)))
        return [indices[start : start + self.size] for start in range(0, len(indices), self.size)]


class TokenLimit(MicroBatchLimit):
    """At most ``size`` tokens including padding, in rows of similar length. A longer row is a micro-batch of its own.

    Rows are sorted by length and cut at the lowest cost: padded tokens, plus 1/32 of the limit per micro-step.

    >>> TokenLimit(16).cut([2, 8, 8, 3, 3])
    [[1, 2], [3, 4], [0]]
    """

    unit = "tokens"
    key = "max_tokens_per_micro_batch"

    def cut(self, lengths: Sequence[int]) -> Cuts:
        order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
        longest = np.array([lengths[index] for index in order], dtype=np.int64)
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
        cuts: Cuts = []
        end = len(order)
        while end:
            cuts.insert(0, order[starts[end] : end])
            end = int(starts[end])
        return cuts


def spread(cuts: Cuts, count: int) -> Cuts:
    """Cut micro-batches further into ``count``, so that every rank has the same number.

    The largest ones are halved. If only single rows are left, empty micro-batches are added. ``count`` must be at least
    the present number.

    >>> spread([[0, 1, 2], [3]], 3), spread([[0]], 2)
    ([[0, 1], [2], [3]], [[0], []])
    """
    cuts = list(cuts)
    while len(cuts) < count and any(len(cut) > 1 for cut in cuts):
        largest = max(range(len(cuts)), key=lambda index: len(cuts[index]))
        rows = cuts[largest]
        middle = -(-len(rows) // 2)
        cuts[largest : largest + 1] = [rows[:middle], rows[middle:]]
    return cuts + [[] for _ in range(count - len(cuts))]


def halvings(size: int, *, above: int) -> list[int]:
    """``size``, its half, its quarter and so on, rounded down, while they are above ``above``.

    >>> halvings(12, above=1)
    [12, 6, 3]
    """
    sizes = []
    while size > above:
        sizes.append(size)
        size //= 2
    return sizes
