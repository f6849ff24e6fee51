"""Cutting loses no sample and keeps their order; halving goes on down to the bound."""

from hypothesis import given, settings
from hypothesis import strategies as st

from torchtune_adaptive.batching import cut, halvings

windows = st.lists(st.lists(st.integers(), max_size=20), max_size=5)  # ragged, and batches without a sample


@settings(derandomize=True, deadline=None, max_examples=200)
@given(window=windows, rows=st.integers(1, 25))
def test_cutting_keeps_every_sample_in_its_place(window: list[list[int]], rows: int) -> None:
    samples = [sample for batch in window for sample in batch]
    assert [sample for piece in cut(window, rows) for sample in piece] == samples


@settings(derandomize=True, deadline=None, max_examples=200)
@given(window=windows, rows=st.integers(1, 25))
def test_no_piece_is_empty_or_above_the_rows_and_there_are_as_few_as_can_be(window: list[list[int]], rows: int) -> None:
    sizes = [len(piece) for piece in cut(window, rows)]
    assert all(0 < size <= rows for size in sizes)
    assert len(sizes) == sum(-(-len(batch) // rows) for batch in window)


def test_a_piece_is_of_one_batch() -> None:
    assert cut([[1, 2, 3], [4], [5, 6]], 2) == [[1, 2], [3], [4], [5, 6]]


def test_batches_that_are_small_enough_stay_as_they_are() -> None:
    window = [[1, 2, 3], [4, 5]]
    assert cut(window, 3) == cut(window, 100) == window


@settings(derandomize=True, deadline=None, max_examples=200)
@given(size=st.integers(1, 10**6), above=st.integers(0, 10**6))
def test_each_halving_is_half_of_the_one_before_and_above_the_bound(size: int, above: int) -> None:
    sizes = halvings(size, above=above)
    assert sizes[:1] == ([size] if size > above else [])
    assert all(one > above for one in sizes)
    assert sizes[1:] == [one // 2 for one in sizes[:-1]]


@settings(derandomize=True, deadline=None, max_examples=200)
@given(size=st.integers(1, 10**6), above=st.integers(0, 10**6))
def test_halving_stops_only_where_the_next_half_is_not_above_the_bound(size: int, above: int) -> None:
    assert (halvings(size, above=above) or [2 * size])[-1] // 2 <= above
