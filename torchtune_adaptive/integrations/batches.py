"""The batches that a trainer has collated, cut into micro-batches."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from torchtune_adaptive.engine.recovery.columns import columns, map_columns
from torchtune_adaptive.engine.recovery.micro_batches import Slices, chosen, consecutive
from torchtune_adaptive.errors import InputError, quote

IGNORED = -100  # a label that transformers' losses leave out
# With what tensors [rows, tokens] are padded; `input_ids` with a token of the trainer's.
_PADDING = {
    "input_ids": 0,
    "attention_mask": 0,
    "labels": IGNORED,
    "position_ids": 0,
    "token_type_ids": 0,
    "completion_mask": 0,
    "assistant_masks": 0,
}


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


Part = tuple[TrainerBatch, Sequence[int]]  # a batch, and the numbers of some of its samples


class _Place(NamedTuple):
    """Where a sample is: the batch, and its number in it."""

    batch: TrainerBatch
    number: int


class TrainerBatches(Slices):
    """Cuts the batches of an optimizer step into micro-batches, or joins whole ones if micro-batches are larger.

    Args:
        size: samples in a micro-batch.
        rows_per_sample: 2 if a sample is a pair whose parts are in the first and in the second half of a batch.

    Attributes:
        joins: whether batches of equally many samples may be joined. Rows are then padded at their end: see
            ``can_be_joined``.
        pad_token: for ``input_ids``.
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
        self.joins = False
        self.pad_token = 0
        self.factor = 1.0

    def cut(self, samples: Sequence[TrainerBatch]) -> list[TrainerBatch]:
        """The micro-batches of all batches, in their order."""
        return list(map(self._micro_batch, self._parts(samples)))

    def trial_batches(
        self, samples: Sequence[TrainerBatch], pair: tuple[int, int] | None = (0, 1)
    ) -> list[list[TrainerBatch]]:
        """Each sample of the ``pair``, then both; to try next, each. Nothing if there is no sample.

        Samples are numbered from the one with the most labels. If they all have equally many, a mean over labels looks
        like one over samples. So if labels are ignored somewhere, half of the second sample's are. They are of the
        largest batch, or of all if batches are joined.
        """
        if not samples:
            return []
        self.factor = 1.0
        order = self._in_order(self._tried(samples))
        one, other = (order[number % len(order)] for number in pair or (0, 1))
        changed = _with_other_labels(other, one)
        first = (changed if one.batch is other.batch else one.batch, [one.number])
        second = (changed, [other.number])
        alone = [self._micro_batch([first]), self._micro_batch([second])]
        return [alone] if pair is None else [[*alone, self._micro_batch([first, second])], alone]

    def num_to_try(self, samples: Sequence[TrainerBatch]) -> int:
        """The samples of the largest batch, or of all, of which a trial can choose two."""
        return sum(self.num_samples(one.inputs) for one in self._tried(samples))

    def can_be_joined(self, samples: Sequence[TrainerBatch]) -> bool:
        """Whether there are several batches, and it is known how their rows are padded to one length.

        Rows may be padded at their end, whatever their own padding is: masks and labels leave that out.
        """
        return len(samples) > 1 and all(_has_known_padding(batch.inputs) for batch in samples)

    def scale_by(self, factor: float) -> bool:
        """Scale losses from now on."""
        self.factor = factor
        return True

    def is_whole(self, samples: Sequence[TrainerBatch]) -> bool:
        """Whether no batch is cut."""
        return self.largest_batch(samples) <= self.size

    def largest_batch(self, samples: Sequence[TrainerBatch]) -> int:
        """The samples of the largest batch; 0 if there is none."""
        return max((self.num_samples(one.inputs) for one in samples), default=0)

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
        return max((sum(len(rows) for _, rows in parts) for parts in self._parts(samples)), default=0)

    def _tried(self, samples: Sequence[TrainerBatch]) -> Sequence[TrainerBatch]:
        """The batches whose samples a trial may take."""
        return samples if self.joins else sorted(samples, key=lambda one: -self.num_samples(one.inputs))[:1]

    def _parts(self, samples: Sequence[TrainerBatch]) -> list[list[Part]]:
        """What each micro-batch has: rows of one batch, or several whole ones."""
        found: list[list[Part]] = []
        last = 0
        for batch in samples:
            number = self.num_samples(batch.inputs)
            if self.joins and number == last and number * (len(found[-1]) + 1) <= self.size:
                found[-1].append((batch, range(number)))
            else:
                found.extend([(batch, rows)] for rows in consecutive(number, self.size))
            last = number
        return found

    def _micro_batch(self, parts: Sequence[Part]) -> TrainerBatch:
        """The samples of all parts, whose batches have equally many, in one batch."""
        batch, rows = parts[0]
        if all(one is batch for one, _ in parts):
            rows = [row for _, some in parts for row in some]
            inputs, number = self._rows(batch.inputs, rows), len(rows)
        else:
            several = [self._rows(one.inputs, some) for one, some in parts]
            inputs, number = self._together(several), sum(map(self.num_samples, several))
        share = number / self.num_samples(batch.inputs)
        # By `factor`: of a sum, of a mean over samples, or of a sum that the trainer divides as if it were a mean.
        weight = {1.0: 1.0, 0.5: share, 2.0: 1 / share}[self.factor]
        return batch._replace(inputs=inputs, divisor=batch.divisor / share, weight=weight)

    def _together(self, several: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """The rows of several inputs; of pairs, all first parts before all second ones."""
        numbers = list(map(self.num_samples, several))
        joined = copy.copy(several[0])
        for name, _ in columns(several[0]):
            padding = self.pad_token if name == "input_ids" else _PADDING.get(name, 0)
            tensors = _of_one_length([one[name] for one in several], padding)
            firsts = [one[:number] for one, number in zip(tensors, numbers, strict=True)]
            seconds = [one[number:] for one, number in zip(tensors, numbers, strict=True)]
            joined[name] = torch.cat([*firsts, *seconds])  # pyright: ignore[reportIndexIssue]  # as above
        return joined

    def _rows(self, inputs: Mapping[str, Any], rows: Sequence[int]) -> Mapping[str, Any]:
        num_samples = self.num_samples(inputs)

        def entries(column: Any) -> Any:
            if len(column) == num_samples:
                return chosen(column, rows)
            return chosen(column, [*rows, *(num_samples + row for row in rows)])

        return map_columns(inputs, entries, lengths={num_samples, num_samples * self._rows_per_sample})

    def _in_order(self, batches: Sequence[TrainerBatch]) -> list[_Place]:
        """All samples as a trial takes them: first the one with the most labels, then one with the fewest but some.

        Of several batches, a sample of another one comes second, if possible of one that is padded to another length.
        """
        every = [_Place(batch, number) for batch in batches for number in range(self.num_samples(batch.inputs))]
        valid = [_valid_labels(batch.inputs) for batch in batches]
        counts = [count for one in valid if one is not None for count in one.sum(dim=1).tolist()]
        if len(counts) != len(every):  # not known
            counts = [1] * len(every)
        first = max(range(len(every)), key=counts.__getitem__)
        of_first = every[first].batch

        def rank(index: int) -> tuple[bool, bool, bool, bool, int]:
            """The least comes first."""
            batch, count = every[index].batch, counts[index]
            is_another, has_no_labels = index != first, count == 0
            is_of_same_batch = batch is of_first
            is_as_long = _padded_length(batch.inputs) == _padded_length(of_first.inputs)
            return is_another, has_no_labels, is_of_same_batch, is_as_long, count

        return [every[index] for index in sorted(range(len(every)), key=rank)]


def rounded_down(size: int, *, largest_batch: int) -> int:
    """``size``, or the samples of as many whole batches of ``largest_batch`` as fit into it.

    >>> [rounded_down(size, largest_batch=3) for size in (1, 2, 3, 4, 8, 9, 12)]
    [1, 2, 3, 3, 6, 9, 12]
    """
    return size - size % largest_batch if size > largest_batch else size


def _padded_length(inputs: Mapping[str, Any]) -> int:
    """The tokens of each row, with padding; 0 if no column has tokens."""
    return max((one.shape[1] for _, one in columns(inputs) if getattr(one, "ndim", 0) > 1), default=0)


def _has_known_padding(inputs: Mapping[str, Any]) -> bool:
    """Whether all inputs are tensors with an entry per row whose padding is known, an attention mask among them."""
    found = dict(columns(inputs))
    return (
        found.keys() == {*inputs}
        and "attention_mask" in found
        and all(
            isinstance(one, torch.Tensor) and (one.ndim == 1 or (one.ndim == 2 and name in _PADDING))
            for name, one in found.items()
        )
    )


def _valid_labels(inputs: Mapping[str, Any]) -> torch.Tensor | None:
    """Which labels [rows, tokens] count in a loss, if a batch has such labels."""
    labels = inputs.get("labels")
    is_known = isinstance(labels, torch.Tensor) and labels.ndim == 2 and labels.dtype == torch.long
    return labels != IGNORED if is_known else None


def _with_other_labels(other: _Place, one: _Place) -> TrainerBatch:
    """The batch of ``other``, in which that has fewer labels than ``one`` if labels are ignored somewhere."""
    batch, number = other
    valid, of_one = _valid_labels(batch.inputs), _valid_labels(one.batch.inputs)
    if valid is None or of_one is None or number >= len(valid) or one.number >= len(of_one):
        return batch
    is_ignored_somewhere = not (valid.all() and of_one.all())
    if not is_ignored_somewhere or valid[number].sum() != of_one[one.number].sum():
        return batch
    labels, places = batch.inputs["labels"].clone(), valid[number].nonzero().flatten()
    labels[number, places[: len(places) // 2]] = IGNORED
    changed = copy.copy(batch.inputs)
    changed["labels"] = labels  # pyright: ignore[reportIndexIssue]  # a dict or one of transformers' own
    return batch._replace(inputs=changed)


def _of_one_length(tensors: Sequence[torch.Tensor], padding: int) -> list[torch.Tensor]:
    """The tensors [rows, tokens] padded at the end to the longest one; those [rows] as they are."""
    longest = max(one.shape[-1] for one in tensors)
    return [one if one.ndim == 1 else pad(one, (0, longest - one.shape[-1]), value=padding) for one in tensors]
