"""What does the adaptive training loop cost while memory does not run out?

    OMP_NUM_THREADS=1 python -m benchmarks.loop [--parts host,speed]

*host*: host time that recovery adds to a step, by cause. A model of many small operations takes steps with recovery and
without, in turns, alone and under FSDP2 on two ranks. ``results/loop_host_cpu.md`` has the tables.

*speed*: trains by the stock recipe and by the adaptive one, with recovery from out-of-memory errors and without, on two
CPU ranks, all in the same processes. In each round every recipe trains a few steps, in an order that changes from round
to round, so that other load on the machine affects all equally. A second stock recipe shows how much equal loops seem
to differ. All must log the same losses, rates and gradient norms. ``results/loop_cpu.md`` has the tables.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from types import FunctionType
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.live import Watch, live_recipe, train_again
from benchmarks.on_ranks import measured_on_ranks, no_assets
from benchmarks.provenance import provenance
from benchmarks.tables import publish, spread, table
from benchmarks.turns import turns
from tests.support.recipe_runs import RecordingLogger, stock_recipe, tiny_config
from torchtune_adaptive.engine.distributed import fsdp_ledger, snapshot
from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.engine.memory.phases import Phases
from torchtune_adaptive.engine.recovery import attempts, step
from torchtune_adaptive.engine.recovery.step import RecoverableStep
from torchtune_adaptive.engine.recovery.watch import PressureWatch
from torchtune_adaptive.tiny import make_tiny_assets

RESULTS = Path(__file__).parent / "results" / "loop_cpu.md"
HOST_RESULTS = RESULTS.with_name("loop_host_cpu.md")
RANKS = 2
COMMAND = "OMP_NUM_THREADS=1 python -m benchmarks.loop --parts"
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
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", default="host,speed")
    parts = parser.parse_args().parts.split(",")
    if "host" in parts:
        _report_host()
    if "speed" in parts:
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
        provenance(f"{COMMAND} speed", **run),
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


# ---- host time by cause

_LAYERS, _WIDTH = 16, 8
_STEPS, _FIRST_STEPS = 200, 20  # the first ones are not timed
_MODEL, _RECORDS, _REST = "forward and backward pass", "records of collectives", "the rest"
_CAUSES: dict[str, list[tuple[Any, str]]] = {
    "random states": [(attempts, "RandomStates")],
    "buffers": [(snapshot.KeptBuffers, "__init__"), (snapshot.KeptBuffers, "renewed")],
    "checks of parameters, gradients and samples": [
        (RecoverableStep, "_needs_dry_run"),
        (RecoverableStep, "_check_no_gradients"),
        (step, "versions"),
    ],
    "phases": [(Phases, "enter")],
    "watch of time and retries": [(PressureWatch, "start_step"), (PressureWatch, "end_step")],
    "votes": [(Consensus, "begin_max")],
    "FSDP2's settings and forward passes": [(attempts, "KeptSettings"), (attempts, "drop_forward_passes")],
}


class Clock:
    """Adds up the thread's CPU time in functions by cause, each without that of the timed functions which it calls."""

    def __init__(self, *, is_calibrated: bool = True) -> None:
        self._ns: defaultdict[str, float] = defaultdict(float)
        self._running, self._since_ns = [""], 0
        self._cost_ns = self._costs_ns() if is_calibrated else (0.0, 0.0)

    def timed(self, cause: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose time counts for ``cause``, as does that of a function that it returns."""
        own_ns, caller_ns = self._cost_ns

        def run(*args: Any, **options: Any) -> Any:
            self._switch()
            self._ns[cause] -= own_ns
            self._ns[self._running[-1]] -= caller_ns
            self._running.append(cause)
            try:
                result = function(*args, **options)
            finally:
                self._switch()
                self._running.pop()
            return self.timed(cause, result) if isinstance(result, FunctionType) else result

        return run

    def _switch(self) -> None:
        now_ns = time.thread_time_ns()
        self._ns[self._running[-1]] += now_ns - self._since_ns
        self._since_ns = now_ns

    def take_us(self, cause: str) -> float:
        """The time since the last call."""
        return self._ns.pop(cause, 0.0) / 1e3

    @staticmethod
    def _costs_ns(calls: int = 10_000) -> tuple[float, float]:
        """What a call of a timed function takes by itself, which counts for it, and for the function that calls it."""
        clock = Clock(is_calibrated=False)
        own = clock.timed("own", lambda: None)
        clock.timed("caller", lambda: [own() for _ in range(calls)])()
        return clock._ns["own"] / calls, clock._ns["caller"] / calls


class Layer(nn.Module):
    """Small operations and buffers, so that the host's time dominates."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(6))
        self.register_buffer("scale", torch.ones(_WIDTH))
        self.register_buffer("shift", torch.zeros(_WIDTH))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for linear in self.linears:
            rows = rows + torch.tanh(linear(rows) * self.scale + self.shift)
        return rows


@dataclass(frozen=True)
class HostTimes:
    """CPU time of each step in microseconds: without recovery, with it, and by cause in further steps with it."""

    plain: list[float]
    recovering: list[float]
    causes: dict[str, list[float]]


def host_times(_tiny_dir: Path) -> HostTimes:
    """Time steps with recovery and without, in turns; under FSDP2 if there are several ranks. A collective."""
    plain, model = _model(), _model()
    clock, rows = Clock(), torch.randn(1, _WIDTH)

    def micro_step(samples: torch.Tensor, model: nn.Module = plain) -> torch.Tensor:
        loss = model(samples).square().sum()
        loss.backward()
        return loss.detach()

    def timed_us(run: Callable[[torch.Tensor], Any]) -> float:
        dist.barrier()
        began_ns = time.thread_time_ns()
        run(rows)
        ended_ns = time.thread_time_ns()
        plain.zero_grad()
        model.zero_grad()
        return (ended_ns - began_ns) / 1e3

    recoverable = RecoverableStep(model, clock.timed(_MODEL, partial(micro_step, model=model)), micro_batch_size=1)
    recoverable.dry_run(torch.randn(2, _WIDTH))
    times: dict[Any, list[float]] = {micro_step: [], recoverable: []}
    for number in range(_FIRST_STEPS + _STEPS):
        for one in (micro_step, recoverable) if number % 2 else (recoverable, micro_step):
            times[one].append(timed_us(one))
    causes: dict[str, list[float]] = {name: [] for name in (_MODEL, *_CAUSES, _REST)}
    with ExitStack() as patches:
        for cause, places in _CAUSES.items():
            for owner, name in places:
                patches.enter_context(mock.patch.object(owner, name, clock.timed(cause, getattr(owner, name))))
        for _ in range(_FIRST_STEPS + _STEPS):
            timed_us(clock.timed(_REST, recoverable))
            for cause, found in causes.items():
                found.append(clock.take_us(cause))
    assert recoverable._recovery is not None
    records_us = len(recoverable._recovery._ledger.issued) * _record_us()
    recoverable.close()
    without, recovering = (found[_FIRST_STEPS:] for found in times.values())
    by_cause = {cause: found[_FIRST_STEPS:] for cause, found in causes.items()} | {_RECORDS: [records_us]}
    return HostTimes(without, recovering, by_cause)


def _model() -> nn.Module:
    """A model, under FSDP2 if there are several ranks. A collective."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(_LAYERS)))
    if dist.get_world_size() > 1:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module in (*model, model):
            fully_shard(module, mesh=mesh)
    return model


def _record_us(calls: int = 10_000) -> float:
    """What the record of a collective takes: a timer around each would take longer."""
    ledger, tensor = fsdp_ledger.FsdpLedger(nn.Sequential(), torch.device("cpu"), reduces_once=False), torch.ones(1)
    issue = fsdp_ledger.RecordedAllGather(ledger, 0, lambda **_: None)
    began_ns = time.thread_time_ns()
    for _ in range(calls):
        issue(output_tensor=tensor, input_tensor=tensor, group=cast(Any, None))
    return (time.thread_time_ns() - began_ns) / calls / 1e3


def _report_host() -> None:
    measured = {ranks: measured_on_ranks(host_times, ranks, make_assets=no_assets) for ranks in (1, RANKS)}
    alone, sharded = (times for times, _ in measured.values())
    run = measured[RANKS][1]
    publish(
        HOST_RESULTS,
        "Host time that recovery adds to a step, CPU",
        provenance(f"{COMMAND} host", **run),
        f"A model of {_LAYERS} layers of 6 linear layers of width {_WIDTH}, with 2 buffers each; one row per step, and"
        " neither optimizer nor data. `RecoverableStep` against the forward and backward pass alone, in turns,"
        f" {_STEPS} steps of each. CPU time of rank 0's training thread, without its waits; median [quartiles]:",
        table(
            ["", "without, us", "with, us", "with / without", "with - without, us"],
            [_host_row(name, times) for name, times in (("one process", alone), ("2 ranks, FSDP2", sharded))],
        ),
        "By cause, in further steps, medians. Each is without the causes that it calls. Records are those of as many"
        " collectives in a loop that does nothing else, and in the model's time here.",
        table(
            ["cause", "one process, us", "2 ranks, FSDP2, us"],
            [[cause, *(f"{median(one.causes[cause]):.0f}" for one in (alone, sharded))] for cause in alone.causes],
        ),
    )


def _host_row(name: str, times: HostTimes) -> list[str]:
    pairs = list(zip(times.plain, times.recovering, strict=True))
    ratios, differences = [after / before for before, after in pairs], [after - before for before, after in pairs]
    spreads = [spread(one, digits=0) for one in (times.plain, times.recovering)]
    return [name, *spreads, spread(ratios, digits=3), spread(differences, digits=0)]


if __name__ == "__main__":
    main()
