"""Batches whose samples follow one another in one row, without padding: TRL's ``padding_free`` and packing.

They are cut and joined as padded rows. The trainer's collator then makes each micro-batch flat again.
"""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils._python_dispatch import _disable_current_modes

from torchtune_adaptive.errors import InputError
from torchtune_adaptive.integrations.trainer_batch import IGNORED, MASK

_LENGTHS = "sample_lengths"
_PADDING = {"input_ids": 0, "labels": IGNORED, "position_ids": 0}

Collate = Callable[[list[Any]], Mapping[str, Any]]


class WithLengths:
    """A collator of flat batches that also tells the tokens of each sample, from which ``as_rows`` makes rows."""

    def __init__(self, collate: Collate) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any]) -> Mapping[str, Any]:
        """A batch as of the collator, and one tensor more."""
        lengths = torch.tensor([len(one["input_ids"]) for one in samples])
        return {**self._collate(samples), _LENGTHS: lengths}


def as_rows(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Tensors [1, tokens] as [samples, longest], padded at the end, with an attention mask; other batches as they are.

    A sample may have several documents, each of which begins at position 0.
    """
    if _LENGTHS not in inputs:
        return inputs
    lengths = inputs[_LENGTHS].tolist()
    rows = {
        name: pad_sequence(inputs[name][0, : sum(lengths)].split(lengths), batch_first=True, padding_value=padding)
        for name, padding in _PADDING.items()
    }
    places = torch.arange(max(lengths), device=rows["input_ids"].device)
    return {**rows, MASK: (places < inputs[_LENGTHS][:, None]).long()}


def as_flat(inputs: Mapping[str, Any], collate: Collate) -> Mapping[str, Any]:
    """The batch that ``collate`` makes of the samples in these rows.

    That takes more operations for more samples. Nobody counts them, or steps of 2 and 3 samples would not be alike.
    """
    with _disable_current_modes():
        columns = [inputs[name].tolist() for name in (*_PADDING, MASK)]
        return collate([_sample(*row) for row in zip(*columns, strict=True)])


def _sample(tokens: list[int], labels: list[int], positions: list[int], mask: list[int]) -> dict[str, list[int]]:
    """As a data set has it, without padding, and with the lengths of its documents."""
    length = sum(mask)
    starts = [place for place in range(length) if positions[place] == 0]
    lengths = [end - start for start, end in itertools.pairwise([*starts, length])]
    return {"input_ids": tokens[:length], "labels": labels[:length], "seq_lengths": lengths}


def check_same_again(batch: Mapping[str, Any], collate: Collate) -> None:
    """Check that the rows of a flat batch, made flat again, are that batch.

    Raises:
        InputError: they are not, because the collator takes samples otherwise.
    """
    if _LENGTHS not in batch:
        raise InputError("With packing or `padding_free`, `get_train_dataloader` must use `self.data_collator`.")
    again = as_flat(as_rows(batch), collate)
    for name in sorted({*batch, *again} - {_LENGTHS}):
        if not torch.equal(*(torch.as_tensor(one.get(name, ())).cpu() for one in (batch, again))):
            raise InputError(
                f"This version of TRL cannot be used with packing or `padding_free`: `{name}` of a batch differs when "
                "its samples are put together again."
            )
