"""Distribute an epoch's samples over optimizer steps of any size, and each step's samples over the ranks."""

from collections.abc import Iterator
from typing import Any

from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from torchtune_adaptive.training.batch.rank_shares import rows_of_rank


class _GlobalBatchOrder(DistributedSampler):
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


class GlobalBatchSampler(StatefulDistributedSampler, _GlobalBatchOrder):
    """One rank's share of consecutive optimizer steps with ``samples_per_step`` samples over all ranks.

    A sample of the data set is used at most once per epoch, on one rank. Samples that do not fill a step are left
    out; with shuffling these differ between epochs. If ``samples_per_step`` is a multiple of the ranks, the samples are
    those of ``StatefulDistributedSampler``, except that it would fill the last step with repeated ones.

    Attributes:
        samples_per_step: at least the number of ranks.
    """
