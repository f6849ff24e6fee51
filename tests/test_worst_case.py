"""The rows of a probe are as long as the longest that training can meet, and the data set is read once at most."""

from typing import Any

import pytest
from torchtune.data import padded_collate_packed
from torchtune.datasets import ConcatDataset, PackedDataset

from torchtune_adaptive.consensus import Consensus
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.worst_case import longest_sample, small_batches, window_maker, worst_case_row


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
