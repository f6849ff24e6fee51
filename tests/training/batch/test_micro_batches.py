"""A step is cut into the same number of micro-batches on every rank, within a limit that recovery may lower."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.toys import OneOf
from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.training.batch.limits import MicroBatchLimit, RowLimit, TokenLimit
from torchtune_adaptive.training.batch.loader import StepSamples
from torchtune_adaptive.training.batch.micro_batches import MicroBatch, MicroBatcher
from torchtune_adaptive.training.batch.rank_shares import largest_share, rows_of_rank
from torchtune_adaptive.training.batch.row_format import Row, TokenRows

FIRST: Row = {"tokens": [-1], "labels": [-1]}  # of the data set; without weight it is a silent row


class Unasked(Consensus):
    """A consensus that must not be used, because each use is a collective."""

    def max_of_each(self, *numbers: int) -> Any:
        raise AssertionError("asked")


def batcher(limit: MicroBatchLimit, consensus: Consensus | None = None) -> MicroBatcher:
    return MicroBatcher(limit, TokenRows(-100), consensus or Consensus(), [FIRST])


def rows_of(*lengths: int) -> list[Row]:
    """Rows of the given lengths; each token is the row's number."""
    return [{"tokens": [number] * length, "labels": [number] * length} for number, length in enumerate(lengths)]


def samples_of(*lengths: int, most: int | None = None) -> StepSamples:
    return StepSamples(rows_of(*lengths), most or len(lengths), ranks=1)


def names(micro_batches: list[MicroBatch]) -> list[list[int | str]]:
    """The rows of each micro-batch by their numbers."""
    silent = FIRST | {"labels": [-100]}
    return [["silent" if row == silent else row["tokens"][0] for row in one.rows] for one in micro_batches]


# ---- cutting


def test_a_rank_with_fewer_rows_takes_as_many_micro_steps_without_communication() -> None:
    asks_nobody = batcher(RowLimit(2), Unasked())
    assert names(asks_nobody.cut(samples_of(1, 1, 1, most=5))) == [[0], [1], [2]]
    cut = asks_nobody.cut(samples_of(1, most=5))
    assert names(cut) == [[0], ["silent"], ["silent"]]
    assert [one.share for one in cut] == [1, 0, 0]


def test_parts_of_torchtunes_micro_step_know_their_share_of_its_rows() -> None:
    samples = replace(samples_of(1, 1, 1, 1), rows_per_micro_step=2)
    assert [one.share for one in batcher(RowLimit(2)).cut(samples)] == [1, 1]
    assert [one.share for one in batcher(RowLimit(1)).cut(samples)] == [0.5] * 4
    measured = batcher(RowLimit(1)).cut(replace(samples, measured=True))
    assert [(one.share, one.is_small, one.ends_small) for one in measured] == [
        (0.5, True, False),
        (0.5, True, True),
        (0.5, False, False),
        (0.5, False, False),
    ]


def test_with_a_limit_in_tokens_the_ranks_agree_on_the_number_of_micro_batches() -> None:
    peers = OneOf(0, 3, 1, 4)
    cut = batcher(TokenLimit(4), peers).cut(samples_of(2, 2, 4))
    assert peers.said == [2]
    assert names(cut) == [[2], [0], [1], ["silent"]]
    peers = OneOf(0, 2, 1)
    assert len(batcher(TokenLimit(4), peers).cut(samples_of(4, 4, 4))) == 3


@settings(max_examples=100)
@given(samples=st.integers(1, 40), ranks=st.integers(1, 6), size=st.integers(1, 12), data=st.data())
def test_every_rank_has_the_same_number_of_micro_batches_and_every_row_is_in_one_of_them(
    samples: int, ranks: int, size: int, data: st.DataObject
) -> None:
    most = largest_share(samples, ranks=ranks)
    limit = data.draw(st.sampled_from([RowLimit(size), TokenLimit(4 * size)]))
    lengths = [
        data.draw(st.lists(st.integers(1, 9), min_size=rows, max_size=rows))
        for rows in (rows_of_rank(samples, rank=rank, ranks=ranks) for rank in range(ranks))
    ]
    counts = [len(limit.cut(of_rank)) for of_rank in lengths]
    cuts = [
        batcher(limit, OneOf(0, ranks, *counts)).cut(StepSamples(rows_of(*of_rank), samples, ranks))
        for of_rank in lengths
    ]
    assert len(set(map(len, cuts))) == 1
    for of_rank, cut in zip(lengths, cuts, strict=True):
        placed = [name for micro_batch in names(cut) for name in micro_batch if name != "silent"]
        assert sorted(placed, key=int) == list(range(len(of_rank)))
        assert all(micro_batch == ["silent"] or "silent" not in micro_batch for micro_batch in names(cut))
        if isinstance(limit, RowLimit):
            assert all(1 <= len(one.rows) <= size for one in cut)
            assert len(cut) == math.ceil(most / size)


@pytest.mark.parametrize(("limit", "rows"), [(RowLimit(4), 2), (RowLimit(1), 1), (TokenLimit(12), 1)], ids=str)
def test_one_step_may_have_the_smallest_micro_batches_that_a_search_tries(limit: MicroBatchLimit, rows: int) -> None:
    batches, samples = batcher(limit), samples_of(*[3] * 8)
    batches.start_small()
    assert batches.limit == limit
    assert [len(one.rows) for one in batches.cut(samples)] == [rows] * (8 // rows)
    batches.end_step()
    assert batches.cut(samples) == batcher(limit).cut(samples)


# ---- padding


def counted(batches: MicroBatcher) -> tuple[int, int]:
    return batches.state_dict()["padding"]


def test_tokens_are_counted_without_and_with_padding_and_silent_rows_are_not() -> None:
    batches = batcher(RowLimit(2))
    assert names(batches.cut(samples_of(3, 5, 2, most=7))) == [[0], [1], [2], ["silent"]]
    batches.end_step()
    assert counted(batches) == (10, 10)
    batches.cut(samples_of(3, 5, 2))
    batches.end_step()
    assert counted(batches) == (20, 10 + 2 * 5 + 2)


def test_padding_is_that_of_the_last_cut_of_each_step_since_it_was_last_taken() -> None:
    batches = batcher(RowLimit(4))
    samples = samples_of(1, 1, 1, 5)
    batches.cut(samples)  # an attempt that ran out of memory
    batches.reduce(samples)
    batches.cut(samples)
    batches.end_step()
    assert batches.take_padding() == pytest.approx(1 - 8 / (2 * 1 + 2 * 5))
    for lengths in ((1, 3), (2, 2), (1, 2)):
        batches.cut(samples_of(*lengths))
        batches.end_step()
    assert batches.take_padding() == pytest.approx(1 - (4 + 4 + 3) / (6 + 4 + 4))


def test_rows_without_tokens_are_padded_to_one() -> None:
    assert [batcher(RowLimit(2)).padded_tokens(MicroBatch(rows_of(*lengths))) for lengths in ((0, 0), (0, 3))] == [2, 6]


# ---- measured steps


def test_the_halves_of_a_measured_step_are_cut_separately_and_the_first_is_the_small_batch() -> None:
    batches, samples = batcher(RowLimit(3)), samples_of(1, 1, 1, 1, 1, 1, 9)
    cut = batches.cut(replace(samples, measured=True))
    assert names(cut) == [[0, 1, 2], [3], [4, 5, 6]]
    assert [(one.is_small, one.ends_small) for one in cut] == [(True, False), (True, True), (False, False)]
    batches.end_step()
    assert counted(batches) == (15, 3 + 1 + 27)
    assert [len(one.rows) for one in batches.cut(samples)] == [3, 3, 1]


@pytest.mark.parametrize(("share", "measured"), [(1, False), (2, True)])
def test_a_step_is_measured_if_some_rank_has_two_rows(share: int, measured: bool) -> None:
    cut = batcher(RowLimit(3)).cut(StepSamples(rows_of(1), num_samples=share, ranks=1, measured=True))
    assert [one.is_small for one in cut] == ([True, False] if measured else [False])


# ---- trial batches


@pytest.mark.parametrize(("limit", "sizes"), [(TokenLimit(8), [[1, 2], [1, 1]]), (RowLimit(1), [[1, 1]])])
def test_trial_batches_have_two_rows_and_then_one_within_the_limit(
    limit: MicroBatchLimit, sizes: list[list[int]]
) -> None:
    found = list(batcher(limit).trial_batches(rows_of(40, 40, 40)))
    assert [[len(one.rows) for one in micro_batches] for micro_batches in found] == sizes
    assert all(len({len(one.rows[0]["tokens"]) for one in micro_batches}) == 2 for micro_batches in found)  # shapes


# ---- a limit that recovery lowers


def test_a_limit_is_halved_and_set_back_and_the_largest_stays() -> None:
    batches = batcher(RowLimit(13))
    found = []
    for _ in range(3):
        assert batches.reduce(samples_of(1, 1, 1))
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
    batches.reduce(samples_of(1, 1))
    batches.largest = RowLimit(20)
    assert (batches.limit, batches.largest) == (RowLimit(4), RowLimit(20))
    batches.largest = RowLimit(3)
    assert batches.limit == RowLimit(3)
    batches.largest = RowLimit(9)
    assert batches.limit == RowLimit(4)


@pytest.mark.parametrize(
    ("limit", "lengths", "measured", "can"),
    [
        (RowLimit(2), [1, 1], False, True),
        (RowLimit(1), [1, 1], False, False),
        (RowLimit(4), [7], False, False),
        (TokenLimit(8), [3, 3], False, True),
        (TokenLimit(8), [5, 5], False, False),  # each is alone already
        (RowLimit(2), [1, 1], True, False),  # each half has a row
        (RowLimit(2), [1, 1, 1], True, True),
    ],
)
def test_a_lower_limit_helps_if_some_micro_batch_has_more_than_a_row(
    limit: MicroBatchLimit, lengths: list[int], measured: bool, can: bool
) -> None:
    samples, batches = replace(samples_of(*lengths), measured=measured), batcher(limit)
    assert batches.reduce(samples) is can
    assert (batches.limit == limit) is not can
    assert batcher(limit, OneOf(0, 2, 0)).reduce(samples) is can
    assert batcher(limit, OneOf(0, 2, 1)).reduce(samples) is True  # on another rank


# ---- state


def test_a_resumed_run_continues_with_the_reduced_limit() -> None:
    batches, resumed = batcher(TokenLimit(80)), batcher(TokenLimit(80))
    state = {"micro_batch": None, "micro_batch_limit": 80, "micro_batch_unit": "tokens", "padding": (0, 0)}
    assert batches.state_dict() == state
    resumed.load_state_dict(batches.state_dict())
    assert resumed.limit == TokenLimit(80)
    batches.reduce(samples_of(1, 1))
    batches.cut(samples_of(4, 5))
    batches.end_step()
    assert batches.state_dict() == state | {"micro_batch": 40, "padding": (9, 10)}
    resumed.load_state_dict(batches.state_dict())
    assert resumed.limit == TokenLimit(40)
    assert resumed.state_dict() == batches.state_dict()


def test_a_saved_limit_in_another_unit_is_ignored() -> None:
    batches, resumed = batcher(TokenLimit(8)), batcher(RowLimit(16))
    batches.reduce(samples_of(1, 1))
    resumed.load_state_dict(batches.state_dict())
    assert (resumed.limit, resumed.largest) == (RowLimit(16), RowLimit(16))
