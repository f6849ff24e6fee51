"""The batches that a trainer has collated, cut into micro-batches."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torchtune_adaptive.engine.recovery.columns import columns, map_columns
from torchtune_adaptive.engine.recovery.micro_batches import Slices, chosen, consecutive
from torchtune_adaptive.errors import InputError, quote

IGNORED = -100  # a label that transformers' losses leave out


class TrainerBatch(NamedTuple):
    """A batch of the trainer, or the part of one in a micro-batch.

    Attributes:
        inputs: tensors and lists with an entry per row, and values for all rows.
        num_items: the labels in the optimizer step on all ranks, by which the loss is divided; None: not counted.
        divisor: by what the trainer divides a loss that is a mean over samples. For a whole batch, the number of
            batches in the optimizer step.
        weight: by what the loss is multiplied, so that those of the parts of a batch add up.
    """

    inputs: Mapping[str, Any]
    num_items: Any
    divisor: float
    weight: float = 1.0


class TrainerBatches(Slices):
    """Cuts the batches of an optimizer step into micro-batches. None has rows of two batches.

    Args:
        size: samples in a micro-batch.
        rows_per_sample: 2 if a sample is a pair whose parts are in the first and in the second half of a batch.
    Attributes:
        factor: by how much the loss of both of two samples differs from the sum of each one's, as a trial has found. It
            is then scaled.
    Raises:
        InputError: ``size`` is not an integer of at least 1.

    >>> batch = TrainerBatch({"input_ids": torch.tensor([[3], [1], [4]])}, num_items=None, divisor=1)
    >>> [(part.inputs["input_ids"].tolist(), part.divisor) for part in TrainerBatches(2).cut([batch])]
    [([[3], [1]], 1.5), ([[4]], 3.0)]
    """

    results = "losses"

    def __init__(self, size: int, *, rows_per_sample: int = 1) -> None:
        super().__init__(size)
        self._rows_per_sample = rows_per_sample
        self.factor = 1.0

    def cut(self, samples: Sequence[TrainerBatch]) -> list[TrainerBatch]:
        """The micro-batches of all batches, in their order."""
        return [
            self._part(batch, rows)
            for batch in samples
            for rows in consecutive(self.num_samples(batch.inputs), self.size)
        ]

    def trial_batches(
        self, samples: Sequence[TrainerBatch], pair: tuple[int, int] | None = (0, 1)
    ) -> list[list[TrainerBatch]]:
        """Each sample of the ``pair``, then both; to try next, each. Nothing if there is no sample.

        Samples are numbered from the one with the most labels. If they all have equally many, a mean over labels looks
        like one over samples. So if labels are ignored somewhere, half of the second sample's are.
        """
        if not samples:
            return []
        self.factor = 1.0
        batch = max(samples, key=lambda one: self.num_samples(one.inputs))
        order = self._by_labels(batch.inputs)
        one, other = (order[number % len(order)] for number in pair or (0, 1))
        batch = batch._replace(inputs=_with_other_labels(batch.inputs, one, other))
        alone = [self._part(batch, [one]), self._part(batch, [other])]
        return [alone] if pair is None else [[*alone, self._part(batch, [one, other])], alone]

    def num_to_try(self, samples: Sequence[TrainerBatch]) -> int:
        """The samples of the largest batch, of which a trial can choose two."""
        return max((self.num_samples(one.inputs) for one in samples), default=0)

    def scale_by(self, factor: float) -> bool:
        """Scale losses from now on."""
        self.factor = factor
        return True

    def is_whole(self, samples: Sequence[TrainerBatch]) -> bool:
        """Whether no batch is cut."""
        return self.num_to_try(samples) <= self.size

    def repeated(self, inputs: Mapping[str, Any], num_samples: int) -> Mapping[str, Any]:
        """So many copies of the only sample in ``inputs``."""
        return self._rows(inputs, [0] * num_samples)

    def samples_of(self, inputs: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Each sample of ``inputs`` as a batch of its own."""
        return [self._rows(inputs, [number]) for number in range(self.num_samples(inputs))]

    def num_samples(self, inputs: Mapping[str, Any]) -> int:
        """The number of samples in a batch.

        Raises:
            InputError: the batch has something whose rows are not known.
        """
        found = dict(columns(inputs))
        arrays = {name: len(column) for name, column in found.items() if hasattr(column, "ndim")}
        lengths = arrays or {name: len(column) for name, column in found.items()}
        num_samples = max(lengths.values(), default=0) // self._rows_per_sample
        if not num_samples or not {*lengths.values()} <= {num_samples, num_samples * self._rows_per_sample}:
            rows = "two rows" if self._rows_per_sample > 1 else "one row"
            raise InputError(f"Every tensor of a batch must have {rows} per sample, but has {quote(lengths)} instead.")
        return num_samples

    def _largest(self, samples: Sequence[TrainerBatch]) -> int:
        return min(self.size, self.num_to_try(samples))

    def _part(self, batch: TrainerBatch, rows: Sequence[int]) -> TrainerBatch:
        """The samples of ``batch`` with these numbers."""
        share = len(rows) / self.num_samples(batch.inputs)
        weight = {1.0: 1.0, 0.5: share, 2.0: 1 / share}[self.factor]
        return batch._replace(inputs=self._rows(batch.inputs, rows), divisor=batch.divisor / share, weight=weight)

    def _rows(self, inputs: Mapping[str, Any], rows: Sequence[int]) -> Mapping[str, Any]:
        num_samples = self.num_samples(inputs)

        def entries(column: Any) -> Any:
            if len(column) == num_samples:
                return chosen(column, rows)
            return chosen(column, [*rows, *(num_samples + row for row in rows)])

        return map_columns(inputs, entries, lengths={num_samples, num_samples * self._rows_per_sample})

    def _by_labels(self, inputs: Mapping[str, Any]) -> list[int]:
        """The numbers of all samples: first the one with the most labels, then one with the fewest but some."""
        every = list(range(self.num_samples(inputs)))
        if (valid := _valid_labels(inputs)) is None or len(valid) != len(every):
            return every
        counts = valid.sum(dim=1).tolist()
        first, *others = sorted(every, key=lambda number: -counts[number])
        return [first, *sorted(others, key=lambda number: (counts[number] == 0, counts[number]))]


def _valid_labels(inputs: Mapping[str, Any]) -> torch.Tensor | None:
    """Which labels [rows, tokens] count in a loss, if a batch has such labels."""
    labels = inputs.get("labels")
    is_known = isinstance(labels, torch.Tensor) and labels.ndim == 2 and labels.dtype == torch.long
    return labels != IGNORED if is_known else None


def _with_other_labels(inputs: Mapping[str, Any], one: int, other: int) -> Mapping[str, Any]:
    """The inputs, in which ``other`` has fewer labels than ``one`` if labels are ignored somewhere."""
    valid = _valid_labels(inputs)
    if valid is None or bool(valid.all()) or max(one, other) >= len(valid) or valid[one].sum() != valid[other].sum():
        return inputs
    labels, places = inputs["labels"].clone(), valid[other].nonzero().flatten()
    labels[other, places[: len(places) // 2]] = IGNORED
    changed = copy.copy(inputs)
    changed["labels"] = labels  # pyright: ignore[reportIndexIssue]  # a dict or one of transformers' own
    return changed
