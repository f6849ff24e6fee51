"""The memory pressure of this rank, and the phase of its step."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchtune_adaptive.distributed.consensus import Consensus
from torchtune_adaptive.memory.allocator_retries import RetryWatch
from torchtune_adaptive.memory.devices import check_limit, describe_peak, meter_for
from torchtune_adaptive.memory.meter import MemoryMeter
from torchtune_adaptive.memory.phases import Phases
from torchtune_adaptive.recovery.attempts import Attempt
from torchtune_adaptive.recovery.events import MemoryEvent

log = logging.getLogger(__name__)


class PressureWatch:
    """Watches the memory pressure of this rank, and describes what happened.

    Args:
        meter: the device's meter; None without one.
        phases: the current phase of a step.
    """

    def __init__(self, consensus: Consensus, meter: MemoryMeter | None, phases: Phases) -> None:
        self._consensus = consensus
        self._meter = meter
        self._phases = phases
        self._retries = RetryWatch(lambda: 0 if meter is None else meter.total_retries)

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
            InputError: the limit is above the memory of the device, or the device cannot have one.
        """
        meter = None
        if limit_bytes is not None:
            check_limit(limit_bytes, device)
        if limit_bytes is not None or device.type == "cuda":
            meter = meter_for(device, model, optimizers, exact=False)
            meter.set_limit(limit_bytes)
        return cls(Consensus.of(model, process_group), meter, Phases([model], meter))

    @property
    def consensus(self) -> Consensus:
        """The agreement between the ranks that train together."""
        return self._consensus

    @property
    def meter(self) -> MemoryMeter | None:
        """The meter of this rank's device; None without one."""
        return self._meter

    @property
    def phases(self) -> Phases:
        """The current phase of a step."""
        return self._phases

    def close(self) -> None:
        """Destroy what ``of`` has created. Every rank must call it."""
        self._phases.remove()
        self._consensus.close()

    def is_thrashing(self) -> bool:
        """Whether the allocator had to free its cache in this step and the one before. Call once per optimizer step."""
        return self._retries.is_thrashing()

    def reset(self) -> None:
        """Ignore the allocator's retries so far, after a change of the micro-batch size."""
        self._retries.reset()

    def stop(self) -> None:
        """Ignore allocator retries from now on."""
        self._retries.stop()

    def event(self, attempt: Attempt[Any], *, step: int, before: int, after: int, unit: str) -> MemoryEvent:
        """The event of ``attempt``, equal on all ranks. A collective."""
        phase = "backward" if attempt.in_backward else self._phases.now
        mine = attempt.own_pressure, phase, describe_peak(self._meter), attempt.error
        reports = zip(self._consensus.ranks, self._consensus.from_all_ranks(mine), strict=True)
        ranks = {rank: figures for rank, (pressure, *figures) in reports if pressure is attempt.pressure}
        phase, figures, error = next(iter(ranks.values()))
        return MemoryEvent(step, attempt.pressure, tuple(ranks), phase, figures, error, before, after, unit)

    def log(self, event: MemoryEvent) -> None:
        """Log ``event`` as a warning, on the first rank only."""
        if self._consensus.rank == 0:
            log.warning("%s", event)
