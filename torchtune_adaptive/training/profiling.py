"""torchtune's profiler in the training loop, and CUDA's memory history."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torchtune import utils

from torchtune_adaptive.errors import CheckpointError, RunEnded, reason_of

log = utils.get_logger("DEBUG")


class StepProfiler:
    """Steps the profiler once for each optimizer step. A trace that cannot be written is logged, and ends no run.

    Args:
        profiler: torchtune's profiler, or its dummy profiler.
        memory_steps: steps of the run's first epoch, from 1, in which CUDA's memory history is recorded, from the
            start of the first to the end of the last; None: it is not recorded.
    """

    def __init__(self, profiler: Any, *, memory_steps: range | None) -> None:
        self._profiler = profiler
        self._memory_steps = memory_steps
        if (write := getattr(profiler, "on_trace_ready", None)) is not None:
            profiler.on_trace_ready = partial(_write_or_log, write)

    @contextmanager
    def running(self) -> Iterator[None]:
        """The context of training. At its end torchtune may write a trace, which needs all ranks.

        So after an error of one rank there is no trace.
        """
        self._profiler.start()
        try:
            yield
        except (RunEnded, CheckpointError):  # raised on all ranks together
            self._profiler.stop()
            raise
        self._profiler.stop()

    def begin_step(self, epoch: int, step: int) -> None:
        """Call it before step number ``step`` of ``epoch``."""
        if self._memory_steps is not None and epoch == 0 and step == self._memory_steps[0]:
            torch.cuda.memory._record_memory_history()

    def end_step(self, epoch: int, step: int) -> None:
        """Call it after step number ``step`` of ``epoch``."""
        if self._memory_steps is not None and epoch == 0 and step == self._memory_steps[-1]:
            torch.cuda.memory._record_memory_history(enabled=None)
        self._profiler.step()


def _write_or_log(write: Callable[[Any], object], profiler: Any) -> None:
    """Call torchtune's function that writes a trace. A collective on several ranks."""
    try:
        write(profiler)
    except (OSError, RuntimeError) as error:  # torch raises either if it cannot create a folder
        log.warning(f"Profile not written: {reason_of(error)}")
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.barrier()  # the last that torchtune's function does, and what the other ranks wait for
