"""An allocator that must give back its cache step after step: how slow that is, and that it is seen and mended."""

from collections.abc import Iterator
from statistics import median
from typing import Any
from unittest import mock

import torch

from benchmarks.on_gpu.observed import Observed
from benchmarks.on_gpu.random_recipe import live_recipe, random_config, start_group
from benchmarks.on_gpu.stage import Section, Stage

_ROWS, _STEPS = 8, 8  # rows of a micro-batch, steps of each phase
PHASES = ("enough memory", "too little, nobody looks", "too little, as it comes")
_BETWEEN = 0.3  # where the limit lies, from the most that is allocated to the most that is reserved
HEADER = ["phase", "ms per step", "steps with retries", "micro-batch at the end", "OOMs"]


def measure(stage: Stage) -> Iterator[list[Section]]:
    """Three phases of an epoch each."""
    start_group(stage)
    cfg = random_config(
        stage,
        stage.lora,
        num_rows=_ROWS * _STEPS,
        lengths_differ=True,
        batch_size=_ROWS,
        epochs=len(PHASES),
        adaptive={"memory_limit": stage.limits_bytes[-1]},
    )
    seen = Watched(live_recipe(stage, cfg))
    seen.recipe.train()
    cells: list[list[str]] = []
    for index, phase in enumerate(PHASES):
        steps = slice(index * _STEPS, (index + 1) * _STEPS)
        step_ms = 1e3 * median(seen.seconds[steps][1:])
        retries = sum(map(bool, seen.retries[steps]))
        cells.append([phase, f"{step_ms:.0f}", str(retries), seen.limits[index], str(seen.ooms[index])])
    events = [entry["reason"] for entry in seen.recipe._report.history if "step" in entry]
    text = [
        f"Config `{stage.lora}`, {_ROWS} rows of up to {stage.seq_len} random tokens, {_STEPS} steps a phase. From the"
        f" second phase on the limit lies {_BETWEEN:.0%} of the way from the most that was allocated in the first to"
        " the most that was reserved, so that the allocator finds room only by giving back its cache. In the second"
        " phase the watch for that is off.",
        *(f"{event}." for event in events),
    ]
    data = [{"seconds": seen.seconds, "retries": seen.retries, "events": events}]
    yield [Section(title="Thrashing", header=HEADER, rows=cells, text=text, data=data)]


class Watched(Observed):
    """Notes retries of each step, and changes the limit at each phase's begin."""

    def __init__(self, recipe: Any) -> None:
        super().__init__(recipe)
        self.retries: list[int] = []
        self.limits: list[str] = []
        self.ooms: list[int] = []
        self._allocated_bytes = self._reserved_bytes = 0
        self._seen = recipe._meter.total_retries
        self._nobody_looks = mock.patch.object(recipe._watch, "is_thrashing", return_value=False)
        self._save = recipe._save_state
        recipe._save_state = self._end_of_phase

    def _observed(self, window: Any) -> Any:
        totals = super()._observed(window)
        retries = self.recipe._meter.total_retries
        self.retries.append(retries - self._seen)
        self._seen = retries
        if self.recipe._device.type == "cuda":
            self._allocated_bytes = max(self._allocated_bytes, torch.cuda.max_memory_allocated())
            self._reserved_bytes = max(self._reserved_bytes, torch.cuda.max_memory_reserved())
        return totals

    def _end_of_phase(self) -> None:
        recipe = self.recipe
        self.limits.append(str(recipe._limit))
        self.ooms.append(recipe._oom_retries - sum(self.ooms))
        if len(self.limits) == 1:
            self._tighten()
            self._nobody_looks.start()
        elif len(self.limits) == 2:
            self._nobody_looks.stop()
        self._save()

    def _tighten(self) -> None:
        recipe = self.recipe
        if recipe._device.type == "cpu":  # whose meter plays a cache
            recipe._meter.cache_limit_bytes = int(0.8 * self.peak_bytes)
            return
        above_bytes = int(_BETWEEN * (self._reserved_bytes - self._allocated_bytes))
        recipe._meter.limit_bytes = self._allocated_bytes + above_bytes
        torch.cuda.empty_cache()
