"""The time and the device memory that a recipe's steps take."""

import time
from typing import Any

import torch

from benchmarks.live import Watch


class Observed(Watch):
    """Times every step, and records the peak of the device's memory.

    Attributes:
        seconds: of each step.
        peak_bytes: the most bytes allocated, in a period that includes the last step.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.peak_bytes = 0

    def begin(self, recipe: Any) -> None:
        super().begin(recipe)
        self.is_cuda = recipe.parts.step.device.type == "cuda"
        # Not at a step's end, which a step that fails does not reach.
        recipe.parts.step.policy.optimizers[-1].register_step_post_hook(lambda *_: self.note_peak())

    def before_step(self, number: int) -> None:
        self._synchronize()
        self._started = time.perf_counter()

    def step(self) -> None:
        self._synchronize()
        self.seconds.append(time.perf_counter() - self._started)

    def note_peak(self) -> None:
        """Called when the optimizer has stepped."""
        self.peak_bytes = (
            torch.cuda.max_memory_allocated() if self.is_cuda else self.recipe.trainer.step.meter.peak_bytes
        )

    def live_bytes(self) -> int:
        """What is allocated on the device."""
        return torch.cuda.memory_allocated() if self.is_cuda else self.recipe.trainer.step.meter.live_bytes

    def _synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()
