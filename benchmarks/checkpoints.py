"""What do checkpoints of steps cost: how long does training wait for them, and how much memory does resuming take?

    OMP_NUM_THREADS=1 python -m benchmarks.checkpoints

Trains a model of 16 million parameters on two CPU ranks three times: without checkpoints, with one every eight steps,
and with these written in the background. All three are in the same processes and take turns, so that other load on the
machine affects all equally. Then every recipe of the tiny model is trained and resumed under an exact memory meter.
Prints tables and writes them to ``results/checkpoints_cpu.md``.
"""

import argparse
import logging
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from adaptive_ppo_full_finetune_single_device import AdaptivePPOFullFinetuneRecipeSingleDevice
from torch import nn
from torchtune.models.llama2 import llama2

from benchmarks.live import Watch, live_recipe
from benchmarks.loop import race
from benchmarks.on_ranks import measured_on_ranks
from benchmarks.provenance import provenance
from benchmarks.tables import publish, spread, table
from tests.support.ppo_runs import make_reward_model, ppo_config
from tests.support.ranks import run_alone, run_on_ranks
from tests.support.recipe_runs import (
    COMMON,
    RECIPES,
    adaptive_recipe,
    finished,
    set_up,
    shallow_assets,
    tiny_config,
)
from torchtune_adaptive.engine.memory.devices import meter_for
from torchtune_adaptive.engine.memory.meter import MemoryMeter
from torchtune_adaptive.text import format_bytes
from torchtune_adaptive.tiny import MODEL_GEOMETRY, MODEL_NAME, make_tiny_assets
from torchtune_adaptive.training.checkpoints.steps import StepCheckpoints

RESULTS = Path(__file__).parent / "results" / "checkpoints_cpu.md"
COMMAND = "OMP_NUM_THREADS=1 python -m benchmarks.checkpoints"
RANKS = 2
CPU = torch.device("cpu")
WIDE: dict[str, Any] = {"embed_dim": 512, "intermediate_dim": 1536}
NONE, NOW, LATER = VARIANTS = ("none", "in the step", "in the background")
EVERY, STEPS, ROUNDS = 8, 27, 9  # steps between checkpoints; steps of a turn; turns (the first is not counted)


class Waits(Watch):
    """Adds up the time between the end of a step and the start of the next, in which checkpoints are made."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._step_ended: float | None = None

    def step(self) -> None:
        self._step_ended = time.perf_counter()

    def before_step(self, number: int) -> None:
        self._add()

    def after_epoch(self) -> None:
        self._add()

    def take(self) -> float:
        """The seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def _add(self) -> None:
        if self._step_ended is not None:
            self.seconds += time.perf_counter() - self._step_ended
        self._step_ended = None


def main() -> None:
    """Measure and write the tables."""
    argparse.ArgumentParser(description=__doc__).parse_args()  # refuses arguments
    waits, run = measured_on_ranks(_waits, RANKS, make_assets=_wide_assets)
    _report(waits, _all_peaks(), run)


def _wide_assets(directory: Path) -> None:
    make_tiny_assets(directory, num_samples=2000)
    torch.manual_seed(0)
    torch.save(llama2(**MODEL_GEOMETRY | WIDE).state_dict(), directory / MODEL_NAME)


def _waits(tiny_dir: Path) -> dict[str, list[tuple[float, float]]]:
    """For each variant and turn: its seconds, and the seconds that training waited for checkpoints. A collective."""
    recipes: dict[str, Any] = {}
    watches = {variant: Waits() for variant in VARIANTS}
    for variant, watch in watches.items():
        saves = {"save_every_n_steps": EVERY, "keep_last_n_checkpoints": 1, "save_in_background": variant == LATER}
        adaptive = {"oom_recovery": False} | (saves if variant != NONE else {})
        cfg = tiny_config(
            "full",
            tiny_dir,
            tiny_dir.parent / variant.replace(" ", "_"),
            epochs=1,
            max_steps_per_epoch=STEPS,
            batch_size=2,
            tokenizer__max_seq_len=128,
            adaptive=adaptive,
            **{f"model__{name}": value for name, value in WIDE.items()},
        )
        recipes[variant] = live_recipe(cfg, watch=watch)
    turns: dict[str, list[tuple[float, float]]] = {variant: [] for variant in VARIANTS}
    started = time.perf_counter()
    for _, variant in race(recipes, ROUNDS):
        dist.barrier()
        turns[variant].append((time.perf_counter() - started, watches[variant].take()))
        started = time.perf_counter()
    return {variant: one[1:] for variant, one in turns.items()}


def _peaks(rank: int, tiny_dir: Path, kind: str) -> tuple[int, int, int]:
    """Bytes of a rank: the peak in training, the peak while loading a checkpoint, and those held after loading."""
    logging.disable(logging.WARNING)
    output_dir = tiny_dir.parent / f"of_{kind}"
    options = COMMON | {"max_steps_per_epoch": 2, "adaptive": {"memory_limit": "4GiB", "save_every_n_steps": 1}}
    steps, *_ = finished(adaptive_recipe(kind), tiny_config(kind, tiny_dir, output_dir, **options))
    resumed_from = str(output_dir / "step_1")
    cfg = tiny_config(kind, tiny_dir, output_dir, resume_from_checkpoint=resumed_from, **options)
    recipe = adaptive_recipe(kind)(cfg)

    def meter() -> MemoryMeter:
        return meter_for(CPU, nn.ModuleList(recipe.models()), recipe.optimizer_policy().optimizers)

    loading = _loading_peak(recipe, cfg, meter)
    return max((int(step["peak_memory_bytes"]) for step in steps), default=0), *loading


def _ppo_peaks(assets: Path) -> tuple[int, int, int]:
    """As ``_peaks``, for PPO."""
    logging.disable(logging.WARNING)
    make_reward_model(assets)
    output_dir = assets.parent / "of_ppo"
    recipe_class: Any = AdaptivePPOFullFinetuneRecipeSingleDevice

    def meter_of(recipe: Any) -> MemoryMeter:
        return meter_for(CPU, nn.ModuleList(recipe.models()), recipe.optimizers())

    def config(**keys: Any) -> Any:
        return ppo_config(assets, output_dir, adaptive={"save_every_n_steps": 1}, **keys)

    recipe = set_up(recipe_class, config())
    with meter_of(recipe) as meter, mock.patch.object(recipe, "save_checkpoint"):
        recipe.train()
    resumed = recipe_class(cfg := config(resume_from_checkpoint=str(output_dir / "step_1")))
    return meter.peak_bytes, *_loading_peak(resumed, cfg, lambda: meter_of(resumed))


def _loading_peak(recipe: Any, cfg: Any, make_meter: Callable[[], MemoryMeter]) -> tuple[int, int]:
    """The peak bytes while a recipe that is set up loads its checkpoint, and the bytes held afterwards."""
    load, meters = StepCheckpoints.load, []

    def metered(checkpoints: StepCheckpoints, *args: Any, **options: Any) -> Any:
        meters.append(make_meter())
        with meters[0]:
            return load(checkpoints, *args, **options)

    with mock.patch.object(StepCheckpoints, "load", metered):
        recipe.setup(cfg)
    return meters[0].peak_bytes, meters[0].live_bytes


def _all_peaks() -> dict[str, tuple[int, int, int]]:
    """Rank 0's ``_peaks`` for each kind of recipe."""
    with tempfile.TemporaryDirectory() as directory:
        tiny_dir = Path(directory) / "tiny"
        make_tiny_assets(tiny_dir, num_samples=400)
        assets = shallow_assets(tiny_dir)
        peaks = {
            kind: run_alone(_peaks, 0, assets, kind)
            if kind.endswith("_single")
            else run_on_ranks(_peaks, RANKS, assets, kind)[0]
            for kind in RECIPES
        }
        return peaks | {"ppo_single": run_alone(_ppo_peaks, assets)}


def _report(turns: dict[str, list[tuple[float, float]]], peaks: dict[str, tuple[int, int, int]], run: Any) -> None:
    base = median(seconds for seconds, _ in turns[NONE])
    waits = [
        [
            variant,
            f"{1e3 * median(seconds for seconds, _ in one) / STEPS:.0f}",
            f"{1e3 * median(waited for _, waited in one) * EVERY / STEPS:.0f}",
            spread([waited / seconds for seconds, waited in one], digits=3),
            spread([seconds / base for seconds, _ in one], digits=3),
        ]
        for variant, one in turns.items()
    ]
    memory = [
        [kind, *(format_bytes(one) for one in (training, loading, left)), f"{loading / training:.2f}"]
        for kind, (training, loading, left) in peaks.items()
    ]
    publish(
        RESULTS,
        "What checkpoints of steps cost, CPU",
        provenance(COMMAND, **run),
        f"A checkpoint every {EVERY} steps of full finetuning, 15.7 million parameters in float32 with AdamW: 188 MB,"
        f" of which each rank writes half. {ROUNDS - 1} turns of {STEPS} steps; medians, and [quartiles]. Training"
        " waits between the end of a step and the begin of the next, and at the end of a turn for what is still"
        " written. The last column is the time of a turn over the median of one without checkpoints. Two ranks use"
        " both cores of this machine, so that a thread in the background takes time from training; beside a GPU it"
        " need not.",
        table(
            ["checkpoints", "ms per step", "waits, ms per checkpoint", "share of time waiting", "time / none"], waits
        ),
        "Memory of a rank by the exact meter, a shallow tiny model: the highest in training, the highest while a"
        " checkpoint of a step is loaded, and what is there afterwards. On a CPU the files' own buffers count as well.",
        table(["recipe", "training", "loading", "loaded", "loading / training"], memory),
    )


if __name__ == "__main__":
    main()
