"""How a recipe cuts the samples of an optimizer step into micro-steps."""

from collections.abc import Callable, Sequence
from functools import partial

from torchtune_adaptive.adaptation import AdaptiveBatch
from torchtune_adaptive.batch.limits import MicroBatchLimit, RowLimit, TokenLimit, spread
from torchtune_adaptive.batch.sampler import most_rows
from torchtune_adaptive.data import num_tokens
from torchtune_adaptive.micro_step import MicroStep, in_small_batch
from torchtune_adaptive.worst_case import Row, silent_row


class AdaptiveCutting(AdaptiveBatch):
    """Keeps how large a micro-batch may be: as large as fits, or smaller once that did not fit."""

    _num_tokens = 0  # of micro-batches, without and with padding, since last asked for
    _num_padded = 0

    @property
    def _limit(self) -> MicroBatchLimit:
        """The present limit of a micro-batch."""
        largest = self._largest_limit()
        return largest.of_size(min(largest.size, self._largest_micro_batch or largest.size))

    def _largest_limit(self) -> MicroBatchLimit:
        """The limit of a micro-batch while memory suffices."""
        if self._token_budget is not None:
            return TokenLimit(self._token_budget)
        rows = self._dataloader.batch_size
        if self._is_global:
            rows = self._rows_at(self._batch_size)
            if not self._adaptive.use_maximum_batch_size:
                rows = min(rows, self._wanted_rows)
            elif self._adaptive.objective == "throughput":
                rows = min(rows, self._fitting_rows or rows)
        if self._result is not None and rows > self._result.exact_batch_size:
            rows = self._fitting_rows or rows
        return RowLimit(rows)

    def _micro_step(self, rows: Sequence[Row]) -> MicroStep:
        """Forward, loss and backward of one micro-batch. A collective."""
        raise NotImplementedError

    def _micro_steps(self, window: Sequence[Row]) -> list[Callable[[], MicroStep]]:
        """The micro-steps of ``window``, as many on every rank. With a token budget a collective."""
        most = most_rows(self._samples_in(window), ranks=self._ranks)
        if most == 1 or not self._measures():
            return [partial(self._micro_step, rows) for rows in self._micro_batches(window, most=most)]
        middle = -(-len(window) // 2)
        small = [partial(self._micro_step, rows) for rows in self._micro_batches(window[:middle], most=-(-most // 2))]
        rest = [partial(self._micro_step, rows) for rows in self._micro_batches(window[middle:], most=most // 2)]
        last = partial(in_small_batch, small.pop(), last_of=self._model)
        return [*(partial(in_small_batch, run) for run in small), last, *rest]

    def _micro_batches(self, window: Sequence[Row], *, most: int) -> list[list[Row]]:
        """``window``, of ``most`` rows on the rank that has most, cut by the present limit, as often on every rank.

        With a token budget a collective.
        """
        limit, lengths = self._limit, [num_tokens(row) for row in window]
        cuts = limit.cut(lengths)
        is_told_by_rows = isinstance(limit, RowLimit)
        count = -(-most // limit.size) if is_told_by_rows else self._consensus.max_over_ranks(len(cuts))
        cuts = spread(cuts, count)
        self._num_tokens += sum(lengths)
        self._num_padded += sum(len(cut) * max(lengths[place] for place in cut) for cut in cuts if cut)
        nothing = [] if all(cuts) else [silent_row(self._dataloader.dataset[0], self._loss_fn.ignore_index)]
        return [[window[place] for place in places] or nothing for places in cuts]

    def _padding(self) -> float:
        """The share of padding in this rank's micro-batches since last asked for."""
        share = 1 - self._num_tokens / max(self._num_padded, 1)
        self._num_tokens = self._num_padded = 0
        return share

    def _cut_aloud(self) -> str:
        limit = self._largest_limit()
        if isinstance(limit, RowLimit) and not self._is_global and limit.size >= self._batch_size:
            return ""
        return f", in micro-steps of at most {limit} per rank"
