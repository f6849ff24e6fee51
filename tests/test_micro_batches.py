"""A step is cut into the same number of micro-batches on every rank, within a limit that recovery may lower."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtune_adaptive.batch.limits import MicroBatchLimit, RowLimit, TokenLimit
from torchtune_adaptive.batch.loader import StepSamples
from torchtune_adaptive.batch.micro_batches import Cut, MicroBatcher
from torchtune_adaptive.batch.rank_shares import most_rows, rows_of_rank
from torchtune_adaptive.batch.row_format import Row, TokenRows
from torchtune_adaptive.distributed.consensus import Consensus

SILENT: Row = {"tokens": [0], "labels": [-100]}


class Unasked(Consensus):
    """A consensus that must not be used, because each use is a collective."""

    def _reduce(self, number: int, op: Any) -> int:
        raise AssertionError("asked")


class With(Consensus):
    """One rank of several: the other ranks give ``others``, and the numbers that this rank gives are recorded."""

    def __init__(self, *others: int) -> None:
        super().__init__()
        self.others = others
        self.said: list[int] = []

    def max_over_ranks(self, number: int) -> int:
        self.said.append(number)
        return max(number, *self.others)


def batcher(limit: MicroBatchLimit, consensus: Consensus | None = None) -> MicroBatcher:
    return MicroBatcher(limit, TokenRows(-100), consensus or Consensus(), make_silent_row=lambda: SILENT)


def rows_of(*lengths: int) -> list[Row]:
    """Rows of the given lengths; each token is the row's number."""
    return [{"tokens": [number] * length, "labels": [number] * length} for number, length in enumerate(lengths)]


def samples_of(*lengths: int, most: int | None = None) -> StepSamples:
    return StepSamples(rows_of(*lengths), most or len(lengths), ranks=1)


def names(cut: Cut) -> list[list[int | str]]:
    """The rows of each micro-batch by their numbers."""
    return [["silent" if row is SILENT else row["tokens"][0] for row in rows] for rows in cut.micro_batches]


# ---- cutting


def test_a_limit_in_rows_keeps_their_order() -> None:
    assert names(batcher(RowLimit(2)).cut(samples_of(3, 9, 4, 4, 1))) == [[0, 1], [2, 3], [4]]


def test_a_limit_in_tokens_puts_rows_of_like_length_together() -> None:
    assert names(batcher(TokenLimit(16)).cut(samples_of(2, 8, 8, 3, 3))) == [[1, 2], [3, 4], [0]]


def test_a_rank_with_fewer_rows_takes_as_many_micro_steps_without_communication() -> None:
    asks_nobody = batcher(RowLimit(2), Unasked())
    assert names(asks_nobody.cut(samples_of(1, 1, 1, most=5))) == [[0], [1], [2]]
    assert names(asks_nobody.cut(samples_of(1, most=5))) == [[0], ["silent"], ["silent"]]


def test_with_a_limit_in_tokens_the_ranks_agree_on_the_number_of_micro_batches() -> None:
    peers = With(1, 4)
    cut = batcher(TokenLimit(4), peers).cut(samples_of(2, 2, 4))
    assert peers.said == [2]
    assert names(cut) == [[2], [0], [1], ["silent"]]
    peers = With(1)
    assert len(batcher(TokenLimit(4), peers).cut(samples_of(4, 4, 4)).micro_batches) == 3


@settings(derandomize=True, deadline=None, max_examples=100)
@given(samples=st.integers(1, 40), ranks=st.integers(1, 6), size=st.integers(1, 12), data=st.data())
def test_every_rank_has_the_same_number_of_micro_batches_and_every_row_is_in_one_of_them(
    samples: int, ranks: int, size: int, data: st.DataObject
) -> None:
    most = most_rows(samples, ranks=ranks)
    limit = data.draw(st.sampled_from([RowLimit(size), TokenLimit(4 * size)]))
    lengths = [
        data.draw(st.lists(st.integers(1, 9), min_size=rows, max_size=rows))
        for rows in (rows_of_rank(samples, rank=rank, ranks=ranks) for rank in range(ranks))
    ]
    counts = [len(limit.cut(of_rank)) for of_rank in lengths]
    cuts = [batcher(limit, With(*counts)).cut(StepSamples(rows_of(*of_rank), samples, ranks)) for of_rank in lengths]
    assert len({len(cut.micro_batches) for cut in cuts}) == 1
    for of_rank, cut in zip(lengths, cuts, strict=True):
        placed = [name for micro_batch in names(cut) for name in micro_batch if name != "silent"]
        assert sorted(placed, key=int) == list(range(len(of_rank)))
        assert all(micro_batch == ["silent"] or "silent" not in micro_batch for micro_batch in names(cut))
        if isinstance(limit, RowLimit):
            assert all(1 <= len(micro_batch) <= size for micro_batch in cut.micro_batches)
            assert len(cut.micro_batches) == math.ceil(most / size)


# ---- padding


def test_tokens_are_counted_without_and_with_padding_and_silent_rows_are_not() -> None:
    cut = batcher(RowLimit(2)).cut(samples_of(3, 5, 2, most=7))
    assert names(cut) == [[0], [1], [2], ["silent"]]
    assert (cut.num_tokens, cut.num_padded_tokens) == (10, 10)
    cut = batcher(RowLimit(2)).cut(samples_of(3, 5, 2))
    assert (cut.num_tokens, cut.num_padded_tokens) == (10, 2 * 5 + 2)


def test_padding_is_that_of_the_cuts_counted_since_it_was_last_taken() -> None:
    batches = batcher(RowLimit(4))
    samples = samples_of(1, 1, 1, 5)
    batches.cut(samples)  # an attempt that ran out of memory
    batches.reduce()
    batches.count_padding(batches.cut(samples))
    assert batches.take_padding() == pytest.approx(1 - 8 / (2 * 1 + 2 * 5))
    batches.count_padding(batches.cut(samples_of(2, 2)))
    assert batches.take_padding() == 0
    batches.count_padding(batches.cut(samples_of(1, 3)), batches.cut(samples_of(2, 2)))
    batches.count_padding(batches.cut(samples_of(1, 2)))
    assert batches.take_padding() == pytest.approx(1 - (4 + 4 + 3) / (6 + 4 + 4))


# ---- a limit that recovery lowers


def test_a_limit_is_halved_and_set_back_and_the_largest_stays() -> None:
    batches = batcher(RowLimit(13))
    found = []
    for _ in range(3):
        batches.reduce()
        found.append(batches.limit)
    assert found == [RowLimit(6), RowLimit(3), RowLimit(1)]
    assert batches.largest == RowLimit(13)
    batches.resize(12)
    assert batches.limit == RowLimit(12)
    batches.resize(13)
    assert batches.limit == RowLimit(13)
    assert batches.state_dict()["micro_batch"] is None


def test_a_reduced_limit_stays_reduced_when_more_rows_are_asked_for() -> None:
    batches = batcher(RowLimit(8))
    batches.reduce()
    batches.set_largest(RowLimit(20))
    assert (batches.limit, batches.largest) == (RowLimit(4), RowLimit(20))
    batches.set_largest(RowLimit(3))
    assert batches.limit == RowLimit(3)
    batches.set_largest(RowLimit(9))
    assert batches.limit == RowLimit(4)


def test_a_limit_that_was_never_reduced_follows_the_largest() -> None:
    batches = batcher(RowLimit(8))
    batches.set_largest(RowLimit(20))
    assert batches.limit == RowLimit(20)


@pytest.mark.parametrize(
    ("limit", "lengths", "can"),
    [
        (RowLimit(2), [1, 1], True),
        (RowLimit(1), [1, 1], False),
        (RowLimit(4), [7], False),
        (TokenLimit(8), [3, 3], True),
        (TokenLimit(8), [5, 5], False),  # each is alone already
    ],
)
def test_a_lower_limit_helps_if_some_micro_batch_has_more_than_a_row(
    limit: MicroBatchLimit, lengths: list[int], can: bool
) -> None:
    samples = samples_of(*lengths, most=len(lengths))
    assert batcher(limit).can_reduce(samples) is can
    assert batcher(limit, With(0)).can_reduce(samples) is can
    assert batcher(limit, With(1)).can_reduce(samples) is True  # on another rank


def test_a_limit_that_was_reduced_to_one_row_cannot_be_reduced_again() -> None:
    batches = batcher(RowLimit(2))
    batches.reduce()
    assert batches.can_reduce(samples_of(1, 1)) is False


def test_rows_of_a_length_at_a_size() -> None:
    (row,) = rows_of(10)
    assert batcher(RowLimit(8)).rows_of(row, size=3) == 3
    assert batcher(TokenLimit(80)).rows_of(row, size=35) == 3


# ---- state


def test_a_resumed_run_continues_with_the_reduced_limit() -> None:
    batches, resumed = batcher(TokenLimit(80)), batcher(TokenLimit(80))
    state = {"micro_batch": None, "micro_batch_limit": 80, "micro_batch_unit": "tokens", "padding": (0, 0)}
    assert batches.state_dict() == state
    resumed.load_state_dict(batches.state_dict())
    assert resumed.limit == TokenLimit(80)
    batches.reduce()
    assert batches.state_dict() == state | {"micro_batch": 40}
    resumed.load_state_dict(batches.state_dict())
    assert resumed.limit == TokenLimit(40)
    assert resumed.state_dict() == batches.state_dict()


def test_a_resumed_run_keeps_its_largest_limit_unless_the_state_has_none() -> None:
    state, resumed = batcher(RowLimit(8)).state_dict(), batcher(RowLimit(13))
    resumed.load_state_dict(state | {"micro_batch_limit": None})
    assert resumed.largest == RowLimit(13)
    resumed.load_state_dict(state)
    assert resumed.largest == RowLimit(8)


def test_a_saved_limit_in_another_unit_is_ignored() -> None:
    batches, resumed = batcher(TokenLimit(8)), batcher(RowLimit(16))
    batches.reduce()
    resumed.load_state_dict(batches.state_dict())
    assert (resumed.limit, resumed.largest) == (RowLimit(16), RowLimit(16))


def test_padding_counted_before_a_resume_is_included_after_it() -> None:
    whole = batcher(RowLimit(4))
    whole.count_padding(whole.cut(samples_of(1, 5)))
    assert whole.state_dict()["padding"] == (6, 10)
    resumed = batcher(RowLimit(4))
    resumed.load_state_dict(whole.state_dict())
    for batches in (whole, resumed):
        batches.count_padding(batches.cut(samples_of(1, 1, 4)))
    assert resumed.take_padding() == whole.take_padding() == pytest.approx(1 - 12 / 22)
    assert resumed.state_dict()["padding"] == (0, 0)
