"""The batches that a trainer has collated, cut into micro-batches."""

import bisect
import copy
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset

from torchtune_adaptive.engine.distributed.snapshot import keep_random_states
from torchtune_adaptive.engine.progress import Bar
from torchtune_adaptive.engine.recovery.micro_batches import Slices
from torchtune_adaptive.engine.recovery.size_range import Cuts, num_tokens
from torchtune_adaptive.errors import InputError, quote

log = logging.getLogger(__name__)

_ROUNDING = 1e-3  # of the same loss, computed twice on a device whose sums have no fixed order


class HostBatch(NamedTuple):
    """A batch of the trainer, or the part of one in a micro-batch.

    Attributes:
        inputs: tensors and lists with an entry per row, and values for all rows.
        num_items: the labels in the optimizer step on all ranks, by which the loss is divided; None: not counted.
        divisor: by what the trainer divides a loss that is a mean over samples. For a whole batch, the number of
            batches in the optimizer step.
    """

    inputs: Mapping[str, Any]
    num_items: Any
    divisor: float


class HostBatches(Slices):
    """Cuts the batches of an optimizer step into micro-batches. None has rows of two batches.

    Args:
        size: samples in a micro-batch.
        rows_per_sample: 2 if a sample is a pair whose parts are in the first and in the second half of a batch.
    Raises:
        InputError: ``size`` is not an integer of at least 1.

    >>> batch = HostBatch({"input_ids": torch.tensor([[3], [1], [4]])}, num_items=None, divisor=1)
    >>> [(part.inputs["input_ids"].tolist(), part.divisor) for part in HostBatches(2).cut([batch])]
    [([[3], [1]], 1.5), ([[4]], 3.0)]
    """

    def __init__(self, size: int, *, rows_per_sample: int = 1) -> None:
        super().__init__(size, lambda micro_batch: num_tokens(micro_batch.inputs))
        self._rows_per_sample = rows_per_sample

    def num_rows(self, micro_batch: HostBatch) -> int:
        """The samples of a micro-batch."""
        return self.num_samples(micro_batch.inputs)

    def rehearsals(self, samples: Sequence[HostBatch]) -> list[list[HostBatch]]:
        """The first sample, then the first two, then what ``undivided_share`` needs; to try next, without the two."""
        if not samples:
            return []
        one = self.first(samples[0], 1)
        most = min(self.size, self.num_samples(samples[0].inputs))
        again: list[HostBatch] = []
        if one.num_items is not None:
            twice = one._replace(num_items=2 * one.num_items)
            again = [twice, twice._replace(divisor=2 * one.divisor)]
        return [[one, self.first(samples[0], min(number, most)), *again] for number in (2, 1)]

    def first(self, batch: HostBatch, num_samples: int) -> HostBatch:
        """The first ``num_samples`` of ``batch``."""
        return self._part(batch, 0, num_samples)

    def num_samples(self, inputs: Mapping[str, Any]) -> int:
        """The number of samples in a batch.

        Raises:
            InputError: the batch has something whose rows are not known.
        """
        lengths = {name: len(value) for name, value in inputs.items() if _has_rows(value)}
        num_samples = max(lengths.values(), default=0) // self._rows_per_sample
        if not num_samples or not {*lengths.values()} <= {num_samples, num_samples * self._rows_per_sample}:
            rows = "two rows" if self._rows_per_sample > 1 else "one row"
            raise InputError(f"Every tensor of a batch must have {rows} per sample, but has {quote(lengths)} instead.")
        return num_samples

    def _largest(self, samples: Sequence[HostBatch]) -> int:
        return min(self.size, max(self.num_samples(batch.inputs) for batch in samples))

    def _consecutive(self, samples: Sequence[HostBatch]) -> tuple[Cuts, Callable[[list[int]], HostBatch]]:
        """As in ``Slices``; numbers are counted over all batches."""
        counts = [self.num_samples(batch.inputs) for batch in samples]
        starts = [0, *itertools.accumulate(counts)]
        cuts: Cuts = []
        for first, end in itertools.pairwise(starts):
            cuts += [list(range(start, min(start + self.size, end))) for start in range(first, end, self.size)]

        def take(rows: list[int]) -> HostBatch:
            number = bisect.bisect_right(starts, rows[0]) - 1
            return self._part(samples[number], rows[0] - starts[number], rows[-1] + 1 - starts[number])

        return cuts, take

    def _part(self, batch: HostBatch, start: int, stop: int) -> HostBatch:
        num_samples = self.num_samples(batch.inputs)
        stop = min(stop, num_samples)

        def part(value: Any) -> Any:
            if not _has_rows(value):
                return value
            if len(value) == num_samples:
                return value[start:stop]
            halves = value[start:stop], value[num_samples + start : num_samples + stop]
            return torch.cat(halves) if isinstance(value, torch.Tensor) else [*halves[0], *halves[1]]

        inputs = {name: part(value) for name, value in batch.inputs.items()}
        return batch._replace(inputs=inputs, divisor=batch.divisor * num_samples / (stop - start))


def _has_rows(value: Any) -> bool:
    """Whether a value of a batch has an entry per row, or is refused for not having it."""
    return value.ndim > 0 if isinstance(value, torch.Tensor) else isinstance(value, list | tuple)


def undivided_share(losses: Sequence[torch.Tensor]) -> float:
    """The share of a sample's loss that micro-batches would count too often; 0 if it is only rounding.

    A term of the loss must be divided by the items, or by ``HostBatch.divisor``. Not all of it by the latter: a mean
    over items must not be. A loss of 0 has no such share.
    Args:
        losses: those of ``HostBatches.rehearsals``: once, of two samples, with twice the items, and with twice both.
    """
    once, _, twice_items, twice_both = (loss.item() for loss in losses[-4:])
    if once == 0:
        return 0.0
    rounding = max(_ROUNDING, torch.finfo(losses[-1].dtype).eps)
    share = abs(2 * twice_both / once - 1)
    if share > rounding:
        return share
    return 1.0 if twice_items / once > 1 - rounding else 0.0


def worst_batches(
    data: Any,
    collate: Callable[[list[Any]], Mapping[str, Any]],
    batches: Sequence[HostBatch],
    cutter: HostBatches,
    *,
    shows_progress: bool,
) -> tuple[Callable[[int], HostBatch], int]:
    """A function that makes a batch of n samples as long as any in training, and the largest n.

    Args:
        data: the samples. If they cannot be indexed, the longest of ``batches`` is cut instead.
        collate: makes a batch of a list of samples.
        batches: the batches of the first optimizer step.
    """
    if isinstance(data, IterableDataset) or not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        log.info("The search uses the longest batch of the first step, because the data cannot be indexed.")
        batch = max(batches, key=lambda one: _numel(one.inputs))
        return partial(cutter.first, batch), min(cutter.size, cutter.num_samples(batch.inputs))

    def collated(samples: list[Any]) -> Mapping[str, Any]:
        return collate([copy.copy(sample) for sample in samples])  # some collators change their samples

    with keep_random_states():
        every = Bar(range(len(data)), desc="looking for the longest sample", disable=not shows_progress)
        sizes = [_numel(collated([data[number]])) for number in every]
        longest, shortest = (data[sizes.index(size)] for size in (max(sizes), min(sizes)))

    def make_batch(size: int) -> HostBatch:
        inputs = collated([longest] + [shortest] * (size - 1))  # of two lengths, so that there is a padding mask
        if (found := cutter.num_samples(inputs)) != size:
            raise InputError(f"A batch of {size} samples must have a row for each, but has {found} instead.")
        return batches[0]._replace(inputs=inputs)

    return make_batch, cutter.size


def _numel(inputs: Mapping[str, Any]) -> int:
    return sum(value.numel() for value in inputs.values() if isinstance(value, torch.Tensor))
