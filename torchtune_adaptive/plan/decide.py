"""Decide what fits: batch sizes of a traced step against the memory of a device.

A figure of a plan is made here from two others: the traced peak (``trace/peaks.py``), which depends on the batch size,
and the device's overhead (``gpu.py``).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from torchtune_adaptive.engine.search.strategies import NO_BOUND, binary_search
from torchtune_adaptive.plan.gpu import Overhead
from torchtune_adaptive.plan.host_memory import HostPlan
from torchtune_adaptive.plan.trace.peaks import StepPeaks, TracedStep

Fits = Literal["yes", "perhaps", "no"]
_ATTENTION_BLOCK = 128  # flash attention's scratch memory rounds each sequence up to a multiple of this


@dataclass(frozen=True, kw_only=True)
class Device:
    """The device of each rank.

    Attributes:
        name: as the user gave it: "H100", "80GiB" or "cpu".
        memory_bytes: memory that a process can use; None if only the allocator's limit is known.
        allocator_limit_bytes: a limit for torch's allocator alone, as ``adaptive.memory_limit`` sets it; None: no
            limit.
        margin: fraction of what the allocator may use that stays free, in [0, 1).
    """

    name: str
    memory_bytes: int | None
    allocator_limit_bytes: int | None = None
    margin: float
    overhead: Overhead

    @cached_property
    def limit_bytes(self) -> float:
        """The most that a process may use with no margin."""
        limits: list[float] = [] if self.memory_bytes is None else [self.memory_bytes]
        if self.allocator_limit_bytes is not None:
            limits.append(self.allocator_limit_bytes + self.overhead.outside_bytes)
        return min(limits)

    @cached_property
    def usable_bytes(self) -> float:
        """The most that a process may use."""
        return self.overhead.usable_bytes(self.limit_bytes, self.margin)


@dataclass(frozen=True, kw_only=True)
class SizePlan:
    """Memory of a rank with ``batch_size`` rows of ``seq_len`` tokens.

    Attributes:
        seq_len: None if the rows are not of tokens.
        peak_bytes: the traced peak.
        phases: traced peak of each phase.
        kinds: bytes of each kind at the highest of these peaks.
        allocated_bytes, reserved_bytes: forecasts of ``torch.cuda.max_memory_allocated`` and ``max_memory_reserved``.
        process_bytes: the process's device memory, inside and outside of the allocator.
        uncertainty_bytes: how far ``process_bytes`` may be off, in either direction.
        fits: "yes"; "no"; or "perhaps" if it fits by the forecast, but not with its full uncertainty added.
    """

    seq_len: int | None
    batch_size: int
    peak_bytes: float
    phases: dict[str, float]
    kinds: dict[str, float]
    allocated_bytes: float
    reserved_bytes: float
    process_bytes: float
    uncertainty_bytes: float
    fits: Fits


@dataclass(frozen=True, kw_only=True)
class LengthPlan:
    """Batch sizes with rows of ``seq_len`` tokens.

    Attributes:
        largest_batch_size: the largest that fits; 0 if none does, None if ``NO_BOUND`` or more fit.
        safe_batch_size: the largest that fits even if the forecast is too low by its full uncertainty.
        used: what a run with these settings would use; it may not fit.
        tokens_per_step: tokens of an optimizer step of such a run, over all ranks; None if rows are not of tokens.
        asked: the requested sizes.
    """

    seq_len: int | None
    largest_batch_size: int | None
    safe_batch_size: int | None
    used: SizePlan
    tokens_per_step: int | None
    asked: tuple[SizePlan, ...] = ()

    @property
    def shown(self) -> tuple[SizePlan, ...]:
        """The sizes whose memory is shown in detail: the requested ones, or else the one that a run would use."""
        return self.asked or (self.used,)

    @property
    def chosen(self) -> SizePlan:
        """The size that a plot shows and changes are compared at: the only requested one, or the one of a run."""
        return self.asked[0] if len(self.asked) == 1 else self.used


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What fits for each length of rows, with the inputs of the plan.

    Attributes:
        title: the config's or the model's name.
        assumptions: what the plan assumes about the run, as one sentence; "" if the config says it all.
        lengths: one for each length of rows.
        host: host memory of a machine; None if it is not planned.
    """

    title: str
    world_size: int
    device: Device
    step: TracedStep
    lengths: tuple[LengthPlan, ...]
    host: HostPlan | None = None
    assumptions: str = ""

    @property
    def decisive(self) -> LengthPlan:
        """The plan of the longest rows, on which training depends. Verdict, changes and pictures are theirs."""
        return max(self.lengths, key=lambda length: length.seq_len or 0)

    @property
    def fits(self) -> bool:
        """Whether a batch of the longest rows fits."""
        return self.decisive.largest_batch_size != 0

    def size(self, batch_size: int) -> SizePlan:
        """The memory of a batch of ``batch_size`` of the longest rows."""
        peaks = max(self.step.peaks, key=lambda peaks: peaks.seq_len)
        return BatchSizes(peaks, self.device, sequences=self.step.sequences).size(batch_size)


@dataclass(frozen=True)
class PlannedChange:
    """A change with its plan, or the reason why it cannot be planned.

    Attributes:
        change: what changes, as text.
        length: the plan of the longest rows.
    """

    change: str
    length: LengthPlan | None
    refused: str = ""

    @property
    def fits(self) -> bool:
        """Whether a batch fits after the change."""
        return self.length is not None and self.length.largest_batch_size != 0


class BatchSizes:
    """The batch sizes of one length of rows on a device.

    Args:
        sequences: sequences of a row; two for a pair of answers.
    """

    def __init__(self, peaks: StepPeaks, device: Device, *, sequences: int = 1) -> None:
        self._peaks = peaks
        self._device = device
        self._sequences = sequences

    @cached_property
    def largest(self) -> int | None:
        """The largest batch that fits; 0 if none does, None if ``NO_BOUND`` or more fit."""
        return self._largest("yes", "perhaps")

    @cached_property
    def safe(self) -> int | None:
        """The largest batch that fits even if the forecast is too low by its full uncertainty."""
        return self._largest("yes")

    def size(self, batch_size: int) -> SizePlan:
        """The memory of a batch of ``batch_size`` rows."""
        moment, overhead, num_tokens = self._peaks.moment(batch_size), self._device.overhead, self._tokens(batch_size)
        peak_bytes = moment.total.at(batch_size)
        phases = self._peaks.phases(batch_size)
        allocated_bytes = overhead.allocated_bytes(phases, num_tokens=num_tokens)
        reserved_bytes = overhead.reserved_bytes(allocated_bytes)
        process_bytes = overhead.outside_bytes + reserved_bytes
        uncertainty_bytes = overhead.uncertainty_bytes_at(reserved_bytes)
        usable_bytes = self._device.usable_bytes
        fits: Fits = "yes" if process_bytes + uncertainty_bytes <= usable_bytes else "perhaps"
        return SizePlan(
            seq_len=self._peaks.seq_len or None,
            batch_size=batch_size,
            peak_bytes=peak_bytes,
            phases=phases,
            kinds=moment.at(batch_size),
            allocated_bytes=allocated_bytes,
            reserved_bytes=reserved_bytes,
            process_bytes=process_bytes,
            uncertainty_bytes=uncertainty_bytes,
            fits=fits if process_bytes <= usable_bytes else "no",
        )

    def plan(self, *, used: int, tokens_per_step: int | None, asked: Sequence[int] = ()) -> LengthPlan:
        """The plan of this length: what fits, the batch that is ``used``, and those ``asked`` for."""
        return LengthPlan(
            seq_len=self._peaks.seq_len or None,
            largest_batch_size=self.largest,
            safe_batch_size=self.safe,
            used=self.size(used),
            tokens_per_step=tokens_per_step,
            asked=tuple(map(self.size, asked)),
        )

    def _largest(self, *enough: Fits) -> int | None:
        """The largest batch whose ``fits`` is one of ``enough``."""
        # Not from 1, because a single row may need more memory than two.
        found = binary_search(lambda size: self.size(size).fits in enough, start=2, max_batch_size=NO_BOUND)
        return None if found == NO_BOUND else found

    def _tokens(self, batch_size: int) -> int:
        """Tokens of the batch as attention kernels count them; samples if the rows are not of tokens."""
        if not self._peaks.seq_len:
            return batch_size
        blocks = math.ceil(self._peaks.seq_len / _ATTENTION_BLOCK)
        return batch_size * self._sequences * blocks * _ATTENTION_BLOCK
