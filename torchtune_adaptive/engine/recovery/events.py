"""Events of memory pressure in training, as objects and as text."""

import textwrap
from dataclasses import dataclass

from torchtune_adaptive.engine.recovery.attempts import MemoryPressure
from torchtune_adaptive.text import ranks_text

_LONGEST_ERROR_CHARS = 200


@dataclass(frozen=True)
class MemoryEvent:
    """Some ranks were short of memory in an optimizer step. The event is equal on every rank.

    Attributes:
        step: the number of the optimizer step, from 1.
        pressure: OUT_OF_MEMORY if the step had to run again. THRASHING if it was only slow, because the allocator had
            to free its cache in two steps in a row.
        ranks: the ranks that were short of memory.
        phase: phase of the first of these ranks: "batch", "forward", "loss" or "backward".
        figures: its peak memory and limit as text; "not metered" without a meter.
        error: its error in one line; None if it was only slow.
        before: the size of a micro-batch in this step.
        after: the size from now on; equal to ``before`` if it cannot be smaller.
        unit: the unit of both sizes, usually "samples".
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

    @property
    def cause(self) -> str:
        """Which ranks were short of memory, and the figures of the first one, as part of a sentence."""
        if self.error is None:
            return f"{ranks_text(self.ranks)} had to free the allocator's cache in two steps in a row ({self.figures})"
        error = textwrap.shorten(self.error, _LONGEST_ERROR_CHARS)
        return f"{ranks_text(self.ranks)} ran out of memory in {self.phase} ({self.figures}: {error})"

    def __str__(self) -> str:
        if self.after == self.before:
            return f"micro-batch stays at a single row, although {self.cause}"
        return f"micro-batch {self.before} -> {self.after} {self.unit}: in step {self.step} {self.cause}"
