"""What does the adaptive training loop cost while memory does not run out?

    OMP_NUM_THREADS=1 python -m benchmarks.loop

Trains by the stock recipe and by the adaptive one, with recovery from out-of-memory errors and without, on two
CPU ranks, all in the same processes. In each round every recipe trains a few steps, in an order that changes from round
to round, so that other load on the machine affects all equally. A second stock recipe shows how much equal loops seem
to differ. All must log the same losses, rates and gradient norms. ``results/loop_cpu.md`` has the tables.
"""

import argparse
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.live import Watch, live_recipe, train_again
from benchmarks.on_ranks import measured_on_ranks
from benchmarks.provenance import provenance
from benchmarks.tables import publish, spread, table
from benchmarks.turns import turns
from tests.support.recipe_runs import RecordingLogger, stock_recipe, tiny_config
from torchtune_adaptive.tiny import make_tiny_assets

RESULTS = Path(__file__).parent / "results" / "loop_cpu.md"
RANKS = 2
COMMAND = "OMP_NUM_THREADS=1 python -m benchmarks.loop"
STOCK, ON, OFF, STOCK_AGAIN = VARIANTS = ("stock", "recovery on", "recovery off", "stock again")
RATIOS = ((ON, STOCK), (OFF, STOCK), (ON, OFF), (STOCK_AGAIN, STOCK))


@dataclass(frozen=True)
class Case:
    """What a step consists of, and how many steps of each recipe are timed in how many rounds."""

    kind: str
    batch_size: int
    seq_len: int
    gradient_accumulation_steps: int
    rounds: int
    timed_steps: int

    @property
    def name(self) -> str:
        """The step in words."""
        rows = f"{self.gradient_accumulation_steps} x {self.batch_size} row{'s' * (self.batch_size > 1)}"
        return f"{self.kind}, {rows} of up to {self.seq_len} tokens"


SHORT = {"batch_size": 1, "seq_len": 32, "gradient_accumulation_steps": 1, "rounds": 80, "timed_steps": 6}
LONG = {"batch_size": 4, "seq_len": 256, "gradient_accumulation_steps": 2, "rounds": 16, "timed_steps": 2}
CASES = [Case(kind, **size) for size in (SHORT, LONG) for kind in ("full", "lora")]


@dataclass(frozen=True)
class Block:
    """The timed steps of one recipe in one round: unmasked tokens over all ranks, and rank 0's time per step."""

    num_tokens: int
    steps: int
    wall_ms: float
    cpu_ms: float

    @property
    def tokens_per_second(self) -> float:
        """Unmasked tokens per second over all ranks."""
        return 1e3 * self.num_tokens / (self.steps * self.wall_ms)


Measured = dict[str, list[Block]]  # by variant: blocks by round


class StepClock(RecordingLogger):
    """Records when each step was logged, and its figures as tensors: to read them would wait for the device."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.moments: list[tuple[float, float]] = []  # by the wall's clock, and in CPU time of this thread

    def log_dict(self, payload: Any, step: int) -> None:
        self.moments.append((time.perf_counter(), time.thread_time()))
        self.steps.append(payload)


def recipe_of(
    variant: str, kind: str, tiny_dir: Path, output_dir: Path, *, watch: Watch | None = None, **overrides: Any
) -> Any:
    """A recipe of one epoch, without a memory limit. A collective."""
    options = {
        "metric_logger": {"_component_": "benchmarks.loop.StepClock"},
        "dataset__train_on_input": True,  # a short row may have no other tokens left
        "adaptive__memory_limit": None,
        "adaptive__oom_recovery": variant == ON,
        "epochs": 1,
    }
    is_stock = variant in (STOCK, STOCK_AGAIN)
    cfg = tiny_config(kind, tiny_dir, output_dir, **options, **overrides)
    recipe = live_recipe(cfg, stock_recipe(kind) if is_stock else None, watch=watch)
    assert is_stock or recipe.trainer.recoverable.recovers == (variant == ON)
    return recipe


def main() -> None:
    """Measure and write the tables."""
    argparse.ArgumentParser(description=__doc__).parse_args()  # refuses arguments
    _report(*measured_on_ranks(_measure, RANKS, CASES, make_assets=partial(make_tiny_assets, num_samples=2000)))


def _measure(tiny_dir: Path, cases: list[Case]) -> list[tuple[Case, Measured]]:
    return [(case, _measured(case, tiny_dir)) for case in cases]


def _measured(case: Case, tiny_dir: Path) -> Measured:
    """Time the steps of each variant. A collective."""
    steps = 1 + case.timed_steps  # the first step of a round is not timed: the data loader starts in it
    rounds = 1 + case.rounds  # the first, with lazy set-up, is not timed
    overrides: dict[str, Any] = {
        "batch_size": case.batch_size,
        "tokenizer__max_seq_len": case.seq_len,
        "gradient_accumulation_steps": case.gradient_accumulation_steps,
        "max_steps_per_epoch": steps,
        "lr_scheduler__num_warmup_steps": rounds * steps,  # the schedule of one epoch would end too early
    }
    recipes = {
        variant: recipe_of(variant, case.kind, tiny_dir, tiny_dir.parent / "out", **overrides) for variant in VARIANTS
    }
    num_tokens = [_timed_tokens(recipes[STOCK], number, case) for number in range(rounds)]
    blocks: dict[str, list[Block]] = {variant: [] for variant in VARIANTS}
    for number, variant in race(recipes, rounds):
        if number > 0 and dist.get_rank() == 0:
            first, *_, last = recipes[variant]._metric_logger.moments[-steps:]
            wall_ms, cpu_ms = (1e3 * (b - a) / case.timed_steps for a, b in zip(first, last, strict=True))
            blocks[variant].append(Block(num_tokens[number], case.timed_steps, wall_ms, cpu_ms))
    if dist.get_rank() == 0:
        _check_same(recipes.values(), steps=rounds * steps)
    return blocks


def race(recipes: dict[str, Any], rounds: int) -> Iterator[tuple[int, str]]:
    """Train each recipe once in each round, in an order that changes; yields the number of the round and the name."""
    for number, name in turns(list(recipes), rounds):
        train_again(recipes[name], seed=number)
        yield number, name


def _timed_tokens(recipe: Any, seed: int, case: Case) -> int:
    """Unmasked tokens over all ranks in the timed steps of a round. A collective."""
    micro_steps = case.gradient_accumulation_steps
    recipe._dataloader.sampler.seed = seed
    recipe._dataloader.sampler.set_epoch(0)
    num_tokens = torch.zeros((), dtype=torch.int64)
    for index, batch in zip(range(micro_steps * (1 + case.timed_steps)), recipe._dataloader, strict=False):
        if index >= micro_steps:
            num_tokens += (batch["labels"] != recipe._loss_fn.ignore_index).sum()
    dist.all_reduce(num_tokens)
    return int(num_tokens)


def _check_same(recipes: Iterable[Any], *, steps: int) -> None:
    names = ("loss", "lr", "grad_norm")
    logged = [[tuple(float(step[name]) for name in names) for step in one._metric_logger.steps] for one in recipes]
    if any(figures != logged[0] for figures in logged) or len(logged[0]) != steps:
        raise RuntimeError("the variants logged different steps, so that they did not do the same work")


def _speeds(case: Case, blocks: dict[str, list[Block]]) -> list[str]:
    times = [median(block.wall_ms for block in blocks[variant]) for variant in (STOCK, ON, OFF)]
    speeds = [median(block.tokens_per_second for block in blocks[variant]) for variant in (STOCK, ON, OFF)]
    return [case.name, f"{case.rounds} x {case.timed_steps}", *(f"{value:.0f}" for value in (*times, *speeds))]


def _ratios(case: Case, blocks: dict[str, list[Block]], clock: str) -> list[str]:
    """How many times faster the first of each pair is, and how many ms per step slower recovery is than stock."""
    step_ms = {variant: [getattr(block, f"{clock}_ms") for block in blocks[variant]] for variant in VARIANTS}
    cells = [case.name, clock]
    for one, other in RATIOS:
        cells.append(spread([b / a for a, b in zip(step_ms[one], step_ms[other], strict=True)], digits=3))
    return [*cells, spread([a - b for a, b in zip(step_ms[ON], step_ms[STOCK], strict=True)], digits=1)]


def _report(measured: list[tuple[Case, Measured]], run: dict[str, Any]) -> None:
    names = (STOCK, ON, OFF)
    speeds = ["step", "rounds x steps", *(f"{name}, ms" for name in names), *(f"{name}, tokens/s" for name in names)]
    ratios = ["step", "clock", *(f"{one} / {other}" for one, other in RATIOS), f"{ON} - {STOCK}, ms"]
    publish(
        RESULTS,
        "Speed of the training loop without out-of-memory errors against the stock recipes, CPU",
        provenance(COMMAND, **run),
        "All recipes live in the same processes and take turns in every round; loss, learning rate and gradient norm"
        " of every step are equal, bit for bit. Set-up, saving, the first round and the first step of each turn are not"
        " timed. Tokens are those not masked, over all ranks. Medians over the rounds:",
        table(speeds, [_speeds(case, blocks) for case, blocks in measured]),
        "Ratios of speeds in each round, larger than 1 where the first is faster, and the difference of times per step;"
        " median [quartiles] over the rounds. By the wall's clock, and by the CPU time of rank 0's training thread,"
        " which leaves out its waits for the other rank and which other load on the machine disturbs less."
        f" '{STOCK_AGAIN}' is a second stock recipe: how far equal loops seem to differ.",
        table(ratios, [_ratios(case, blocks, clock) for case, blocks in measured for clock in ("wall", "cpu")]),
    )


if __name__ == "__main__":
    main()
