"""An allocator that must free its cache in every step: how slow that is, and that it is detected and stopped."""

from collections.abc import Iterator
from statistics import median
from typing import Any
from unittest import mock

import torch

from benchmarks.on_gpu.observed import Observed
from benchmarks.on_gpu.random_recipe import live_random_recipe, random_config, start_group
from benchmarks.on_gpu.random_rows import SHORTEST_RISING
from benchmarks.on_gpu.stage import Section, Stage
from torchtune_adaptive.engine.memory.cpu_meter import CpuMeter
from torchtune_adaptive.engine.recovery.watch import PressureWatch

_ROWS, _STEPS = 4, 16  # rows of a micro-batch, steps of each phase: as many as recovery compares
# A GPU prepares kernels for each new length, which is not what the others show.
PHASES = (
    "each length for the first time",
    "enough memory",
    "too little, retries not watched",
    "too little, as it comes",
)
_LIMIT = 1.2  # times the most that is allocated
HEADER = ["phase", "ms per step", "steps with retries", "micro-batch at the end", "OOMs"]


def measure(stage: Stage) -> Iterator[list[Section]]:
    """Each phase is an epoch."""
    start_group(stage)
    seq_len = stage.seq_len // 2  # so that most devices have enough memory in the first phase
    cfg = random_config(
        stage,
        stage.lora,
        num_rows=_ROWS * _STEPS,
        lengths="rising",
        shuffle=False,
        tokenizer__max_seq_len=seq_len,
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
    events = [str(event) for event in recipe.trainer.recoverable.events]
    text = [
        f"Config `{stage.lora}`, {_ROWS} rows, {_STEPS} steps a phase. In each phase rows grow from"
        f" {SHORTEST_RISING * seq_len:.0f} to {seq_len} random tokens, so that few cached blocks are large enough for"
        f" the next step. From the third phase on the limit is {_LIMIT} times the most that was allocated in the"
        " first two, so that the allocator finds room only by freeing its cache. In the third phase the package does"
        " not act on that.",
        *(f"{event}." for event in events),
    ]
    data = [{"seconds": seen.seconds, "retries": seen.retries, "events": events}]
    yield [Section(title="Thrashing", header=HEADER, rows=cells, text=text, data=data)]


class Watched(Observed):
    """Records the retries of each step, lowers the limit for the third phase, and does not watch retries in it."""

    def __init__(self) -> None:
        super().__init__()
        self.retries: list[int] = []
        self.limits: list[str] = []
        self.ooms: list[int] = []
        self._allocated_bytes = 0
        self._simulated = 0
        self._simulates = mock.patch.object(CpuMeter, "total_retries", property(lambda _: self._simulated))
        self._no_watch = mock.patch.object(PressureWatch, "is_thrashing", return_value=None)

    def begin(self, recipe: Any) -> None:
        super().begin(recipe)
        self._simulates.start()
        self._retries_before = recipe.trainer.step.meter.total_retries

    def before_step(self, number: int) -> None:
        micro_batches = self.recipe.trainer.micro_batches
        # A CPU has no cache: from the third phase on, each step of the largest micro-batch counts as one retry.
        self._simulated += len(self.limits) > 1 and micro_batches.limit == micro_batches.largest
        super().before_step(number)

    def note_peak(self) -> None:
        super().note_peak()
        if self.is_cuda:
            self._allocated_bytes = max(self._allocated_bytes, self.peak_bytes)

    def step(self) -> None:
        super().step()
        retries = self.recipe.trainer.step.meter.total_retries
        self.retries.append(retries - self._retries_before)
        self._retries_before = retries

    def after_epoch(self) -> None:
        trainer = self.recipe.trainer
        self.limits.append(str(trainer.micro_batches.limit))
        self.ooms.append(trainer.recoverable.retries - sum(self.ooms))
        if self.is_cuda:
            torch.cuda.empty_cache()  # so that all phases begin alike
        if len(self.limits) == 2:
            self._tighten()
            self._no_watch.start()
        elif len(self.limits) == 3:
            self._no_watch.stop()
        elif len(self.limits) == len(PHASES):
            self._simulates.stop()

    def _tighten(self) -> None:
        if self.is_cuda:
            self.recipe.trainer.step.meter.limit_bytes = int(_LIMIT * self._allocated_bytes)
