"""Each optimizer step is a slice of one order of the samples, divided among the ranks; a run can resume at any step."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from torchtune_adaptive.training.batch.rank_shares import largest_share, rows_of_rank
from torchtune_adaptive.training.batch.sampler import DealtSampler

properties = settings(derandomize=True, deadline=None, max_examples=100)


class Run(NamedTuple):
    """Ranks that train on ``samples`` samples; the data set is the list of its indices."""

    samples: int
    ranks: int
    shuffle: bool
    seed: int

    @property
    def dataset(self) -> Any:
        return list(range(self.samples))

    def sampler(self, rank: int, samples_per_step: int, *, epoch: int = 0) -> DealtSampler:
        sampler = DealtSampler(self.dataset, self.ranks, rank, self.shuffle, self.seed)
        sampler.set_samples_per_step(samples_per_step)
        sampler.set_epoch(epoch)
        return sampler

    def order(self, epoch: int) -> list[int]:
        """The order of torch's sampler for a single rank."""
        whole: Any = DistributedSampler(self.dataset, 1, 0, shuffle=self.shuffle, seed=self.seed)
        whole.set_epoch(epoch)
        return list(whole)


runs = st.builds(Run, st.integers(1, 60), st.integers(1, 5), st.booleans(), st.integers(0, 2**31))
epochs = st.integers(0, 3)
extras = st.integers(0, 12)  # samples of a step above one per rank


def steps_of(samples: Sequence[int], rows: int) -> list[list[int]]:
    return [list(samples[first : first + rows]) for first in range(0, len(samples), rows)]


@properties
@given(samples=st.integers(1, 500), ranks=st.integers(1, 64))
def test_the_rows_of_all_ranks_are_the_step_and_differ_by_one_at_most(samples: int, ranks: int) -> None:
    rows = [rows_of_rank(samples, rank=rank, ranks=ranks) for rank in range(ranks)]
    assert sum(rows) == samples
    assert max(rows) - min(rows) <= 1
    assert rows == sorted(rows, reverse=True)
    assert max(rows) == largest_share(samples, ranks=ranks)


@properties
@given(run=runs, extra=extras, epoch=epochs)
def test_each_step_is_the_next_slice_of_one_order_and_no_sample_comes_twice(run: Run, extra: int, epoch: int) -> None:
    size = run.ranks + extra
    samplers = [run.sampler(rank, size, epoch=epoch) for rank in range(run.ranks)]
    dealt = [list(sampler) for sampler in samplers]
    assert [len(sampler) for sampler in samplers] == [len(samples) for samples in dealt]
    rows = [rows_of_rank(size, rank=rank, ranks=run.ranks) for rank in range(run.ranks)]
    of_ranks = [steps_of(samples, rows[rank]) for rank, samples in enumerate(dealt)]
    steps = [sorted(itertools.chain(*step)) for step in zip(*of_ranks, strict=True)]
    order = run.order(epoch)
    assert steps == [sorted(order[first : first + size]) for first in range(0, run.samples // size * size, size)]
    taken = list(itertools.chain(*dealt))
    assert len(set(taken)) == len(taken) == run.samples // size * size


@properties
@given(run=runs, times=st.integers(1, 4), epoch=epochs)
def test_with_equal_samples_on_each_rank_steps_are_those_of_the_stock_sampler(run: Run, times: int, epoch: int) -> None:
    for rank in range(run.ranks):
        stock: Any = StatefulDistributedSampler(run.dataset, run.ranks, rank, run.shuffle, run.seed)
        stock.set_epoch(epoch)
        dealt = list(run.sampler(rank, times * run.ranks, epoch=epoch))
        assert dealt == list(stock)[: len(dealt)]
