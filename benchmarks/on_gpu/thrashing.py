"""An allocator that must free its cache in every step: how slow that is, and that it is detected and stopped."""

from collections.abc import Iterator
from statistics import median
from typing import Any
from unittest import mock

import torch

from benchmarks.on_gpu.observed import Observed
from benchmarks.on_gpu.random_recipe import live_random_recipe, random_config, start_group
from benchmarks.on_gpu.stage import Section, Stage
from torchtune_adaptive.memory.allocator_retries import RetryWatch

_ROWS, _STEPS = 8, 8  # rows of a micro-batch, steps of each phase
PHASES = ("enough memory", "too little, retries not watched", "too little, as it comes")
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
    seen = Watched()
    recipe = live_random_recipe(cfg, watch=seen)
    recipe.train()
    cells: list[list[str]] = []
    for index, phase in enumerate(PHASES):
        steps = slice(index * _STEPS, (index + 1) * _STEPS)
        step_ms = 1e3 * median(seen.seconds[steps][1:])
        retries = sum(map(bool, seen.retries[steps]))
        cells.append([phase, f"{step_ms:.0f}", str(retries), seen.limits[index], str(seen.ooms[index])])
    events = [entry["reason"] for entry in recipe.trainer.record.history if "step" in entry]
    text = [
        f"Config `{stage.lora}`, {_ROWS} rows of up to {stage.seq_len} random tokens, {_STEPS} steps a phase. From the"
        f" second phase on the limit lies {_BETWEEN:.0%} of the way from the most that was allocated in the first to"
        " the most that was reserved, so that the allocator finds room only by freeing its cache. In the second"
        " phase the watch for that is off.",
        *(f"{event}." for event in events),
    ]
    data = [{"seconds": seen.seconds, "retries": seen.retries, "events": events}]
    yield [Section(title="Thrashing", header=HEADER, rows=cells, text=text, data=data)]


class Watched(Observed):
    """Records the retries of each step, lowers the limit for the second phase, and does not watch retries in it."""

    def __init__(self) -> None:
        super().__init__()
        self.retries: list[int] = []
        self.limits: list[str] = []
        self.ooms: list[int] = []
        self._allocated_bytes = self._reserved_bytes = 0
        self._no_watch = mock.patch.object(RetryWatch, "is_thrashing", return_value=False)

    def begin(self, recipe: Any) -> None:
        super().begin(recipe)
        self._retries_before = recipe.trainer.meter.total_retries

    def note_peak(self) -> None:
        super().note_peak()
        if self.is_cuda:
            self._allocated_bytes = max(self._allocated_bytes, self.peak_bytes)
            self._reserved_bytes = max(self._reserved_bytes, torch.cuda.max_memory_reserved())

    def step(self) -> None:
        super().step()
        retries = self.recipe.trainer.meter.total_retries
        self.retries.append(retries - self._retries_before)
        self._retries_before = retries

    def after_epoch(self) -> None:
        trainer = self.recipe.trainer
        self.limits.append(str(trainer.micro_batches.limit))
        self.ooms.append(trainer.retry.retries - sum(self.ooms))
        if len(self.limits) == 1:
            self._tighten()
            self._no_watch.start()
        elif len(self.limits) == 2:
            self._no_watch.stop()

    def _tighten(self) -> None:
        meter = self.recipe.trainer.meter
        if not self.is_cuda:  # the CPU's meter simulates a cache
            meter.cache_limit_bytes = int(0.8 * self.peak_bytes)
            return
        above_bytes = int(_BETWEEN * (self._reserved_bytes - self._allocated_bytes))
        meter.set_limit(self._allocated_bytes + above_bytes)
        torch.cuda.empty_cache()
