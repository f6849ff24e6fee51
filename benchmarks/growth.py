"""What growth does to batch, steps and learning rate, epoch by epoch, on two CPU ranks.

    python -m benchmarks.growth

Each run trains the tiny model for five epochs. The rate is the one that the optimizer's step used, the noise scale the
estimate at the epoch's end. "planned" are the steps that loader, progress bar and schedule were told of, "taken" the
optimizer's.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.provenance import gloo_ranks, provenance
from benchmarks.tables import publish, spread, table
from tests.ranks import run_on_ranks
from tests.recipe_runs import adaptive_recipe, finished, tiny_config
from torchtune_adaptive.tiny import make_tiny_assets

RANKS = 2
ROUNDS = 15
RESULT = Path(__file__).parent / "results" / "growth_cpu.md"
DOUBLING = {"_component_": "torchtune_adaptive.schedule.geometric", "factor": 2}
MEASURING = {"_component_": "torchtune_adaptive.schedule.gradient_noise_scale", "every_steps": 2}
RUNS: dict[str, dict[str, Any]] = {
    "doubling, `growth_limit: memory`, `lr_scaling: none`": {"batch_increase_function": DOUBLING},
    "doubling, `growth_limit: none`, `lr_scaling: sqrt`": {
        "batch_increase_function": DOUBLING,
        "adaptive__growth_limit": "none",
        "adaptive__lr_scaling": "sqrt",
    },
    "doubling from `global_batch_size: 24`, `growth_limit: 100`, `lr_scaling: linear`": {
        "batch_increase_function": DOUBLING,
        "adaptive__global_batch_size": 24,
        "adaptive__growth_limit": 100,
        "adaptive__lr_scaling": "linear",
    },
    "`gradient_noise_scale`, `growth_limit: none`, `lr_scaling: sqrt`": {
        "batch_increase_function": MEASURING,
        "adaptive__growth_limit": "none",
        "adaptive__lr_scaling": "sqrt",
    },
}
NAMES = ("epoch", "batch", "samples per step", "micro-batch", "planned", "taken", "first rate", "last rate")


def _train(rank: int, tiny_dir: Path, output_dir: Path, overrides: dict[str, Any]) -> list[list[str]]:
    rows: list[list[str]] = []

    class Watched(adaptive_recipe("full")):
        def _train_epoch(self, epoch: int) -> None:
            self.rates: list[float] = []
            super()._train_epoch(epoch)
            batch, rates = self._batch_size, self.rates
            sizes = [str(batch), str(self._samples_per_step_at(batch)), str(self._limit)]
            noise_scale = self._measured().get("gradient_noise_scale")
            rows.append(
                [
                    *(str(epoch), *sizes, str(self._steps_per_epoch), str(len(rates))),
                    *(f"{rates[0]:.2e}", f"{rates[-1]:.2e}"),
                    *("-" if noise_scale is None else f"{noise_scale:.0f}", f"{self.losses[-1]:.3f}"),
                ]
            )

        def _train_step(self, window: Any) -> Any:
            self.rates.append(self._learning_rate())
            totals = super()._train_step(window)
            self.losses = [totals.loss]
            return totals

    common: dict[str, Any] = {
        "batch_size": 4,
        "epochs": 5,
        "tokenizer__max_seq_len": 64,
        "lr_scheduler__num_warmup_steps": 10,
        "adaptive__memory_limit": "96MiB",
    }
    finished(Watched, tiny_config("full", tiny_dir, output_dir, **common | overrides))
    return rows


def _time_measuring(rank: int, tiny_dir: Path, output_dir: Path) -> list[list[str]]:
    """What a measured step takes longer than another of the same window, if that has one micro-step, or two."""
    rows: list[list[str]] = []
    for micro_batch in (16, 8):
        options: dict[str, Any] = {"batch_size": micro_batch, "batch_increase_function": MEASURING}
        options |= {"adaptive": {"global_batch_size": 16 * RANKS, "growth_limit": "none", "memory_limit": "512MiB"}}
        cfg = tiny_config("full", tiny_dir, output_dir, tokenizer__max_seq_len=64, **options)
        recipe = adaptive_recipe("full")(cfg=cfg)
        recipe.setup(cfg=cfg)
        recipe._meter = None  # it takes time per operation on a CPU
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for window in itertools.islice(recipe._windows(), 1 + ROUNDS):
            for measures in seconds:
                recipe._measures = lambda measures=measures: measures
                dist.barrier()
                started = time.perf_counter()
                recipe._train_step(window)
                dist.barrier()
                seconds[measures].append(time.perf_counter() - started)
        ratios = [slow / quick for slow, quick in list(zip(seconds[True], seconds[False], strict=True))[1:]]
        rows.append([str(16 // micro_batch), f"{1e3 * statistics.median(seconds[False]):.0f}", spread(ratios)])
    return rows


def main() -> None:
    """Train, print the tables and write them."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    lines = [
        "# Growth on two CPU ranks",
        "",
        provenance("OMP_NUM_THREADS=1 python -m benchmarks.growth", ranks=gloo_ranks(RANKS)),
        "",
        "The tiny model of `torchtune_adaptive.tiny` on 600 samples, rows of up to 64 tokens, limit 96 MiB per rank,"
        " cosine schedule with 10 steps of warm-up at a rate of 1e-3. Rates are those that steps used; *planned* is the"
        " progress bar's total, *taken* what the optimizer did.",
    ]
    with tempfile.TemporaryDirectory() as directory:
        tiny_dir = Path(directory) / "tiny"
        make_tiny_assets(tiny_dir, num_samples=600)
        for name, overrides in RUNS.items():
            rows = run_on_ranks(_train, RANKS, tiny_dir, Path(directory) / "run", overrides, timeout_s=300)[0]
            header = [*NAMES, "noise scale", "last loss"]
            lines += ["", f"## {name}", "", *table(header, rows)]
        timed = run_on_ranks(_time_measuring, RANKS, tiny_dir, Path(directory) / "run", timeout_s=300)[0]
    lines += [
        "",
        "## What a measured step costs",
        "",
        f"The same {ROUNDS} windows of 16 rows a rank, measured and not in turn; ratio of times, median [quartiles].",
        "",
        *table(["micro-steps of a step", "ms", "measured / not"], timed),
    ]
    publish(lines, RESULT)


if __name__ == "__main__":
    main()
