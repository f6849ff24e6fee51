"""How growth changes batch, steps and learning rate, epoch by epoch, on two CPU ranks.

    python -m benchmarks.growth

Each run trains the tiny model for five epochs. The rate is the one that the optimizer's step used, the noise scale is
the estimate at the epoch's end. "planned" is the number of steps of an epoch for loader, progress bar and schedule,
"taken" the number that the optimizer took.
"""

import argparse
import itertools
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torchtune.training.lr_schedulers import get_lr

from benchmarks.live import Watch, live_recipe, timed_step, workload_of
from benchmarks.on_ranks import measured_on_ranks
from benchmarks.provenance import provenance
from benchmarks.tables import publish, spread, table
from tests.support.recipe_runs import RecordingLogger, tiny_config
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
Rows = list[list[str]]  # of a table
NAMES = ("epoch", "batch", "samples per step", "micro-batch", "planned", "taken", "first rate", "last rate")


class Epochs(Watch):
    """Records a row of the table for each epoch, only on rank 0, which logs."""

    def __init__(self) -> None:
        self.rows: Rows = []
        self._rates: list[float] = []

    def before_step(self, number: int) -> None:
        self._rates.append(get_lr(self.recipe._optimizer))

    def after_epoch(self) -> None:
        trainer, rates = self.recipe.trainer, self._rates
        loader, self._rates = trainer.loader, []
        if dist.get_rank():
            return
        logged = RecordingLogger.last.steps[-1]
        noise_scale = logged.get("gradient_noise_scale")
        sizes = [str(loader.batch_size), str(loader.samples_per_step), str(trainer.micro_batches.limit)]
        self.rows.append(
            [
                *(str(len(self.rows)), *sizes, str(loader.steps_per_epoch), str(len(rates))),
                *(f"{rates[0]:.2e}", f"{rates[-1]:.2e}"),
                *("-" if noise_scale is None else f"{noise_scale:.0f}", f"{logged['loss']:.3f}"),
            ]
        )


def _train(tiny_dir: Path, output_dir: Path, overrides: dict[str, Any]) -> Rows:
    common: dict[str, Any] = {
        "batch_size": 4,
        "epochs": 5,
        "tokenizer__max_seq_len": 64,
        "lr_scheduler__num_warmup_steps": 10,
        "adaptive__memory_limit": "96MiB",
    }
    epochs = Epochs()
    live_recipe(tiny_config("full", tiny_dir, output_dir, **common | overrides), watch=epochs).train()
    return epochs.rows


def _time_measuring(tiny_dir: Path, output_dir: Path) -> Rows:
    """How much longer a measured step takes than an unmeasured one of the same samples, in one and two micro-steps."""
    rows: Rows = []
    for micro_batch in (16, 8):
        options: dict[str, Any] = {"batch_size": micro_batch, "tokenizer__max_seq_len": 64}
        options |= {"adaptive": {"global_batch_size": 16 * RANKS}}  # no limit: a meter takes time per operation
        recipe = live_recipe(tiny_config("full", tiny_dir, output_dir, **options))
        step: Any = workload_of(recipe, is_metered=False).train_step
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for samples in itertools.islice(recipe.trainer.loader.steps(0), 1 + ROUNDS):
            for measured, taken in seconds.items():
                taken.append(timed_step(recipe, step, samples, measured=measured)[0])
        ratios = [slow / quick for slow, quick in list(zip(seconds[True], seconds[False], strict=True))[1:]]
        rows.append([str(16 // micro_batch), f"{1e3 * statistics.median(seconds[False]):.0f}", spread(ratios)])
    return rows


def _measure(tiny_dir: Path, runs: dict[str, dict[str, Any]]) -> tuple[list[Rows], Rows]:
    output_dir = tiny_dir.parent / "run"
    return [_train(tiny_dir, output_dir, run) for run in runs.values()], _time_measuring(tiny_dir, output_dir)


def main() -> None:
    """Train, print the tables and write them."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    (trained, timed), run = measured_on_ranks(
        _measure, RANKS, RUNS, make_assets=partial(make_tiny_assets, num_samples=600)
    )
    lines = [
        "# Growth on two CPU ranks",
        "",
        provenance("OMP_NUM_THREADS=1 python -m benchmarks.growth", **run),
        "",
        "The tiny model of `torchtune_adaptive.tiny` on 600 samples, rows of up to 64 tokens, limit 96 MiB per rank,"
        " cosine schedule with 10 steps of warm-up at a rate of 1e-3. Rates are those that steps used; *planned* is the"
        " progress bar's total, *taken* what the optimizer did.",
    ]
    for name, rows in zip(RUNS, trained, strict=True):
        lines += ["", f"## {name}", "", *table([*NAMES, "noise scale", "last loss"], rows)]
    lines += [
        "",
        "## What a measured step costs",
        "",
        f"The same {ROUNDS} steps of 16 rows a rank, measured and not in turn; ratio of times, median [quartiles].",
        "",
        *table(["micro-steps of a step", "ms", "measured / not"], timed),
    ]
    publish(lines, RESULT)


if __name__ == "__main__":
    main()
