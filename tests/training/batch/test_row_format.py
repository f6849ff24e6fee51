"""The rows of a probe are as long as the longest that training can meet, and the data set is read once at most."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchtune.data import padded_collate_dpo, padded_collate_packed, padded_collate_sft
from torchtune.datasets import ConcatDataset, PackedDataset

from tests.support.toys import OneOf, Samples
from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.training.batch.row_format import PreferenceRows, Row, TokenRows, is_packed

ROWS = TokenRows(-100)


def packs_of(max_seq_len: int) -> Any:
    dataset: Any = Samples(3, 4, 2, 5)
    return PackedDataset(dataset, max_seq_len=max_seq_len)


# ---- the longest row


def worst_case(
    samples: Any,
    *,
    seq_len: int | None = None,
    tokenizer_max_seq_len: int | None = None,
    consensus: Consensus | None = None,
) -> Row:
    return ROWS.worst_case(
        samples, seq_len=seq_len, tokenizer_max_seq_len=tokenizer_max_seq_len, consensus=consensus or Consensus()
    )


def test_the_length_asked_for_comes_first_then_the_tokenizers_then_the_longest_sample() -> None:
    samples = Samples(3, 7, 5)
    assert ROWS.num_tokens(worst_case(samples, seq_len=9, tokenizer_max_seq_len=6)) == 9
    assert ROWS.num_tokens(worst_case(samples, tokenizer_max_seq_len=6)) == 6
    assert samples.read == [0, 0]  # neither needs the data set to be read
    assert ROWS.num_tokens(worst_case(samples)) == 7
    assert samples.read == [0, 0, 0, 0, 1, 2]


def test_each_rank_reads_its_share_and_knows_the_longest_of_all() -> None:
    first, second = Samples(4, 9, 2, 3, 8), Samples(4, 9, 2, 3, 8)
    assert len(worst_case(first, consensus=OneOf(0, 2, 9))["tokens"]) == 9
    assert len(worst_case(second, consensus=OneOf(1, 2, 8))["tokens"]) == 9
    assert (first.read, second.read) == ([0, 0, 2, 4], [0, 1, 3])  # row 0 is read first; the longest is made from it


def test_a_pack_keeps_its_length() -> None:
    packs = packs_of(8)
    for dataset in (packs, ConcatDataset([packs, packs])):
        row = worst_case(dataset, tokenizer_max_seq_len=99)
        assert worst_case(dataset, seq_len=8).keys() == row.keys()
        assert ROWS.num_tokens(row) == 8
        batch = padded_collate_packed([row] * 3)
        assert tuple(batch["tokens"].shape) == (3, 8)
        assert tuple(batch["mask"].shape) == (3, 8, 8)


def test_another_length_than_the_packs_is_refused() -> None:
    with pytest.raises(InputError) as refusal:
        worst_case(packs_of(8), seq_len=4)
    assert str(refusal.value) == "`seq_len` must be null or the packs' length (8), but is 4 instead."


# ---- rows made from other rows


def test_small_batches_differ_in_shape_and_keep_to_the_batch_size() -> None:
    first, second = ({"tokens": [number] * 40, "labels": [number] * 40} for number in (1, 2))
    both = [first, second]
    assert [[len(row["tokens"]) for row in batch] for batch in ROWS.small_batches(both, 4)] == [[16], [24, 24]]
    assert [[len(row["labels"]) for row in batch] for batch in ROWS.small_batches(both, 1)] == [[16], [24]]
    assert [[row["tokens"][0] for row in batch] for batch in ROWS.small_batches(both, 2)] == [[1], [1, 2]]
    assert [[row["tokens"][0] for row in batch] for batch in ROWS.small_batches(both, 1)] == [[1], [2]]
    assert [len(batch) for batch in ROWS.small_batches([first], 2)] == [1, 2]


def test_small_batches_leave_rows_of_another_kind_as_they_are() -> None:
    assert [len(row["tokens"]) for batch in ROWS.small_batches(packs_of(64), 1) for row in batch] == [64, 64]
    longer = {"tokens": [1] * 40, "labels": [1] * 40, "image": "of these tokens"}
    assert ROWS.shortened(longer, 16) is longer
    tensors = {"tokens": torch.ones(40), "labels": torch.ones(40)}
    assert ROWS.shortened(tensors, 16) is tensors


@settings(max_examples=100)
@given(tokens=st.lists(st.integers(0, 9), min_size=1, max_size=20), length=st.integers(1, 70), tensors=st.booleans())
def test_a_stretched_row_repeats_its_row_up_to_its_length(tokens: list[int], length: int, tensors: bool) -> None:
    row = {"tokens": torch.tensor(tokens) if tensors else tokens, "labels": [-100] * len(tokens), "more": "kept"}
    stretched = ROWS.stretched(row, length)
    assert list(stretched["tokens"]) == stretched["labels"] == [tokens[place % len(tokens)] for place in range(length)]
    assert stretched["tokens"] is not stretched["labels"]
    assert stretched["more"] == "kept"
    assert row["labels"] == [-100] * len(tokens)


def test_a_stretched_row_has_a_mask_of_its_length_for_a_collator_that_reads_it() -> None:
    row = {"tokens": [1, 2, 3], "labels": [-100, 2, 3], "mask": [True, False, False]}
    assert ROWS.stretched(row, 5) == {"tokens": [1, 2, 3, 1, 2], "labels": [1, 2, 3, 1, 2], "mask": [False] * 5}
    assert ROWS.stretched(row, 2)["mask"] == [False] * 2


@pytest.mark.parametrize("make", [torch.tensor, np.array])
def test_columns_of_a_row_keep_their_type_and_one_value_for_each_token(make: Any) -> None:
    """A `collate_fn` of one's own may take samples that are tensors, and positions or weights of their tokens."""
    columns = {"tokens": [5, 6, 7], "labels": [-100, 6, 7], "mask": [True, False, False], "input_pos": [0, 1, 2]}
    row = {name: make(values) for name, values in columns.items()} | {"source": "a name", "images": make([[1, 2]])}
    longer, silent = ROWS.stretched(row, 5), ROWS.masked(row)
    for made in (longer, silent):
        assert {name: (type(values), values.dtype) for name, values in made.items() if name != "source"} == {
            name: (type(values), values.dtype) for name, values in row.items() if name != "source"
        }
        assert made["source"] == "a name"
        assert made["images"] is row["images"]
    assert {name: longer[name].tolist() for name in columns} == {
        "tokens": [5, 6, 7, 5, 6],
        "labels": [5, 6, 7, 5, 6],
        "mask": [False] * 5,
        "input_pos": [0, 1, 2, 0, 1],
    }
    assert {name: silent[name].tolist() for name in columns} == columns | {"labels": [-100] * 3, "mask": [True] * 3}


def test_a_silent_row_has_a_few_tokens_of_which_none_counts_and_its_source_is_unchanged() -> None:
    row = {"tokens": list(range(40)), "labels": list(range(40)), "mask": [False] * 40}
    assert ROWS.masked(row) == {"tokens": list(range(16)), "labels": [-100] * 16, "mask": [True] * 16}
    assert (row["labels"], row["mask"]) == (list(range(40)), [False] * 40)
    assert TokenRows(-7).masked({"tokens": [1, 2], "labels": [1, 2]}) == {"tokens": [1, 2], "labels": [-7, -7]}


def test_a_silent_pack_keeps_its_length() -> None:
    pack = dict(packs_of(64)[0])
    silent = ROWS.masked(pack)
    assert padded_collate_packed([silent])["labels"].tolist() == [[-100] * 64]
    assert silent["tokens"] is pack["tokens"]
    assert silent["labels"].dtype == pack["labels"].dtype


# ---- rows without tokens

COLLATE: Any = padded_collate_sft
EMPTY: Row = {"tokens": [], "labels": []}


def test_a_row_without_tokens_can_be_probed_and_be_in_a_dry_run() -> None:
    assert worst_case(Samples(0, 3)) == {"tokens": [0, 0, 0], "labels": [0, 0, 0]}
    collate = ROWS.collating(COLLATE)
    batches = [collate(batch) for batch in ROWS.small_batches([EMPTY, EMPTY], 2)]
    assert [batch["tokens"].tolist() for batch in batches] == [[[0]], [[0], [0]]]
    assert [batch["labels"].tolist() for batch in batches] == [[[-100]], [[-100], [-100]]]


def test_batches_that_have_tokens_are_collated_as_by_torchtune_also_with_rows_without() -> None:
    full: Row = {"tokens": [5, 6], "labels": [5, 6]}
    for rows in ([full], [full, EMPTY], [EMPTY, full]):
        ours, torchtunes = ROWS.collating(COLLATE)(rows), COLLATE(rows)
        torch.testing.assert_close(ours, torchtunes, rtol=0, atol=0)
    assert EMPTY == {"tokens": [], "labels": []}


# ---- what is refused


def test_samples_up_to_the_budget_pass_and_each_rank_reads_its_share_once() -> None:
    samples = Samples(4, 8, 2, 3, 8)
    for rank in range(2):
        ROWS.check_lengths(samples, max_tokens=8, consensus=OneOf(rank, 2, None))
    assert sorted(samples.read) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_first_sample_above_the_budget_is_refused_on_every_rank_whichever_has_found_it(rank: int) -> None:
    found = [(6, 9), (4, 10), None]  # by rank: index and length of the first sample above the budget in its share
    others = [one for other, one in enumerate(found) if other != rank]
    with pytest.raises(InputError) as refusal:
        ROWS.check_lengths(Samples(8, 1, 2, 3, 10, 5, 9), max_tokens=8, consensus=OneOf(rank, 3, *others))
    assert str(refusal.value) == (
        "`max_tokens_per_micro_batch` must be at least 10, the tokens of sample 4, but is 8 instead."
    )


def test_packs_are_told_from_other_data() -> None:
    packs, samples = packs_of(8), [Samples(1), Samples(2)]
    unpacked: list[Any] = [*samples, ConcatDataset(samples)]  # pyright: ignore[reportArgumentType]
    assert all(map(is_packed, (packs, ConcatDataset([packs]))))
    assert not any(map(is_packed, unpacked))


# ---- pairs of answers

PAIRS = PreferenceRows()


def pair(chosen: int, rejected: int) -> Row:
    """A pair of answers with these numbers of tokens; the first half of each does not count."""
    row: Row = {}
    for name, length in (("chosen", chosen), ("rejected", rejected)):
        tokens = list(range(1, length + 1))
        row |= {f"{name}_input_ids": tokens, f"{name}_labels": [-100] * (length // 2) + tokens[length // 2 :]}
    return row


@pytest.mark.parametrize(("chosen", "rejected"), [(3, 9), (9, 3)])
def test_a_pair_is_padded_to_its_longer_answer_and_has_two_rows(chosen: int, rejected: int) -> None:
    row = pair(chosen, rejected)
    assert (PAIRS.num_tokens(row), PAIRS.padded_tokens(row), PAIRS.own_tokens(row)) == (9, 18, 12)
    tokens, _ = padded_collate_dpo([row])  # pyright: ignore[reportArgumentType]
    assert tokens.numel() == PAIRS.padded_tokens(row)


@pytest.mark.parametrize("length", [2, 30])
def test_a_stretched_pair_has_two_answers_of_that_length_that_count(length: int) -> None:
    row = PAIRS.stretched(pair(3, 9), length)
    assert set(row) == set(pair(1, 1))
    assert {len(values) for values in row.values()} == {length}
    assert row["chosen_labels"] == row["rejected_labels"] == row["chosen_input_ids"]
    assert row["chosen_input_ids"][:9] == list(range(1, 10))[:length]


def test_a_silent_pair_has_no_label() -> None:
    row = PAIRS.masked(pair(9, 3))
    assert set(row["chosen_labels"] + row["rejected_labels"]) == {-100}
    assert len(row["chosen_labels"]) == len(row["chosen_input_ids"]) == 9


def test_a_pair_with_other_columns_is_left_as_it_is() -> None:
    """They may be of each pair, as a margin, or of each token."""
    row = pair(40, 30)
    assert {len(values) for values in PAIRS.shortened(row, 16).values()} == {16}
    for value in (0.5, None, [1] * 40):
        with_column = row | {"margin": value}
        assert PAIRS.shortened(with_column, 16) is with_column
        assert PAIRS.stretched(with_column, 9)["margin"] is value
        assert set(PAIRS.masked(with_column)["chosen_labels"]) == {-100}


def test_a_first_pair_without_tokens_gets_one_that_does_not_count() -> None:
    collate: Any = PAIRS.collating(padded_collate_dpo)  # pyright: ignore[reportArgumentType]
    tokens, labels = collate([pair(0, 0)])
    assert (tokens.tolist(), labels.tolist()) == ([[0], [0]], [[-100], [-100]])
    tokens, labels = collate([pair(0, 0), pair(2, 1)])  # torchtune makes them numbers with a fraction
    assert (tokens.tolist(), labels.tolist()) == (
        [[0, 0], [1, 2], [0, 0], [1, 0]],
        [[-100, -100], [-100, 2], [-100, -100], [1, -100]],
    )
    assert not tokens.is_floating_point()
