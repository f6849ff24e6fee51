"""The largest token budget: padded tokens of a micro-batch that fit for any row lengths."""

from collections.abc import Callable

_SHORTEST_ROW = 16
_SHORTER_BY = (2, 4, 8)


def largest_token_budget(
    largest_rows_at: Callable[[int, int], int], *, seq_len: int, rows: int, forecast_rows: float | None, max_rows: int
) -> int:
    """The largest token budget: at least ``rows * seq_len``, unless shorter rows need more memory per token.

    With rows of s tokens a step needs ``c + e * s**2 + rows * (a * s + d * s**2)`` bytes. For the same number of tokens
    the longest rows need the most. The forecast may allow a fraction of a row more than ``rows``. This budget is tried
    with one row more, of the length that it then allows, and with several shorter lengths.
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
    if budget > rows * seq_len and rows < max_rows and largest_rows_at(budget // (rows + 1), rows + 1) <= rows:
        budget = rows * seq_len
    for part in _SHORTER_BY:
        length = seq_len // part
        bound = min(budget // max(length, 1), max_rows)
        if length >= _SHORTEST_ROW and (found := largest_rows_at(length, bound)) < bound:
            budget = found * length
    return budget
