"""Batches of a trainer are cut by samples, and a trial gets two samples whose labels show how the loss adds up."""

from typing import Any

import pytest
import torch

from torchtune_adaptive import InputError
from torchtune_adaptive.integrations.batches import IGNORED, TrainerBatch, TrainerBatches


def batch(labels: list[list[int]], divisor: float = 1) -> TrainerBatch:
    ids = torch.arange(len(labels)).reshape(-1, 1)
    return TrainerBatch({"input_ids": ids, "labels": torch.tensor(labels)}, None, divisor)


def tried(*batches: TrainerBatch, pair: tuple[int, int] | None = (0, 1)) -> tuple[list[Any], list[Any]]:
    """The samples of each micro-batch of a trial, and their labels."""
    parts = TrainerBatches(4).trial_batches(batches, pair)[0]
    return [one.inputs["input_ids"].flatten().tolist() for one in parts], [
        one.inputs["labels"].tolist() for one in parts
    ]


def test_the_parts_of_pairs_stay_together() -> None:
    ids = torch.arange(8).reshape(8, 1)  # chosen 0 to 3, rejected 4 to 7
    pairs = TrainerBatch({"input_ids": ids, "margin": torch.arange(4), "names": list("abcd")}, None, 1)
    parts = TrainerBatches(3, rows_per_sample=2).cut([pairs])
    assert [part.inputs["input_ids"].flatten().tolist() for part in parts] == [[0, 1, 2, 4, 5, 6], [3, 7]]
    assert [part.inputs["margin"].tolist() for part in parts] == [[0, 1, 2], [3]]
    assert [part.inputs["names"] for part in parts] == [["a", "b", "c"], ["d"]]


def test_a_micro_batch_has_at_least_one_sample() -> None:
    with pytest.raises(InputError, match="`micro_batch_size` must be at least 1, but is 0 instead"):
        TrainerBatches(0)


def test_a_batch_with_other_rows_is_refused() -> None:
    odd = TrainerBatch({"input_ids": torch.zeros(4, 2), "pixels": torch.zeros(9, 2)}, None, 1)
    with pytest.raises(InputError, match=r"one row per sample, but has .'input_ids': 4, 'pixels': 9. instead"):
        TrainerBatches(2).cut([odd])


@pytest.mark.parametrize(("factor", "weights"), [(1.0, [1.0, 1.0]), (0.5, [0.75, 0.25]), (2.0, [4 / 3, 4.0])])
def test_a_part_counts_by_its_share_of_the_batch(factor: float, weights: list[float]) -> None:
    """1.0: of a sum; 0.5: of a mean over samples; 2.0: of a sum that the trainer divides as if it were a mean."""
    batches = TrainerBatches(3)
    batches.scale_by(factor)
    parts = batches.cut([batch([[1], [2], [3], [4]], divisor=2)])
    assert [one.weight for one in parts] == pytest.approx(weights)
    assert [one.divisor for one in parts] == pytest.approx([2 / 0.75, 2 / 0.25])


def test_no_micro_batch_has_rows_of_two_batches() -> None:
    parts = TrainerBatches(2).cut([batch([[1], [2], [3]]), batch([[4]])])
    assert [part.inputs["labels"].flatten().tolist() for part in parts] == [[1, 2], [3], [4]]


def joined(size: int, *batches: TrainerBatch, rows_per_sample: int = 1) -> list[TrainerBatch]:
    cutter = TrainerBatches(size, rows_per_sample=rows_per_sample)
    cutter.joins = True
    return cutter.cut(batches)


def test_whole_batches_of_equally_many_samples_are_joined() -> None:
    pairs, single = [[1], [2]], [[9]]
    parts = joined(5, *(batch(pairs, divisor=4) for _ in range(3)), batch(single, divisor=4))
    assert [part.inputs["labels"].flatten().tolist() for part in parts] == [[1, 2, 1, 2], [1, 2], [9]]
    assert [part.divisor for part in parts] == [2, 4, 4]
    assert [len(part.inputs["labels"]) for part in joined(1, batch(pairs), batch(pairs))] == [1] * 4


def test_rows_of_joined_batches_are_padded_at_their_end() -> None:
    short = {"input_ids": [[5], [6]], "labels": [[5], [6]], "attention_mask": [[1], [1]], "weight": [0.5, 0.6]}
    long = {"input_ids": [[7, 8]] * 2, "labels": [[7, 8]] * 2, "attention_mask": [[0, 1]] * 2, "weight": [0.7, 0.8]}
    batches = [
        TrainerBatch({name: torch.tensor(value) for name, value in one.items()}, None, 1) for one in (short, long)
    ]
    cutter = TrainerBatches(4)
    cutter.joins, cutter.pad_token = cutter.can_be_joined(batches), 3
    (part,) = cutter.cut(batches)
    assert {name: one.tolist() for name, one in part.inputs.items() if name != "weight"} == {
        "input_ids": [[5, 3], [6, 3], [7, 8], [7, 8]],
        "labels": [[5, IGNORED], [6, IGNORED], [7, 8], [7, 8]],
        "attention_mask": [[1, 0], [1, 0], [0, 1], [0, 1]],
    }
    assert part.inputs["weight"].tolist() == pytest.approx([0.5, 0.6, 0.7, 0.8])
    assert batches[0].inputs["labels"].tolist() == [[5], [6]]


def test_joined_pairs_have_all_first_rows_before_all_second_ones() -> None:
    one, other = (
        TrainerBatch({"input_ids": torch.tensor(ids), "margin": torch.tensor([float(ids[0][0])])}, None, 1)
        for ids in ([[1], [2]], [[3, 3], [4, 4]])
    )
    (part,) = joined(2, one, other, rows_per_sample=2)
    assert part.inputs["input_ids"].tolist() == [[1, 0], [3, 3], [2, 0], [4, 4]]
    assert part.inputs["margin"].tolist() == [1, 3]


@pytest.mark.parametrize(
    "more",
    [
        {"pixel_values": torch.zeros(2, 3)},
        {"names": ["a", "b"]},
        {"inner": {"input_ids": torch.zeros(2, 1)}},
        {"scale": 0.5},  # which may be another one in the next batch
        {"attention_mask": torch.ones(2, 1, 1, 1)},
    ],
)
def test_batches_whose_padding_is_not_known_are_not_joined(more: dict[str, Any]) -> None:
    known = {"input_ids": torch.zeros(2, 1), "attention_mask": torch.ones(2, 1), "index": torch.arange(2)}
    cutter, batches = TrainerBatches(4), [TrainerBatch(known, None, 1)] * 2
    assert cutter.can_be_joined(batches)
    assert not cutter.can_be_joined(batches[:1])
    assert not cutter.can_be_joined([TrainerBatch(known | more, None, 1)] * 2)
    assert not cutter.can_be_joined([TrainerBatch({"input_ids": torch.zeros(2, 1)}, None, 1)] * 2)


def test_a_trial_of_joined_batches_takes_samples_of_two_that_are_padded_to_other_lengths() -> None:
    ignored = IGNORED
    whole = batch([[1, 2, 3], [1, ignored, ignored]])
    as_long, shorter = batch([[4, 5, ignored]]), batch([[6, 7]])
    cutter = TrainerBatches(4)
    cutter.joins = True
    one, other, both = cutter.trial_batches([whole, as_long, shorter])[0]
    assert [part.inputs["labels"].tolist() for part in (one, other)] == [[[1, 2, 3]], [[6, 7]]]
    assert both.inputs["labels"].tolist() == [[1, 2, 3], [6, 7, ignored]]


@pytest.mark.parametrize(("pair", "expected"), [((0, 1), [[1], [3], [1, 3]]), ((2, 3), [[0], [2], [0, 2]])])
def test_samples_with_the_most_and_the_fewest_labels_are_tried_first(pair: Any, expected: list[list[int]]) -> None:
    ignored = IGNORED
    small = batch([[7, 7, 7]])
    large = batch([[1, 2, ignored], [1, 2, 3], [ignored] * 3, [1, ignored, ignored]])
    assert tried(small, large, pair=pair)[0] == expected


def test_of_samples_with_equally_many_labels_one_loses_half_if_labels_are_ignored_anywhere() -> None:
    """Or a mean over labels would look like one over samples."""
    ignored = IGNORED
    one, other = [1, 2, 3, 4, ignored], [ignored, 5, 6, 7, 8]
    halved = [ignored, ignored, ignored, 7, 8]
    given = batch([one, other])
    assert tried(given) == ([[0], [1], [0, 1]], [[one], [halved], [one, halved]])
    assert given.inputs["labels"].tolist() == [one, other]
    assert tried(batch([[1, 2], [3, 4]]))[1] == [[[1, 2]], [[3, 4]], [[1, 2], [3, 4]]]


def test_without_two_samples_a_trial_has_the_one_there_is() -> None:
    assert tried(batch([[1], [2]]), pair=None)[0] == [[0], [1]]
    assert tried(batch([[1]]))[0] == [[0], [0], [0, 0]]
    assert TrainerBatches(4).trial_batches([]) == []
    assert [TrainerBatches(4).num_to_try(batches) for batches in ([], [batch([[1], [2]]), batch([[1]])])] == [0, 2]
