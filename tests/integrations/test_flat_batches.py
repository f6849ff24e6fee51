"""Flat batches become padded rows, and the same flat batches again."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from torchtune_adaptive import InputError
from torchtune_adaptive.integrations.batches import TrainerBatches
from torchtune_adaptive.integrations.flat_batches import WithLengths, as_flat, as_rows, check_same_again
from torchtune_adaptive.integrations.trainer_batch import TrainerBatch

# Of three samples, the second one of two documents.
SAMPLES: list[dict[str, list[int]]] = [
    {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "seq_lengths": [3]},
    {"input_ids": [8, 9, 3, 4, 5], "labels": [8, 9, -100, 4, 5], "seq_lengths": [2, 3]},
    {"input_ids": [6, 7], "labels": [6, 7], "seq_lengths": [2]},
]


def collate(samples: list[Any], *, multiple: int = 1) -> dict[str, Any]:
    """As TRL's collator: labels of first tokens are ignored, the end is padded to a multiple."""

    def row(entries: list[int], padding: int) -> torch.Tensor:
        return torch.tensor([entries + [padding] * (-len(entries) % multiple)])

    positions = row([place for one in samples for length in one["seq_lengths"] for place in range(length)], 0)
    labels = row([label for one in samples for label in one["labels"]], -100)
    starts = (positions[0] == 0).nonzero().flatten()
    return {
        "input_ids": row([token for one in samples for token in one["input_ids"]], 0),
        "labels": labels.masked_fill(positions == 0, -100),
        "position_ids": positions,
        "cu_seq_lens_q": torch.cat([starts, torch.tensor([positions.shape[1]])]).int(),
        "max_length_q": max(length for one in samples for length in one["seq_lengths"]),
    }


def assert_equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(torch.as_tensor(one[name]), torch.as_tensor(other[name])) for name in one)


@pytest.mark.parametrize("multiple", [1, 8])
def test_micro_batches_of_a_flat_batch_are_what_the_collator_makes_of_their_samples(multiple: int) -> None:
    def padded(samples: list[Any]) -> Mapping[str, Any]:
        return collate(samples, multiple=multiple)

    rows = as_rows(WithLengths(padded)(SAMPLES))
    assert rows["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]
    first, second = TrainerBatches(2).cut([TrainerBatch(rows, num_items=None, divisor=1)])
    assert_equal(as_flat(first.inputs, padded), padded(SAMPLES[:2]))
    assert_equal(as_flat(second.inputs, padded), padded(SAMPLES[2:]))


def test_samples_of_several_flat_batches_are_joined() -> None:
    batches = [WithLengths(collate)([one]) for one in SAMPLES[:2]]
    cutter = TrainerBatches(2)
    every = [TrainerBatch(as_rows(one), num_items=None, divisor=2) for one in batches]
    assert cutter.can_be_joined(every)
    cutter.joins = True
    (joined,) = cutter.cut(every)
    assert_equal(as_flat(joined.inputs, collate), collate(SAMPLES[:2]))


def test_other_batches_stay_as_they_are() -> None:
    batch = {"input_ids": torch.ones(2, 3)}
    assert as_rows(batch) is batch


def test_a_collator_that_takes_samples_otherwise_is_refused() -> None:
    def by_weight(samples: list[Any]) -> Mapping[str, Any]:
        """With a column that only samples of the data set have."""
        return {**collate(samples), "weights": torch.tensor([one.get("weight", 1.0) for one in samples])}

    check_same_again(WithLengths(by_weight)(SAMPLES), by_weight)
    with pytest.raises(InputError, match="`weights` of a batch differs"):
        check_same_again(WithLengths(by_weight)([{**one, "weight": 0.5} for one in SAMPLES]), by_weight)
    with pytest.raises(InputError, match=r"must use `self\.data_collator`"):
        check_same_again(collate(SAMPLES), collate)
