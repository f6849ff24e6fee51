"""The memory pressure of ranks: watched on each, and described as an event."""

import logging
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.engine.memory.devices import check_limit, describe_peak, meter_for
from torchtune_adaptive.engine.memory.meter import MemoryMeter, device_memory_bytes
from torchtune_adaptive.engine.memory.phases import Phases
from torchtune_adaptive.engine.recovery.attempts import Attempt, MemoryPressure
from torchtune_adaptive.text import ranks_text

log = logging.getLogger(__name__)

_LONGEST_LIST = 3  # different figures of ranks in a message
_LONGEST_ERROR_CHARS = 200
_MOST_LINES = 10  # for events of one kind, before only every tenth gets a line


@dataclass(frozen=True)
class MemoryEvent:
    """Some ranks were short of memory in an optimizer step, or a larger micro-batch fits again. Equal on every rank.

    Attributes:
        step: the number of the optimizer step, from 1.
        pressure: OUT_OF_MEMORY if the step had to run again. THRASHING if it was only slow, because the allocator had
            to free its cache in two steps in a row. NONE if a larger micro-batch fits again; ``ranks``, ``phase`` and
            ``figures`` are then empty.
        ranks: the ranks that were short of memory.
        phase: phase of the first of these ranks: "batch", "forward", "loss" or "backward".
        figures: its peak memory and limit as text; "not metered" without a meter.
        error: its error in one line; None if it was only slow.
        before: the size of a micro-batch in this step.
        after: the size from now on; equal to ``before`` if it cannot be smaller.
        unit: the unit of both sizes, usually "samples".
        times: how many such events there have been, with this one.
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

    @classmethod
    def growth(cls, step: int, before: int, after: int, unit: str) -> "MemoryEvent":
        """A micro-batch that was reduced to ``before`` has fitted with ``after`` in ``step``."""
        return cls(step, MemoryPressure.NONE, (), "", "", None, before, after, unit)

    @property
    def cause(self) -> str:
        """Which ranks were short of memory, and the figures of the first one, as part of a sentence."""
        if self.error is None:
            return f"{ranks_text(self.ranks)} had to free the allocator's cache in two steps in a row ({self.figures})"
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
            return f"micro-batch stays at a single row, although {self.cause}"
        return f"micro-batch {self.before} -> {self.after} {self.unit}: in step {self.step} {self.cause}"


class PressureWatch:
    """Watches the memory pressure of this rank, and describes what happened."""

    def __init__(self, consensus: Consensus, meter: MemoryMeter | None, phases: Phases) -> None:
        self.consensus = consensus
        self.meter = meter
        self.phases = phases
        self._counts_retries = meter is not None
        self.reset()

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
        meter = None
        device_memory_bytes(device)  # refuses other devices
        if limit_bytes is not None:
            check_limit(limit_bytes, device)
        if limit_bytes is not None or device.type == "cuda":
            meter = meter_for(device, model, optimizers, exact=False)
            meter.limit_bytes = limit_bytes
        return cls(Consensus.of(model, process_group), meter, Phases([model], meter))

    def close(self) -> None:
        """Destroy what ``of`` has created. Every rank must call it."""
        self.phases.remove()
        self.consensus.close()

    def is_thrashing(self) -> bool:
        """Whether the allocator had to free its cache in this step and the one before (the rule of Composer).

        This raises no error, but is slow. Call it once per optimizer step.
        """
        retries, had_retries = self._retries(), self._had_retries
        self._had_retries = retries > self._retries_before
        self._retries_before = retries
        return self._had_retries and had_retries

    def reset(self) -> None:
        """Ignore the allocator's retries so far, for example after a change of the micro-batch size."""
        self._retries_before = self._retries()
        self._had_retries = False

    def stop(self) -> None:
        """Ignore the allocator's retries from now on."""
        self._counts_retries = False
        self.reset()

    def event(self, attempt: Attempt[Any], *, step: int, before: int, after: int, unit: str) -> MemoryEvent:
        """The event of ``attempt``, equal on all ranks. A collective."""
        phase = "backward" if attempt.in_backward else self.phases.now
        mine = attempt.own_pressure, phase, describe_peak(self.meter), attempt.error
        reports = zip(self.consensus.ranks, self.consensus.from_all_ranks(mine), strict=True)
        ranks = {rank: figures for rank, (pressure, *figures) in reports if pressure is attempt.pressure}
        phase, figures, error = next(iter(ranks.values()))
        return MemoryEvent(step, attempt.pressure, tuple(ranks), phase, figures, error, before, after, unit)

    def figures(self) -> str:
        """Peaks and limits of the ranks as text, without duplicates. A collective."""
        figures = self.consensus.from_all_ranks(describe_peak(self.meter))
        return "; ".join(list(dict.fromkeys(figures))[:_LONGEST_LIST])

    def log(self, event: MemoryEvent) -> None:
        """Log ``event`` on the first rank only, as a warning if it was a shortage of memory."""
        if self.consensus.rank == 0 and event.is_logged:
            log.log(logging.WARNING if event.pressure else logging.INFO, "%s", event)

    def _retries(self) -> int:
        """How often the allocator has freed its cache to make an allocation possible, since the process began."""
        return self.meter.total_retries if self.meter is not None and self._counts_retries else 0
