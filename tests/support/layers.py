"""Layers that several test files share."""

import torch
from torch import nn


class RunningMean(nn.Module):
    """Passes its input on, and in training mode keeps a running mean and a count of batches in buffers."""

    mean: torch.Tensor
    num_batches: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("num_batches", torch.zeros((), dtype=torch.long))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows`` [..., width]."""
        if self.training:
            self.mean.lerp_(rows.detach().float().mean(dim=tuple(range(rows.ndim - 1))), 0.1)
            self.num_batches.add_(1)
        return rows
