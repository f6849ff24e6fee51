"""What plain training loops on several ranks have in common."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


def finish_step(model: nn.Module, optimizer: torch.optim.Optimizer, loss_sum: torch.Tensor, num_samples: int) -> None:
    """Divide gradients by the samples of all ranks, clip them, and step the optimizer. A collective.

    Args:
        loss_sum, num_samples: of this rank's samples. The gradients are means over ranks of those of the sums.
    """
    sums = torch.stack((loss_sum, torch.tensor(float(num_samples), device=loss_sum.device)))
    dist.all_reduce(sums)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(dist.get_world_size() / sums[1])
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def own_shards(model: nn.Module) -> list[torch.Tensor]:
    """This rank's part of each parameter."""
    parameters: list[Any] = list(model.parameters())
    return [one.to_local() if isinstance(one, DTensor) else one for one in parameters]
