"""An epoch resumed at any place has the rest of its batches, and draws the same random numbers."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from tests.support.toys import Samples
from torchtune_adaptive.training.batch.epoch_batches import EpochBatches
from torchtune_adaptive.training.batch.row_format import Row
from torchtune_adaptive.training.batch.sampler import DealtSampler

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # by torchdata 0.11


def batches_over(
    samples: Samples, rows: int, *, ranks: int = 1, rank: int = 0, samples_per_step: int | None = None
) -> EpochBatches:
    """Shuffled batches; with ``samples_per_step``, samples are dealt to the ranks step by step."""
    dataset: Any = samples
    if samples_per_step is None:
        return EpochBatches(StatefulDistributedSampler(dataset, ranks, rank, shuffle=True, seed=3), rows)
    sampler = DealtSampler(dataset, ranks, rank, True, 3)
    sampler.set_samples_per_step(samples_per_step)
    return EpochBatches(sampler, rows)


def places(batch: list[Row]) -> list[int]:
    """The places of the rows in ``Samples(1, 2, 3, ...)``."""
    return [len(row["tokens"]) - 1 for row in batch]


def numbered(count: int) -> Samples:
    return Samples(*range(1, count + 1))


def epoch_of(batches: EpochBatches, epoch: int) -> list[list[int]]:
    found = [places(batch) for batch in batches.begin(epoch)]
    batches.go_to(0)
    return found


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    count=st.integers(1, 30),
    rows=st.integers(1, 4),
    ranks=st.integers(1, 3),
    is_dealt=st.booleans(),
    epoch=st.integers(0, 2),
    data=st.data(),
)
def test_an_epoch_resumed_at_any_place_has_the_rest_of_its_batches(
    count: int, rows: int, ranks: int, is_dealt: bool, epoch: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, ranks - 1))
    options: dict[str, Any] = {"ranks": ranks, "rank": rank, "samples_per_step": rows * ranks if is_dealt else None}
    whole = batches_over(numbered(count), rows, **options)
    expected = [epoch_of(whole, number) for number in (epoch, epoch + 1)]
    done = data.draw(st.integers(0, len(expected[0])))
    resumed = batches_over(numbered(count), rows, **options)
    resumed.go_to(done)
    assert resumed.done == done
    assert epoch_of(resumed, epoch) == expected[0][done:]
    assert epoch_of(resumed, epoch + 1) == expected[1]


def test_nothing_before_the_place_is_read() -> None:
    samples = numbered(20)
    order = [place for batch in epoch_of(batches_over(numbered(20), 3), 1) for place in batch]
    resumed = batches_over(samples, 3)
    resumed.go_to(4)
    batches = resumed.begin(1)
    assert samples.read == []
    next(batches)
    assert samples.read == order[12:15]
    assert [len(batch) for batch in batches] == [3]  # the last two rows fill no batch
    assert samples.read == order[12:18]


def test_batches_are_counted_until_the_epoch_ends() -> None:
    batches = batches_over(numbered(10), 3)
    assert (batches.done, batches.rows) == (0, 3)
    given_batches = batches.begin(0)
    assert batches.done == 0
    next(given_batches)
    assert batches.done == 1
    assert len(list(given_batches)) == 2
    assert batches.done == 3
    batches.go_to(0)
    assert batches.done == 0
    batches.go_to(1)
    assert next(iter(batches.begin(0)))
    assert batches.done == 2


def test_rows_of_a_batch_may_change_between_epochs() -> None:
    batches = batches_over(numbered(12), 2)
    epoch_of(batches, 0)
    batches.set_rows(5)
    assert (batches.rows, batches.data_loader.batch_size) == (5, 5)
    assert [len(batch) for batch in epoch_of(batches, 1)] == [5, 5]


def numbers_drawn(batches: EpochBatches, epoch: int) -> int:
    """How many numbers of torch's generator a whole epoch draws."""
    torch.manual_seed(0)
    epoch_of(batches, epoch)
    after = torch.get_rng_state()
    torch.manual_seed(0)
    for count in range(100):
        if torch.equal(torch.get_rng_state(), after):
            return count
        torch.empty((), dtype=torch.int64).random_()
    raise AssertionError("it draws other numbers, or many")


def test_a_resumed_epoch_draws_as_many_random_numbers_as_a_whole_one() -> None:
    """Dropout draws from the same generator. An epoch draws its numbers when it begins."""
    whole, resumed = batches_over(numbered(12), 2), batches_over(numbered(12), 2)
    expected = [numbers_drawn(whole, epoch) for epoch in range(3)]
    assert expected == [1, 1, 1]
    resumed.go_to(4)
    assert [numbers_drawn(resumed, epoch) for epoch in range(3)] == expected
    again = batches_over(numbered(12), 2)
    for begun in (0, 4):
        again.go_to(begun)
        torch.manual_seed(0)
        batches = again.begin(0)
        after = torch.get_rng_state()
        list(batches)
        again.go_to(0)
        assert torch.equal(torch.get_rng_state(), after)
