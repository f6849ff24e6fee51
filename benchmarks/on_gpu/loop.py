"""The adaptive training loop against the stock one at the same batch size, in one process and in turn."""

import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch

from benchmarks.live import Watch
from benchmarks.loop import OFF, ON, STOCK, STOCK_AGAIN, VARIANTS, Block, race
from benchmarks.on_gpu.random_recipe import (
    apart,
    apart_text,
    live_random_recipe,
    logged,
    random_config,
    start_group,
)
from benchmarks.on_gpu.stage import Section, Stage
from benchmarks.tables import spread

_ROUNDS, _STEPS = 16, 5  # the first step of a round is not timed
_BATCH_SIZES = (1, 4)
HEADER = ["rows", "loop", "ms per step", "tokens/s", "/ stock", "host, ms per step", "host / stock", "losses"]


def measure(stage: Stage) -> Iterator[list[Section]]:
    """At each batch size every variant trains a few steps in each round."""
    start_group(stage)
    text = [
        f"Config `{stage.lora}`, rows of {stage.seq_len} random tokens, one process without accumulation;"
        f" {_ROUNDS} rounds of {_STEPS} timed steps of each in turn. The stock recipe is torchtune's, but that here too"
        " a single rank does not shard. Ratios of speeds by round, median [quartiles], larger than 1 where it is"
        " faster than stock. The host's time is the CPU time of the process, all its threads included.",
    ]
    section = Section(title="The training loop while nothing happens", header=HEADER, text=text)
    for batch_size in _BATCH_SIZES:
        blocks, losses = _raced(stage, batch_size)
        for variant in (STOCK, ON, OFF, STOCK_AGAIN):
            speeds = [block.tokens_per_second for block in blocks[variant]]
            pairs = list(zip(blocks[STOCK], blocks[variant], strict=True))
            ratios = [stock.wall_ms / own.wall_ms for stock, own in pairs]
            host_ratios = [stock.cpu_ms / own.cpu_ms for stock, own in pairs]
            difference = apart(losses[variant], losses[STOCK])
            step_ms = median(block.wall_ms for block in blocks[variant])
            section.rows.append(
                [
                    str(batch_size),
                    variant,
                    f"{step_ms:.1f}",
                    f"{median(speeds):.0f}",
                    spread(ratios, digits=3),
                    f"{median(block.cpu_ms for block in blocks[variant]):.1f}",
                    spread(host_ratios, digits=3),
                    apart_text(difference),
                ]
            )
            section.data.append(
                {
                    "rows": batch_size,
                    "loop": variant,
                    "step_ms": step_ms,
                    "ratios": ratios,
                    "host_ratios": host_ratios,
                    "apart": difference,
                }
            )
    yield [section]


def _raced(stage: Stage, batch_size: int) -> tuple[dict[str, list[Block]], dict[str, list[float]]]:
    """The blocks of each variant, and its losses."""
    recipes: dict[str, Any] = {}
    clocks = {variant: _Clock(stage.device) for variant in VARIANTS}
    for variant, clock in clocks.items():
        cfg = random_config(
            stage,
            stage.lora,
            num_rows=4 * batch_size * (1 + _STEPS),
            batch_size=batch_size,
            epochs=1,
            max_steps_per_epoch=1 + _STEPS,
            clip_grad_norm=None,
            adaptive={"oom_recovery": variant == ON},
        )
        recipes[variant] = live_random_recipe(cfg, stock=variant in (STOCK, STOCK_AGAIN), watch=clock)
        if variant != STOCK:
            recipes[variant]._model.load_state_dict(recipes[STOCK]._model.state_dict())
    blocks: dict[str, list[Block]] = {variant: [] for variant in VARIANTS}
    num_tokens = batch_size * stage.seq_len
    for number, variant in race(recipes, 1 + _ROUNDS):
        if number > 0:
            blocks[variant].append(Block(num_tokens * _STEPS, _STEPS, *clocks[variant].ms_per_step(_STEPS)))
    return blocks, {variant: [step["loss"] for step in logged(recipe)] for variant, recipe in recipes.items()}


class _Clock(Watch):
    """Records when each step has ended; waits for the device at the first and the last one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self) -> None:
        self._moments: list[tuple[float, float]] = []

    def step(self) -> None:
        if len(self._moments) in (0, _STEPS) and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._moments.append((time.perf_counter(), time.process_time()))

    def ms_per_step(self, steps: int) -> list[float]:
        """The mean time and CPU time of a step, from the end of the first step to the end of the last."""
        return [1e3 * (last - first) / steps for first, last in zip(self._moments[0], self._moments[-1], strict=True)]
