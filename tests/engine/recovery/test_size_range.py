"""Sizes that did not fit are cut, others are not, and every rank has the same number of micro-batches."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.engine.recovery.size_range import SizeRange, num_tokens

properties = settings(max_examples=200)
lengths_of_rank = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=6), min_size=1, max_size=5)


class Peers(Consensus):
    """A rank beside others with up to ``most`` micro-batches, and at least ``fewest_rows``; counts the exchanges."""

    def __init__(self, most: int = 0, fewest_rows: int = 99) -> None:
        super().__init__()
        self.most, self.fewest_rows = most, fewest_rows
        self.exchanges = 0

    def begin_max(self, *numbers: int) -> Any:
        self.exchanges += 1
        count, negated_rows = numbers
        return lambda: [max(count, self.most), max(negated_rows, -self.fewest_rows)]


def known(*failed: int, fitted: int = 0, peers: Consensus | None = None) -> SizeRange:
    sizes = SizeRange(peers or Consensus())
    sizes.fitted(fitted)
    for size in failed:
        sizes.failed(size)
    return sizes


@properties
@given(cuts=lengths_of_rank, limit=st.integers(1, 200), most=st.integers(0, 40))
def test_micro_batches_are_below_the_limit_or_single_rows_and_none_is_lost(
    cuts: list[list[int]], limit: int, most: int
) -> None:
    lengths = [length for cut in cuts for length in cut]
    numbers = iter(range(len(lengths)))
    before = [[next(numbers) for _ in cut] for cut in cuts]

    def size_of(rows: list[int]) -> int:
        return len(rows) * max(lengths[row] for row in rows)

    after = known(limit, peers=Peers(most)).cut(before, size_of)
    assert [row for cut in after for row in cut] == list(range(len(lengths)))
    assert all(len(cut) <= 1 or size_of(cut) < limit for cut in after)
    assert len(after) >= most
    if all(size_of(cut) < limit for cut in before) and most <= len(before):
        assert after == before
    if len(after) > max(most, len(before)):  # then only because of the limit
        assert any(size_of(cut) >= limit for cut in before if len(cut) > 1)


def test_without_an_error_nothing_is_cut_and_nothing_exchanged() -> None:
    peers = Peers(9)
    sizes = known(fitted=8, peers=peers)
    assert sizes.cut([[0, 1]], lambda rows: 100) == [[0, 1]]
    assert (sizes.limit, peers.exchanges) == (None, 0)
    sizes.failed(10)
    assert len(sizes.cut([[0, 1]], lambda rows: 100)) == 9
    assert peers.exchanges == 1


@pytest.mark.parametrize(("most", "fewest_rows", "is_even"), [(0, 9, True), (3, 3, True), (3, 2, False), (5, 9, False)])
def test_numbers_are_even_if_every_rank_has_a_row_for_each_micro_batch(
    most: int, fewest_rows: int, is_even: bool
) -> None:
    sizes = known(10, peers=Peers(most, fewest_rows))
    sizes.cut([[0, 1], [2, 3]], lambda rows: 1)
    assert sizes.made_even is is_even
    sizes.try_again()
    sizes.cut([[0, 1], [2, 3]], lambda rows: 1)
    assert not sizes.made_even


def test_the_range_narrows_and_never_widens() -> None:
    sizes = known(50, 40, 45, fitted=30)
    sizes.fitted(20)
    assert (sizes.largest_fitted, sizes.smallest_failed, sizes.limit) == (30, 40, 40)


def test_sizes_that_failed_are_tried_until_one_fails_again() -> None:
    sizes = known()
    sizes.try_again()
    sizes.failed(60)
    assert sizes.limit == 60  # nothing had failed before
    sizes.try_again()
    assert sizes.limit is None
    sizes.failed(70)
    assert sizes.limit == 60
    sizes.try_again()
    sizes.failed(50)
    assert sizes.limit == 50


def test_what_has_fitted_when_it_was_tried_has_not_failed() -> None:
    sizes = known(60)
    sizes.failed(70, most_fitted=65)  # the row of 65 could not be cut
    assert sizes.limit == 60
    sizes.try_again()
    sizes.failed(80, most_fitted=59)
    assert sizes.limit == 60
    sizes.try_again()
    sizes.failed(80, most_fitted=60)
    assert sizes.limit == 80


def test_a_resumed_run_continues_with_the_same_limit_or_forgets_it() -> None:
    for tried in (False, True):
        sizes, resumed = known(60), known()
        if tried:
            sizes.try_again()
        resumed.load_state_dict(sizes.state_dict())
        assert resumed.state_dict() == sizes.state_dict()
        assert (resumed.limit, resumed.smallest_failed) == (None if tried else 60, 60)
        resumed.forget()
        assert (resumed.limit, resumed.smallest_failed, resumed.largest_fitted) == (None, None, 0)


@pytest.mark.parametrize(
    ("micro_batch", "size"),
    [
        (torch.zeros(3, 5, dtype=torch.long), 15),
        (torch.zeros(3, 5), 3),
        ({"weight": torch.ones(3), "mask": torch.ones(3, 5, dtype=torch.bool), "ids": torch.ones(3, 5).int()}, 15),
        ({"weight": torch.ones(3), "number": torch.tensor(7)}, 3),
        ({"images": torch.ones(2, 8), "text": ["a", "b"]}, 2),
        ([torch.zeros(4, dtype=torch.long), torch.zeros(9, dtype=torch.long)], 18),
        ([{"ids": torch.zeros(4, dtype=torch.long)}, {"ids": torch.zeros(2, dtype=torch.long)}], 8),
        ([torch.zeros(4), torch.zeros(9)], 2),
        (["text", "text", "text"], 3),
        ([], 0),
    ],
)
def test_tokens_are_the_elements_of_the_first_tensor_of_integers_or_else_samples(micro_batch: Any, size: int) -> None:
    assert num_tokens(micro_batch) == size
