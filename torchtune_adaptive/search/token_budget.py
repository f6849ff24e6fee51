"""The largest token budget: padded tokens of a micro-batch that fit however they are made up of rows."""

from collections.abc import Callable

_SHORTEST_ROW = 16
_SHORTER_BY = (2, 4, 8)


def largest_token_budget(
    largest_rows_at: Callable[[int, int], int], *, seq_len: int, rows: int, forecast_rows: float | None, max_rows: int
) -> int:
    """The largest token budget: at least ``rows * seq_len``, unless shorter rows need more memory per token.

    With rows of s tokens a step takes ``c + e * s**2 + rows * (a * s + d * s**2)`` bytes: for the same number of tokens
    the longest rows take most. The forecast may allow a part of a row more than ``rows``: this is tried with one row
    more, of the length that the budget then allows. The budget is also tried with several shorter lengths.

    Args:
        largest_rows_at: ``(length, bound)`` to the largest number of rows up to ``bound`` that fit, tried.
        seq_len: the longest rows, of which ``rows`` fit, and by a forecast ``forecast_rows``, not rounded down.
        max_rows: the most rows that a micro-batch can have.

    >>> largest_token_budget(lambda length, bound: min(bound, 1930 // length),
    ...                      seq_len=256, rows=7, forecast_rows=7.5, max_rows=1000)
    1920
    """
    budget = max(rows * seq_len, int(seq_len * (forecast_rows or 0)))
    if budget > rows * seq_len and rows < max_rows and largest_rows_at(budget // (rows + 1), rows + 1) <= rows:
        budget = rows * seq_len
    for part in _SHORTER_BY:
        length = seq_len // part
        bound = min(budget // max(length, 1), max_rows)
        if length >= _SHORTEST_ROW and (found := largest_rows_at(length, bound)) < bound:
            budget = found * length
    return budget
