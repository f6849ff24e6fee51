"""One optimizer step: accumulate micro-steps, sum over ranks, normalize, clip and step."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only
from torchtune import utils

from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.engine.loop import Loop
from torchtune_adaptive.engine.memory.meter import MemoryMeter
from torchtune_adaptive.engine.memory.out_of_memory import (
    comes_from_out_of_memory,
    free_memory,
    is_out_of_memory_in_collective,
)
from torchtune_adaptive.engine.memory.phases import Phases
from torchtune_adaptive.training.batch.micro_batches import MicroBatch
from torchtune_adaptive.training.batch.row_format import Row
from torchtune_adaptive.training.objectives import Loss, Objective
from torchtune_adaptive.training.optimizers import OptimizerPolicy, divisor, sum_over_ranks


@dataclass(frozen=True)
class StepResult:
    """The result of an optimizer step over all ranks.

    Attributes:
        loss: loss per unit of weight.
        weight, num_tokens: sums over all ranks' samples.
        metrics: values per unit of weight.
        grad_norm: norm before clipping, None without clipping.
        measured: the sums for ``gradient_norms``; empty except in measured steps.
        stop: whether some rank was asked to end the run after this step.
    """

    loss: float
    weight: float
    num_tokens: int
    metrics: dict[str, float]
    grad_norm: float | None
    measured: tuple[float, ...] = ()
    stop: bool = False

    @classmethod
    def read(cls, values: torch.Tensor, sums: Loss) -> "StepResult":
        """The result from what ``TrainStep.finish`` has made of ``sums``. Waits once for the device."""
        loss, weight, num_tokens, stop, *rest = values.tolist()
        metrics = dict(zip(sums.metrics, rest, strict=False))
        others = rest[len(metrics) :]
        measured = () if sums.small_batch is None else tuple(others[-3:])
        grad_norm = others[0] if len(others) > len(measured) else None
        return cls(metrics.pop("loss", loss), weight, round(num_tokens), metrics, grad_norm, measured, stop > 0)


@dataclass(eq=False)
class TrainStep:
    """An optimizer step of a recipe: ``micro_step`` for each micro-batch, then ``finish`` with the sum of their losses.

    Attributes:
        models: all models on the device, the trained one first.
        policy: when and how the optimizers step.
        collate: makes a batch in host memory from a list of rows.
        phases: tracks the current phase.
        meter: the device's meter, which must count batches explicitly; None without a meter.
        release: frees what a failed step holds outside of the models.
        stop_requested: whether this rank was asked to end; the step's own all-reduce tells all ranks.
    """

    models: Sequence[nn.Module]
    objective: Objective
    policy: OptimizerPolicy
    _: KW_ONLY
    collate: Callable[[Sequence[Row]], Any]
    device: torch.device
    phases: Phases
    meter: MemoryMeter | None
    release: Callable[[], object] = lambda: None
    stop_requested: Callable[[], bool] = lambda: False
    _has_finished_one: bool = field(default=False, init=False)

    def loop(self, consensus: Consensus) -> Loop:
        """What search, recovery and plan run."""
        return Loop(
            model=nn.ModuleList(self.models),
            optimizers=self.policy.optimizers,
            device=self.device,
            micro_step=self.micro_step,
            finish=self.finish,
            release=self.release,
            consensus=consensus,
            meter=self.meter,
            state_comes_first=True,
        )

    def micro_step(self, micro_batch: MicroBatch) -> Loss:
        """Forward pass, loss and backward pass of one micro-batch. With FSDP2 a collective.

        The last micro-step of a small batch also measures the accumulated gradient.
        """
        self.phases.enter("forward")
        loss = self.objective(self._batch(micro_batch.rows))  # hooks enter the phase "loss" after the forward pass
        if not micro_batch.share:  # its labels may count: a `collate_fn` may make others than those of the row
            loss = loss.without_weight()
        elif loss.is_mean and micro_batch.share != 1:
            loss = replace(loss, total=loss.total * micro_batch.share)
        self.phases.enter("backward")
        self.policy.backward(loss)
        loss = loss.detached()
        if not micro_batch.is_small:
            return loss
        norm_squared = torch.zeros((), dtype=torch.float64, device=loss.total.device)
        if micro_batch.ends_small:
            norm_squared = own_norm_squared(self.policy.model).to(norm_squared)
        return replace(loss, small_batch=torch.stack((norm_squared, loss.weight.double())))

    def finish(self, sums: Loss) -> torch.Tensor:
        """Normalize gradients by the weight of all ranks, clip them, and step the optimizers. A collective.

        Returns a float64 vector over all ranks for ``StepResult.read``: loss, weight, tokens, number of ranks that were
        asked to end, the metrics, the gradient's norm if it is clipped, and the measured sums.
        """
        self.phases.enter("clip")
        values = self._sum_over_ranks(sums)
        weight = divisor(values[1]).to(sums.weight.dtype)
        norm = self.policy.normalize(weight)
        self.phases.enter("optimizer")
        self.policy.step()
        # Rounded as in torchtune, which divides a number by a tensor.
        loss = weight.reciprocal() * values[0].to(sums.total.dtype)
        metrics_end = 4 + len(sums.metrics)
        parts = [loss.double()[None], values[1:4], values[4:metrics_end] / divisor(values[1])]
        if norm is not None:
            parts.append(norm.detach().to(values)[None])
        parts.append(values[metrics_end:])
        return torch.cat(parts)

    @contextlib.contextmanager
    def finishing(self) -> Iterator[None]:
        """Context of ``finish`` in training, where an out-of-memory error ends the run.

        What CUDA's allocator has cached is freed before and after the first ``finish``, so that optimizer state and
        activations never share a block.

        Raises:
            RuntimeError: out of memory after all ranks had agreed that the micro-steps succeeded.
        """
        creates_state = not self._has_finished_one and not any(one.state for one in self.policy.optimizers)
        frees_cache = creates_state and self.device.type == "cuda"
        if frees_cache:
            free_memory(self.device)
        try:
            yield
        except Exception as error:
            if not comes_from_out_of_memory(error) and not is_out_of_memory_in_collective(error):
                raise
            raise RuntimeError(
                f"out of memory in phase {self.phases.now!r}: parameters and optimizer state may be half updated, so"
                " the run ends; resume from the last checkpoint. An 8-bit optimizer, LoRA or more ranks need less"
            ) from error
        if frees_cache:
            free_memory(self.device)
        self._has_finished_one = True

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

    def _sum_over_ranks(self, sums: Loss) -> torch.Tensor:
        """Loss, weight, tokens, requests to end, metrics and measured sums, in one all-reduce. A collective.

        In float64, which holds counts exactly, and rounds the sum of two ranks as their own type does.
        """
        num_tokens = sums.weight if sums.num_tokens is None else sums.num_tokens
        stop = torch.full_like(sums.total, self.stop_requested())
        scalars = [sums.total, sums.weight, num_tokens, stop, *sums.metrics.values()]
        values = torch.stack([value.detach().double() for value in scalars])
        if sums.small_batch is not None:
            norm_squared = own_norm_squared(self.policy.model).to(values.device)
            values = torch.cat((values, sums.small_batch, norm_squared[None]))
        return sum_over_ranks(values)


def own_norm_squared(model: nn.Module) -> torch.Tensor:
    """The squared norm of this rank's part of the gradient, in float64. Nothing is communicated."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    own = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    norms = [torch.linalg.vector_norm(one, dtype=torch.promote_types(one.dtype, torch.float32)).double() for one in own]
    return torch.stack(norms).square().sum()
