"""What torch's allocator makes of a train step: allocated and reserved bytes, by phase and by kind."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from torchtune_adaptive.plan.allocator import Block, CachingAllocator
from torchtune_adaptive.plan.trace.events import BEFORE, Events

WORKSPACES = "workspaces"  # the kind of memory that libraries keep
_MOST_STEPS = 3


@dataclass(frozen=True)
class StepMemory:
    """Memory of a step of one size.

    Attributes:
        events: what the step takes and gives back.
        changes: by how many bytes each event changes what is allocated, as the allocator rounds it.
        workspace_bytes: that libraries keep.
        reserved_bytes: the most that the allocator holds, see ``torch.cuda.max_memory_reserved``.
        clears: how often the allocator emptied its cache to stay within its limit.
    """

    events: Events
    changes: Sequence[int]
    workspace_bytes: int
    reserved_bytes: int
    clears: int = 0

    @cached_property
    def live_bytes(self) -> list[int]:
        """Allocated bytes after each event."""
        return list(accumulate(self.changes, initial=self.workspace_bytes))[1:]

    @property
    def allocated_bytes(self) -> int:
        """The peak, see ``torch.cuda.max_memory_allocated``."""
        return max(self.live_bytes)

    @cached_property
    def phases(self) -> dict[str, int]:
        """Peak of each phase, in order."""
        found: dict[str, int] = {}
        for event, live_bytes in zip(self.events, self.live_bytes, strict=True):
            if event.phase != BEFORE:
                found[event.phase] = max(live_bytes, found.get(event.phase, 0))
        return found

    def kinds(self, phase: str | None = None) -> dict[str, int]:
        """Bytes of each kind at the peak of the step, or of ``phase``."""
        places = (index for index, event in enumerate(self.events) if phase in (None, event.phase))
        peak = max(places, key=self.live_bytes.__getitem__)
        found = {event.kind: 0 for event in self.events if event.kind}
        for event, change in zip(self.events[: peak + 1], self.changes, strict=False):
            if event.kind:
                found[event.kind] += change
        return found | ({WORKSPACES: self.workspace_bytes} if self.workspace_bytes else {})


def exact(events: Events) -> StepMemory:
    """The memory of a step on a CPU: the bytes of its tensors, as nothing is kept for later."""
    changes = [-events[one.taken].num_bytes if one.taken >= 0 else one.num_bytes for one in events]
    return StepMemory(events, changes, 0, max(accumulate(changes)))


def replayed(
    events: Events, *, workspaces: Sequence[int] = (), expandable: bool = False, limit_bytes: float = float("inf")
) -> StepMemory:
    """The memory of a step in a process whose allocator begins empty.

    What exists before the step comes first, then the libraries' workspaces. Steps follow until they reserve no more.

    Args:
        workspaces: bytes of each block that libraries keep.
        expandable: the allocator has ``expandable_segments:True``.
        limit_bytes: the most that it may reserve.

    Raises:
        DoesNotFitError: the step does not fit, even after the allocator has emptied its cache.
    """
    process = _Process(events, CachingAllocator(limit_bytes=limit_bytes, expandable=expandable))
    for num_bytes in workspaces:
        process.allocator.allocate(num_bytes)
    allocator, reserved_bytes = process.allocator, 0
    for _ in range(_MOST_STEPS):
        allocator.reset_peaks()
        process.step()
        if allocator.peak_reserved_bytes <= reserved_bytes:
            break
        reserved_bytes = allocator.peak_reserved_bytes
    return StepMemory(events, process.changes, sum(workspaces), reserved_bytes, allocator.retries)


class _Process:
    """Runs steps on an allocator.

    Attributes:
        changes: by how many bytes each event changed what is allocated.
    """

    def __init__(self, events: Events, allocator: CachingAllocator) -> None:
        self.allocator = allocator
        self.changes = [0] * len(events)
        self._events = events
        self._held: dict[int, Block] = {}  # by the event that took it
        self._num_before = sum(event.phase == BEFORE for event in events)
        self._run(range(self._num_before))

    def step(self) -> None:
        """Run a step. Afterwards there is what was there before: a step replaces what it gives back of it."""
        before = list(self._held)
        self._run(range(self._num_before, len(self._events)))
        for index in [index for index in self._held if index >= self._num_before]:
            self.allocator.free(self._held.pop(index))
        for index in before:
            if index not in self._held:
                self._held[index] = self.allocator.allocate(self._events[index].num_bytes, self._events[index].stream)

    def _run(self, indices: range) -> None:
        allocator, held, changes = self.allocator, self._held, self.changes
        for index in indices:
            event = self._events[index]
            if event.taken >= 0:
                if block := held.pop(event.taken, None):  # None: nothing was taken for so few rows
                    changes[index] = -block.num_bytes
                    allocator.free(block)
            elif event.num_bytes:
                held[index] = block = allocator.allocate(event.num_bytes, event.stream)
                changes[index] = block.num_bytes
