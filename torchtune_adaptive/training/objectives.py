"""Objectives: the forward pass and loss of a micro-batch. One class for each training method.

Shapes in comments: B rows of a micro-batch, S tokens of a row.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Loss:
    """The loss of one micro-batch. A step's gradient is that of the sum of ``total`` divided by the sum of ``weight``.

    Attributes:
        total: a scalar to call ``backward`` on.
        weight: a scalar count, for example of unmasked tokens or of pairs; 0 if the micro-batch does not count.
        num_tokens: tokens for the logged tokens per second; None if ``weight`` counts tokens.
        metrics: sums over the units of ``weight``, logged as means. "loss" replaces the loss of ``total`` in the log.
    """

    total: torch.Tensor
    weight: torch.Tensor
    num_tokens: torch.Tensor | None = None
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)


Objective: TypeAlias = Callable[[Any], Loss]  # from a batch on the device


@dataclass(frozen=True, eq=False)
class NextToken:
    """Supervised finetuning: the cross entropy of each unmasked token. For full, LoRA and quantization-aware training.

    Attributes:
        loss_fn: the mean loss per unmasked token, from logits [B, S, vocabulary] as a whole or in chunks.
        activations: the context of the forward pass, for example one that offloads activations.
        weight_depends_on_cut: count unmasked labels as torchtune does, before they are shifted. A row's first token
            then counts although nothing predicts it. The weight of a row then depends on the other rows.
    """

    model: nn.Module
    loss_fn: Any
    activations: AbstractContextManager[Any]
    _: KW_ONLY
    weight_depends_on_cut: bool

    def __call__(self, batch: dict[str, torch.Tensor]) -> Loss:
        labels = batch.pop("labels")  # [B, S]
        targets, num_tokens = targets_of(labels, self.loss_fn.ignore_index, counts_first=self.weight_depends_on_cut)
        with self.activations:
            logits = self.model(**batch)
        return Loss(self.loss_fn(*as_loss_takes(logits, targets)) * num_tokens, num_tokens)


def targets_of(labels: torch.Tensor, ignore_index: int, *, counts_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The target of each token [B, S], and how many labels count, a scalar.

    A mean over no target would be 0 / 0, and so would its gradient, even if it is multiplied by 0. So if there is no
    target, all are some class that is not ignored, none counts, and the caller must multiply the loss by 0.

    Args:
        labels: [B, S].
        counts_first: count a row's first label too, although it is no target.
    """
    counted = labels if counts_first else labels[..., 1:]
    targets = F.pad(labels[..., 1:], (0, 1), value=ignore_index)
    has_target = (targets != ignore_index).any()
    num_tokens = torch.where(has_target, (counted != ignore_index).sum(), 0)
    return torch.where(has_target, targets, int(ignore_index == 0)), num_tokens


def as_loss_takes(logits: Any, targets: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """Logits and targets in the form that torchtune's losses take: chunks as they are, else flattened.

    Args:
        logits: [B, S, vocabulary], or a list of chunks.
        targets: [B, S].
    """
    if isinstance(logits, list):
        return logits, targets
    return logits.reshape(-1, logits.size(-1)), targets.reshape(-1)
