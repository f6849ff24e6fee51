"""The batches that a trainer has collated, cut into micro-batches."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from torchtune_adaptive.engine.recovery.columns import column_lengths, columns, map_columns
from torchtune_adaptive.engine.recovery.micro_batches import Slices, chosen, consecutive, not_a_sum
from torchtune_adaptive.engine.recovery.trial import cannot_cut
from torchtune_adaptive.errors import InputError, quote
from torchtune_adaptive.integrations.trainer_batch import IGNORED, MASK, TrainerBatch
from torchtune_adaptive.integrations.trial_samples import (
    TrialSamples,
    WeighedSample,
    ignored_samples,
    samples_of,
    with_fewer_labels,
)

# With what tensors [rows, tokens] are padded; `input_ids` with a token of the trainer's.
_PADDING = {
    "input_ids": 0,
    MASK: 0,
    "labels": IGNORED,
    "position_ids": 0,
    "token_type_ids": 0,
    "completion_mask": 0,
    "assistant_masks": 0,
}
Part = tuple[TrainerBatch, Sequence[int]]  # a batch, and the numbers of some of its samples


class TrainerBatches(Slices):
    """Cuts the batches of an optimizer step into micro-batches, or joins whole ones if micro-batches are larger.

    Args:
        size: samples in a micro-batch.
        rows_per_sample: 2 if a sample is a pair whose parts are in the first and in the second half of a batch.

    Attributes:
        joins: whether batches of equally many samples may be joined. Rows are then padded at their end: see
            ``can_be_joined``.
        pad_token: for ``input_ids``.
        ignores_labels: whether the loss is known to leave out labels of -100.
        can_scale: whether the last micro-step's loss could be scaled.
        why_whole: why batches must not be cut, as part of a sentence, or "".
        trial_samples: those of the trials so far.
        factor: by how much the loss of both of two samples differs from the sum of each one's, as a trial has found. It
            is then scaled. None: not known.
        trial_weight: by what the losses of trials are multiplied.

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
        self.ignores_labels = False
        self.can_scale = True
        self.why_whole = ""
        self.trial_weight = 1.0
        self.forget_trials()

    def forget_trials(self) -> None:
        """Begin as if there had been no trial."""
        self.factor: float | None = None
        self.trial_samples = TrialSamples()

    def cut(self, samples: Sequence[TrainerBatch]) -> list[TrainerBatch]:
        """The micro-batches of all batches, in their order."""
        return [self._micro_batch(parts, self.factor or 1.0) for parts in self._parts(samples)]

    def trial_batches(
        self, samples: Sequence[TrainerBatch], pair: tuple[int, int] | None = (0, 1), *, group: int = 1
    ) -> list[list[TrainerBatch]]:
        """Each sample of the ``pair``, then both; to try next, each. Nothing if there is no sample.

        They differ as much as possible in what a loss may weigh samples by: first in what no trial has seen. If labels
        are ignored somewhere, the second has at most about half of the first one's; and if whole samples are, it comes
        with one of them, and the first one twice. They are of one batch, or of several if batches are joined: the
        second one then loses its own padding, and is padded as joined batches are.

        Raises:
            CannotCutError: batches must not be cut.
        """
        if self.why_whole:
            raise cannot_cut(self.why_whole)
        if not samples:
            return []
        if group > 1:
            return self._trial_of_groups(samples, group)
        order = self.trial_samples.in_order(map(self._samples, self._groups(samples)), joins=self.joins)
        one, other = (order[number % len(order)] for number in pair or (0, 1))
        changed, rows, of_first = with_fewer_labels(other, one), [other.number], [one.number]
        ignored = [number for number in ignored_samples(changed.inputs) if number != one.number]
        if ignored and other.number not in ignored:
            rows, of_first = [*rows, ignored[0]], 2 * of_first
        if one.batch is other.batch:
            first = (changed, of_first)
        else:
            first, changed = (one.batch, of_first), self._without_padding(changed, rows)
        second = (changed, rows)
        alone = [self._micro_batch([first]), self._micro_batch([second])]
        if pair is None:
            self.trial_samples.compare_nothing()
            return [alone]
        self.trial_samples.compare(*(self._samples([part]) for part in alone))
        return [[*alone, self._micro_batch([first, second])], alone]

    def _trial_of_groups(self, samples: Sequence[TrainerBatch], group: int) -> list[list[TrainerBatch]]:
        """The first samples of batches that may be joined, the next ones, and both; to try next, two samples alone."""
        self.trial_samples.compare_nothing()
        every = [(one, [row]) for one in self._groups(samples)[0] for row in range(self.num_samples(one.inputs))]
        first, second = ([every[place % len(every)] for place in part] for part in consecutive(2 * group, group))
        alone = [self._micro_batch([part]) for part in every[:2]]
        return [[*map(self._micro_batch, (first, second, first + second))], alone]

    def tells_more(self, samples: Sequence[TrainerBatch]) -> bool:
        """Whether samples that may meet in a micro-batch differ far more than those of all trials with a factor."""
        return any(self.trial_samples.tell_more(self._samples(group)) for group in self._groups(samples))

    def lacks_padding(self, samples: Sequence[TrainerBatch]) -> bool:
        """Whether batches are padded when they are joined, and no trial has seen what that does."""
        return self.joins and not self.trial_samples.pads and not _have_one_shape(samples)

    def num_to_try(self, samples: Sequence[TrainerBatch]) -> int:
        """The samples of the largest batch, or of all, of which a trial can choose two."""
        return sum(self.num_samples(one.inputs) for one in samples) if self.joins else self.largest_batch(samples)

    def can_be_joined(self, samples: Sequence[TrainerBatch]) -> bool:
        """Whether there are several batches of equal columns, and it is known how their rows are padded to one length.

        Rows may be padded at their end, whatever their own padding is: masks and labels leave that out. Labels do if
        their own padding has -100, or the loss is known to ignore it.
        """
        every = [batch.inputs for batch in samples]
        are_alike = all(_has_known_padding(one) and _types(one) == _types(every[0]) for one in every)
        if len(every) < 2 or not are_alike:
            return False
        return _have_one_shape(samples) or self._labels_leave_padding_out(every)

    def scale_by(self, factor: float) -> str:
        """Scale losses from now on, as the last trial has found. Returns why that is not possible, or ""."""
        if self.factor not in (None, factor):
            return "the loss weighs some samples otherwise than others"
        if not self.can_scale and (reason := not_a_sum(factor)):
            return reason
        self.factor = factor
        self.trial_samples.confirm()
        return ""

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
        lengths = column_lengths(inputs)
        if not lengths:
            raise InputError(f"A batch must be a mapping of tensors, but is {quote(inputs)} instead.")
        num_samples = max(lengths.values()) // self._rows_per_sample
        if not num_samples or not {*lengths.values()} <= {num_samples, num_samples * self._rows_per_sample}:
            rows = "two rows" if self._rows_per_sample > 1 else "one row"
            raise InputError(f"Every tensor of a batch must have {rows} per sample, but has {quote(lengths)} instead.")
        return num_samples

    def _largest(self, samples: Sequence[TrainerBatch]) -> int:
        return max((sum(len(rows) for _, rows in parts) for parts in self._parts(samples)), default=0)

    def _groups(self, samples: Sequence[TrainerBatch]) -> list[Sequence[TrainerBatch]]:
        """The batches whose samples may meet in a micro-batch, the largest first."""
        if self.joins:
            return [samples]
        return [[batch] for batch in sorted(samples, key=lambda one: -self.num_samples(one.inputs))]

    def _samples(self, batches: Sequence[TrainerBatch]) -> list[WeighedSample]:
        return [one for batch in batches for one in samples_of(batch, self.num_samples(batch.inputs))]

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

    def _micro_batch(self, parts: Sequence[Part], factor: float | None = None) -> TrainerBatch:
        """The samples of all parts, whose batches have equally many, in one batch. ``factor``: None in a trial."""
        batch, rows = parts[0]
        if all(one is batch for one, _ in parts):
            rows = [row for _, some in parts for row in some]
            inputs, number = self._rows(batch.inputs, rows), len(rows)
        else:
            several = [self._rows(one.inputs, some) for one, some in parts]
            inputs, number = self._together(several), sum(map(self.num_samples, several))
        share = number / self.num_samples(batch.inputs)
        # By the factor: of a sum, of a mean over samples, or of a sum that the trainer divides as if it were a mean.
        weight = {1.0: 1.0, 0.5: share, 2.0: 1 / share, None: self.trial_weight}[factor]
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
        if list(rows) == list(range(num_samples)):
            return inputs  # whatever its lists are

        def entries(column: Any) -> Any:
            if len(column) == num_samples:
                return chosen(column, rows)
            return chosen(column, [*rows, *(num_samples + row for row in rows)])

        return map_columns(inputs, entries, lengths={num_samples, num_samples * self._rows_per_sample})

    def _labels_leave_padding_out(self, every: Sequence[Mapping[str, Any]]) -> bool:
        """Whether joined rows may be padded with labels of -100, so far as it can be seen."""
        found = [(one["labels"], one[MASK]) for one in every if "labels" in one]
        if any(labels.shape == mask.shape and (labels[mask == 0] != IGNORED).any() for labels, mask in found):
            return False
        is_padded = len({labels.shape[1:] for labels, _ in found}) > 1
        return not is_padded or self.ignores_labels or any((labels == IGNORED).any() for labels, _ in found)

    def _without_padding(self, batch: TrainerBatch, numbers: Sequence[int]) -> TrainerBatch:
        """The batch without the tokens at both ends that are padding in all samples with these ``numbers``."""
        mask = self._rows(batch.inputs, numbers).get(MASK)
        if not isinstance(mask, torch.Tensor) or mask.ndim != 2 or not mask.any():
            return batch
        width, places = mask.shape[1], mask.any(dim=0).nonzero()
        tokens = slice(int(places[0]), int(places[-1]) + 1)
        inputs = copy.copy(batch.inputs)
        for name, column in columns(batch.inputs):
            if getattr(column, "shape", ())[1:] == (width,):
                inputs[name] = column[:, tokens]  # pyright: ignore[reportIndexIssue]  # a dict or one of transformers' own
        return batch._replace(inputs=inputs)


def rounded_down(size: int, *, largest_batch: int) -> int:
    """``size``, or the samples of as many whole batches of ``largest_batch`` as fit into it.

    >>> [rounded_down(size, largest_batch=3) for size in (1, 2, 3, 4, 8, 9, 12)]
    [1, 2, 3, 3, 6, 9, 12]
    """
    return size - size % largest_batch if size > largest_batch else size


def _has_known_padding(inputs: Mapping[str, Any]) -> bool:
    """Whether all inputs are tensors with an entry per row whose padding is known, an attention mask among them."""
    found = dict(columns(inputs))
    return (
        found.keys() == {*inputs}
        and MASK in found
        and all(
            isinstance(one, torch.Tensor) and (one.ndim == 1 or (one.ndim == 2 and name in _PADDING))
            for name, one in found.items()
        )
    )


def _types(inputs: Mapping[str, Any]) -> dict[str, tuple[torch.dtype, int]]:
    return {name: (one.dtype, one.ndim) for name, one in columns(inputs)}


def _have_one_shape(samples: Sequence[TrainerBatch]) -> bool:
    """Whether no column has to be padded if batches are joined."""
    shapes = [{name: getattr(one, "shape", ())[1:] for name, one in columns(batch.inputs)} for batch in samples]
    return all(one == shapes[0] for one in shapes)


def _of_one_length(tensors: Sequence[torch.Tensor], padding: int) -> list[torch.Tensor]:
    """The tensors [rows, tokens] padded at the end to the longest one; those [rows] as they are."""
    longest = max(one.shape[-1] for one in tensors)
    return [one if one.ndim == 1 else pad(one, (0, longest - one.shape[-1]), value=padding) for one in tensors]
