"""What torch's allocator makes of a train step: allocated and reserved bytes, by phase and by kind."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, groupby

from torchtune_adaptive.plan.allocator import Block, CachingAllocator, DoesNotFitError
from torchtune_adaptive.plan.trace.events import BEFORE, MADE, REBUILT, Events
from torchtune_adaptive.plan.trace.libraries import PRODUCT, with_scratch

WORKSPACES = "workspaces"  # the kind of memory that libraries keep
STATE, OPTIMIZER = "optimizer state", "optimizer"  # the kind of it, and the phase that makes it
_MOST_STEPS = 3


@dataclass(frozen=True)
class StepMemory:
    """Memory of a step of one size.

    Attributes:
        events: what the step takes and gives back.
        changes: by how many bytes each event changes what is allocated, as the allocator rounds it.
        workspace_bytes: that libraries keep.
        reserved_bytes: the most that the allocator holds, see ``torch.cuda.max_memory_reserved``.
    """

    events: Events
    changes: Sequence[int]
    workspace_bytes: int
    reserved_bytes: int

    @cached_property
    def live_bytes(self) -> list[int]:
        """Allocated bytes after each event."""
        return list(accumulate(self.changes, initial=self.workspace_bytes))[1:]

    @property
    def allocated_bytes(self) -> int:
        """The peak of the step, see ``torch.cuda.max_memory_allocated``."""
        return max(self.live_bytes[self._start :])

    @cached_property
    def _start(self) -> int:
        """The event after which the step begins."""
        return max(0, sum(event.phase == BEFORE for event in self.events) - 1)

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
        during = range(self._start, len(self.events))
        places = (index for index in during if phase in (None, self.events[index].phase))
        peak = max(places, key=self.live_bytes.__getitem__)
        found = {event.kind: 0 for event in self.events if event.kind}
        for event, change in zip(self.events[: peak + 1], self.changes, strict=False):
            if event.kind:
                found[event.kind] += change
        return found | ({WORKSPACES: self.workspace_bytes} if self.workspace_bytes else {})


def exact(events: Events) -> StepMemory:
    """The memory of a step on a CPU: the bytes of its tensors, as nothing is kept for later."""
    events = with_scratch(events, 0)
    changes = [-events[one.taken].num_bytes if one.taken >= 0 else one.num_bytes for one in events]
    return StepMemory(events, changes, 0, max(accumulate(changes)))


def replayed(
    events: Events,
    *,
    workspaces: Sequence[int] = (),
    threads: int = 0,
    expandable: bool = False,
    limit_bytes: float = float("inf"),
    state_exists: bool = True,
) -> StepMemory:
    """The memory of a step in a process whose allocator begins empty.

    What exists before the step comes first. Steps follow until they reserve no more.

    Args:
        workspaces: bytes of each block that libraries keep.
        threads: that the device runs at once, on which the scratch memory of sums depends.
        expandable: the allocator has ``expandable_segments:True``.
        limit_bytes: the most that it may reserve.
        state_exists: the optimizer's state and the workspaces exist before the first step; otherwise that step makes
            them.

    Raises:
        DoesNotFitError: the step does not fit, even after the allocator has emptied its cache.
    """
    events = with_scratch(events, threads)
    allocator = CachingAllocator(limit_bytes=limit_bytes, expandable=expandable)
    process = _Process(events, allocator, state_exists=state_exists, workspaces=workspaces)
    reserved_bytes = 0
    for _ in range(_MOST_STEPS):
        process.step()
        if allocator.peak_reserved_bytes == reserved_bytes:
            break
        reserved_bytes = allocator.peak_reserved_bytes
    return StepMemory(events, process.changes, sum(workspaces), allocator.peak_reserved_bytes)


class _Process:
    """Runs steps on an allocator.

    Attributes:
        changes: by how many bytes each event changed what is allocated.
    """

    def __init__(
        self, events: Events, allocator: CachingAllocator, *, state_exists: bool, workspaces: Sequence[int]
    ) -> None:
        self.allocator = allocator
        self.changes = [0] * len(events)
        self._events = events
        self._held: dict[int, Block] = {}  # by the event that took it
        self._num_before = sum(event.phase == BEFORE for event in events)
        before = range(self._num_before)
        self._rebuilt = [index for index in before if events[index].operation == REBUILT]
        self._late = [index for index in before if events[index].kind == STATE and not state_exists]
        self._made = [index for index in before if events[index].operation == MADE]  # not before the first step
        products = [index for index, event in enumerate(events) if event.operation == PRODUCT and event.taken < 0]
        places = [] if state_exists else products  # the steps that made the state took them
        self._workspaces = dict(zip(places, workspaces, strict=False))  # by the event that they come with
        state = [] if self._late else [index for index in before if events[index].kind == STATE]
        self._run(sorted({*before}.difference(self._rebuilt, self._late, state, self._made)))
        if state_exists:
            self._make_state(state)
        for num_bytes in workspaces[len(places) :]:
            allocator.allocate(num_bytes)

    def _make_state(self, state: Sequence[int]) -> None:
        """Make the optimizer's state as the run does: by a step on gradients of zeros. Then the cache is emptied.

        Adam, of which ``allocate_state`` makes it, has two tensors of the size of each gradient, one after the other.
        Gradients do not count in the limit: steps have as many at once, or one at a time if the optimizer steps in
        backward, where the state is made so, too.

        Raises:
            DoesNotFitError: the state does not fit beside the weights.
        """
        allocator, limit_bytes = self.allocator, self.allocator.limit_bytes
        allocator.limit_bytes = float("inf")
        groups = (
            (num_bytes, len([*same])) for num_bytes, same in groupby(self._events[one].num_bytes for one in state)
        )
        gradients = [allocator.allocate(num_bytes) for num_bytes, number in groups for _ in range(number // 2)]
        self._run(state)
        for block in gradients:
            allocator.free(block)
        allocator.empty_cache()
        allocator.peak_reserved_bytes = allocator.reserved_bytes
        allocator.limit_bytes = limit_bytes
        if allocator.reserved_bytes > limit_bytes:
            raise DoesNotFitError(f"{allocator.reserved_bytes} bytes of weights and optimizer state do not fit")

    def step(self) -> None:
        """Run a step. Afterwards there is what was there before: what the step gave back of it, it has made again."""
        before = [*self._held, *self._late, *self._made]
        start = end = len(self._events)
        if self._late:
            start = next((index for index, event in enumerate(self._events) if event.phase == OPTIMIZER), end)
        self._run(range(self._num_before, start))
        self._run(self._late)
        self._run(range(start, end))
        self._late = self._made = []
        self._carry_over([index for index in before if index not in self._held])
        self._run(self._rebuilt)
        self._rebuilt = []

    def _carry_over(self, missing: Iterable[int]) -> None:
        """Take what is ``missing`` before a step from what the last one has left, or else anew; give back the rest."""
        left = defaultdict[tuple[str, int], list[Block]](list)  # by kind and bytes
        for index in [index for index in self._held if index >= self._num_before]:
            event = self._events[index]
            left[event.kind, event.num_bytes].append(self._held.pop(index))
        new = list[int]()
        for index in missing:
            event = self._events[index]
            if blocks := left[event.kind, event.num_bytes]:
                self._held[index] = blocks.pop(0)
                self.changes[index] = self._held[index].num_bytes
            else:
                new.append(index)
        for block in chain.from_iterable(left.values()):
            self.allocator.free(block)
        self._run(new)

    def _run(self, indices: Iterable[int]) -> None:
        allocator, held, changes, workspaces = self.allocator, self._held, self.changes, self._workspaces
        for index in indices:
            event = self._events[index]
            if event.taken >= 0:
                if block := held.pop(event.taken, None):  # None: nothing was taken for so few rows
                    changes[index] = -block.num_bytes
                    allocator.free(block)
            elif workspace_bytes := workspaces.pop(index, 0):
                allocator.allocate(workspace_bytes)
            elif event.num_bytes:
                held[index] = block = allocator.allocate(event.num_bytes, event.stream)
                changes[index] = block.num_bytes
