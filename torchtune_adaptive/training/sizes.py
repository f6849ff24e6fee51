"""Find the largest micro-batch of a recipe, by whole train steps on the longest rows that can occur in training."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn
from torchtune import utils

from torchtune_adaptive.engine.loop import Loop
from torchtune_adaptive.engine.search.find import search
from torchtune_adaptive.engine.search.strategies import SearchResult
from torchtune_adaptive.engine.search.tables import length_table, probe_table, rate_table, summary
from torchtune_adaptive.engine.search.throughput import time_in_turns
from torchtune_adaptive.engine.search.timing import Timing, simplest_near_best
from torchtune_adaptive.engine.search.token_budget import search_token_budget
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.settings import AdaptiveSettings
from torchtune_adaptive.training.batch.limits import MicroBatchLimit, RowLimit, TokenLimit, halvings
from torchtune_adaptive.training.batch.loader import StepLoader, check_fills_step
from torchtune_adaptive.training.batch.micro_batches import MicroBatch, MicroBatcher
from torchtune_adaptive.training.batch.rank_shares import largest_share
from torchtune_adaptive.training.batch.row_format import Row, RowFormat, check_row_length, is_packed

log = utils.get_logger("DEBUG")
_TIMED_SAMPLES = 32  # at least, unless they are more than four steps
_MOST_TIMED_STEPS = 4


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The largest size of a micro-batch, as far as it is known.

    Attributes:
        result: the search's result, None without a search.
        seq_len: the length of the probes' rows in tokens, None without a search.
        fitting_rows: rows to use if more are requested than fit, None without a search.
        max_rows: an upper bound on rows, even if more fit; None: no such bound.
        token_budget: padded tokens of a micro-batch; None if the limit is in rows.
        timings: of micro-batches that were compared by their speed; None if none were.
    """

    result: SearchResult | None = None
    seq_len: int | None = None
    fitting_rows: int | None = None
    max_rows: int | None = None
    token_budget: int | None = None
    timings: dict[MicroBatchLimit, Timing] | None = None

    def limit(self, rows: int) -> MicroBatchLimit:
        """The limit of a micro-batch if ``rows`` are requested.

        >>> str(Sizes(max_rows=8).limit(32)), str(Sizes(token_budget=512).limit(32))
        ('8 rows', '512 tokens')
        """
        if self.token_budget is not None:
            return TokenLimit(self.token_budget)
        rows = min(rows, self.max_rows or rows)
        if self.result is not None and rows > self.result.exact_batch_size:
            rows = self.fitting_rows or rows
        return RowLimit(rows)


@dataclass(frozen=True)
class SizeFinder:
    """Finds the sizes that a run needs.

    Attributes:
        loop: its micro-steps take ``MicroBatch``es.
        loader: the loader as configured, before the search.
        models: all models that process rows; each may limit their length.
        wanted_rows: the config's ``batch_size``.
        tokenizer_max_seq_len: length to which the tokenizer truncates samples; None if it does not.
    """

    loop: Loop
    loader: StepLoader
    row_format: RowFormat
    settings: AdaptiveSettings
    models: Sequence[nn.Module]
    wanted_rows: int
    tokenizer_max_seq_len: int | None

    def find(self) -> Sizes:
        """Find the sizes. A collective; it restores models and optimizers.

        Raises:
            InputError: the data cannot be cut as the settings require.
            NothingFitsError: one row does not fit.
        """
        settings, dataset, longest = self.settings, self.loader.dataset, self.tokenizer_max_seq_len
        budget = settings.max_tokens_per_micro_batch
        if budget is not None and is_packed(dataset):
            raise InputError(
                "`max_tokens_per_micro_batch` has no effect with `dataset.packed: True`: packed rows have one length."
            )
        if budget is not None and not self.row_format.memory_follows_tokens:
            raise InputError(
                f"`max_tokens_per_micro_batch: {budget}` cannot be used with images, whose memory follows not only"
                " tokens."
            )
        sizes = self._search() if settings.searches_on(self.loop.device.type) else Sizes()
        if isinstance(budget, int):
            # Otherwise the tokenizer truncates samples to fewer tokens.
            if longest is None or self.row_format.sequences * longest > budget:
                self.row_format.check_lengths(dataset, max_tokens=budget, consensus=self.loop.consensus)
            sizes = replace(sizes, token_budget=budget)
        if self.loader.is_global:
            bound = sizes.fitting_rows if settings.objective == "speed" else None
            sizes = replace(sizes, max_rows=bound if settings.use_maximum_batch_size else self.wanted_rows)
        return sizes

    def _search(self) -> Sizes:
        check_fills_step(self.loader, 1)
        options, bound, row = self.settings.search_options, self._bound(), self._worst_row()
        seq_len = self.row_format.num_tokens(row)
        result = search(self.loop, partial(self._probe_batch, row), options, start=self.wanted_rows, bound=bound)
        utils.log_rank_zero(
            log, f"Probes, with the figures of rank 0:\n{probe_table(result)}\n{summary(result, seq_len)}"
        )
        sizes = Sizes(result=result, seq_len=seq_len, fitting_rows=result.batch_size)
        if self.settings.max_tokens_per_micro_batch == "auto":
            sizes = replace(sizes, token_budget=self._largest_token_budget(row, result, bound))
        if self.settings.objective == "speed":
            timings = self._timings(row, result, bound)
            fastest = simplest_near_best(timings)
            utils.log_rank_zero(log, f"Tokens per second of training steps:\n{rate_table(timings, chosen=fastest)}")
            found = {"token_budget" if isinstance(fastest, TokenLimit) else "fitting_rows": fastest.size}
            sizes = replace(sizes, timings=timings, **found)
        return sizes

    def _largest_token_budget(self, row: Row, result: SearchResult, max_rows: int) -> int:
        """Padded tokens of the largest micro-batch that fits for any row lengths. A collective."""

        def make_batch(rows: int, length: int) -> list[MicroBatch]:
            return self._probe_batch(self.row_format.stretched(row, length // self.row_format.sequences), rows)

        budget, tried = search_token_budget(
            self.loop,
            make_batch,
            self.settings.search_options,
            result,
            seq_len=self.row_format.padded_tokens(row),
            max_rows=max_rows,
        )
        utils.log_rank_zero(
            log, f"Probes of other row lengths:\n{length_table(tried)}\ntoken budget: {budget} tokens with padding"
        )
        return budget

    def _timings(self, row: Row, result: SearchResult, bound: int) -> dict[MicroBatchLimit, Timing]:
        """Timings of micro-batches that fit, the simplest first. A collective.

        If the samples of a step are given, they are steps over some of the data set. Otherwise a step is a probe of
        the longest ``row``.
        """
        loader, consensus = self.loader, self.loop.consensus
        rows = sorted(halvings(result.batch_size, above=0))
        if not loader.is_global:
            probes: dict[MicroBatchLimit, Any] = {RowLimit(size): [self._probe_batch(row, size)] for size in rows}
            row_tokens = self.row_format.padded_tokens(row) * loader.ranks
            tokens = {limit: row_tokens * sum(len(one.rows) for one in steps[0]) for limit, steps in probes.items()}
            return time_in_turns(self.loop, probes, num_tokens=tokens)
        samples = loader.drawn_steps(min(_MOST_TIMED_STEPS, -(-_TIMED_SAMPLES // loader.samples_per_step)))
        own_rows = min(self.wanted_rows, result.exact_batch_size)
        limits: list[MicroBatchLimit] = [*map(RowLimit, dict.fromkeys([own_rows, *rows]))]
        lengths = {self.row_format.padded_tokens(one) for step in samples for one in step.rows}
        if consensus.any_rank(len(lengths) > 1) and self.row_format.memory_follows_tokens:
            budget = self._largest_token_budget(row, result, bound)
            longest = self.row_format.padded_tokens(row)
            limits += map(TokenLimit, sorted(halvings(budget, above=longest - 1)))
        batchers = [MicroBatcher(limit, self.row_format, consensus, loader.dataset) for limit in limits]
        steps = {one.largest: [one.cut(step) for step in samples] for one in batchers}
        own_tokens = sum(self.row_format.own_tokens(one) for step in samples for one in step.rows)
        num_tokens = sum(consensus.from_all_ranks(own_tokens)) * loader.ranks // consensus.world_size
        return time_in_turns(self.loop, steps, num_tokens=dict.fromkeys(limits, num_tokens))

    def _bound(self) -> int:
        """Rows of the largest micro-batch that can occur in training."""
        settings, loader = self.settings, self.loader
        largest, grows = loader.largest_batch_size, settings.batch_increase_function is not None
        if not loader.is_global:
            return largest if grows or settings.use_maximum_batch_size else loader.rows_per_step
        if not grows:
            return loader.rows_per_step
        limit = settings.growth_limit if isinstance(settings.growth_limit, int) else largest
        samples = loader.samples_per_step_at(max(loader.batch_size, min(limit, largest)))
        return largest_share(samples, ranks=loader.ranks)

    def _probe_batch(self, row: Row, rows: int) -> list[MicroBatch]:
        """The micro-batches of a probe with ``rows`` copies of ``row``."""
        settings, loader = self.settings, self.loader
        if (
            settings.max_tokens_per_micro_batch is not None
            or settings.growth_limit != "memory"
            or settings.needs_gradient_noise
        ):
            return probe_batch(row, rows, micro_steps=2)  # more need no more memory
        steps = math.ceil(loader.rows_per_step / rows) if loader.is_global else loader.micro_steps
        return probe_batch(row, rows, micro_steps=steps)

    def _worst_row(self) -> Row:
        """The longest row that can occur in training. A collective."""
        longest, seq_len = self.tokenizer_max_seq_len, self.settings.seq_len
        row = self.row_format.worst_case(
            self.loader.dataset,
            seq_len=seq_len,
            tokenizer_max_seq_len=longest,
            consensus=self.loop.consensus,
        )
        num_tokens = self.row_format.num_tokens(row)
        for model in self.models:
            check_row_length(num_tokens, model, key="tokenizer.max_seq_len" if seq_len is None else "seq_len")
        if longest is not None and num_tokens < longest:
            utils.log_rank_zero(
                log, f"Rows can have up to {longest} tokens, but probes have {num_tokens}: longer rows may not fit."
            )
        return row


def probe_batch(row: Any, rows: int, *, micro_steps: int) -> list[MicroBatch]:
    """The micro-batches of a probe with ``rows`` times ``row``. At most two: from the second one on, gradients exist.

    >>> [one.rows for one in probe_batch("row", 2, micro_steps=8)]
    [['row', 'row'], ['row', 'row']]
    """
    return [MicroBatch([row] * rows)] * min(2, micro_steps)
