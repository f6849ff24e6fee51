"""The figures of an optimizer step: what micro-steps leave, and what comes of it over all ranks."""

from dataclasses import dataclass, field

import torch

from torchtune_adaptive.training.objectives import Loss


@dataclass(frozen=True)
class StepSums:
    """What micro-steps leave to be added up, as scalars on the device.

    ``small_batch`` is there in steps whose gradient noise is measured: the squared norm of this rank's part of the
    gradient that the small batch has left, and its weight, in float64.
    """

    loss: torch.Tensor
    weight: torch.Tensor
    num_tokens: torch.Tensor | None = None  # None: the weight counts them
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)
    small_batch: torch.Tensor | None = None

    @classmethod
    def of(cls, loss: Loss) -> "StepSums":
        """Those of one micro-step. A micro-batch without weight has no loss: the mean over nothing is not a number."""
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
    """An optimizer step over all ranks.

    Attributes:
        loss: per unit of weight.
        weight, num_tokens: of all ranks' samples.
        metrics: per unit of weight.
        grad_norm: before clipping, None without clipping.
        measured: of ``gradient_norms``, empty but for measured steps.
        stop: whether some rank is asked to end the run after this step.
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

    ``values`` is a float64 vector of loss, weight, tokens and ranks that are asked to end, then what ``names`` says,
    then what was measured.
    """

    values: torch.Tensor
    names: tuple[str, ...]

    def read(self) -> StepResult:
        """The figures on the host, at the price of one wait for the device."""
        loss, weight, num_tokens, stop, *rest = self.values.tolist()
        metrics = dict(zip(self.names, rest, strict=False))
        grad_norm = metrics.pop("grad_norm", None)
        loss = metrics.pop("loss", loss)
        return StepResult(loss, weight, round(num_tokens), metrics, grad_norm, tuple(rest[len(self.names) :]), stop > 0)
