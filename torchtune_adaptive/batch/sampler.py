"""Distribute an epoch's samples over optimizer steps of any size, and each step's samples over the ranks."""

import math
from collections.abc import Iterator
from typing import Any

from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from torchtune_adaptive.errors import InputError


def rows_of_rank(samples_per_step: int, *, rank: int, ranks: int) -> int:
    """Samples of ``rank`` in an optimizer step: the first ranks have one more where they cannot have the same number.

    >>> [rows_of_rank(10, rank=rank, ranks=4) for rank in range(4)]
    [3, 3, 2, 2]
    """
    return len(range(rank, samples_per_step, ranks))


def most_rows(samples_per_step: int, *, ranks: int) -> int:
    """Samples of an optimizer step on the rank that has most of them."""
    return math.ceil(samples_per_step / ranks)


class _DealtOrder(DistributedSampler):
    """One rank's samples, in the order of ``DistributedSampler`` on a single rank."""

    samples_per_step = 1

    def set_samples_per_step(self, samples_per_step: int) -> None:
        """Set ``samples_per_step``, between epochs."""
        self.samples_per_step = samples_per_step

    def __iter__(self) -> Iterator[int]:
        whole: Any = DistributedSampler(self.dataset, 1, 0, self.shuffle, self.seed)
        whole.set_epoch(self.epoch)
        order = list(whole)
        for step in range(len(order) // self.samples_per_step):
            first = step * self.samples_per_step
            yield from order[first + self.rank : first + self.samples_per_step : self.num_replicas]

    def __len__(self) -> int:
        steps = len(self.dataset) // self.samples_per_step  # pyright: ignore[reportArgumentType]
        return steps * rows_of_rank(self.samples_per_step, rank=self.rank, ranks=self.num_replicas)


class DealtSampler(StatefulDistributedSampler, _DealtOrder):
    """A rank's share of optimizer steps of ``samples_per_step`` samples over all ranks, one step after the other.

    Every sample of the data set is in one step of an epoch at most, on one rank. What does not fill a step is left
    out, other samples in every epoch if they are shuffled. Where ``samples_per_step`` is a multiple of the ranks, the
    samples are those of ``StatefulDistributedSampler``, which would fill the last step with repeated ones.

    Attributes:
        samples_per_step: at least the number of ranks.
    """


def check_samples_per_step(samples_per_step: int, *, ranks: int) -> None:
    """Check that every rank has a sample in each optimizer step.

    Raises:
        InputError: there are fewer samples than ranks.
    """
    if samples_per_step < ranks:
        raise InputError(
            f"`global_batch_size` must be at least the number of ranks ({ranks}), but is {samples_per_step} instead."
        )
