"""Find the largest micro-batch of a recipe, by whole train steps on the longest rows that can occur in training."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn
from torchtune import utils

from torchtune_adaptive.batch.limits import MicroBatchLimit, RowLimit, TokenLimit, halvings
from torchtune_adaptive.batch.loader import StepLoader, check_fills_step
from torchtune_adaptive.batch.rank_shares import most_rows
from torchtune_adaptive.batch.row_format import Row, RowFormat, check_row_length, check_unpacked, is_packed
from torchtune_adaptive.search.find import search
from torchtune_adaptive.search.found_size import FoundSize
from torchtune_adaptive.search.reuse import FoundSizes
from torchtune_adaptive.search.strategies import Probe, SearchResult
from torchtune_adaptive.search.tables import length_table, probe_table, rate_table, summary
from torchtune_adaptive.search.throughput import smallest_near_best, tokens_per_second
from torchtune_adaptive.search.token_budget import largest_token_budget
from torchtune_adaptive.search.workload import Workload
from torchtune_adaptive.settings import AdaptiveSettings

log = utils.get_logger("DEBUG")

MicroBatches = list[list[Row]]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The largest size of a micro-batch, as far as it is known.

    Attributes:
        result: the search's result, None without a search.
        probe_row: the row of the probes, None without a search.
        seq_len: its length in tokens.
        fitting_rows: rows to use if more are requested than fit, None without a search.
        most_rows: an upper bound on rows, even if more fit; None: no such bound.
        token_budget: padded tokens of a micro-batch; None if the limit is in rows.
        tokens_per_second: the rate of each timed size; None if none was timed.
    """

    result: SearchResult | None = None
    probe_row: Row | None = None
    seq_len: int | None = None
    fitting_rows: int | None = None
    most_rows: int | None = None
    token_budget: int | None = None
    tokens_per_second: dict[int, float] | None = None

    def limit(self, rows: int) -> MicroBatchLimit:
        """The limit of a micro-batch if ``rows`` are requested.

        >>> str(Sizes(most_rows=8).limit(32)), str(Sizes(token_budget=512).limit(32))
        ('8 rows', '512 tokens')
        """
        if self.token_budget is not None:
            return TokenLimit(self.token_budget)
        rows = min(rows, self.most_rows or rows)
        if self.result is not None and rows > self.result.exact_batch_size:
            rows = self.fitting_rows or rows
        return RowLimit(rows)


class SizeFinder:
    """Finds the sizes that the settings require.

    Args:
        workload: its train step takes the micro-batches of a step, as lists of rows.
        loader: the loader as configured, before the search.
        models: all models that process rows; each may limit their length.
        wanted_rows: the config's ``batch_size``.
        tokenizer_max_seq_len: length to which the tokenizer truncates samples; None if it does not.
        found_sizes: results of earlier searches, to which this one is added; None to keep nothing.
    """

    def __init__(
        self,
        workload: Workload,
        loader: StepLoader,
        row_format: RowFormat,
        settings: AdaptiveSettings,
        *,
        models: Sequence[nn.Module],
        wanted_rows: int,
        tokenizer_max_seq_len: int | None,
        found_sizes: FoundSizes | None = None,
    ) -> None:
        self._workload = workload
        self._loader = loader
        self._row_format = row_format
        self._settings = settings
        self._models = models
        self._wanted_rows = wanted_rows
        self._tokenizer_max_seq_len = tokenizer_max_seq_len
        self._found_sizes = found_sizes

    def find(self) -> Sizes:
        """Find the sizes. A collective; it restores models and optimizers.

        Raises:
            InputError: the data cannot be cut as the settings require.
            NothingFitsError: one row does not fit.
        """
        settings, dataset = self._settings, self._loader.dataset
        if settings.max_tokens_per_micro_batch is not None:
            check_unpacked(dataset)
        sizes = self._search() if settings.searches else Sizes()
        if isinstance(settings.max_tokens_per_micro_batch, int):
            self._check_sample_lengths(settings.max_tokens_per_micro_batch)
            sizes = replace(sizes, token_budget=settings.max_tokens_per_micro_batch)
        if self._loader.is_global:
            throughput = settings.objective == "throughput"
            bound = sizes.fitting_rows if throughput else None
            sizes = replace(sizes, most_rows=bound if settings.use_maximum_batch_size else self._wanted_rows)
        return sizes

    def _search(self) -> Sizes:
        check_fills_step(self._loader, 1)
        settings, most_rows = self._settings, self._most_rows()
        row = self._worst_row()
        seq_len = self._row_format.num_tokens(row)
        bound = min(most_rows, settings.max_batch_size or most_rows)
        asked = _asked(row, self._row_format, self._loader, most_rows=most_rows)
        known = None if self._found_sizes is None else self._found_sizes.known(**asked)
        result = self._search_rows(row, settings, start=self._wanted_rows, bound=bound, known=known)
        known = known if result.reused else None
        utils.log_rank_zero(
            log, f"Probes, with the figures of rank 0:\n{probe_table(result)}\n{summary(result, seq_len)}"
        )
        sizes = Sizes(result=result, probe_row=row, seq_len=seq_len, fitting_rows=result.batch_size)
        if settings.max_tokens_per_micro_batch == "auto":
            if known is not None and not self._budget_still_fits(known.token_budget, row, result):
                known = None
            budget = None if known is None else known.token_budget
            sizes = replace(sizes, token_budget=budget or self._largest_token_budget(row, result, most_rows))
        if settings.objective == "throughput":
            rates = (None if known is None else known.tokens_per_second) or self._time_sizes(row, result)
            sizes = replace(sizes, tokens_per_second=rates, fitting_rows=smallest_near_best(rates))
        if self._found_sizes is not None and known is None:
            self._found_sizes.keep(_found(sizes, result), **asked)
        return sizes

    def _search_rows(
        self, row: Row, settings: AdaptiveSettings, *, start: int, bound: int, known: FoundSize | None = None
    ) -> SearchResult:
        """Search for the largest number of copies of ``row``, up to ``bound``. A collective."""
        make_batch = partial(self._probe_batch, row)
        return search(self._workload, make_batch, settings=settings, start=start, bound=bound, known=known)

    def _largest_token_budget(self, row: Row, result: SearchResult, most_rows: int) -> int:
        """Padded tokens of the largest micro-batch that fits for any row lengths. A collective."""
        tried: list[tuple[int, Probe]] = []

        def largest_rows_at(length: int, bound: int) -> int:
            found = self._search_length(row, length, bound)
            tried.extend((length, probe) for probe in found.probes)
            return found.exact_batch_size

        budget = largest_token_budget(
            largest_rows_at,
            seq_len=self._row_format.padded_tokens(row),
            rows=result.exact_batch_size,
            forecast_rows=result.forecast_rows,
            max_rows=most_rows,
        )
        utils.log_rank_zero(
            log, f"Probes of other row lengths:\n{length_table(tried)}\ntoken budget: {budget} tokens with padding"
        )
        return budget

    def _budget_still_fits(self, budget: int | None, row: Row, result: SearchResult) -> bool:
        """Whether a token budget found before fits, where the rows of ``result`` do not fill it. A collective."""
        rows = result.exact_batch_size
        if budget is None or budget <= rows * self._row_format.padded_tokens(row):
            return budget is not None
        return self._search_length(row, budget // (rows + 1), rows + 1).exact_batch_size > rows

    def _search_length(self, row: Row, length: int, bound: int) -> SearchResult:
        """The search, from above, among up to ``bound`` rows of ``length`` tokens with padding. A collective."""
        settings = replace(self._settings, strategy="decrease_until_oom", power_of_two=False)
        stretched = self._row_format.stretched(row, length // self._row_format.sequences)
        return self._search_rows(stretched, settings, start=bound, bound=bound)

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

    def _most_rows(self) -> int:
        """Rows of the largest micro-batch that can occur in training."""
        settings, loader = self._settings, self._loader
        largest = loader.largest_batch_size
        is_found = settings.use_maximum_batch_size and not loader.is_global
        if settings.batch_increase_function is None and not is_found:
            return loader.rows_per_step
        if not loader.is_global:
            return largest
        limit = settings.growth_limit if isinstance(settings.growth_limit, int) else largest
        samples = loader.samples_per_step_at(max(loader.batch_size, min(limit, largest)))
        return most_rows(samples, ranks=loader.ranks)

    def _probe_batch(self, row: Row, rows: int) -> MicroBatches:
        """The micro-batches of a probe with ``rows`` copies of ``row``."""
        return probe_batch(row, rows, micro_steps=self._micro_steps(rows))

    def _micro_steps(self, rows: int) -> int:
        """Micro-steps of an optimizer step if the largest micro-batch has ``rows`` rows."""
        settings, loader = self._settings, self._loader
        if settings.max_tokens_per_micro_batch is not None or settings.growth_limit != "memory":
            return 2  # more need no more memory
        return math.ceil(loader.rows_per_step / rows) if loader.is_global else loader.micro_steps

    def _worst_row(self) -> Row:
        """The longest row that can occur in training. A collective."""
        longest = self._tokenizer_max_seq_len
        row = self._row_format.worst_case(
            self._loader.dataset,
            seq_len=self._settings.seq_len,
            tokenizer_max_seq_len=longest,
            consensus=self._workload.consensus,
        )
        seq_len = self._row_format.num_tokens(row)
        for model in self._models:
            check_row_length(
                seq_len, model, key="tokenizer.max_seq_len" if self._settings.seq_len is None else "seq_len"
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


def _asked(row: Row, row_format: RowFormat, loader: StepLoader, *, most_rows: int) -> dict[str, Any]:
    """What the result of a search with copies of ``row`` depends on, besides the config."""
    return {
        "seq_len": row_format.num_tokens(row),
        "keys": sorted(row),
        "packed": is_packed(loader.dataset),
        "most_rows": most_rows,
        "micro_steps": loader.micro_steps,
        "rows_per_step": loader.rows_per_step if loader.is_global else None,
    }


def _found(sizes: Sizes, result: SearchResult) -> FoundSize:
    """What to keep of a search for later runs."""
    return FoundSize(
        exact_batch_size=result.exact_batch_size,
        batch_size=result.batch_size,
        fitting_rows=sizes.fitting_rows or result.batch_size,
        memory_limit_bytes=result.memory_limit_bytes,
        forecast_rows=result.forecast_rows,
        token_budget=sizes.token_budget,
        tokens_per_second=sizes.tokens_per_second,
    )
