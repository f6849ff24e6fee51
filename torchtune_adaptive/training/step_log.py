"""The log of optimizer steps."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torchtune import training

from torchtune_adaptive.batch.growth import BatchGrowth
from torchtune_adaptive.batch.loader import StepLoader
from torchtune_adaptive.memory.resident import anonymous_bytes
from torchtune_adaptive.training.oom_retry import OomRetry
from torchtune_adaptive.training.run_events import RunEvents
from torchtune_adaptive.training.step_figures import StepResult
from torchtune_adaptive.training.train_step import TrainStep


@dataclass(frozen=True)
class StepTotals:
    """Totals over the steps that this process has trained: tokens of all ranks, the peak memory of this rank."""

    steps: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    peak_bytes: int = 0

    def plus(self, num_tokens: int, seconds: float) -> "StepTotals":
        """With one step more."""
        return replace(
            self, steps=self.steps + 1, num_tokens=self.num_tokens + num_tokens, seconds=self.seconds + seconds
        )


class StepLog:
    """Writes the figures of every n-th optimizer step to torchtune's metric logger and to the journal, on rank 0.

    Args:
        metric_logger: None on the other ranks, which log nothing.
        every_steps: n.
        ranks: number of ranks over which tokens are counted.
        with_memory_stats: log the device's own memory statistics too.
    """

    def __init__(
        self,
        metric_logger: Any,
        step: TrainStep,
        retry: OomRetry,
        loader: StepLoader,
        growth: BatchGrowth,
        events: RunEvents,
        *,
        every_steps: int,
        device: torch.device,
        ranks: int,
        with_memory_stats: bool,
    ) -> None:
        self._metric_logger = metric_logger
        self._step = step
        self._retry = retry
        self._loader = loader
        self._growth = growth
        self._events = events
        self._every_steps = every_steps
        self._device = device
        self._ranks = ranks
        self._with_memory_stats = with_memory_stats
        self._totals = StepTotals()

    @property
    def writes(self) -> bool:
        """Whether this rank logs."""
        return self._metric_logger is not None

    @property
    def totals(self) -> StepTotals:
        """So far; zeros on ranks that do not log."""
        meter = self._step.meter
        return self._totals if meter is None else replace(self._totals, peak_bytes=meter.peak_bytes)

    def write(self, step: int, result: StepResult, *, epoch: int, seconds: float) -> None:
        """Log ``result`` of step number ``step``, from 1, which took ``seconds``, if this rank logs this step.

        The meter's peak covers all steps so far, and the share of padding those since the last logged one.
        """
        if not self.writes:
            return
        self._events.look()
        self._totals = self._totals.plus(result.num_tokens, seconds)
        if step % self._every_steps:
            return
        limit = self._retry.micro_batches.limit
        metrics: dict[str, Any] = {
            "loss": result.loss,
            "lr": self._step.learning_rate,
            "tokens_per_second_per_gpu": result.num_tokens / (seconds * self._ranks),
            "global_batch_size": self._loader.samples_per_step,
            limit.key: limit.size,
            "padding": self._retry.micro_batches.take_padding(),
            "oom_retries": self._retry.retries,
        }
        metrics |= result.metrics | self._growth.figures()
        if not self._loader.is_global:
            metrics["batch_size"] = self._loader.batch_size
        if result.grad_norm is not None:
            metrics["grad_norm"] = result.grad_norm
        if (host_bytes := anonymous_bytes()) is not None:
            metrics["host_memory_bytes"] = host_bytes
        if (meter := self._step.meter) is not None:
            metrics["peak_memory_bytes"] = meter.peak_bytes
        if self._with_memory_stats:
            # torchtune's recipes reset the device's own peaks here. They are the user's, and do not end with a step.
            metrics |= training.get_memory_stats(device=self._device, reset_stats=False)
        self._metric_logger.log_dict(metrics, step=step)
        self._events.journal.append(step=step, epoch=epoch, seconds=seconds, **metrics)
