"""torchtune's profiler in the training loop, and CUDA's memory history."""

from typing import Any

import torch


class StepProfiler:
    """Steps the profiler once for each optimizer step.

    Args:
        profiler: torchtune's, which may be one that does nothing.
        memory_steps: steps of the run's first epoch, from 1, in which CUDA's memory history is recorded: from the
            start of the first one to the end of the last; None if it is not recorded.
    """

    def __init__(self, profiler: Any, *, memory_steps: range | None) -> None:
        self._profiler = profiler
        self._memory_steps = memory_steps

    def start(self) -> None:
        """Before training."""
        self._profiler.start()

    def begin_step(self, epoch: int, step: int) -> None:
        """Before step number ``step`` of ``epoch``."""
        if self._memory_steps is not None and epoch == 0 and step == self._memory_steps[0]:
            torch.cuda.memory._record_memory_history()

    def end_step(self, epoch: int, step: int) -> None:
        """After step number ``step`` of ``epoch``."""
        if self._memory_steps is not None and epoch == 0 and step == self._memory_steps[-1]:
            torch.cuda.memory._record_memory_history(enabled=None)
        self._profiler.step()

    def stop(self) -> None:
        """After training."""
        self._profiler.stop()
