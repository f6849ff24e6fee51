"""The rows of a probe are as long as the longest that training can meet, and the data set is read once at most."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchtune.data import padded_collate_packed
from torchtune.datasets import ConcatDataset, PackedDataset

from torchtune_adaptive.distributed.consensus import Consensus
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.worst_case import (
    longest_sample,
    refuse_long_samples,
    silent_row,
    small_batches,
    stretched_row,
    window_maker,
    worst_case_row,
)


class Samples:
    """Rows of given lengths; notes which were read."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.read.append(index)
        length = self.lengths[index]
        return {"tokens": list(range(1, length + 1)), "labels": [-100] * length, "more": "kept"}


class OneOf(Consensus):
    """One rank of several that all hold the same largest number."""

    def __init__(self, rank: int, world_size: int, largest: int) -> None:
        super().__init__()
        self._place = (rank, world_size)
        self._largest = largest

    @property
    def rank(self) -> int:
        return self._place[0]

    @property
    def world_size(self) -> int:
        return self._place[1]

    def max_over_ranks(self, number: int) -> int:
        return max(number, self._largest)


def test_the_length_asked_for_comes_first_then_the_tokenizers_then_the_longest_sample() -> None:
    samples, alone = Samples(3, 7, 5), Consensus()
    assert worst_case_row(samples, seq_len=9, tokenizer_max_seq_len=6, consensus=alone)[1] == 9
    assert worst_case_row(samples, seq_len=None, tokenizer_max_seq_len=6, consensus=alone)[1] == 6
    assert samples.read == [0, 0]  # neither needs the data set to be read
    assert worst_case_row(samples, seq_len=None, tokenizer_max_seq_len=None, consensus=alone)[1] == 7
    assert samples.read == [0, 0, 0, 0, 1, 2]


def test_a_row_is_repeated_or_cut_to_its_length_and_every_token_counts() -> None:
    row, _ = worst_case_row(Samples(3), seq_len=7, tokenizer_max_seq_len=None, consensus=Consensus())
    assert row == {"tokens": [1, 2, 3, 1, 2, 3, 1], "labels": [1, 2, 3, 1, 2, 3, 1], "more": "kept"}
    row, _ = worst_case_row(Samples(3), seq_len=2, tokenizer_max_seq_len=None, consensus=Consensus())
    assert row["tokens"] == row["labels"] == [1, 2]


def test_each_rank_reads_its_share_and_knows_the_longest_of_all() -> None:
    first, second = Samples(4, 9, 2, 3, 8), Samples(4, 9, 2, 3, 8)
    assert longest_sample(first, OneOf(0, 2, largest=9)) == 9
    assert longest_sample(second, OneOf(1, 2, largest=8)) == 9
    assert sorted(first.read + second.read) == [0, 1, 2, 3, 4]


def test_a_pack_is_as_long_as_it_is() -> None:
    packs = PackedDataset(Samples(3, 4, 2, 5), max_seq_len=8)  # pyright: ignore[reportArgumentType]
    for dataset in (packs, ConcatDataset([packs, packs])):
        row, length = worst_case_row(dataset, seq_len=None, tokenizer_max_seq_len=99, consensus=Consensus())
        assert length == len(row["tokens"]) == 8
        batch = padded_collate_packed(window_maker(row, micro_batches=1)(3)[0])
        assert tuple(batch["tokens"].shape) == (3, 8)
        assert tuple(batch["mask"].shape) == (3, 8, 8)


def test_another_length_than_the_packs_is_refused() -> None:
    packs = PackedDataset(Samples(3, 4, 2, 5), max_seq_len=8)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError) as refusal:
        worst_case_row(packs, seq_len=4, tokenizer_max_seq_len=None, consensus=Consensus())
    assert str(refusal.value) == "`seq_len` must be null or the packs' length (8), but is 4 instead."


def test_a_window_has_micro_batches_of_the_row_and_no_more_than_two() -> None:
    assert [window_maker({"tokens": [1]}, micro_batches=number)(3) for number in (1, 2, 5)] == [
        [[{"tokens": [1]}] * 3] * number for number in (1, 2, 2)
    ]


def test_small_batches_differ_in_shape_and_keep_to_the_batch_size() -> None:
    first, second = ({"tokens": [number] * 40, "labels": [number] * 40} for number in (1, 2))
    assert [[len(row["tokens"]) for row in batch] for batch in small_batches([first, second], 4)] == [[16], [24, 24]]
    assert [[len(row["labels"]) for row in batch] for batch in small_batches([first, second], 1)] == [[16], [24]]
    assert [batch[-1]["tokens"][0] for batch in small_batches([first, second], 1)] == [1, 2]
    assert [len(batch) for batch in small_batches([first], 2)] == [1, 2]


def test_small_batches_leave_rows_of_another_kind_as_they_are() -> None:
    packs = PackedDataset(Samples(3, 4, 2, 5), max_seq_len=64)  # pyright: ignore[reportArgumentType]
    assert [len(row["tokens"]) for batch in small_batches(packs, 1) for row in batch] == [64, 64]


# ---- rows made for what a rank must compute with


@settings(derandomize=True, deadline=None, max_examples=100)
@given(tokens=st.lists(st.integers(0, 9), min_size=1, max_size=20), length=st.integers(1, 70), tensors=st.booleans())
def test_a_stretched_row_begins_as_its_row_and_goes_round_to_its_length(
    tokens: list[int], length: int, tensors: bool
) -> None:
    row = {"tokens": torch.tensor(tokens) if tensors else tokens, "labels": [-100] * len(tokens), "more": "kept"}
    stretched = stretched_row(row, length)
    assert stretched["tokens"] == stretched["labels"] == [tokens[place % len(tokens)] for place in range(length)]
    assert stretched["more"] == "kept"
    assert row["labels"] == [-100] * len(tokens)


def test_a_silent_row_is_a_few_tokens_of_which_none_counts_and_leaves_its_row_as_it_is() -> None:
    row = {"tokens": list(range(40)), "labels": list(range(40)), "mask": [False] * 40}
    silent = silent_row(row, -100)
    assert silent == {"tokens": list(range(16)), "labels": [-100] * 16, "mask": [False] * 16}
    assert row["labels"] == list(range(40))
    assert silent_row({"tokens": [1, 2], "labels": [1, 2]}, -7) == {"tokens": [1, 2], "labels": [-7, -7]}


def test_a_silent_pack_is_as_long_as_it_is() -> None:
    packs = PackedDataset(Samples(3, 4, 2, 5), max_seq_len=64)  # pyright: ignore[reportArgumentType]
    pack = dict(packs[0])
    silent = silent_row(pack, -100)
    assert padded_collate_packed([silent])["labels"].tolist() == [[-100] * 64]
    assert silent["tokens"] is pack["tokens"]
    assert silent["labels"].dtype == pack["labels"].dtype


# ---- samples above a token budget


class Ranks(OneOf):
    """One rank of several, of which the others have found ``others``."""

    def __init__(self, rank: int, world_size: int, others: list[Any]) -> None:
        super().__init__(rank, world_size, largest=0)
        self._others = others

    def from_all_ranks(self, value: Any) -> list[Any]:
        return [value, *self._others]


def test_samples_up_to_the_budget_pass_and_each_rank_reads_its_share_once() -> None:
    samples = Samples(4, 8, 2, 3, 8)
    for rank in range(2):
        refuse_long_samples(samples, max_tokens=8, consensus=Ranks(rank, 2, [None]))
    assert sorted(samples.read) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_first_sample_above_the_budget_is_refused_on_every_rank_whichever_has_found_it(rank: int) -> None:
    found = [(6, 9), (4, 10), None]  # by rank, of samples 0 to 6: the first of each one's share
    others = [one for other, one in enumerate(found) if other != rank]
    with pytest.raises(InputError) as refusal:
        refuse_long_samples(Samples(8, 1, 2, 3, 10, 5, 9), max_tokens=8, consensus=Ranks(rank, 3, others))
    assert str(refusal.value) == (
        "`max_tokens_per_micro_batch` must be at least every sample's length, but is 8, and sample 4 has 10 tokens."
    )
