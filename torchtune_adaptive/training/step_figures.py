"""The figures of an optimizer step: sums of micro-steps, and results over all ranks."""

from dataclasses import dataclass, field

import torch

from torchtune_adaptive.training.objectives import Loss


@dataclass(frozen=True)
class StepSums:
    """The sums over micro-steps, as scalars on the device.

    ``small_batch`` is set in steps whose gradient noise is measured. It holds the squared norm of this rank's part of
    the small batch's gradient, and the small batch's weight, in float64.
    """

    loss: torch.Tensor
    weight: torch.Tensor
    num_tokens: torch.Tensor | None = None  # None: the weight counts them
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)
    small_batch: torch.Tensor | None = None

    @classmethod
    def of(cls, loss: Loss) -> "StepSums":
        """The sums of one micro-step. A micro-batch without weight has no loss, because the mean of nothing is NaN."""
        counts = loss.weight > 0
        metrics = {name: torch.where(counts, value.detach(), 0.0) for name, value in loss.metrics.items()}
        return cls(torch.where(counts, loss.total.detach(), 0.0), loss.weight, loss.num_tokens, metrics)

    def __add__(self, other: "StepSums") -> "StepSums":
        small_batches = [one.small_batch for one in (self, other) if one.small_batch is not None]
        return StepSums(
            self.loss + other.loss,
            self.weight + other.weight,
            None if self.num_tokens is None or other.num_tokens is None else self.num_tokens + other.num_tokens,
            {name: value + other.metrics[name] for name, value in self.metrics.items()},
            torch.stack(small_batches).sum(dim=0) if small_batches else None,
        )


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


@dataclass(frozen=True)
class StepFigures:
    """A ``StepResult`` that is still on the device.

    ``values`` is a float64 vector: loss, weight, tokens, number of ranks that were asked to end, the metrics in
    ``names``, then the measured sums.
    """

    values: torch.Tensor
    names: tuple[str, ...]

    def read(self) -> StepResult:
        """The figures on the host. Waits once for the device."""
        loss, weight, num_tokens, stop, *rest = self.values.tolist()
        metrics = dict(zip(self.names, rest, strict=False))
        grad_norm = metrics.pop("grad_norm", None)
        loss = metrics.pop("loss", loss)
        return StepResult(loss, weight, round(num_tokens), metrics, grad_norm, tuple(rest[len(self.names) :]), stop > 0)
