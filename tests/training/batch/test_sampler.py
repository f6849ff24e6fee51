"""The rows of a step are divided evenly among the ranks; in equal shares the steps are those of the stock sampler."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from torchtune_adaptive.training.batch.rank_shares import largest_share, rows_of_rank
from torchtune_adaptive.training.batch.sampler import GlobalBatchSampler

properties = settings(max_examples=100)


@properties
@given(samples=st.integers(1, 500), ranks=st.integers(1, 64))
def test_the_rows_of_all_ranks_are_the_step_and_differ_by_one_at_most(samples: int, ranks: int) -> None:
    rows = [rows_of_rank(samples, rank=rank, ranks=ranks) for rank in range(ranks)]
    assert sum(rows) == samples
    assert max(rows) - min(rows) <= 1
    assert rows == sorted(rows, reverse=True)
    assert max(rows) == largest_share(samples, ranks=ranks)


@properties
@given(
    samples=st.integers(1, 60),
    ranks=st.integers(1, 5),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**31),
    times=st.integers(1, 4),
    epoch=st.integers(0, 3),
)
def test_with_equal_samples_on_each_rank_steps_are_those_of_the_stock_sampler(
    samples: int, ranks: int, shuffle: bool, seed: int, times: int, epoch: int
) -> None:
    dataset: Any = range(samples)
    for rank in range(ranks):
        stock: Any = StatefulDistributedSampler(dataset, ranks, rank, shuffle, seed)
        stock.set_epoch(epoch)
        sampler = GlobalBatchSampler(dataset, ranks, rank, shuffle, seed)
        sampler.set_samples_per_step(times * ranks)
        sampler.set_epoch(epoch)
        assert list(sampler) == list(stock)[: samples // (times * ranks) * times]
        assert len(sampler) == len(list(sampler))
