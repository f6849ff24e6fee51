"""The largest token budget: tokens of a micro-batch, padding included, that fit for any row lengths."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torchtune_adaptive.engine.loop import Loop
from torchtune_adaptive.engine.search.find import search
from torchtune_adaptive.engine.search.options import SearchOptions
from torchtune_adaptive.engine.search.strategies import SMALL_BATCH_SIZES, Probe, SearchResult, bisect

_PARTS = 32
_SHORTEST_ROW = 16
_SHORTER_BY = (2, 4, 8)


def largest_token_budget(
    largest_rows_at: Callable[[int, int], int], *, seq_len: int, rows: int, forecast_rows: float | None, max_rows: int
) -> int:
    """The largest token budget: at least ``rows * seq_len``, unless shorter rows need more memory per token.

    With rows of s tokens a step needs ``c + e * s**2 + rows * (a * s + d * s**2)`` bytes. For the same number of tokens
    the longest rows need the most. The forecast may allow a fraction of a row more than ``rows``. This budget is tried
    with one row more, of the length that it then allows, and with several shorter lengths. If so few rows fit that
    there is no forecast, that length is searched, to a part of ``seq_len``.

    Args:
        largest_rows_at: maps ``(length, bound)`` to the largest number of rows up to ``bound`` that fit, by probes.
        seq_len: the length of the longest rows. Of these, ``rows`` fit by probes, and ``forecast_rows`` by the
            forecast before rounding.
        max_rows: the most rows that a micro-batch can have.

    >>> largest_token_budget(lambda length, bound: min(bound, 1930 // length),
    ...                      seq_len=256, rows=7, forecast_rows=7.5, max_rows=1000)
    1920
    """
    budget = max(rows * seq_len, int(seq_len * (forecast_rows or 0)))
    if forecast_rows is None and rows < min(SMALL_BATCH_SIZES[-1], max_rows):
        unit = max(1, seq_len // _PARTS)
        fitted, failed = rows * seq_len // (rows + 1) // unit, -(-seq_len // unit)
        units = bisect(lambda units: largest_rows_at(units * unit, rows + 1) > rows, fitted=fitted, failed=failed)
        budget = max(budget, (rows + 1) * units * unit)
    elif budget > rows * seq_len and rows < max_rows and largest_rows_at(budget // (rows + 1), rows + 1) <= rows:
        budget = rows * seq_len
    for part in _SHORTER_BY:
        length = seq_len // part
        bound = min(budget // max(length, 1), max_rows)
        if length >= _SHORTEST_ROW and (found := largest_rows_at(length, bound)) < bound:
            budget = found * length
    return budget


def search_token_budget(
    loop: Loop,
    make_batch: Callable[[int, int], Any],
    options: SearchOptions,
    longest: SearchResult,
    *,
    seq_len: int,
    max_rows: int,
) -> tuple[int, list[tuple[int, Probe]]]:
    """The largest token budget, and the probes that it took, each with the length of its rows. A collective.

    Args:
        make_batch: ``make_batch(rows, length)`` returns micro-batches of so many rows of ``length`` tokens.
        longest: the result of the search with rows of ``seq_len`` tokens.
        max_rows: the most rows that a micro-batch can have.
    """
    tried: list[tuple[int, Probe]] = []
    # Shorter rows may be more than `max_batch_size`, and are seldom fewer than the bound.
    from_above = replace(options, strategy="decrease_until_oom", power_of_two=False, max_batch_size=None)

    def largest_rows_at(length: int, bound: int) -> int:
        found = search(loop, lambda rows: make_batch(rows, length), from_above, start=bound, bound=bound)
        tried.extend((length, probe) for probe in found.probes)
        return bound if found.exact_batch_size == found.bound else found.exact_batch_size  # the data may have fewer

    is_bounded = longest.exact_batch_size == longest.bound  # else memory was the bound
    budget = largest_token_budget(
        largest_rows_at,
        seq_len=seq_len,
        rows=longest.exact_batch_size,
        forecast_rows=float(longest.bound) if is_bounded else longest.forecast_rows,
        max_rows=max_rows,
    )
    return budget, tried
