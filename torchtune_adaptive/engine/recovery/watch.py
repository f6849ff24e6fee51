"""The memory pressure of ranks: watched on each, and described as an event."""

import logging
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from time import perf_counter_ns
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.engine.memory.devices import check_limit, describe_peak, meter_of_run
from torchtune_adaptive.engine.memory.meter import MemoryMeter, device_memory_bytes
from torchtune_adaptive.engine.memory.phases import Phases
from torchtune_adaptive.engine.recovery.attempts import Attempt
from torchtune_adaptive.engine.recovery.columns import padded_numel
from torchtune_adaptive.engine.recovery.pace import Pace
from torchtune_adaptive.text import count_text, ranks_text

log = logging.getLogger(__name__)

_LONGEST_ERROR_CHARS = 200
_MOST_LINES = 10  # for events of one kind, before only every tenth gets a line


class MemoryPressure(IntEnum):
    """How short of memory ranks are."""

    NONE = 0
    THRASHING = 1
    OUT_OF_MEMORY = 2


@dataclass(frozen=True)
class MemoryEvent:
    """Some ranks were short of memory in an optimizer step, or a larger micro-batch fits again. Equal on every rank.

    Attributes:
        step: the number of the optimizer step, from 1.
        pressure: OUT_OF_MEMORY if the step had to run again. THRASHING if the allocator had to free its cache in the
            step before, and has done so in other steps: the micro-batch is smaller from now on, or stays, because
            smaller ones would be slower. NONE if a larger micro-batch fits again; ``ranks``, ``phase`` and ``figures``
            are then empty.
        ranks: the ranks that were short of memory.
        phase: phase of the first of these ranks: "batch", "forward", "loss" or "backward".
        figures: its peak memory and limit as text; "not metered" without a meter.
        error: its error in one line; None if no allocation failed.
        before: the size of a micro-batch in this step.
        after: the size from now on; equal to ``before`` if it cannot be smaller.
        unit: the unit of both sizes, usually "samples".
        times: how many such events there have been, with this one.
        slowdown: if THRASHING, how much longer steps take because of it, on average: 0.03 is 3 %. None if it is not
            known, because steps in which the allocator did not free its cache were too few.
    """

    step: int
    pressure: MemoryPressure
    ranks: tuple[int, ...]
    phase: str
    figures: str
    error: str | None
    before: int
    after: int
    unit: str
    times: int = 1
    slowdown: float | None = None

    @classmethod
    def growth(cls, step: int, before: int, after: int, unit: str) -> "MemoryEvent":
        """A micro-batch that was reduced to ``before`` has fitted with ``after`` in ``step``."""
        return cls(step, MemoryPressure.NONE, (), "", "", None, before, after, unit)

    @property
    def cause(self) -> str:
        """Which ranks were short of memory, and the figures of the first one, as part of a sentence."""
        if self.error is None:
            cost = "" if self.slowdown is None else f", which makes steps {self.slowdown:.1%} slower"
            return f"{ranks_text(self.ranks)} had to free the allocator's cache{cost} ({self.figures})"
        error = textwrap.shorten(self.error, _LONGEST_ERROR_CHARS)
        return f"{ranks_text(self.ranks)} ran out of memory in {self.phase} ({self.figures}: {error})"

    @property
    def kind(self) -> tuple[Any, ...]:
        """What events have in common that are counted together."""
        return self.pressure, self.before, self.after

    @property
    def is_logged(self) -> bool:
        """Whether the event gets a line in the log: only every tenth after the first ten of its kind."""
        return self.times <= _MOST_LINES or self.times % _MOST_LINES == 0

    def __str__(self) -> str:
        return self._text() if self.times <= _MOST_LINES else f"{self._text()} ({self.times} times so far)"

    def _text(self) -> str:
        if self.pressure is MemoryPressure.NONE:
            return f"micro-batch {self.before} -> {self.after} {self.unit}: fits again in step {self.step}"
        if self.after == self.before:
            return f"micro-batch stays at {count_text(self.before, self.unit.removesuffix('s'))}, although {self.cause}"
        return f"micro-batch {self.before} -> {self.after} {self.unit}: in step {self.step} {self.cause}"


class PressureWatch:
    """Watches the memory pressure of this rank, and describes what happened.

    Attributes:
        last_step: nanoseconds, retries of the allocator and work of the step before; zeros if it was not timed. Ranks
            exchange them in the vote of the present step.
    """

    def __init__(self, consensus: Consensus, meter: MemoryMeter | None, phases: Phases) -> None:
        self.consensus = consensus
        self.meter = meter
        self.phases = phases
        self._counts_retries = meter is not None
        self._pace = Pace()
        self._size = self._last_size = 0  # of the present step and of the one before
        self._is_timed = False  # whether the present step is
        self._began_ns = self._retries_before = self._work = 0  # of the present step
        self.last_step = (0, 0, 0)
        self._failed_in = ""  # phase of the last micro-step that failed; others may have run since
        self._had_retries = False  # the step before, on any rank and with micro-batches of the present size

    @classmethod
    def of(
        cls,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        device: torch.device,
        *,
        process_group: dist.ProcessGroup | None,
        limit_bytes: int | None,
    ) -> "PressureWatch":
        """Create a watch on ``model``, with its own CPU process group, which ``close`` destroys.

        A collective of the ranks that train the model: see ``Consensus.of``.

        Args:
            limit_bytes: the limit within ``with watch.meter:``. A CPU has no meter without one: it would cost time.

        Raises:
            InputError: the device is neither the CPU nor CUDA, or the limit is above its memory.
        """
        device_memory_bytes(device)  # refuses other devices
        if limit_bytes is not None:
            check_limit(limit_bytes, device)
        meter = meter_of_run([model], optimizers, device, limit_bytes)
        if meter is not None:
            meter.limit_bytes = limit_bytes
        return cls(Consensus.of(model, process_group), meter, Phases([model], meter))

    def close(self) -> None:
        """Destroy what ``of`` has created. Every rank must call it."""
        self.phases.remove()
        self.consensus.close()

    @contextmanager
    def noting_failures(self) -> Iterator[None]:
        """Context of a micro-step: note the phase in which it fails."""
        try:
            yield
        except BaseException:
            self._failed_in = self.phases.now
            raise

    def start_step(self, size: int) -> None:
        """Begin a step with micro-batches of ``size``. The time of the one before ends now.

        So it includes what the program does between steps, such as loading data. The first step of each size is not
        timed: the allocator frees its cache for the new sizes.
        """
        now_ns = perf_counter_ns()
        retries = self.meter.total_retries if self.meter is not None and self._counts_retries else 0
        self.last_step = (0, 0, 0)
        if self._is_timed:
            self.last_step = (now_ns - self._began_ns, retries - self._retries_before, self._work)
        self._last_size, self._size = self._size, size
        self._is_timed = self._counts_retries and self._last_size == size
        self._began_ns, self._retries_before = now_ns, retries

    def end_step(self, micro_batches: Sequence[Any], slowest: Sequence[int]) -> None:
        """End a step that ran ``micro_batches``. ``slowest``: the largest figures of ``last_step`` on any rank."""
        time_ns, retries, work = slowest
        self._had_retries = retries > 0 and self._last_size == self._size
        if time_ns:
            self._pace.note(self._last_size, time_ns * 1e-9, work=work, had_retries=retries > 0)
        self._work = sum(map(padded_numel, micro_batches)) if self._is_timed else 0

    def is_thrashing(self) -> bool | None:
        """Whether smaller micro-batches would be faster than those of the step before, with the allocator's retries.

        None if it had none, or that is not known. Equal on all ranks after ``end_step``.
        """
        return self._pace.is_slow(self._size) if self._had_retries else None

    def reset(self) -> None:
        """Do not time the present step, which runs again in smaller micro-batches."""
        self._is_timed, self._size = False, 0

    def stop(self) -> None:
        """Ignore the allocator's retries from now on."""
        self._counts_retries = self._is_timed = self._had_retries = False

    def event(self, attempt: Attempt, *, step: int, before: int, after: int, unit: str) -> MemoryEvent:
        """The event of ``attempt``, equal on all ranks. A collective."""
        was_short = attempt.error is not None if attempt.ran_out else self.last_step[1] > 0
        phase = "backward" if attempt.in_backward else self._failed_in if attempt.ran_out else self.phases.now
        mine = was_short, phase, describe_peak(self.meter), attempt.error
        reports = zip(self.consensus.ranks, self.consensus.from_all_ranks(mine), strict=True)
        ranks = {rank: figures for rank, (was_short, *figures) in reports if was_short}
        phase, figures, error = next(iter(ranks.values()))
        pressure = MemoryPressure.OUT_OF_MEMORY if attempt.ran_out else MemoryPressure.THRASHING
        slowdown = None if attempt.ran_out else self._pace.slowdown(before)
        return MemoryEvent(step, pressure, tuple(ranks), phase, figures, error, before, after, unit, slowdown=slowdown)

    def log(self, event: MemoryEvent) -> None:
        """Log ``event`` on the first rank only, as a warning if it was a shortage of memory."""
        if self.consensus.rank == 0 and event.is_logged:
            log.log(logging.WARNING if event.pressure else logging.INFO, "%s", event)
