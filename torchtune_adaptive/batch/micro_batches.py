"""Cut an optimizer step's samples into equally many micro-batches on every rank, by a limit that can be lowered."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchtune_adaptive.batch.limits import MicroBatchLimit, RowLimit, spread
from torchtune_adaptive.batch.loader import StepSamples
from torchtune_adaptive.batch.row_format import Row, RowFormat
from torchtune_adaptive.distributed.consensus import Consensus


@dataclass(frozen=True)
class Cut:
    """The micro-batches of some samples, with their tokens on this rank, without and with padding."""

    micro_batches: tuple[list[Row], ...]
    num_tokens: int
    num_padded_tokens: int


class MicroBatcher:
    """Owns the limit of a micro-batch: the largest one, or a smaller one after memory ran out.

    Args:
        largest: the limit before memory runs out.
        make_silent_row: makes a row without weight in the loss, for a rank with fewer rows than micro-steps.
    """

    def __init__(
        self,
        largest: MicroBatchLimit,
        row_format: RowFormat,
        consensus: Consensus,
        *,
        make_silent_row: Callable[[], Row],
    ) -> None:
        self._largest = largest
        self._row_format = row_format
        self._consensus = consensus
        self._make_silent_row = make_silent_row
        self._reduced_size: int | None = None  # set once memory ran out
        self._num_tokens = self._num_padded_tokens = 0

    @property
    def largest(self) -> MicroBatchLimit:
        """The limit before memory runs out."""
        return self._largest

    @property
    def limit(self) -> MicroBatchLimit:
        """The current limit."""
        return self._largest.of_size(min(self._largest.size, self._reduced_size or self._largest.size))

    def set_largest(self, largest: MicroBatchLimit) -> None:
        """Set the largest limit, for example when the batch size grows. A reduced limit stays reduced."""
        self._largest = largest

    def reduce(self) -> None:
        """Halve the current limit."""
        self._reduced_size = self.limit.size // 2

    def resize(self, size: int) -> None:
        """Set the current limit to ``size``, which must be at most the largest limit."""
        self._reduced_size = None if size >= self._largest.size else size

    def rows_of(self, row: Row, *, size: int) -> int:
        """How many rows like ``row`` a micro-batch of limit ``size`` has."""
        return self._largest.of_size(size).rows_of(self._row_format.padded_tokens(row))

    def can_reduce(self, samples: StepSamples) -> bool:
        """Whether some rank has a micro-batch of more than one row, so that a lower limit helps. A collective."""
        places = self.limit.cut(self._lengths(samples.rows))
        return self._consensus.any_rank(any(len(rows) > 1 for rows in places))

    def cut(self, samples: StepSamples) -> Cut:
        """The micro-batches of ``samples`` by the current limit, equally many on every rank.

        With a token limit this is a collective, in which the ranks agree on the number. With a row limit every rank
        computes the number.
        """
        limit, rows = self.limit, samples.rows
        lengths = self._lengths(rows)
        places = limit.cut(lengths)
        if isinstance(limit, RowLimit):
            count = math.ceil(samples.most_rows / limit.size)
        else:
            count = self._consensus.max_over_ranks(len(places))
        places = spread(places, count)
        micro_batches = tuple([rows[place] for place in one] or [self._make_silent_row()] for one in places)
        padded = sum(len(one) * max(lengths[place] for place in one) for one in places if one)
        return Cut(micro_batches, sum(map(self._row_format.own_tokens, rows)), padded)

    def count_padding(self, *cuts: Cut) -> None:
        """Count the padding of micro-batches used in training. Failed attempts do not count."""
        self._num_tokens += sum(cut.num_tokens for cut in cuts)
        self._num_padded_tokens += sum(cut.num_padded_tokens for cut in cuts)

    def take_padding(self) -> float:
        """The share of padding in this rank's micro-batches since the last call."""
        share = 1 - self._num_tokens / max(self._num_padded_tokens, 1)
        self._num_tokens = self._num_padded_tokens = 0
        return share

    def state_dict(self) -> dict[str, Any]:
        """The state for a resumed run: the reduced size (None if memory never ran out), limit, unit and padding."""
        return {
            "micro_batch": self._reduced_size,
            "micro_batch_limit": self._largest.size,
            "micro_batch_unit": self._largest.unit,
            "padding": (self._num_tokens, self._num_padded_tokens),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state. A size in another unit is ignored. A limit of None leaves the limit as it is."""
        self._num_tokens, self._num_padded_tokens = state["padding"]
        if state["micro_batch_unit"] == self._largest.unit:
            self._reduced_size = state["micro_batch"]
            self._largest = self._largest.of_size(state["micro_batch_limit"] or self._largest.size)

    def _lengths(self, rows: list[Row]) -> list[int]:
        return [self._row_format.padded_tokens(row) for row in rows]
