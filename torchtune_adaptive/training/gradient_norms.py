"""Norms of gradients over a small and a large batch, from which the gradient noise scale is estimated.

In a measured optimizer step the small batch is the first half of each rank's samples, and the large batch is all of
them. Samples are in random order, so that each half is a random sample, however it is cut into micro-batches. The
gradient of the first half is available after its last micro-step, before the second half adds its own.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchtune_adaptive.training.batch.noise_scale import GradientNorms
from torchtune_adaptive.training.batch.rank_shares import small_samples


def own_norm_squared(model: nn.Module) -> torch.Tensor:
    """The squared norm of this rank's part of the gradient, in float64. Nothing is communicated."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    own = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    wide = [torch.promote_types(gradient.dtype, torch.float32) for gradient in own]
    norms = [
        torch.linalg.vector_norm(gradient, dtype=dtype).double() for gradient, dtype in zip(own, wide, strict=True)
    ]
    return torch.stack(norms).square().sum()


def gradient_norms(sums: Sequence[float], *, weight: float, samples: int, ranks: int) -> GradientNorms | None:
    """The norms of mean gradients, per unit of weight as in training; None if the small batch has no weight.

    Args:
        sums: the small batch's squared norm, its weight, and the whole squared norm, each summed over all ranks.
    """
    small_squared, small_weight, squared = sums
    if not small_weight:
        return None
    # FSDP2 divides gradients by the number of ranks; this multiplies them back.
    return GradientNorms(
        small_samples=small_samples(samples, ranks=ranks),
        small_norm_squared=small_squared * (ranks / small_weight) ** 2,
        samples=samples,
        norm_squared=squared * (ranks / weight) ** 2,
    )
