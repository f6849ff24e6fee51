"""Does a growing batch train a small transformer better, or sooner, than a fixed one?

    OMP_NUM_THREADS=1 python -m benchmarks.growth_study

Trains a tiny model from random weights on docstrings of Python's standard library, by the recipe for one device,
always on the same number of samples: with a small batch, a large one, and ones that grow from the small to the large
size, by a schedule or by the gradient noise scale, with and without scaling of the learning rate. The loss on samples
that are not trained on is measured along the way. Writes a table to ``results/growth_study_cpu.md``, and
``docs/images/growth_study.svg``.
"""

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.figure import Figure
from omegaconf import DictConfig
from torchtune import config, training
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, padded_collate_sft

from benchmarks.live import Watch, live_recipe
from benchmarks.provenance import provenance
from benchmarks.tables import publish, table
from tests.support.recipe_runs import adaptive_recipe, tiny_config
from torchtune_adaptive.tiny import MODEL_NAME, make_tiny_assets

RESULTS = Path(__file__).parent / "results" / "growth_study_cpu.md"
PICTURE = Path(__file__).parent.parent / "docs" / "images" / "growth_study.svg"
COMMAND = "OMP_NUM_THREADS=1 python -m benchmarks.growth_study"
SEEDS = (0, 1, 2)
SMALL, LARGE = 8, 64
TRAINED, HELD_OUT, EPOCHS = 2048, 256, 4
EVERY = 512  # samples between two evaluations
SHIFT = 1800  # samples, from those that one seed trains on to those of the next
WARM_UP = 0.05  # of the steps
# Tried with seed 0, each for the size of batch that it is for.
SMALL_RATES, LARGE_RATES = (1e-3, 3e-3, 1e-2), (3e-3, 1e-2, 3e-2)
BY_SCHEDULE = {"_component_": "torchtune_adaptive.schedule.geometric", "factor": 2}
BY_NOISE = {"_component_": "torchtune_adaptive.schedule.gradient_noise_scale"}


@dataclass(frozen=True)
class Run:
    """What is trained: a size of batch that is fixed, or grows to ``LARGE`` by ``grows_by``."""

    name: str
    batch_size: int
    rate: float
    seed: int
    grows_by: dict[str, Any] | None = None
    lr_scaling: str = "none"


@dataclass(frozen=True)
class Curve:
    """The loss per token on the samples held out, after so many samples and optimizer steps."""

    run: Run
    samples: list[int]
    steps: list[int]
    losses: list[float]
    seconds: float  # of the processor
    last_batch_size: int


class HeldOut(Watch):
    """Evaluates the model on samples that are not trained on, every ``EVERY`` samples."""

    def __init__(self, cfg: DictConfig) -> None:
        self.samples, self.steps, self.losses = [0], [0], list[float]()
        data = config.instantiate(cfg.dataset, config.instantiate(cfg.tokenizer), split=f"train[:{HELD_OUT}]")
        rows = [data[number] for number in range(HELD_OUT)]
        self._batches: list[Any] = [padded_collate_sft(rows[start : start + 32]) for start in range(0, HELD_OUT, 32)]
        self._steps = self._samples = 0

    def begin(self, recipe: Any) -> None:
        super().begin(recipe)
        self.losses.append(self._loss())

    def step(self) -> None:
        self._steps += 1
        self._samples += self.recipe.trainer.loader.samples_per_step
        if self._samples // EVERY > self.samples[-1] // EVERY:
            self.samples.append(self._samples)
            self.steps.append(self._steps)
            self.losses.append(self._loss())

    @torch.no_grad()
    def _loss(self) -> float:
        """Mean of all tokens of answers."""
        total = count = 0.0
        for batch in self._batches:
            chunks = self.recipe._model(batch["tokens"])
            logits = torch.cat(chunks, dim=1)[:, :-1]
            labels = batch["labels"][:, 1:].flatten()
            total += torch.nn.functional.cross_entropy(
                logits.flatten(0, 1).float(), labels, ignore_index=CROSS_ENTROPY_IGNORE_IDX, reduction="sum"
            ).item()
            count += (labels != CROSS_ENTROPY_IGNORE_IDX).sum().item()
        return total / count


def _train(run: Run, tiny_dir: Path) -> Curve:
    torch.set_num_threads(1)
    first = HELD_OUT + run.seed * SHIFT
    options: dict[str, Any] = {
        "batch_size": run.batch_size,
        "epochs": EPOCHS,
        "model__num_layers": 2,
        "tokenizer__max_seq_len": 64,
        "dataset__split": f"train[{first}:{first + TRAINED}]",
        "optimizer__lr": run.rate,
        "lr_scheduler__num_warmup_steps": round(WARM_UP * EPOCHS * TRAINED / run.batch_size),
        "adaptive": {"memory_limit": "1GiB", "lr_scaling": run.lr_scaling},
    }
    if run.grows_by:
        options |= {"batch_increase_function": run.grows_by, "adaptive__growth_limit": LARGE}
    directory = tiny_dir.parent / f"run_{os.getpid()}"
    cfg = tiny_config("full_single", tiny_dir, directory, **options)
    cfg.checkpointer.checkpoint_dir = str(_random_weights(cfg, run.seed, directory / "first"))
    watch = HeldOut(cfg)
    recipe = live_recipe(cfg, adaptive_recipe("full_single"), watch=watch)
    started = time.process_time()
    recipe.train()
    seconds = time.process_time() - started
    return Curve(run, watch.samples, watch.steps, watch.losses, seconds, recipe.trainer.loader.samples_per_step)


def _random_weights(cfg: DictConfig, seed: int, directory: Path) -> Path:
    directory.mkdir(parents=True)
    training.set_seed(seed=seed)
    torch.save(config.instantiate(cfg.model).state_dict(), directory / MODEL_NAME)
    return directory


def _trained(runs: Sequence[Run], tiny_dir: Path) -> list[Curve]:
    """Each in a process of its own, as many at once as there are processors."""
    with multiprocessing.get_context("spawn").Pool(os.cpu_count(), maxtasksperchild=1) as pool:
        curves = []
        for curve in pool.imap(partial(_train, tiny_dir=tiny_dir), runs):
            print(f"{curve.run}: {curve.losses[-1]:.3f} after {curve.steps[-1]} steps", flush=True)
            curves.append(curve)
    return curves


def _best(curves: Sequence[Curve]) -> float:
    return min(curves, key=lambda curve: curve.losses[-1]).run.rate


def _runs(small: float, large: float) -> list[Run]:
    """Those that are compared, with the rates that are best for either size."""
    ratio = (LARGE / SMALL) ** 0.5
    variants: list[dict[str, Any]] = [
        {"name": f"fixed {SMALL}", "batch_size": SMALL, "rate": small},
        {"name": f"fixed {LARGE}", "batch_size": LARGE, "rate": small},
        {"name": f"fixed {LARGE}, rate * sqrt", "batch_size": LARGE, "rate": small * ratio},
        {"name": f"fixed {LARGE}, best rate", "batch_size": LARGE, "rate": large},
    ]
    for name, grows_by in (("doubles every epoch", BY_SCHEDULE), ("noise scale", BY_NOISE)):
        for scaling in ("none", "sqrt"):
            grown = {"name": f"{name}, {scaling}", "batch_size": SMALL, "rate": small, "grows_by": grows_by}
            variants.append(grown | {"lr_scaling": scaling})
    return [Run(seed=seed, **variant) for variant in variants for seed in SEEDS]


def by_name(curves: Sequence[Curve]) -> dict[str, list[Curve]]:
    """The curves of all seeds."""
    return {
        name: [curve for curve in curves if curve.run.name == name]
        for name in dict.fromkeys(c.run.name for c in curves)
    }


def lines_of(curves: Sequence[Curve]) -> list[str]:
    """A table with the mean and the range over seeds."""
    header = ["batch", "rate", "last batch", "optimizer steps", "held-out loss, mean [range]", "processor seconds"]
    rows = []
    for name, seeds in by_name(curves).items():
        losses = [curve.losses[-1] for curve in seeds]
        cells = [name, f"{seeds[0].run.rate:.2g}", str(seeds[0].last_batch_size)]
        cells += [" ".join(str(steps) for steps in sorted({curve.steps[-1] for curve in seeds}))]
        cells += [f"{statistics.mean(losses):.3f} [{min(losses):.3f}, {max(losses):.3f}]"]
        rows.append([*cells, f"{statistics.mean(curve.seconds for curve in seeds):.0f}"])
    return table(header, rows)


def draw(curves: Sequence[Curve], path: Path) -> None:
    """Held-out loss against samples and against optimizer steps, the mean and range over seeds."""
    colours = ("#000000", "#999999", "#D55E00", "#E69F00", "#56B4E9", "#0072B2", "#CC79A7", "#009E73")
    with mpl.rc_context({"svg.hashsalt": "growth_study", "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure = Figure(figsize=(9.0, 3.6), layout="constrained")
        by_samples, by_steps = figure.subplots(1, 2, sharey=True)
        for colour, (name, seeds) in zip(colours, by_name(curves).items(), strict=True):
            losses = list(zip(*(curve.losses[1:] for curve in seeds), strict=True))
            means = [statistics.mean(values) for values in losses]
            low, high = [min(values) for values in losses], [max(values) for values in losses]
            for axes, x in ((by_samples, seeds[0].samples[1:]), (by_steps, seeds[0].steps[1:])):
                axes.plot(x, means, color=colour, label=name)
                axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        by_samples.set(xlabel="samples", ylabel="held-out loss per token")
        by_steps.set(xlabel="optimizer steps", xscale="log")
        by_steps.legend(fontsize="small", frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
        for axes in (by_samples, by_steps):
            axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Train, draw, and write the table."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        tiny_dir = Path(name) / "tiny"
        make_tiny_assets(tiny_dir)
        tried = [Run("rate", SMALL, rate, seed=0) for rate in SMALL_RATES]
        tried += [Run("rate", LARGE, rate, seed=0) for rate in LARGE_RATES]
        swept = _trained(tried, tiny_dir)
        small, large = _best(swept[: len(SMALL_RATES)]), _best(swept[len(SMALL_RATES) :])
        curves = _trained(_runs(small, large), tiny_dir)
    rates = [[str(one.run.batch_size), f"{one.run.rate:.2g}", f"{one.losses[-1]:.3f}"] for one in swept]
    lines = [
        "# Does growth help?",
        "",
        provenance(COMMAND, seconds=time.monotonic() - started),
        "",
        f"The tiny model of `torchtune_adaptive.tiny` with two layers; {TRAINED} docstrings of"
        f" Python's standard library, rows of up to 64 tokens, {EPOCHS} epochs; AdamW, cosine schedule with"
        f" {WARM_UP:.0%} of warm-up. Batches grow from {SMALL} to {LARGE}. The loss is that of {HELD_OUT} other"
        " docstrings. Three seeds, each with first weights and samples of its own; an eighth of them are those of"
        " another seed too. The base rate is the best of those tried with one seed:",
        "",
        *table(["batch", "rate", "held-out loss"], rates),
        "",
        f"`sqrt` multiplies the rate by the square root of the growth. With {EPOCHS * TRAINED} samples each:",
        "",
        *lines_of(curves),
    ]
    draw(curves, PICTURE)
    publish(lines, RESULTS)


if __name__ == "__main__":
    main()
