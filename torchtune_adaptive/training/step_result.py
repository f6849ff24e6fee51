"""What an optimizer step reports."""

from dataclasses import dataclass

import torch

from torchtune_adaptive.training.objectives import Loss


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
