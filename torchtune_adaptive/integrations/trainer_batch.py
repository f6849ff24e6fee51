"""A batch that a trainer has collated."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torchtune_adaptive.engine.recovery.columns import columns

IGNORED = -100  # a label that transformers' losses leave out
MASK = "attention_mask"


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


def padded_length(inputs: Mapping[str, Any]) -> int:
    """The tokens of each row, with padding; 0 if no column has tokens."""
    return max((one.shape[1] for _, one in columns(inputs) if getattr(one, "ndim", 0) > 1), default=0)
