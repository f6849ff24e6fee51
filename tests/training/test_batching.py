"""Every row is in one micro-batch, none is above its limit, and a token budget is cut at the lowest cost."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtune_adaptive.training.batch.limits import Cuts, MicroBatchLimit, RowLimit, TokenLimit, spread

properties = settings(max_examples=150)
windows = st.lists(st.integers(1, 40), max_size=24)
limits = st.builds(RowLimit, st.integers(1, 25)) | st.builds(TokenLimit, st.integers(1, 200))


def padded_tokens(lengths: Sequence[int], indices: Sequence[int]) -> int:
    return len(indices) * max(lengths[index] for index in indices)


def is_within(limit: MicroBatchLimit, lengths: Sequence[int], indices: Sequence[int]) -> bool:
    """Whether a micro-batch is within the limit: in rows, or in padded tokens unless it is a single row."""
    if isinstance(limit, RowLimit):
        return len(indices) <= limit.size
    return len(indices) <= 1 or padded_tokens(lengths, indices) <= limit.size


def cost(limit: TokenLimit, lengths: Sequence[int], cuts: Cuts) -> float:
    """The cost of a window: its padded tokens, plus 1/32 of the limit for each micro-step."""
    return sum(padded_tokens(lengths, indices) + limit.size / 32 for indices in cuts)


def every_partition(indices: Sequence[int]) -> list[Cuts]:
    """All ways to cut ``indices`` without changing their order."""
    inner = range(1, len(indices))
    bounds = (
        [0, *marks, len(indices)] for count in range(len(indices)) for marks in itertools.combinations(inner, count)
    )
    return [[list(indices[start:end]) for start, end in itertools.pairwise(marks)] for marks in bounds]


# ---- cutting


@properties
@given(lengths=windows, limit=limits)
def test_every_row_is_in_one_micro_batch_and_none_is_empty_or_above_the_limit(
    lengths: list[int], limit: MicroBatchLimit
) -> None:
    cuts = limit.cut(lengths)
    assert sorted(itertools.chain(*cuts)) == list(range(len(lengths)))
    assert all(cuts)
    assert [indices for indices in cuts if not is_within(limit, lengths, indices)] == []


@properties
@given(lengths=windows, rows=st.integers(1, 25))
def test_a_limit_in_rows_keeps_their_order_and_makes_the_fewest_micro_batches(lengths: list[int], rows: int) -> None:
    cuts = RowLimit(rows).cut(lengths)
    assert list(itertools.chain(*cuts)) == list(range(len(lengths)))
    assert len(cuts) == -(-len(lengths) // rows)


@settings(properties, max_examples=80)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8), tokens=st.integers(1, 400))
def test_a_token_limit_is_cut_at_the_least_cost_of_all_ways_to_cut_the_rows_by_length(
    lengths: list[int], tokens: int
) -> None:
    limit = TokenLimit(tokens)
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    allowed = [cuts for cuts in every_partition(order) if all(is_within(limit, lengths, indices) for indices in cuts)]
    assert cost(limit, lengths, limit.cut(lengths)) == pytest.approx(
        min(cost(limit, lengths, cuts) for cuts in allowed), rel=1e-12
    )


# ---- the same number of micro-batches on every rank


@properties
@given(lengths=windows, limit=limits, more=st.integers(0, 30))
def test_spreading_gives_the_count_loses_no_row_and_keeps_the_limit(
    lengths: list[int], limit: MicroBatchLimit, more: int
) -> None:
    cuts = limit.cut(lengths)
    before = [list(indices) for indices in cuts]
    assert spread(cuts, len(cuts)) == before
    spread_cuts = spread(cuts, len(cuts) + more)
    assert cuts == before
    assert len(spread_cuts) == len(cuts) + more
    assert list(itertools.chain(*spread_cuts)) == list(itertools.chain(*cuts))
    assert [indices for indices in spread_cuts if indices and not is_within(limit, lengths, indices)] == []
    assert all(spread_cuts) or all(len(indices) <= 1 for indices in spread_cuts)
