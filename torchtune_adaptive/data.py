"""A recipe's samples: what each optimizer step is made of, and how many steps an epoch has."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from datasets.exceptions import DatasetsError
from omegaconf import DictConfig
from torch.utils._python_dispatch import _disable_current_modes
from torchdata.stateful_dataloader import StatefulDataLoader

from torchtune_adaptive.batch.sampler import DealtSampler, most_rows, rows_of_rank
from torchtune_adaptive.distributed.consensus import Consensus
from torchtune_adaptive.errors import InputError, reason_of
from torchtune_adaptive.memory.meter import MemoryMeter
from torchtune_adaptive.refuse import refuse_few_samples_per_step, refuse_small_data
from torchtune_adaptive.settings import AdaptiveSettings
from torchtune_adaptive.worst_case import Row


class AdaptiveData:
    """Keeps the data loader of the stock recipe below it, and what depends on it.

    A batch size is in the unit of the key that a config gives it by: ``batch_size`` counts the samples of a rank and
    micro-step, ``adaptive.global_batch_size`` those of an optimizer step over all ranks.

    The annotated attributes are the stock recipe's own, as its ``setup`` leaves them.
    """

    max_steps_per_epoch: int | None
    _device: torch.device
    _loss_fn: Any
    _dataloader: Any  # a StatefulDataLoader over a StatefulDistributedSampler
    _gradient_accumulation_steps: int
    _steps_per_epoch: int

    _adaptive: AdaptiveSettings
    _consensus: Consensus
    _meter: MemoryMeter | None = None
    _collate: Callable[[Sequence[Row]], dict[str, Any]]  # the data loader's own
    _longest_row: Row | None = None
    _first_tokens_count = True  # in a micro-batch's weight, as in stock, although nothing predicts them

    def __init__(self, cfg: DictConfig) -> None:
        super().__init__(cfg=cfg)  # pyright: ignore[reportCallIssue]
        if self._is_global:
            self._gradient_accumulation_steps = 1  # a step's samples come as one batch, cut as memory wants it
        # Where samples are ours to cut, the weight of each must not depend on the cut.
        self._first_tokens_count = not self._is_global and self._adaptive.max_tokens_per_micro_batch is None
        self._pending: list[Row] = []

    @property
    def _is_global(self) -> bool:
        """Whether batch sizes count the samples of an optimizer step over all ranks."""
        return self._adaptive.global_batch_size is not None

    @property
    def _batch_size(self) -> int:
        """The present batch size."""
        return self._dataloader.sampler.samples_per_step if self._is_global else self._dataloader.batch_size

    @property
    def _ranks(self) -> int:
        """Ranks that have samples of their own."""
        return self._dataloader.sampler.num_replicas

    def _samples_per_step_at(self, batch_size: int) -> int:
        """Samples of an optimizer step over all ranks."""
        return batch_size if self._is_global else batch_size * self._gradient_accumulation_steps * self._ranks

    def _samples_in(self, window: Sequence[Row]) -> int:
        """Samples of all ranks in an optimizer step of which this one has ``window``."""
        return self._batch_size if self._is_global else len(window) * self._ranks

    def _rows_at(self, batch_size: int) -> int:
        """Samples of an optimizer step on the rank that has most of them."""
        return most_rows(self._samples_per_step_at(batch_size), ranks=self._ranks)

    def _largest_batch_size(self) -> int:
        """The batch size at which an epoch is a single optimizer step."""
        if self._is_global:
            return len(self._dataloader.dataset)
        return len(self._dataloader.sampler) // self._gradient_accumulation_steps

    def _steps_at(self, batch_size: int) -> int:
        """Optimizer steps per epoch."""
        steps = self._largest_batch_size() // batch_size
        return steps if self.max_steps_per_epoch is None else min(steps, self.max_steps_per_epoch)

    def _set_batch_size(self, batch_size: int) -> None:
        """The only writer of the batch size: data loader, steps per epoch and torchtune's label cache follow it."""
        loader, rows = self._dataloader, batch_size
        if self._is_global:
            loader.sampler.samples_per_step = batch_size
            rows = rows_of_rank(batch_size, rank=loader.sampler.rank, ranks=self._ranks)
        self._dataloader = _loader(loader.sampler, rows)
        self._steps_per_epoch = self._steps_at(batch_size)
        self.ignore_labels_cache = torch.full((rows, 1), self._loss_fn.ignore_index, device=self._device)

    def _setup_data(self, *args: Any, **kwargs: Any) -> StatefulDataLoader:
        """Stock's data loader, but that it gives lists of samples: how they are cut is decided later."""
        try:
            loader = super()._setup_data(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        except (DatasetsError, OSError, StopIteration, ValueError) as error:  # the last but one: an empty JSON file
            raise InputError(f"`dataset` must be loadable and not empty, but failed: {reason_of(error)}.") from error
        if len(loader.dataset) == 0:
            raise InputError("`dataset` must have samples, but has 0.")
        self._collate, loader.collate_fn = loader.collate_fn, list
        return self._dealt(loader, self._adaptive.global_batch_size) if self._adaptive.global_batch_size else loader

    def _dealt(self, loader: StatefulDataLoader, samples_per_step: int) -> StatefulDataLoader:
        """``loader`` with the samples of a rank in an optimizer step as its batch."""
        stock: Any = loader.sampler
        ranks = stock.num_replicas
        refuse_few_samples_per_step(samples_per_step, ranks=ranks)
        sampler = DealtSampler(loader.dataset, ranks, stock.rank, stock.shuffle, stock.seed)
        sampler.samples_per_step = samples_per_step
        return _loader(sampler, rows_of_rank(samples_per_step, rank=stock.rank, ranks=ranks))

    def _windows(self) -> Iterator[list[Row]]:
        """The samples of each optimizer step of an epoch.

        As in stock, micro-batches left over at an epoch's end open the next epoch's first window.
        """
        for index, rows in enumerate(self._dataloader, start=1):
            self._pending += rows
            if index % self._gradient_accumulation_steps == 0:
                window, self._pending = self._pending, []
                yield window

    def _left_over(self) -> tuple[int, int]:
        """The places, in this epoch's order of a rank's samples, of those that open the next epoch's first window."""
        end = len(self._dataloader) * self._dataloader.batch_size
        return end - len(self._pending), end

    def _take_up_left_over(self, left_over: tuple[int, int], *, epoch: int) -> None:
        """Have the samples of ``epoch`` again that it left over."""
        sampler = self._dataloader.sampler
        sampler.set_epoch(epoch)
        self._pending = [self._dataloader.dataset[place] for place in list(sampler)[slice(*left_over)]]

    def _collated(self, rows: Sequence[Row]) -> dict[str, Any]:
        """A batch of ``rows`` on the host. Unseen by the meter, because its operations are as many as its rows."""
        self._longest_row = max(rows if self._longest_row is None else [self._longest_row, *rows], key=num_tokens)
        if self._meter is None:
            return self._collate(rows)
        with _disable_current_modes():
            batch = self._collate(rows)
        self._meter.count(batch)
        return batch

    def _refuse_small_data(self, batch_size: int) -> None:
        refuse_small_data(len(self._dataloader.dataset), needed=self._arithmetic(batch_size))

    def _arithmetic(self, batch_size: int) -> str:
        """What an optimizer step is made of, said aloud."""
        samples = self._samples_per_step_at(batch_size)
        if self._is_global:
            return f"{samples} samples per optimizer step on {self._ranks} ranks"
        micro_steps = self._gradient_accumulation_steps
        return (
            f"{batch_size} rows * {micro_steps} micro-steps * {self._ranks} ranks"
            f" = {samples} samples per optimizer step"
        )


def _loader(sampler: Any, rows: int) -> StatefulDataLoader:
    """Lists of ``rows`` samples of the sampler's data set; as in stock, fewer at the end are dropped."""
    return StatefulDataLoader(sampler.dataset, batch_size=rows, sampler=sampler, collate_fn=list, drop_last=True)


def num_tokens(row: Row) -> int:
    """Tokens of a sample."""
    return len(row["tokens"])
