"""One optimizer step: accumulate micro-steps, sum over ranks, normalize, clip and step."""

import contextlib
import functools
import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only
from torchtune import utils

from torchtune_adaptive.engine.memory.meter import MemoryMeter
from torchtune_adaptive.engine.memory.out_of_memory import (
    comes_from_out_of_memory,
    free_memory,
    is_out_of_memory_in_collective,
)
from torchtune_adaptive.engine.memory.phases import Phases
from torchtune_adaptive.training.batch.micro_batches import MicroBatch
from torchtune_adaptive.training.batch.row_format import Row
from torchtune_adaptive.training.objectives import Objective
from torchtune_adaptive.training.optimizers import OptimizerPolicy, divisor, sum_over_ranks
from torchtune_adaptive.training.step_figures import StepFigures, StepSums


@dataclass(eq=False)
class TrainStep:
    """Runs optimizer steps of one objective.

    Attributes:
        collate: makes a batch in host memory from a list of rows.
        phases: tracks the current phase.
        meter: the device's meter, which must count batches explicitly; None without a meter.
        stop_requested: whether this rank was asked to end; the step's own all-reduce tells all ranks.
    """

    objective: Objective
    optimizer_policy: OptimizerPolicy
    _: KW_ONLY
    collate: Callable[[Sequence[Row]], Any]
    device: torch.device
    phases: Phases
    meter: MemoryMeter | None
    stop_requested: Callable[[], bool] = lambda: False
    _has_finished_one: bool = field(default=False, init=False)

    @property
    def metered(self) -> AbstractContextManager[Any]:
        """The context in which the device's memory is metered, if there is a meter."""
        return contextlib.nullcontext() if self.meter is None else self.meter

    def micro_step(self, micro_batch: MicroBatch) -> StepSums:
        """Forward pass, loss and backward pass of one micro-batch. With FSDP2 a collective.

        The last micro-step of a small batch also measures the accumulated gradient.
        """
        self.phases.enter("forward")
        loss = self.objective(self._batch(micro_batch.rows))  # hooks enter the phase "loss" after the forward pass
        self.phases.enter("backward")
        self.optimizer_policy.backward(loss)
        sums = StepSums.of(loss)
        del loss  # only the sums outlive the backward pass
        if not micro_batch.is_small:
            return sums
        norm_squared = torch.zeros((), dtype=torch.float64, device=sums.loss.device)
        if micro_batch.ends_small:
            norm_squared = own_norm_squared(self.optimizer_policy.model).to(norm_squared)
        return replace(sums, small_batch=torch.stack((norm_squared, sums.weight.double())))

    def finish(self, sums: StepSums) -> StepFigures:
        """Normalize gradients by the weight of all ranks, clip them, and step the optimizers. A collective.

        Raises:
            RuntimeError: out of memory after all ranks had agreed that the micro-steps succeeded.
        """
        creates_state = not self._has_finished_one and not any(one.state for one in self.optimizer_policy.optimizers)
        if creates_state:
            self._free_cache()
        try:
            figures = self._finish(sums)
        except Exception as error:
            if not comes_from_out_of_memory(error) and not is_out_of_memory_in_collective(error):
                raise
            raise RuntimeError(
                f"out of memory in phase {self.phases.now!r}, when parameters and optimizer state may be half updated:"
                " the run must end, and may resume from its last checkpoint; an 8-bit optimizer, LoRA or more ranks"
                " would need less"
            ) from error
        if creates_state:
            self._free_cache()
        self._has_finished_one = True
        return figures

    def __call__(self, micro_batches: Sequence[Sequence[Row]]) -> StepFigures:
        """A whole step over ``micro_batches``, without recovery: a probe. A collective."""
        return self._finish(functools.reduce(operator.add, map(self.micro_step, map(MicroBatch, micro_batches))))

    def _finish(self, sums: StepSums) -> StepFigures:
        self.phases.enter("clip")
        values = self._sum_over_ranks(sums)
        weight = divisor(values[1]).to(sums.weight.dtype)
        norm = self.optimizer_policy.normalize(weight)
        self.phases.enter("optimizer")
        self.optimizer_policy.step()
        # Rounded as in torchtune, which divides a number by a tensor.
        loss = weight.reciprocal() * values[0].to(sums.loss.dtype)
        metrics_end = 4 + len(sums.metrics)
        parts = [loss.double()[None], values[1:4], values[4:metrics_end] / divisor(values[1])]
        if norm is not None:
            parts.append(norm.detach().to(values)[None])
        parts.append(values[metrics_end:])
        names = (*sums.metrics, "grad_norm") if norm is not None else tuple(sums.metrics)
        return StepFigures(torch.cat(parts), names)

    def _free_cache(self) -> None:
        """Free what CUDA's allocator has cached, so that optimizer state and activations never share a block of it."""
        if self.device.type == "cuda":
            free_memory(self.device)

    def _batch(self, rows: Sequence[Row]) -> Any:
        if self.meter is None:
            batch = self.collate(rows)
        else:
            with _disable_current_modes():  # a forecast needs the same operations for any number of rows
                batch = self.collate(rows)
            self.meter.count(batch)
        if isinstance(batch, dict):
            utils.batch_to_device(batch, self.device)  # moves block masks too
            return batch
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to(self.device), batch)

    def _sum_over_ranks(self, sums: StepSums) -> torch.Tensor:
        """Loss, weight, tokens, requests to end, metrics and measured sums, in one all-reduce. A collective.

        In float64, which holds counts exactly, and rounds the sum of two ranks as their own type does.
        """
        num_tokens = sums.weight if sums.num_tokens is None else sums.num_tokens
        stop = torch.full_like(sums.loss, self.stop_requested())
        scalars = [sums.loss, sums.weight, num_tokens, stop, *sums.metrics.values()]
        values = torch.stack([value.detach().double() for value in scalars])
        if sums.small_batch is not None:
            norm_squared = own_norm_squared(self.optimizer_policy.model).to(values.device)
            values = torch.cat((values, sums.small_batch, norm_squared[None]))
        return sum_over_ranks(values)


def own_norm_squared(model: nn.Module) -> torch.Tensor:
    """The squared norm of this rank's part of the gradient, in float64. Nothing is communicated."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    own = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    wide = [torch.promote_types(gradient.dtype, torch.float32) for gradient in own]
    norms = [
        torch.linalg.vector_norm(gradient, dtype=dtype).double() for gradient, dtype in zip(own, wide, strict=True)
    ]
    return torch.stack(norms).square().sum()
