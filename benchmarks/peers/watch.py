"""Watches a contestant: what its search costs and what it changes."""

import gc
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from benchmarks.peers.state import changed, state_of
from benchmarks.peers.task import Task


@dataclass
class Found:
    """What a contestant's search found and what it cost.

    ``steps`` are optimizer steps completed in the search, ``gc_seconds`` the part of ``seconds`` spent collecting
    garbage. ``changed`` are the parts of the state that training begins with that differ from before the search, None
    if values are not computed. With an ``error`` nothing else counts.
    """

    size: int = 0
    steps: int = 0
    ooms: int = 0
    seconds: float = 0.0
    gc_seconds: float = 0.0
    changed: list[str] | None = field(default_factory=list)
    survives: str = ""
    error: str = ""


class Clock:
    """Seconds since it was made, and how many of them Python has spent collecting garbage."""

    def __init__(self) -> None:
        self.gc_seconds = 0.0
        self._gc_started = 0.0
        gc.callbacks.append(self._note)
        self._started = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._started

    def _note(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._gc_started = time.perf_counter()
        else:
            self.gc_seconds += time.perf_counter() - self._gc_started


class Search:
    """A search that begins now, and ends before training begins. ``optimizer``: None if there is none yet."""

    def __init__(self, task: Task, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self._task = task
        self._model = model
        self._optimizer = optimizer
        self._before = state_of(model, optimizer)
        self._clock = Clock()

    def over(self, size: int, ooms: int | None = None) -> Found:
        """What the search found, called when it is over. ``ooms``: errors raised; None: those that the card counted."""
        seconds, gc_seconds = self._clock.seconds, self._clock.gc_seconds
        differing = changed(self._before, state_of(self._model, self._optimizer))
        ooms = self._task.card.ooms if ooms is None else ooms
        return Found(size, self._task.steps, ooms, seconds, gc_seconds, differing)


class Attempts:
    """Follows a contestant that searches by training: its search is over when its last attempt begins."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._last = Found()
        self._first_state: dict[str, str] = {}
        self._restarts = 0  # of attempts that had completed a step
        self._clock = Clock()

    def begin(self, size: int, model: nn.Module, optimizer: Any) -> None:
        """An attempt at ``size`` is about to take its first step."""
        seconds, gc_seconds = self._clock.seconds, self._clock.gc_seconds
        state = state_of(model, optimizer)
        self._restarts += self._task.steps > self._last.steps
        self._first_state = self._first_state or state
        differing = changed(self._first_state, state)
        self._last = Found(size, self._task.steps, self._task.card.ooms, seconds, gc_seconds, differing)

    def found(self) -> Found:
        """What the search found, called after a training that starts over at each error."""
        self._last.survives = f"yes, started over {self._restarts} x in mid-training" if self._restarts else "yes"
        return self._last

    def found_by_first(self, sizes: list[int], ooms: list[int]) -> Found:
        """What the first step found, if every step searches; ``sizes`` and ``ooms`` are those of each step."""
        later = sum(count > 0 for count in ooms[1:])
        self._last.survives = (
            f"yes, with {sum(ooms[1:])} OOMs in {later} of its steps, down to {min(sizes)}" if later else "yes"
        )
        return self._last
