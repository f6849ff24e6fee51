"""Find the largest micro-batch of a recipe, by whole train steps on the longest rows that can occur in training."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from torch import nn
from torchtune import utils

from torchtune_adaptive.engine.search.find import search
from torchtune_adaptive.engine.search.options import SearchOptions
from torchtune_adaptive.engine.search.strategies import Probe, SearchResult
from torchtune_adaptive.engine.search.tables import length_table, probe_table, rate_table, summary
from torchtune_adaptive.engine.search.throughput import smallest_near_best, tokens_per_second
from torchtune_adaptive.engine.search.workload import Workload
from torchtune_adaptive.training.batch.limits import MicroBatchLimit, RowLimit, TokenLimit, halvings
from torchtune_adaptive.training.batch.loader import StepLoader, check_fills_step
from torchtune_adaptive.training.batch.rank_shares import largest_share
from torchtune_adaptive.training.batch.row_format import Row, RowFormat, check_row_length, check_unpacked
from torchtune_adaptive.training.token_budget import largest_token_budget

log = utils.get_logger("DEBUG")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The largest size of a micro-batch, as far as it is known.

    Attributes:
        result: the search's result, None without a search.
        probe_row: the row of the probes, None without a search.
        seq_len: its length in tokens.
        fitting_rows: rows to use if more are requested than fit, None without a search.
        max_rows: an upper bound on rows, even if more fit; None: no such bound.
        token_budget: padded tokens of a micro-batch; None if the limit is in rows.
        tokens_per_second: the rate of each timed size; None if none was timed.
    """

    result: SearchResult | None = None
    probe_row: Row | None = None
    seq_len: int | None = None
    fitting_rows: int | None = None
    max_rows: int | None = None
    token_budget: int | None = None
    tokens_per_second: dict[int, float] | None = None

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


@dataclass(frozen=True, kw_only=True)
class SizeOptions:
    """Which sizes a run needs.

    Attributes:
        search: how to search; None: no search.
        seq_len: tokens per row of the probes; None: the longest row there can be.
        uses_largest: use the largest size that fits as the config's ``batch_size``.
        uses_fastest: rather use the smallest size that is about as fast as the best one.
        max_tokens: padded tokens of a micro-batch; None: the limit is in rows.
        grows, growth_limit: whether the batch grows, and up to which size.
    """

    search: SearchOptions | None = None
    seq_len: int | None = None
    uses_largest: bool = False
    uses_fastest: bool = False
    max_tokens: int | Literal["auto"] | None = None
    grows: bool = False
    growth_limit: int | Literal["memory", "none"] = "memory"


class SizeFinder:
    """Finds the sizes that a run needs.

    Args:
        workload: its train step takes the micro-batches of a step, as lists of rows.
        loader: the loader as configured, before the search.
        models: all models that process rows; each may limit their length.
        wanted_rows: the config's ``batch_size``.
        tokenizer_max_seq_len: length to which the tokenizer truncates samples; None if it does not.
    """

    def __init__(
        self,
        workload: Workload,
        loader: StepLoader,
        row_format: RowFormat,
        options: SizeOptions,
        *,
        models: Sequence[nn.Module],
        wanted_rows: int,
        tokenizer_max_seq_len: int | None,
    ) -> None:
        self._workload = workload
        self._loader = loader
        self._row_format = row_format
        self._options = options
        self._models = models
        self._wanted_rows = wanted_rows
        self._tokenizer_max_seq_len = tokenizer_max_seq_len

    def find(self) -> Sizes:
        """Find the sizes. A collective; it restores models and optimizers.

        Raises:
            InputError: the data cannot be cut as the options require.
            NothingFitsError: one row does not fit.
        """
        options = self._options
        if options.max_tokens is not None:
            check_unpacked(self._loader.dataset)
        sizes = Sizes() if options.search is None else self._search(options.search)
        if isinstance(options.max_tokens, int):
            self._check_sample_lengths(options.max_tokens)
            sizes = replace(sizes, token_budget=options.max_tokens)
        if self._loader.is_global:
            bound = sizes.fitting_rows if options.uses_fastest else None
            sizes = replace(sizes, max_rows=bound if options.uses_largest else self._wanted_rows)
        return sizes

    def _search(self, how: SearchOptions) -> Sizes:
        check_fills_step(self._loader, 1)
        bound, row = self._bound(), self._worst_row()
        seq_len = self._row_format.num_tokens(row)
        result = self._search_rows(row, how, start=self._wanted_rows, bound=bound)
        utils.log_rank_zero(
            log, f"Probes, with the figures of rank 0:\n{probe_table(result)}\n{summary(result, seq_len)}"
        )
        sizes = Sizes(result=result, probe_row=row, seq_len=seq_len, fitting_rows=result.batch_size)
        if self._options.max_tokens == "auto":
            sizes = replace(sizes, token_budget=self._largest_token_budget(row, how, result, bound))
        if self._options.uses_fastest:
            rates = self._time_sizes(row, result)
            sizes = replace(sizes, tokens_per_second=rates, fitting_rows=smallest_near_best(rates))
        return sizes

    def _search_rows(self, row: Row, how: SearchOptions, *, start: int, bound: int) -> SearchResult:
        """Search for the largest number of copies of ``row``, up to ``bound``. A collective."""
        return search(self._workload, partial(self._probe_batch, row), how, start=start, bound=bound)

    def _largest_token_budget(self, row: Row, how: SearchOptions, result: SearchResult, max_rows: int) -> int:
        """Padded tokens of the largest micro-batch that fits for any row lengths. A collective."""
        tried: list[tuple[int, Probe]] = []
        # Shorter rows may be more than `max_batch_size`, and are seldom fewer than the bound.
        from_above = replace(how, strategy="decrease_until_oom", power_of_two=False, max_batch_size=None)

        def largest_rows_at(length: int, bound: int) -> int:
            stretched = self._row_format.stretched(row, length // self._row_format.sequences)
            found = self._search_rows(stretched, from_above, start=bound, bound=bound)
            tried.extend((length, probe) for probe in found.probes)
            return found.exact_batch_size

        budget = largest_token_budget(
            largest_rows_at,
            seq_len=self._row_format.padded_tokens(row),
            rows=result.exact_batch_size,
            forecast_rows=result.forecast_rows,
            max_rows=max_rows,
        )
        utils.log_rank_zero(
            log, f"Probes of other row lengths:\n{length_table(tried)}\ntoken budget: {budget} tokens with padding"
        )
        return budget

    def _time_sizes(self, row: Row, result: SearchResult) -> dict[int, float]:
        """Tokens per second of the size found and of its halvings. A collective."""
        tokens = self._row_format.padded_tokens(row)
        rates = tokens_per_second(
            self._workload,
            lambda rows: self._probe_batch(row, rows),
            halvings(result.batch_size, above=0),
            num_tokens=lambda rows: rows * tokens * len(self._probe_batch(row, rows)),
        )
        table = rate_table(rates, chosen=smallest_near_best(rates))
        utils.log_rank_zero(log, f"Tokens per second of training steps:\n{table}")
        return rates

    def _bound(self) -> int:
        """Rows of the largest micro-batch that can occur in training."""
        options, loader = self._options, self._loader
        largest = loader.largest_batch_size
        is_found = options.uses_largest and not loader.is_global
        if not options.grows and not is_found:
            return loader.rows_per_step
        if not loader.is_global:
            return largest
        limit = options.growth_limit if isinstance(options.growth_limit, int) else largest
        samples = loader.samples_per_step_at(max(loader.batch_size, min(limit, largest)))
        return largest_share(samples, ranks=loader.ranks)

    def _probe_batch(self, row: Row, rows: int) -> list[list[Row]]:
        """The micro-batches of a probe with ``rows`` copies of ``row``."""
        return probe_batch(row, rows, micro_steps=self._micro_steps(rows))

    def _micro_steps(self, rows: int) -> int:
        """Micro-steps of an optimizer step if the largest micro-batch has ``rows`` rows."""
        options, loader = self._options, self._loader
        if options.max_tokens is not None or options.growth_limit != "memory":
            return 2  # more need no more memory
        return math.ceil(loader.rows_per_step / rows) if loader.is_global else loader.micro_steps

    def _worst_row(self) -> Row:
        """The longest row that can occur in training. A collective."""
        longest = self._tokenizer_max_seq_len
        row = self._row_format.worst_case(
            self._loader.dataset,
            seq_len=self._options.seq_len,
            tokenizer_max_seq_len=longest,
            consensus=self._workload.consensus,
        )
        seq_len = self._row_format.num_tokens(row)
        for model in self._models:
            check_row_length(
                seq_len, model, key="tokenizer.max_seq_len" if self._options.seq_len is None else "seq_len"
            )
        if longest is not None and seq_len < longest:
            utils.log_rank_zero(
                log, f"Rows can have up to {longest} tokens, but probes have {seq_len}: longer rows may not fit."
            )
        return row

    def _check_sample_lengths(self, max_tokens: int) -> None:
        """Check samples against a token budget. They are read only if the tokenizer does not truncate. A collective."""
        longest = self._tokenizer_max_seq_len
        if longest is None or longest > max_tokens:
            self._row_format.check_lengths(
                self._loader.dataset, max_tokens=max_tokens, consensus=self._workload.consensus
            )


def probe_batch(row: Any, rows: int, *, micro_steps: int) -> list[list[Any]]:
    """The micro-batches of a probe with ``rows`` times ``row``. At most two: from the second one on, gradients exist.

    >>> probe_batch("row", 2, micro_steps=8)
    [['row', 'row'], ['row', 'row']]
    """
    return [[row] * rows] * min(2, micro_steps)
