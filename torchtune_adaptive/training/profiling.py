"""torchtune's profiler in the training loop, and CUDA's memory history."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torchtune import utils

from torchtune_adaptive.errors import CheckpointError, RunEnded, reason_of

log = utils.get_logger("DEBUG")


class StepProfiler:
    """Steps the profiler once for each optimizer step.

    Args:
        profiler: torchtune's profiler, or its dummy profiler.
        memory_steps: steps of the run's first epoch, from 1, in which CUDA's memory history is recorded, from the
            start of the first to the end of the last; None: it is not recorded.
    """

    def __init__(self, profiler: Any, *, memory_steps: range | None) -> None:
        self._profiler = profiler
        self._memory_steps = memory_steps

    @contextmanager
    def running(self) -> Iterator[None]:
        """The context of training. At its end torchtune may write a trace, which needs all ranks.

        So after an error of one rank there is no trace. If a trace cannot be written, this is logged.
        """
        self._profiler.start()
        try:
            yield
        except (RunEnded, CheckpointError):  # raised on all ranks together
            self._stop()
            raise
        self._stop()

    def begin_step(self, epoch: int, step: int) -> None:
        """Call it before step number ``step`` of ``epoch``."""
        if self._memory_steps is not None and epoch == 0 and step == self._memory_steps[0]:
            torch.cuda.memory._record_memory_history()

    def end_step(self, epoch: int, step: int) -> None:
        """Call it after step number ``step`` of ``epoch``."""
        if self._memory_steps is not None and epoch == 0 and step == self._memory_steps[-1]:
            torch.cuda.memory._record_memory_history(enabled=None)
        self._profiler.step()

    def _stop(self) -> None:
        try:
            self._profiler.stop()
        except OSError as error:
            log.warning(f"Profile not written: {reason_of(error)}")
