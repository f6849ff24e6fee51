"""What is logged of optimizer steps, and when."""

from typing import Any

import torch
from torchtune import training

from torchtune_adaptive.memory.meter import MemoryMeter
from torchtune_adaptive.training.train_step import StepResult


class StepLog:
    """Writes the figures of every n-th optimizer step to torchtune's metric logger, on rank 0.

    Args:
        metric_logger: None on the other ranks, which log nothing.
        every_steps: n.
        ranks: among which tokens are shared.
        meter: whose peak is logged, and reset after it; None if nothing is metered.
        with_memory_stats: log the device's own memory statistics too.
    """

    def __init__(
        self,
        metric_logger: Any,
        *,
        every_steps: int,
        device: torch.device,
        ranks: int,
        meter: MemoryMeter | None,
        with_memory_stats: bool,
    ) -> None:
        self._metric_logger = metric_logger
        self._every_steps = every_steps
        self._device = device
        self._ranks = ranks
        self._meter = meter
        self._with_memory_stats = with_memory_stats

    @property
    def writes(self) -> bool:
        """Whether this rank logs."""
        return self._metric_logger is not None

    def is_due(self, step: int) -> bool:
        """Whether step number ``step``, from 1, is to be logged here."""
        return self.writes and step % self._every_steps == 0

    def write(self, step: int, result: StepResult, figures: dict[str, float], *, seconds: float) -> None:
        """Log ``result`` and other ``figures`` of a step that took ``seconds``."""
        metrics: dict[str, Any] = {
            "loss": result.loss,
            "tokens_per_second_per_gpu": result.num_tokens / (seconds * self._ranks),
        }
        metrics |= result.metrics | figures
        if result.grad_norm is not None:
            metrics["grad_norm"] = result.grad_norm
        if self._meter is not None:
            metrics["peak_memory_bytes"] = self._meter.peak_bytes
        if self._with_memory_stats:
            metrics |= training.get_memory_stats(device=self._device)
        if self._meter is not None:
            self._meter.reset()
        self._metric_logger.log_dict(metrics, step=step)
