"""Records out-of-memory errors and checkpoints in the journal."""

from collections.abc import Callable, Sequence
from pathlib import Path

from torchtune_adaptive.recovery.attempts import MemoryPressure
from torchtune_adaptive.training.journal import RunJournal
from torchtune_adaptive.training.oom_retry import OomRetry

Checkpoints = Callable[[], Sequence[tuple[Path, int]]]  # each one's folder and optimizer step


class RunEvents:
    """Writes each out-of-memory error and each finished checkpoint to the journal.

    Args:
        checkpoints: gives the checkpoints that this process has finished, in order.
    """

    def __init__(self, journal: RunJournal, retry: OomRetry, *, checkpoints: Checkpoints) -> None:
        self._journal = journal
        self._retry = retry
        self._checkpoints = checkpoints
        self._num_memory_events = 0
        self._num_checkpoints = 0

    @property
    def journal(self) -> RunJournal:
        """The journal."""
        return self._journal

    @property
    def checkpoint(self) -> Path | None:
        """The folder of the last checkpoint; None if this process has finished none."""
        finished = self._checkpoints()
        return finished[-1][0] if finished else None

    def look(self) -> None:
        """Write what has happened since the last look."""
        events = self._retry.events[self._num_memory_events :]
        self._num_memory_events += len(events)
        for event in events:
            is_out = event.pressure is MemoryPressure.OUT_OF_MEMORY
            names = ("step", "phase", "figures", "error", "before", "after", "unit")
            values = {name: getattr(event, name) for name in names}
            self._journal.event("out of memory" if is_out else "thrashing", ranks=list(event.ranks), **values)
        finished = self._checkpoints()[self._num_checkpoints :]
        self._num_checkpoints += len(finished)
        for path, step in finished:
            self._journal.event("checkpoint", step=step, path=str(path))
