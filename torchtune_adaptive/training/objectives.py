"""Objectives: the forward pass and loss of a micro-batch. One class for each training method.

Shapes in comments: B rows of a micro-batch, S tokens of a row.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Loss:
    """The loss of one micro-batch, or the sum of several. All values are scalars on the device.

    A step's gradient is that of the sum of ``total`` divided by the sum of ``weight``.

    Attributes:
        total: the loss, on which ``backward`` is called.
        weight: a count, for example of unmasked tokens or of pairs; 0 if the micro-batch does not count.
        num_tokens: tokens for the logged tokens per second; None if ``weight`` counts tokens.
        metrics: sums over the units of ``weight``, logged as means. "loss" replaces the loss of ``total`` in the log.
        is_mean: whether ``total`` is a mean, of which a part of a micro-batch needs its share, as torchtune's
            distillation has it.
        small_batch: only in steps whose gradient noise is measured: the squared norm of this rank's part of the small
            batch's gradient, and the small batch's weight, in float64.
    """

    total: torch.Tensor
    weight: torch.Tensor
    num_tokens: torch.Tensor | None = None
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)
    is_mean: bool = False
    small_batch: torch.Tensor | None = None

    def detached(self) -> "Loss":
        """The values without their graph. Without weight they are 0, because the mean of nothing is NaN."""
        counts = self.weight > 0
        metrics = {name: torch.where(counts, value.detach(), 0.0) for name, value in self.metrics.items()}
        return replace(self, total=torch.where(counts, self.total.detach(), 0.0), metrics=metrics)

    def without_weight(self) -> "Loss":
        """The loss of a micro-batch that does not count. Its backward pass makes gradients of 0."""
        num_tokens = None if self.num_tokens is None else self.num_tokens * 0
        return replace(self, total=self.total * 0, weight=self.weight * 0, num_tokens=num_tokens)

    def __add__(self, other: "Loss") -> "Loss":
        small_batches = [one.small_batch for one in (self, other) if one.small_batch is not None]
        return Loss(
            self.total + other.total,
            self.weight + other.weight,
            None if self.num_tokens is None or other.num_tokens is None else self.num_tokens + other.num_tokens,
            {name: value + other.metrics[name] for name, value in self.metrics.items()},
            small_batch=torch.stack(small_batches).sum(dim=0) if small_batches else None,
        )


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
