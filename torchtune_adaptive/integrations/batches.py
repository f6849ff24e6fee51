"""The batches that a trainer has collated, cut into micro-batches."""

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from torchtune_adaptive.engine.recovery.columns import columns, map_columns
from torchtune_adaptive.engine.recovery.micro_batches import Slices, chosen, consecutive
from torchtune_adaptive.engine.recovery.trial import cannot_cut
from torchtune_adaptive.errors import InputError, quote

IGNORED = -100  # a label that transformers' losses leave out
# With what tensors [rows, tokens] are padded; `input_ids` with a token of the trainer's.
_MASK = "attention_mask"
_PADDING = {
    "input_ids": 0,
    _MASK: 0,
    "labels": IGNORED,
    "position_ids": 0,
    "token_type_ids": 0,
    "completion_mask": 0,
    "assistant_masks": 0,
}
_POSITIONS = ("start_positions", "end_positions")  # of answers: those behind a row are left out like a label of -100
_VALID = "valid labels"  # an amount: how many labels [rows, tokens] of a sample count in a loss
_LABEL = "label "  # and the one of a sample: an amount of 1
_FAR_APART = 1 / 3  # two amounts of which one is twice the other: a larger difference would not tell more
_LONGEST_SHARE = 3 / 4  # of the longer row: how long the other one may be, so that its padding is seen in a trial

Amounts = dict[str, float]  # by what a loss may weigh a sample


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


class _Shown(NamedTuple):
    """What the samples of a trial can show.

    Attributes:
        differences: between the two.
        pads: whether one of them is padded.
        wanted: the differences for which they were chosen.
    """

    differences: Amounts
    pads: bool
    wanted: Amounts


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
        has_told_more: whether the last trial has found a factor with two samples that differ more than those before.
        factor: by how much the loss of both of two samples differs from the sum of each one's, as a trial has found. It
            is then scaled. None: not known.

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
        self.forget_trials()

    def forget_trials(self) -> None:
        """Begin as if there had been no trial."""
        self.factor: float | None = None
        self.has_told_more = False
        self._tried: Amounts = {}  # the largest differences between the two samples of a trial that has found a factor
        self._pads = False  # whether one of them was padded
        self._last = _Shown({}, pads=False, wanted={})

    def cut(self, samples: Sequence[TrainerBatch]) -> list[TrainerBatch]:
        """The micro-batches of all batches, in their order."""
        return [self._micro_batch(parts, self.factor or 1.0) for parts in self._parts(samples)]

    def trial_batches(
        self, samples: Sequence[TrainerBatch], pair: tuple[int, int] | None = (0, 1), *, group: int = 1
    ) -> list[list[TrainerBatch]]:
        """Each sample of the ``pair``, then both; to try next, each. Nothing if there is no sample.

        A mean over labels, or one with weights, looks like one over samples if the two have equally many, or the same
        weight. So they differ as much as possible in what a loss may weigh samples by: first in what no trial has seen.
        If labels are ignored somewhere, the second has at most about half of the first one's; and if whole samples are,
        it comes with one of them, and the first one twice. They are of one batch, or of several if batches are joined:
        the second one then loses its own padding, and is padded as joined batches are.

        Raises:
            CannotCutError: batches must not be cut.
        """
        if self.why_whole:
            raise cannot_cut(self.why_whole)
        if not samples:
            return []
        self.has_told_more = False
        if group > 1:
            return self._trial_of_groups(samples, group)
        order, wanted = self._in_order(samples)
        one, other = (order[number % len(order)] for number in pair or (0, 1))
        changed, rows, of_first = _with_fewer_labels(other, one), [other.number], [one.number]
        ignored = [number for number in _ignored_samples(changed.inputs) if number != one.number]
        if ignored and other.number not in ignored:
            rows, of_first = [*rows, ignored[0]], 2 * of_first
        if one.batch is other.batch:
            first = (changed, of_first)
        else:
            first, changed = (one.batch, of_first), self._without_padding(changed, rows)
        second = (changed, rows)
        alone = [self._micro_batch([first]), self._micro_batch([second])]
        if pair is None:
            return [alone]
        shorter, longer = sorted(_padded_length(part.inputs) for part in alone)
        amounts = [_sum(self._amounts(part.inputs)) for part in alone]
        self._last = _Shown(_differences(amounts), pads=shorter <= _LONGEST_SHARE * longer, wanted=wanted)
        return [[*alone, self._micro_batch([first, second])], alone]

    def _trial_of_groups(self, samples: Sequence[TrainerBatch], group: int) -> list[list[TrainerBatch]]:
        """The first samples of batches that may be joined, the next ones, and both; to try next, two samples alone."""
        self._last = _Shown({}, pads=False, wanted={})
        every = [(one, [row]) for one in self._groups(samples)[0] for row in range(self.num_samples(one.inputs))]
        first, second = ([every[place % len(every)] for place in part] for part in consecutive(2 * group, group))
        alone = [self._micro_batch([part]) for part in every[:2]]
        return [[*map(self._micro_batch, (first, second, first + second))], alone]

    def tells_more(self, samples: Sequence[TrainerBatch]) -> bool:
        """Whether samples that may meet in a micro-batch differ far more than those of all trials with a factor."""
        return any(
            self._untried([amounts for batch in group for amounts in self._amounts(batch.inputs)])
            for group in self._groups(samples)
        )

    def lacks_padding(self, samples: Sequence[TrainerBatch]) -> bool:
        """Whether batches are padded when they are joined, and no trial has seen what that does."""
        return self.joins and not self._pads and not _have_one_shape(samples)

    def num_to_try(self, samples: Sequence[TrainerBatch]) -> int:
        """The samples of the largest batch, or of all, of which a trial can choose two."""
        numbers = [self.num_samples(one.inputs) for one in samples]
        return sum(numbers) if self.joins else max(numbers, default=0)

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

    def scale_by(self, factor: float) -> bool:
        """Scale losses from now on, as the last trial has found. Returns whether that is possible."""
        if factor != 1 and not self.can_scale:
            return False
        differences, pads, wanted = self._last  # which a trial has now confirmed
        self.factor, self._pads = factor, self._pads or pads
        self.has_told_more = any(differences.get(name, 0.0) > self._tried.get(name, 0.0) for name in wanted)
        for name, size in differences.items():
            self._tried[name] = max(size, self._tried.get(name, 0.0))
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
        if not lengths:
            raise InputError(f"A batch must be a mapping of tensors, but is {quote(inputs)} instead.")
        num_samples = max(lengths.values(), default=0) // self._rows_per_sample
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

    def _micro_batch(self, parts: Sequence[Part], factor: float = 1.0) -> TrainerBatch:
        """The samples of all parts, whose batches have equally many, in one batch."""
        batch, rows = parts[0]
        if all(one is batch for one, _ in parts):
            rows = [row for _, some in parts for row in some]
            inputs, number = self._rows(batch.inputs, rows), len(rows)
        else:
            several = [self._rows(one.inputs, some) for one, some in parts]
            inputs, number = self._together(several), sum(map(self.num_samples, several))
        share = number / self.num_samples(batch.inputs)
        # By the factor: of a sum, of a mean over samples, or of a sum that the trainer divides as if it were a mean.
        weight = {1.0: 1.0, 0.5: share, 2.0: 1 / share}[factor]
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
        found = [(one["labels"], one[_MASK]) for one in every if "labels" in one]
        if any(labels.shape == mask.shape and (labels[mask == 0] != IGNORED).any() for labels, mask in found):
            return False
        is_padded = len({labels.shape[1:] for labels, _ in found}) > 1
        return not is_padded or self.ignores_labels or any((labels == IGNORED).any() for labels, _ in found)

    def _without_padding(self, batch: TrainerBatch, numbers: Sequence[int]) -> TrainerBatch:
        """The batch without the tokens at both ends that are padding in all samples with these ``numbers``."""
        mask = self._rows(batch.inputs, numbers).get(_MASK)
        if not isinstance(mask, torch.Tensor) or mask.ndim != 2 or not mask.any():
            return batch
        width, places = mask.shape[1], mask.any(dim=0).nonzero()
        tokens = slice(int(places[0]), int(places[-1]) + 1)
        inputs = copy.copy(batch.inputs)
        for name, column in columns(batch.inputs):
            if getattr(column, "shape", ())[1:] == (width,):
                inputs[name] = column[:, tokens]  # pyright: ignore[reportIndexIssue]  # a dict or one of transformers' own
        return batch._replace(inputs=inputs)

    def _amounts(self, inputs: Mapping[str, Any]) -> list[Amounts]:
        """By what a loss may weigh each sample, of a pair for both parts: labels, masks, weights and other numbers."""
        number = self.num_samples(inputs)
        every: list[Amounts] = [{} for _ in range(number)]
        for name, column in columns(inputs):
            if isinstance(column, torch.Tensor):
                for part, rows in enumerate(column.split(number)):
                    for amounts, (key, amount) in zip(every, _amounts_of_rows(name, rows), strict=False):
                        amounts[f"{key} {part}" if part else key] = amount
        for one in _without_answers(inputs):
            every[one][f"{_LABEL}{IGNORED}"] = 1.0
        return every

    def _untried(self, samples: Sequence[Amounts]) -> Amounts:
        """How much samples differ, where that is more than twice as much as in all trials that found a factor."""
        tried = self._tried
        return {
            name: size for name, size in _differences(samples).items() if tried.get(name, 0) < min(size / 2, _FAR_APART)
        }

    def _distance(self, samples: Sequence[Amounts]) -> tuple[float, float]:
        """How far apart samples are: in length, if batches are joined and no trial has seen padding; then in all."""
        is_first = self.joins and not self._pads
        lengths = (size for name, size in _differences(samples).items() if name.startswith(_MASK))
        return sum(lengths) if is_first else 0.0, sum(self._untried(samples).values())

    def _in_order(self, samples: Sequence[TrainerBatch]) -> tuple[list[_Place], Amounts]:
        """Samples that may meet in a micro-batch, as a trial takes them; and what it is to show.

        The first one has the most of what differs the most, or the label of the most samples. The next ones have
        labels, are if possible of another batch, and differ the most from it.
        """

        def found_in(group: Sequence[TrainerBatch]) -> list[tuple[_Place, Amounts]]:
            return [
                (_Place(batch, number), amounts)
                for batch in group
                for number, amounts in enumerate(self._amounts(batch.inputs))
            ]

        every = max(
            map(found_in, self._groups(samples)), key=lambda found: self._distance([amounts for _, amounts in found])
        )
        names = Counter(name for _, amounts in every for name in amounts)
        counts = [_num_labels(amounts, names) for _, amounts in every]
        wanted = self._untried([amounts for _, amounts in every])
        main = _MASK if self.joins and not self._pads else max(wanted, key=wanted.__getitem__, default="")
        if main != _MASK and any(name.startswith(_LABEL) for name in names):
            main = ""  # all labels are compared with the one of the most samples
        first = max(range(len(every)), key=lambda one: (counts[one] > 0, every[one][1].get(main, 0.0), counts[one]))
        (of_first, _), amounts_of_first = every[first]

        def rank(index: int) -> tuple[Any, ...]:
            """The least comes first."""
            (batch, _), amounts = every[index]
            is_another, has_no_labels = index != first, counts[index] == 0
            distances = (-one for one in self._distance([amounts_of_first, amounts]))
            is_as_long = _padded_length(batch.inputs) == _padded_length(of_first.inputs)
            return is_another, has_no_labels, batch is of_first, *distances, is_as_long, counts[index]

        return [every[index][0] for index in sorted(range(len(every)), key=rank)], wanted


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
        and _MASK in found
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


def _amounts_of_rows(name: str, rows: torch.Tensor) -> list[tuple[str, float]]:
    """The name and the amount of each row's entry in a column; nothing if a loss would not weigh by it."""
    if name == "labels" and rows.dtype == torch.long and rows.ndim == 1:
        return [(f"{_LABEL}{label}", 1.0) for label in rows.tolist()]
    if name == "labels" and rows.dtype == torch.long and rows.ndim == 2:
        name, sums = _VALID, (rows != IGNORED).sum(dim=1)
    elif rows.ndim == 1:
        sums = rows
    elif rows.ndim == 2 and ("mask" in name or "weight" in name):
        sums = rows.double().abs().sum(dim=1)
    else:
        return []
    return [(name, amount) for amount in sums.double().abs().nan_to_num().tolist()]


def _sum(samples: Sequence[Amounts]) -> Amounts:
    return {name: sum(one.get(name, 0.0) for one in samples) for one in samples for name in one}


def _differences(samples: Sequence[Amounts]) -> Amounts:
    """How far apart the smallest and the largest of each amount are, from 0 (equal) to 1 (one of them is 0).

    >>> _differences([{"tokens": 3, "label 1": 1}, {"tokens": 1, "label 2": 1}])
    {'label 1': 1.0, 'label 2': 1.0, 'tokens': 0.5}
    """
    found: Amounts = {}
    for name in sorted({name for one in samples for name in one}):
        amounts = [one.get(name, 0.0) for one in samples]
        smallest, largest = min(amounts), max(amounts)
        found[name] = (largest - smallest) / (largest + smallest) if largest else 0.0
    return found


def _num_labels(amounts: Amounts, names: Counter[str]) -> float:
    """How many labels a sample has; if one, how many samples have the same; 1 if its labels are not known."""
    if _VALID in amounts or f"{_LABEL}{IGNORED}" in amounts:
        return amounts.get(_VALID, 0)
    return next((names[name] for name in amounts if name.startswith(_LABEL)), 1)


def _ignored_samples(inputs: Mapping[str, Any]) -> list[int]:
    """The numbers of the samples whose only label does not count, or one end of whose answer."""
    labels = inputs.get("labels")
    is_one = isinstance(labels, torch.Tensor) and labels.ndim == 1
    return (labels == IGNORED).nonzero().flatten().tolist() if is_one else _without_answers(inputs)


def _without_answers(inputs: Mapping[str, Any]) -> list[int]:
    """The numbers of the samples whose answers begin or end behind their rows."""
    found = (inputs.get(name) for name in _POSITIONS)
    positions = [one for one in found if isinstance(one, torch.Tensor) and one.ndim == 1]
    width = _padded_length(inputs)
    return [number for number, ends in enumerate(zip(*positions, strict=True)) if max(ends) >= width]


def _valid_labels(inputs: Mapping[str, Any]) -> torch.Tensor | None:
    """Which labels [rows, tokens] count in a loss, if a batch has such labels."""
    labels = inputs.get("labels")
    is_known = isinstance(labels, torch.Tensor) and labels.ndim == 2 and labels.dtype == torch.long
    return labels != IGNORED if is_known else None


def _with_fewer_labels(other: _Place, one: _Place) -> TrainerBatch:
    """The batch of ``other``, in which that loses half of its labels if some are ignored anywhere.

    Not if it has at most half as many as ``one`` already.
    """
    batch, number = other
    valid, of_one = _valid_labels(batch.inputs), _valid_labels(one.batch.inputs)
    if valid is None or of_one is None or number >= len(valid) or one.number >= len(of_one):
        return batch
    is_ignored_somewhere = not (valid.all() and of_one.all())
    if not is_ignored_somewhere or 2 * valid[number].sum() <= of_one[one.number].sum():
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
