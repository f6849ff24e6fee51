"""Knowledge distillation (Hinton et al. 2015, https://arxiv.org/abs/1503.02531)."""

from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import nn

from torchtune_adaptive.training.objectives import Loss, as_loss_takes, targets_of


@dataclass(frozen=True, eq=False)
class Distillation:
    """Cross entropy of each unmasked token, and its divergence from a teacher's prediction.

    Attributes:
        loss_fn: the mean loss per unmasked token, from logits as a whole or in chunks.
        kd_loss_fn: the mean divergence per unmasked token, from the student's logits, the teacher's, and labels.
        ratio: the share of the divergence in the loss, in [0, 1].
        means_add_up: as torchtune does, sum the mean losses of micro-batches and divide by all tokens. The gradient is
            then too small by the number of tokens of a micro-batch.
    """

    student: nn.Module
    teacher: nn.Module
    loss_fn: Any
    kd_loss_fn: Any
    _: KW_ONLY
    ratio: float
    means_add_up: bool

    def __call__(self, batch: dict[str, torch.Tensor]) -> Loss:
        labels = batch.pop("labels")  # [B, S]
        shifted, num_tokens = targets_of(labels, self.loss_fn.ignore_index, counts_first=self.means_add_up)
        logits, targets = as_loss_takes(self.student(**batch), shifted)
        with torch.no_grad():
            teacher_logits, _ = as_loss_takes(self.teacher(**batch), shifted)
        kd_loss = self.kd_loss_fn(logits, teacher_logits, targets)
        class_loss = self.loss_fn(logits, targets)
        mean = (1 - self.ratio) * class_loss + self.ratio * kd_loss
        means = {"loss": mean, "class_loss": class_loss, "kd_loss": kd_loss}
        sums = {name: value.detach() * num_tokens for name, value in means.items()}
        total = mean * (num_tokens > 0 if self.means_add_up else num_tokens)
        return Loss(total, num_tokens, None, sums, is_mean=self.means_add_up)
