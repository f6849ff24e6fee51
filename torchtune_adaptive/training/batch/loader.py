"""The samples of each optimizer step, and the steps per epoch. The only owner of the batch size."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from torchtune_adaptive.errors import InputError
from torchtune_adaptive.text import count_text
from torchtune_adaptive.training.batch.rank_shares import (
    check_samples_per_step,
    largest_share,
    rows_of_rank,
    small_samples,
)
from torchtune_adaptive.training.batch.row_format import NumberedSamples, Row, RowFormat


@dataclass(frozen=True)
class StepSamples:
    """The samples of one optimizer step, which are cut into micro-batches, and cut again if memory runs out.

    Attributes:
        rows: this rank's samples, in host memory.
        num_samples: samples over all ranks, divided as ``rows_of_rank`` says.
        ranks: number of ranks with different samples.
        measured: whether the gradient norm of a small batch is measured, which is the first half.
        rows_per_micro_step: of torchtune's micro-step, by the config; None where the config has only a global batch.
        shares: of each row in its micro-step; None where they are not known.
    """

    rows: list[Row]
    num_samples: int
    ranks: int
    measured: bool = False
    rows_per_micro_step: int | None = None
    shares: list[float] | None = None

    @property
    def largest_share(self) -> int:
        """The largest number of samples on a rank."""
        return largest_share(self.num_samples, ranks=self.ranks)

    def halves(self) -> tuple["StepSamples", "StepSamples"]:
        """The first and the second half of each rank's samples. The first half is larger if the number is odd.

        >>> first, second = StepSamples([{"tokens": [1]}] * 3, num_samples=6, ranks=2).halves()
        >>> (len(first.rows), first.num_samples), (len(second.rows), second.num_samples)
        ((2, 4), (1, 2))
        """
        middle, small = (len(self.rows) + 1) // 2, small_samples(self.num_samples, ranks=self.ranks)
        first, rest = (
            (self.rows[part], None if self.shares is None else self.shares[part])
            for part in (slice(middle), slice(middle, None))
        )
        return (
            replace(self, rows=first[0], shares=first[1], num_samples=small, measured=False),
            replace(self, rows=rest[0], shares=rest[1], num_samples=self.num_samples - small, measured=False),
        )


class StepLoader:
    """Yields the samples of each optimizer step, with torchtune's ``batch_size``: samples per rank and micro-step.

    As in torchtune, micro-batches left over at an epoch's end are used in the first step of the next epoch.

    Args:
        sampler: this rank's ``DistributedSampler`` over the data set.
        max_steps_per_epoch: the most optimizer steps per epoch; None: no bound.
        longest: the most tokens of a sample that the model takes; None: any number.

    Attributes:
        dataset: the samples, by index.
        ranks: number of ranks with different samples.
        batch_size: the current batch size, in the unit of the config's key. ``set_batch_size`` changes it.
        micro_steps: micro-steps per optimizer step, as long as they fit.
        data_loader: the current data loader, whose state is saved in torchtune's checkpoints.
    """

    key = "batch_size"
    is_global = False

    def __init__(
        self,
        sampler: Any,
        row_format: RowFormat,
        *,
        batch_size: int,
        micro_steps: int,
        max_steps_per_epoch: int | None,
        longest: int | None = None,
    ) -> None:
        self.dataset: Any = sampler.dataset
        self._samples = NumberedSamples(self.dataset, row_format, longest=longest)
        self.ranks: int = sampler.num_replicas
        self.micro_steps = micro_steps
        self._sampler = sampler
        self._row_format = row_format
        self._max_steps_per_epoch = max_steps_per_epoch
        self._left_over: list[Row] = []
        self._batches_done = 0  # of the current epoch; 0 between epochs
        self.set_batch_size(batch_size)

    @property
    def largest_batch_size(self) -> int:
        """The batch size at which an epoch is a single optimizer step."""
        return len(self._sampler) // self.micro_steps

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps per epoch."""
        return self.steps_per_epoch_at(self.batch_size)

    @property
    def samples_per_step(self) -> int:
        """Samples of an optimizer step over all ranks."""
        return self.samples_per_step_at(self.batch_size)

    @property
    def rows_per_step(self) -> int:
        """The largest number of samples of an optimizer step on a rank."""
        return largest_share(self.samples_per_step, ranks=self.ranks)

    @property
    def rows_per_micro_step(self) -> int:
        """Samples of a micro-step, as long as they fit."""
        return self.batch_size

    @property
    def steps_done(self) -> int:
        """Optimizer steps of the current epoch so far; 0 between epochs."""
        return self._batches_done // self.micro_steps

    def samples_per_step_at(self, batch_size: int) -> int:
        """Samples of an optimizer step over all ranks, at another batch size."""
        return batch_size * self.micro_steps * self.ranks

    def steps_per_epoch_at(self, batch_size: int) -> int:
        """Optimizer steps per epoch, at another batch size."""
        steps = self.largest_batch_size // batch_size
        return steps if self._max_steps_per_epoch is None else min(steps, self._max_steps_per_epoch)

    def steps_in(self, epoch_samples: int, *, batch_size: int) -> int:
        """Whole optimizer steps of ``batch_size`` in the first ``epoch_samples`` of an epoch, at most all of it."""
        return min(epoch_samples // self.samples_per_step_at(batch_size), self.steps_per_epoch_at(batch_size))

    def set_batch_size(self, batch_size: int) -> None:
        """Set the batch size, between epochs."""
        self.batch_size = batch_size
        self._rows_per_batch = self._rows_of_rank(batch_size)
        self.data_loader = self._make_data_loader(self._sampler)

    def steps(self, epoch: int) -> Iterator[StepSamples]:
        """The samples of each remaining optimizer step of ``epoch``; those before are not read.

        The data loader's iterator is made at once, which draws a random number.
        """
        self._sampler.set_epoch(epoch)
        if self._batches_done:
            rest = list(self._sampler)[self._batches_done * self._rows_per_batch :]
            self.data_loader = self._make_data_loader(rest)
        elif self.data_loader.sampler is not self._sampler:
            self.data_loader = self._make_data_loader(self._sampler)
        return self._steps(iter(self.data_loader))

    def _steps(self, batches: Iterator[list[Row]]) -> Iterator[StepSamples]:
        while self.steps_done != self._max_steps_per_epoch and (rows := next(batches, None)) is not None:
            self._batches_done += 1
            self._left_over += rows
            if self._batches_done % self.micro_steps == 0:
                rows, self._left_over = self._left_over, []
                yield self._step_samples(rows)
        if self.steps_done < self.steps_per_epoch:
            raise InputError(
                f"`dataset` ended an epoch after {self.steps_done} of {self.steps_per_epoch} steps: a sample raised"
                " StopIteration."
            )
        self._batches_done = 0

    def drawn_steps(self, count: int) -> list[StepSamples]:
        """This rank's samples of ``count`` optimizer steps, or as many as there are, drawn at random: always the same.

        The position in the epoch stays.

        Raises:
            InputError: a sample cannot be loaded.
        """
        size = self.samples_per_step
        order = random.Random(0).sample(range(len(self.dataset)), len(self.dataset) // size * size)
        starts = range(0, min(len(order), count * size), size)
        own = [order[start : start + size][self._sampler.rank :: self.ranks] for start in starts]
        return [StepSamples([self._samples[one] for one in step], size, self.ranks) for step in own]

    def describe(self, batch_size: int) -> str:
        """The size of an optimizer step as arithmetic, for the log."""
        return (
            f"{count_text(batch_size, 'row')} * {count_text(self.micro_steps, 'micro-step')}"
            f" * {count_text(self.ranks, 'rank')} = {self.samples_per_step_at(batch_size)} samples per optimizer step"
        )

    def state_dict(self) -> dict[str, Any]:
        """The state for a resumed run. ``left_over`` are positions in a rank's order of the last epoch's samples."""
        end = len(self._sampler) // self._rows_per_batch * self._rows_per_batch
        return {
            "batch_size": self.batch_size,
            "is_global": self.is_global,
            "epoch_samples": self.steps_done * self.samples_per_step,
            "samples_per_step": self.samples_per_step,
            "left_over": (end - len(self._left_over), end),
            "dataset_samples": len(self.dataset),
            "ranks": self.ranks,
        }

    def load_state_dict(self, state: dict[str, Any], *, epoch: int) -> None:
        """Resume from ``state_dict``, saved after ``epoch`` or within the next one. The caller has set the batch size.

        If the number of samples per step has changed, the run resumes at the last position where one of its steps
        begins. If the epoch's last step has been reached or passed, the epoch ends at once. Left-over samples are read
        again, unless the data, the number of ranks or the batch's unit changed.
        """
        self._batches_done = self.steps_in(state["epoch_samples"], batch_size=self.batch_size) * self.micro_steps
        is_alike = state["is_global"], state["dataset_samples"], state["ranks"]
        if is_alike == (self.is_global, len(self.dataset), self.ranks):
            self._sampler.set_epoch(epoch)
            self._left_over = [self._samples[index] for index in list(self._sampler)[slice(*state["left_over"])]]

    def _rows_of_rank(self, batch_size: int) -> int:
        """This rank's rows of a batch that the data loader reads."""
        return batch_size

    def _make_data_loader(self, indices: Any) -> StatefulDataLoader:
        """As in torchtune, samples at the end that do not fill a batch are dropped."""
        rows: Any = self._rows_per_batch
        return StatefulDataLoader(self._samples, batch_size=rows, sampler=indices, collate_fn=list, drop_last=True)

    def _step_samples(self, rows: list[Row]) -> StepSamples:
        return StepSamples(rows, len(rows) * self.ranks, self.ranks, rows_per_micro_step=self.batch_size)


class _GlobalBatchOrder(DistributedSampler):
    """One rank's samples, in the order of ``DistributedSampler`` on a single rank."""

    samples_per_step = 1

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
        samples_per_step: at least the number of ranks. It may be set between epochs.
    """


class GlobalStepLoader(StepLoader):
    """A ``StepLoader`` whose batch size is ``adaptive.global_batch_size``: samples per step over all ranks.

    The sampler's order, shuffling and seed are kept.
    """

    key = "global_batch_size"
    is_global = True
    _sampler: GlobalBatchSampler

    def __init__(self, sampler: Any, row_format: RowFormat, *, batch_size: int, **options: Any) -> None:
        check_samples_per_step(batch_size, ranks=sampler.num_replicas)
        new = GlobalBatchSampler(sampler.dataset, sampler.num_replicas, sampler.rank, sampler.shuffle, sampler.seed)
        super().__init__(new, row_format, batch_size=batch_size, micro_steps=1, **options)

    @property
    def largest_batch_size(self) -> int:
        return len(self.dataset)

    @property
    def rows_per_micro_step(self) -> int:
        return self.rows_per_step

    def samples_per_step_at(self, batch_size: int) -> int:
        return batch_size

    def describe(self, batch_size: int) -> str:
        return f"{batch_size} samples per optimizer step on {count_text(self.ranks, 'rank')}"

    def _rows_of_rank(self, batch_size: int) -> int:
        self._sampler.samples_per_step = batch_size
        return rows_of_rank(batch_size, rank=self._sampler.rank, ranks=self.ranks)

    def _step_samples(self, rows: list[Row]) -> StepSamples:
        return StepSamples(rows, num_samples=self.batch_size, ranks=self.ranks)


def check_sampler(sampler: Any, *, is_global: bool) -> None:
    """Check that optimizer steps can follow the order of ``sampler``, which a recipe of one's own may have set up.

    Args:
        is_global: of a global batch, whose order over all ranks is made anew.

    Raises:
        InputError: they cannot.
    """
    name, kept = type(sampler).__name__, (DistributedSampler.__iter__, StatefulDistributedSampler.__iter__)
    if not isinstance(sampler, DistributedSampler):
        raise InputError(
            f"The data loader of `_setup_data` must have a `DistributedSampler`, but has a {name} instead."
        )
    if is_global and type(sampler).__iter__ not in kept:
        raise InputError(f"`global_batch_size` needs torchtune's sampler: it would not keep the order of {name}.")


def check_fills_step(loader: StepLoader, batch_size: int) -> None:
    """Check that the data set is large enough for an optimizer step of ``batch_size``.

    Raises:
        InputError: the data set is too small.
    """
    if loader.steps_per_epoch_at(batch_size) == 0:
        described, samples = loader.describe(batch_size), len(loader.dataset)
        raise InputError(f"`dataset` has {samples} samples, too few for one optimizer step ({described}).")
