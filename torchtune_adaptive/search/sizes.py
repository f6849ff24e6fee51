"""Find how large a recipe's micro-batch may be, by whole train steps on the longest rows that training can meet."""

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
from torchtune_adaptive.search.reuse import FoundSize, FoundSizes
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
    """What is known of how large a micro-batch may be.

    Attributes:
        result: of the search, None without one.
        probe_row: the row that probes were made of, None without a search.
        seq_len: its length in tokens.
        fitting_rows: rows to use where more are asked for than fit, None without a search.
        most_rows: rows that are not exceeded although more may fit; None for no such bound.
        token_budget: padded tokens of a micro-batch; None where rows count.
        tokens_per_second: of the sizes that were timed, None if none were.
    """

    result: SearchResult | None = None
    probe_row: Row | None = None
    seq_len: int | None = None
    fitting_rows: int | None = None
    most_rows: int | None = None
    token_budget: int | None = None
    tokens_per_second: dict[int, float] | None = None

    def limit(self, rows: int) -> MicroBatchLimit:
        """The limit of a micro-batch where ``rows`` are asked for.

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
    """Finds the sizes that the settings ask for.

    Args:
        workload: its train step takes the micro-batches of a step, as lists of rows.
        loader: as the config describes it, before anything was found.
        models: all that are given rows, of which each limits their length by its positions.
        wanted_rows: the config's ``batch_size``.
        tokenizer_max_seq_len: to which the tokenizer cuts samples; None if it does not.
        found_sizes: of earlier searches, where this one is kept too; None to search anew and keep nothing.
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
        """Find the sizes. A collective, which leaves no trace on models and optimizers.

        Raises:
            InputError: the data cannot be cut as the settings ask for.
            NothingFitsError: not even one row fits.
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
        utils.log_rank_zero(log, f"Probes as rank 0 saw them:\n{probe_table(result)}\n{summary(result, seq_len)}")
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
            least_bytes = self._workload.consensus.min_over_ranks(result.memory_limit_bytes)
            self._found_sizes.keep(_found(sizes, result, memory_limit_bytes=least_bytes), **asked)
        return sizes

    def _search_rows(
        self, row: Row, settings: AdaptiveSettings, *, start: int, bound: int, known: FoundSize | None = None
    ) -> SearchResult:
        """The search among up to ``bound`` copies of ``row``. A collective."""
        make_batch = partial(self._probe_batch, row)
        return search(self._workload, make_batch, settings=settings, start=start, bound=bound, known=known)

    def _largest_token_budget(self, row: Row, result: SearchResult, most_rows: int) -> int:
        """The tokens of the largest micro-batch that fits, whatever rows make it up. A collective."""
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
        utils.log_rank_zero(log, f"Other lengths:\n{length_table(tried)}\ntoken budget: {budget} with padding")
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
        """Tokens per second of the size found and its halvings. A collective."""
        tokens = self._row_format.padded_tokens(row)
        rates = tokens_per_second(
            self._workload,
            lambda rows: self._probe_batch(row, rows),
            halvings(result.batch_size, above=0),
            num_tokens=lambda rows: rows * tokens * len(self._probe_batch(row, rows)),
        )
        table = rate_table(rates, chosen=smallest_near_best(rates))
        utils.log_rank_zero(log, f"Steps as in training, timed:\n{table}")
        return rates

    def _most_rows(self) -> int:
        """Rows of the largest micro-batch that training can ask for."""
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
        """Micro-steps that an optimizer step takes where ``rows`` rows are the largest micro-batch."""
        settings, loader = self._settings, self._loader
        if settings.max_tokens_per_micro_batch is not None or settings.growth_limit != "memory":
            return 2  # or more, which need no more memory
        return math.ceil(loader.rows_per_step / rows) if loader.is_global else loader.micro_steps

    def _worst_row(self) -> Row:
        """The longest row that training can meet. A collective."""
        longest = self._tokenizer_max_seq_len
        row = self._row_format.worst_case(
            self._loader.dataset,
            seq_len=self._settings.seq_len,
            tokenizer_max_seq_len=longest,
            consensus=self._workload.consensus,
        )
        seq_len = self._row_format.num_tokens(row)
        for model in self._models:
            check_row_length(seq_len, model)
        if longest is not None and seq_len < longest:
            utils.log_rank_zero(
                log, f"Rows may have {longest} tokens, but probes have {seq_len}: longer ones may not fit."
            )
        return row

    def _check_sample_lengths(self, max_tokens: int) -> None:
        """Check samples against a token budget; they are read only if the tokenizer does not cut them. A collective."""
        longest = self._tokenizer_max_seq_len
        if longest is None or longest > max_tokens:
            self._row_format.check_lengths(
                self._loader.dataset, max_tokens=max_tokens, consensus=self._workload.consensus
            )


def probe_batch(row: Any, rows: int, *, micro_steps: int) -> list[list[Any]]:
    """The micro-batches of a step of ``rows`` times ``row``; at most two, because the second one finds gradients.

    >>> probe_batch("row", 2, micro_steps=8)
    [['row', 'row'], ['row', 'row']]
    """
    return [[row] * rows] * min(2, micro_steps)


def _asked(row: Row, row_format: RowFormat, loader: StepLoader, *, most_rows: int) -> dict[str, Any]:
    """What a search with copies of ``row`` is for."""
    return {
        "seq_len": row_format.num_tokens(row),
        "keys": sorted(row),
        "packed": is_packed(loader.dataset),
        "most_rows": most_rows,
        "micro_steps": loader.micro_steps,
        "rows_per_step": loader.rows_per_step if loader.is_global else None,
    }


def _found(sizes: Sizes, result: SearchResult, *, memory_limit_bytes: int) -> FoundSize:
    """What to keep of a search for later runs."""
    return FoundSize(
        exact_batch_size=result.exact_batch_size,
        batch_size=result.batch_size,
        fitting_rows=sizes.fitting_rows or result.batch_size,
        memory_limit_bytes=memory_limit_bytes,
        forecast_rows=result.forecast_rows,
        token_budget=sizes.token_budget,
        tokens_per_second=sizes.tokens_per_second,
    )
