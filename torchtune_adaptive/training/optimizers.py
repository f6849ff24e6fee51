"""When optimizers step: after all backward passes of a step, or during each of them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torchtune import training

from torchtune_adaptive.training.objectives import Loss

_LEAKS_HOST_MEMORY = ("2.10.", "2.11.")  # versions of torch; delete when the oldest that is allowed is later


@dataclass(eq=False)
class OptimizerPolicy(ABC):
    """The interface of a train step to the optimizers: ``backward`` for each micro-step, ``normalize``, then ``step``.

    Attributes:
        model: the trained model.
        optimizers: all of them.
        accumulates: whether a step may have several micro-steps.
    """

    accumulates = True

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]

    def zero_grad(self) -> None:
        """Drop gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    @abstractmethod
    def backward(self, loss: Loss) -> None:
        """The backward pass of one micro-step. With FSDP2 a collective."""

    @abstractmethod
    def normalize(self, weight: torch.Tensor) -> torch.Tensor | None:
        """Divide gradients by the ``weight`` of all ranks, above 0, and clip them; return their norm if clipped.

        With FSDP2 a collective.
        """

    @abstractmethod
    def step(self) -> None:
        """Step all optimizers, and drop gradients."""


@dataclass(eq=False)
class OptimizerStep(OptimizerPolicy):
    """Accumulates the gradients of all micro-steps. Then they are normalized and clipped, and the optimizers step.

    Attributes:
        ranks: number of ranks over which FSDP2 averages gradients.
        max_grad_norm: the norm to which gradients are clipped; None: no clipping, and the norm is unknown.
    """

    _: KW_ONLY
    ranks: int
    max_grad_norm: float | None

    def backward(self, loss: Loss) -> None:
        loss.total.backward()

    def normalize(self, weight: torch.Tensor) -> torch.Tensor | None:
        # FSDP2 divides gradients by the number of ranks; this multiplies them back.
        training.scale_grads(self.model, self.ranks / weight)
        if self.max_grad_norm is None:
            return None
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=self.max_grad_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        self.zero_grad()


class OptimizerInBackward(OptimizerPolicy):
    """torchtune's ``optimizer_in_bwd``: each parameter has an optimizer, which steps once its gradient is computed.

    An optimizer step is a single micro-step, whose loss is normalized before its backward pass.

    Args:
        wrapper: torchtune's wrapper, which holds the optimizers.
        normalizes: False as in torchtune's single-device recipe, whose gradient is the sum over tokens.
    """

    accumulates = False

    def __init__(self, model: nn.Module, wrapper: Any, *, ranks: int, normalizes: bool) -> None:
        super().__init__(model, list(wrapper.optim_map.values()))
        self._ranks = ranks
        self._normalizes = normalizes

    def backward(self, loss: Loss) -> None:
        if not self._normalizes:
            loss.total.backward()
            return
        (loss.total * (self._ranks / divisor(sum_over_ranks(loss.weight.clone())))).backward()

    def normalize(self, weight: torch.Tensor) -> None:
        """Nothing is left to do."""

    def step(self) -> None:
        """Nothing is left to do."""


def leak_warning(optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """A sentence about host memory that steps of a sharded model leak with this version of torch; "" if none is known.

    The source of the versions: https://github.com/pytorch/pytorch/issues/181761, and our own measurements in
    ``benchmarks/results/host_growth_cpu.md``.
    """
    parameters = [one for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]]
    is_sharded = any(isinstance(one, DTensor) for one in parameters)
    if not is_sharded or not torch.__version__.startswith(_LEAKS_HOST_MEMORY):
        return ""
    return (
        f"torch {torch.__version__} leaks host memory in each optimizer step of a sharded model; torch 2.9.1 and 2.12.1"
        " do not (https://github.com/pytorch/pytorch/issues/181761)."
    )


def divisor(weight: torch.Tensor) -> torch.Tensor:
    """What to divide sums by to get means: ``weight``, or 1 if nothing counts, where all sums are 0."""
    return torch.where(weight > 0, weight, 1)


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Sum ``values`` over all ranks, in place. With a process group a collective."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values
