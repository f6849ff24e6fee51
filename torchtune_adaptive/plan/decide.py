"""Decide what fits: batch sizes of a traced step against the memory of a device.

What torch's allocator reserves for a step (``replay.py``) must fit beside what the process has outside of it
(``gpu.py``).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from torchtune_adaptive.engine.search.strategies import NO_BOUND, binary_search, bisect
from torchtune_adaptive.plan.allocator import DoesNotFitError
from torchtune_adaptive.plan.gpu import Overhead
from torchtune_adaptive.plan.host_memory import HostPlan
from torchtune_adaptive.plan.replay import StepMemory, exact, replayed
from torchtune_adaptive.plan.trace.step_events import StepEvents, TracedStep

Fits = Literal["fits", "may fit", "does not fit"]


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

    def reservable_bytes(self, outside_bytes: float, *, keeps_margin: bool = True) -> float:
        """The most that the allocator may reserve beside ``outside_bytes``.

        >>> Device(name="any", memory_bytes=2700, margin=0.25, overhead=Overhead()).reservable_bytes(300)
        1800.0
        """
        limits: list[float] = [] if self.memory_bytes is None else [max(0.0, self.memory_bytes - outside_bytes)]
        if self.allocator_limit_bytes is not None:
            limits.append(self.allocator_limit_bytes)
        return min(limits) * (1 - self.margin * keeps_margin)

    @property
    def outside_bytes(self) -> float:
        """What is expected outside the allocator: between the least and the most."""
        return (self.overhead.least_outside_bytes + self.overhead.most_outside_bytes) / 2

    @property
    def limit_bytes(self) -> float:
        """The most that a process is expected to use with no margin."""
        return self.outside_bytes + self.reservable_bytes(self.outside_bytes, keeps_margin=False)

    @property
    def usable_bytes(self) -> float:
        """The most that a process is expected to use."""
        return self.outside_bytes + self.reservable_bytes(self.outside_bytes)


@dataclass(frozen=True, kw_only=True)
class SizePlan:
    """Memory of a rank with ``batch_size`` rows of ``seq_len`` tokens.

    Attributes:
        seq_len: None if the rows are not of tokens.
        phases: peak of each phase.
        kinds: bytes of each kind at the highest of these peaks.
        allocated_bytes, reserved_bytes: forecasts of ``torch.cuda.max_memory_allocated`` and ``max_memory_reserved``.
        process_bytes: the process's device memory, inside and outside of the allocator.
        uncertainty_bytes: how far ``process_bytes`` may be off, in either direction.
        usable_bytes: what it may be: without the margin for sizes that the user asks for.
        fits: "fits" even if the forecast is too low by its full uncertainty; "does not fit" even if it is too high by
            that; or "may fit", also if the allocator must empty its cache within a step.
    """

    seq_len: int | None
    batch_size: int
    phases: dict[str, int]
    kinds: dict[str, int]
    allocated_bytes: int
    reserved_bytes: int
    process_bytes: float
    uncertainty_bytes: float
    usable_bytes: float
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
        uses_largest: what is `used` is the largest batch that fits, and not what settings say.
    """

    title: str
    world_size: int
    device: Device
    step: TracedStep
    lengths: tuple[LengthPlan, ...]
    host: HostPlan | None = None
    assumptions: str = ""
    uses_largest: bool = False

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
        return self._longest.size(batch_size)

    def memory(self, batch_size: int) -> StepMemory:
        """The memory of the same batch, event by event."""
        return self._longest.memory(batch_size)

    @cached_property
    def _longest(self) -> "BatchSizes":
        return BatchSizes(max(self.step.lengths, key=lambda step: step.seq_len), self.device)


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
    """The batch sizes of one length of rows on a device."""

    def __init__(self, step: StepEvents, device: Device) -> None:
        self._step = step
        self._device = device
        self._peaks_of: dict[int, tuple[int, int]] = {}  # by rows: allocated and reserved bytes
        self._sizes: dict[tuple[int, bool], SizePlan] = {}  # by rows, and whether they keep the margin

    @cached_property
    def largest(self) -> int | None:
        """The largest batch that is expected to fit; 0 if none does, None if ``NO_BOUND`` or more fit."""
        limit_bytes = self._device.reservable_bytes(self._device.outside_bytes)
        return self._largest(lambda size: self._peaks(size)[1] <= limit_bytes)

    @cached_property
    def safe(self) -> int | None:
        """The largest batch that fits even if the forecast is too low by its full uncertainty."""
        return self._largest(lambda size: self._fits(size, keeps_margin=True) == "fits")

    def size(self, batch_size: int, *, keeps_margin: bool = True) -> SizePlan:
        """The memory of a batch of ``batch_size`` rows."""
        if (batch_size, keeps_margin) not in self._sizes:
            self._sizes[batch_size, keeps_margin] = self._size(batch_size, keeps_margin=keeps_margin)
        return self._sizes[batch_size, keeps_margin]

    def memory(self, batch_size: int, limit_bytes: float = float("inf")) -> StepMemory:
        """What steps of ``batch_size`` rows take if the allocator may reserve ``limit_bytes``.

        Raises:
            DoesNotFitError: they do not run in so many bytes.
        """
        events, overhead = self._step.at(batch_size), self._device.overhead
        if not overhead.caches:
            return exact(events)
        return replayed(
            events,
            workspaces=overhead.workspaces,
            threads=overhead.threads,
            expandable=overhead.expandable,
            limit_bytes=limit_bytes,
            state_exists=self._step.state_exists,
        )

    def plan(
        self, *, used: int, searches: bool = True, tokens_per_step: int | None, asked: Sequence[int] = ()
    ) -> LengthPlan:
        """The plan of this length: what fits, the batch that is ``used``, and those ``asked`` for.

        Args:
            searches: whether a search finds the batch that is used, which keeps the margin free.
        """
        return LengthPlan(
            seq_len=self._step.seq_len or None,
            largest_batch_size=self.largest,
            safe_batch_size=self.safe,
            used=self.size(used, keeps_margin=searches),
            tokens_per_step=tokens_per_step,
            asked=tuple(self.size(size, keeps_margin=False) for size in asked),
        )

    def _size(self, batch_size: int, *, keeps_margin: bool) -> SizePlan:
        memory, device, overhead = self.memory(batch_size), self._device, self._device.overhead
        self._peaks_of[batch_size] = memory.allocated_bytes, memory.reserved_bytes
        outside_bytes = device.outside_bytes
        return SizePlan(
            seq_len=self._step.seq_len or None,
            batch_size=batch_size,
            phases=memory.phases,
            kinds=memory.kinds(),
            allocated_bytes=memory.allocated_bytes,
            reserved_bytes=memory.reserved_bytes,
            process_bytes=memory.reserved_bytes + outside_bytes,
            uncertainty_bytes=overhead.uncertainty * memory.reserved_bytes
            + (overhead.most_outside_bytes - overhead.least_outside_bytes) / 2,
            usable_bytes=outside_bytes + device.reservable_bytes(outside_bytes, keeps_margin=keeps_margin),
            fits=self._fits(batch_size, keeps_margin=keeps_margin),
        )

    def _peaks(self, batch_size: int) -> tuple[int, int]:
        """The most bytes that are allocated and reserved, where there is room for them."""
        if batch_size not in self._peaks_of:
            memory = self.memory(batch_size)
            self._peaks_of[batch_size] = memory.allocated_bytes, memory.reserved_bytes
        return self._peaks_of[batch_size]

    def _runs_in(self, batch_size: int, limit_bytes: float) -> bool:
        """Whether steps run while the allocator may reserve so many bytes, even if it must empty its cache."""
        allocated_bytes, reserved_bytes = self._peaks(batch_size)
        if reserved_bytes <= limit_bytes or allocated_bytes > limit_bytes:
            return reserved_bytes <= limit_bytes
        try:
            self.memory(batch_size, limit_bytes)
        except DoesNotFitError:
            return False
        return True

    def _fits(self, batch_size: int, *, keeps_margin: bool) -> Fits:
        device, overhead = self._device, self._device.overhead
        least, most = (
            device.reservable_bytes(outside_bytes, keeps_margin=keeps_margin)
            for outside_bytes in (overhead.most_outside_bytes, overhead.least_outside_bytes)
        )
        if self._peaks(batch_size)[1] * (1 + overhead.uncertainty) <= least:
            return "fits"
        return "may fit" if self._runs_in(batch_size, most * (1 + overhead.uncertainty)) else "does not fit"

    def _largest(self, fits: Callable[[int], bool]) -> int | None:
        """The largest batch that fits."""
        # A single row may need more memory than two, and what is allocated is a bound that is found in less time.
        limit_bytes = self._device.reservable_bytes(self._device.overhead.least_outside_bytes)
        limit_bytes *= 1 + self._device.overhead.uncertainty
        bound = binary_search(
            lambda size: exact(self._step.at(size)).allocated_bytes <= limit_bytes, start=2, max_batch_size=NO_BOUND
        )
        if bound == NO_BOUND and fits(bound):
            return None
        return bisect(fits, fitted=1, failed=bound + 1) if bound > 1 and fits(2) else int(fits(1))
