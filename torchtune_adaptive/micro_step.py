"""What a micro-step leaves to be added up: its loss, its tokens, and where that is wanted what tells of gradient noise.

A measured optimizer step takes the first half of each rank's samples as the small batch and all of them as the large
one: samples are in random order, so that each half is a fair sample, however it is cut. The gradient of the first half
is there when its last micro-step is done, and is the whole one's part.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchtune_adaptive.batch.noise_scale import GradientNorms
from torchtune_adaptive.batch.sampler import rows_of_rank


@dataclass(frozen=True)
class MicroStep:
    """What one forward and backward leaves, or several: the loss summed over its unmasked tokens, and their number.

    ``small_batch`` is there in measured steps: the squared norm of this rank's part of the gradient that the small
    batch has left, and its unmasked tokens.
    """

    loss_sum: torch.Tensor
    num_tokens: torch.Tensor
    small_batch: torch.Tensor | None = None  # [2], float64

    def __add__(self, other: "MicroStep") -> "MicroStep":
        known = [one.small_batch for one in (self, other) if one.small_batch is not None]
        small_batch = torch.stack(known).sum(dim=0) if known else None
        return MicroStep(self.loss_sum + other.loss_sum, self.num_tokens + other.num_tokens, small_batch)


def in_small_batch(run: Callable[[], MicroStep], *, last_of: nn.Module | None = None) -> MicroStep:
    """Run a micro-step of the small batch; its last one, given the model, measures the gradient that is there."""
    micro_step = run()
    norm_squared = micro_step.loss_sum.new_zeros((), dtype=torch.float64)
    if last_of is not None:
        norm_squared = own_norm_squared(last_of).to(norm_squared)
    return replace(micro_step, small_batch=torch.stack((norm_squared, micro_step.num_tokens.double())))


def own_norm_squared(model: nn.Module) -> torch.Tensor:
    """The squared norm of this rank's part of the gradient, in float64. Nothing is communicated."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    own = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    wide = [torch.promote_types(gradient.dtype, torch.float32) for gradient in own]
    norms = [
        torch.linalg.vector_norm(gradient, dtype=dtype).double() for gradient, dtype in zip(own, wide, strict=True)
    ]
    return torch.stack(norms).square().sum()


def small_samples(samples: int, *, ranks: int) -> int:
    """Samples of the small batch over all ranks, of ``samples`` in the step.

    >>> small_samples(10, ranks=4)  # ranks of 3, 3, 2 and 2
    6
    """
    return sum(-(-rows_of_rank(samples, rank=rank, ranks=ranks) // 2) for rank in range(ranks))


def gradient_norms(sums: Sequence[float], *, num_tokens: float, samples: int, ranks: int) -> GradientNorms | None:
    """The norms of mean gradients, per unmasked token as training takes them; None if the small batch has no token.

    Args:
        sums: over all ranks, of the small batch's squared norm, its unmasked tokens, and the whole squared norm.
    """
    small_squared, small_tokens, squared = sums
    if not small_tokens:
        return None
    # FSDP2 divides gradients by the number of ranks; this multiplies them back.
    return GradientNorms(
        small_samples=small_samples(samples, ranks=ranks),
        small_norm_squared=small_squared * (ranks / small_tokens) ** 2,
        samples=samples,
        norm_squared=squared * (ranks / num_tokens) ** 2,
    )
