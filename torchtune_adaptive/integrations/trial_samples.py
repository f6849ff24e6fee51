"""Which samples a trial compares: those that a loss may weigh most differently.

A mean over labels, or one with weights, looks like one over samples if the two have equally many, or the same weight.
"""

import copy
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torchtune_adaptive.engine.recovery.columns import columns, is_column, named_values
from torchtune_adaptive.integrations.trainer_batch import IGNORED, MASK, TrainerBatch, padded_length

_MISSING, _NO_CLASS = -1, 255  # other entries that losses leave out: missing labels, and pixels without a class
_POSITIONS = ("start_positions", "end_positions")  # of answers: those behind a row are left out like a label of -100
_VALID = "valid labels"  # an amount: how many labels [rows, tokens] of a sample count in a loss
_LABEL = "label "  # and the one of a sample: an amount of 1
_COUNTED = "counted "  # of another column
_WORDS_OF_LABELS = ("label", "target", "class", "tag")  # in the names of columns
_FAR_APART = 1 / 3  # two amounts of which one is twice the other: a larger difference would not tell more
_LONGEST_SHARE = 3 / 4  # of the longer row: how long the other one may be, so that its padding is seen in a trial

Amounts = dict[str, float]  # by what a loss may weigh a sample


class WeighedSample(NamedTuple):
    """One of a batch: its number, and by what a loss may weigh it."""

    batch: TrainerBatch
    number: int
    amounts: Amounts


class TrialSamples:
    """Chooses the samples of trials, and keeps how different those were that have found a factor.

    Attributes:
        has_told_more: whether the last trial has found a factor with two samples that differ more than those before.
        pads: whether one of the two samples of such a trial was padded.
    """

    def __init__(self) -> None:
        self.has_told_more = False
        self.pads = False
        self._tried: Amounts = {}  # the largest differences of all trials that have found a factor
        self._wanted: Amounts = {}  # the differences for which the last samples were chosen
        self._shown: Amounts = {}  # those between the last two samples
        self._shows_padding = False

    def tell_more(self, samples: Sequence[WeighedSample]) -> bool:
        """Whether ``samples`` differ far more than those of all trials that have found a factor."""
        return bool(self._untried([one.amounts for one in samples]))

    def in_order(self, groups: Iterable[Sequence[WeighedSample]], *, joins: bool) -> list[WeighedSample]:
        """The samples as a trial takes them, of the group of those that may meet in a micro-batch and differ the most.

        The first one has the most of what differs the most, or the label of the most samples. The next ones have
        labels, are if possible of another batch, and differ the most from it.

        Args:
            joins: whether batches are joined: if no trial has seen padding, differences in length come first.
        """
        looks_at_length = joins and not self.pads

        def distance(samples: Iterable[WeighedSample]) -> tuple[float, float]:
            amounts = [one.amounts for one in samples]
            lengths = (size for name, size in _differences(amounts).items() if name.startswith(MASK))
            return sum(lengths) if looks_at_length else 0.0, sum(self._untried(amounts).values())

        every = max(groups, key=distance)
        names = Counter(name for one in every for name in one.amounts)
        counts = [_num_labels(one.amounts, names) for one in every]
        self.has_told_more, self._wanted = False, self._untried([one.amounts for one in every])
        main = MASK if looks_at_length else max(self._wanted, key=self._wanted.__getitem__, default="")
        if main != MASK and any(name.startswith(_LABEL) for name in names):
            main = ""  # all labels are compared with the one of the most samples
        first = max(
            range(len(every)), key=lambda one: (counts[one] > 0, every[one].amounts.get(main, 0.0), counts[one])
        )

        def rank(index: int) -> tuple[Any, ...]:
            """The least comes first."""
            one, of_first = every[index], every[first]
            is_another, has_no_labels = index != first, counts[index] == 0
            distances = (-size for size in distance([of_first, one]))
            is_as_long = padded_length(one.batch.inputs) == padded_length(of_first.batch.inputs)
            return is_another, has_no_labels, one.batch is of_first.batch, *distances, is_as_long, counts[index]

        return [every[index] for index in sorted(range(len(every)), key=rank)]

    def compare(self, one: Sequence[WeighedSample], other: Sequence[WeighedSample]) -> None:
        """Note what the trial of two batches with these samples can show."""
        amounts = [_sum([sample.amounts for sample in samples]) for samples in (one, other)]
        shorter, longer = sorted(padded_length(samples[0].batch.inputs) for samples in (one, other))
        self._shown, self._shows_padding = _differences(amounts), shorter <= _LONGEST_SHARE * longer

    def compare_nothing(self) -> None:
        """Note that the next trial shows nothing about single samples."""
        self.has_told_more, self._wanted, self._shown, self._shows_padding = False, {}, {}, False

    def confirm(self) -> None:
        """Note that the trial has found a factor."""
        self.pads = self.pads or self._shows_padding
        self.has_told_more = any(self._shown.get(name, 0.0) > self._tried.get(name, 0.0) for name in self._wanted)
        for name, size in self._shown.items():
            self._tried[name] = max(size, self._tried.get(name, 0.0))

    def _untried(self, samples: Sequence[Amounts]) -> Amounts:
        """How much samples differ, where that is more than twice as much as in all trials that found a factor."""
        tried = self._tried
        return {
            name: size for name, size in _differences(samples).items() if tried.get(name, 0) < min(size / 2, _FAR_APART)
        }


def samples_of(batch: TrainerBatch, num_samples: int) -> list[WeighedSample]:
    """The samples of ``batch``: of pairs, both parts are one sample. A loss may weigh it by any of its numbers."""
    every: list[Amounts] = [{} for _ in range(num_samples)]
    for name, column in columns(batch.inputs):
        if isinstance(column, torch.Tensor):
            for part, rows in enumerate(column.split(num_samples)):
                for amounts, of_row in zip(every, _amounts_of_rows(name, rows), strict=False):
                    amounts |= {f"{key} {part}" if part else key: amount for key, amount in of_row.items()}
        elif len(column) == num_samples:  # lists, as of the objects in each image
            for amounts, entry in zip(every, column, strict=True):
                amounts |= _amounts_of_entry(name, entry)
    for one in _without_answers(batch.inputs):
        every[one][f"{_LABEL}{IGNORED}"] = 1.0
    return [WeighedSample(batch, number, amounts) for number, amounts in enumerate(every)]


def _amounts_of_rows(name: str, rows: torch.Tensor) -> list[Amounts]:
    """Of each row's entry in a column; nothing if a loss would not weigh by it."""
    counted = f"{_COUNTED}{name}"
    if rows.ndim == 1 and _is_label(name) and not rows.is_floating_point():
        start = _LABEL if name == "labels" and rows.dtype == torch.long else f"{name} "
        return [{f"{start}{label}": 1.0} for label in rows.tolist()]
    if rows.ndim == 1:
        numbers, counts = (one.double().abs().nan_to_num().tolist() for one in (rows, _not_left_out(name, rows)))
        return [{name: number, counted: count} for number, count in zip(numbers, counts, strict=True)]
    if "mask" in name or "weight" in name:
        sums = rows.flatten(1).sum(dim=1, dtype=torch.double) if rows.ndim > 2 else rows.double().abs().sum(dim=1)
    elif _is_label(name) or not rows.is_floating_point():
        sums = _not_left_out(name, rows).flatten(1).sum(dim=1)
        name = _VALID if name == "labels" and rows.dtype == torch.long and rows.ndim == 2 else counted
    else:
        return []
    return [{name: amount} for amount in sums.double().abs().nan_to_num().tolist()]


def _is_label(name: str) -> bool:
    """Whether a column may have labels, by its name."""
    return any(word in name for word in _WORDS_OF_LABELS)


def _not_left_out(name: str, rows: torch.Tensor) -> torch.Tensor:
    """Which entries of a column a loss may count, if they are labels: by the values that stand for no label."""
    if rows.dtype == torch.uint8:  # which has no negative values
        found = torch.ones_like(rows, dtype=torch.bool)
    else:
        found = (rows != IGNORED) & (rows != _MISSING) & ~rows.isnan()
    return found & (rows != _NO_CLASS) if rows.ndim > 2 and _is_label(name) else found


def _amounts_of_entry(name: str, entry: Any) -> Amounts:
    """How many elements the tensors and lists in the entry of one sample have, by their names."""
    if (named := named_values(entry)) is not None:
        inner = (_amounts_of_entry(f"{name}.{key}", value) for key, value in named)
        return {key: amount for amounts in inner for key, amount in amounts.items()}
    if isinstance(entry, torch.Tensor):
        return {name: float(entry.numel())}
    return {name: float(len(entry))} if is_column(entry) else {}


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


def ignored_samples(inputs: Mapping[str, Any]) -> list[int]:
    """The numbers of the samples whose only label does not count, or one end of whose answer."""
    labels = inputs.get("labels")
    is_one = isinstance(labels, torch.Tensor) and labels.ndim == 1
    return (labels == IGNORED).nonzero().flatten().tolist() if is_one else _without_answers(inputs)


def _without_answers(inputs: Mapping[str, Any]) -> list[int]:
    """The numbers of the samples whose answers begin or end behind their rows."""
    found = (inputs.get(name) for name in _POSITIONS)
    positions = [one for one in found if isinstance(one, torch.Tensor) and one.ndim == 1]
    width = padded_length(inputs)
    return [number for number, ends in enumerate(zip(*positions, strict=True)) if max(ends) >= width]


def _valid_labels(inputs: Mapping[str, Any]) -> torch.Tensor | None:
    """Which labels [rows, tokens] count in a loss, if a batch has such labels."""
    labels = inputs.get("labels")
    is_known = isinstance(labels, torch.Tensor) and labels.ndim == 2 and labels.dtype == torch.long
    return labels != IGNORED if is_known else None


def with_fewer_labels(other: WeighedSample, one: WeighedSample) -> TrainerBatch:
    """The batch of ``other``, in which that loses half of its labels if some are ignored anywhere.

    Not if it has at most half as many as ``one`` already.
    """
    batch, number, _ = other
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
