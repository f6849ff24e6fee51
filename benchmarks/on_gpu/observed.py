"""What a recipe's steps take: time, and memory of its device."""

import time
from typing import Any

import torch


def live_bytes(recipe: Any) -> int:
    """What is allocated on the recipe's device."""
    is_cuda = recipe._device.type == "cuda"
    return torch.cuda.memory_allocated(recipe._device) if is_cuda else recipe._meter.live_bytes


class Observed:
    """A recipe whose every step is timed, and its device's memory noted."""

    def __init__(self, recipe: Any) -> None:
        self.recipe = recipe
        self.seconds: list[float] = []
        self.peak_bytes = 0
        self._train_step = recipe._train_step
        recipe._train_step = self._observed

    def before(self, step: int) -> None:
        """Called before each step, the first of which is 1."""

    def _observed(self, window: Any) -> Any:
        is_cuda = self.recipe._device.type == "cuda"
        self.before(self.recipe.global_step + 1)
        if is_cuda:
            torch.cuda.synchronize()
        started = time.perf_counter()
        totals = self._train_step(window)
        if is_cuda:
            torch.cuda.synchronize()
            self.peak_bytes = torch.cuda.max_memory_allocated()
        else:
            self.peak_bytes = self.recipe._meter.peak_bytes
        self.seconds.append(time.perf_counter() - started)
        return totals
