"""Is the memory forecast from fake tensors right, and what do the searches cost that it can replace?

    python -m benchmarks.forecast_accuracy [--seed SEED] [--cases CASES]

Draws models, ranks and options at random. For each case the plan's tracer forecasts a step's memory; then the
real recipe on gloo ranks takes whole steps of 1, 2, 3, ... rows under a memory limit until one does not fit, and
each strategy searches under the same limit. The limit lies where a drawn number of rows just fits, or anywhere
between that and one row more. Prints a table and writes it to ``results/forecast_accuracy_cpu.md``; the exit
status is not 0 if a forecast missed its aim.
"""

import argparse
import gc
import logging
import math
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torchtune import config
from tqdm import tqdm

from benchmarks.live import live_recipe, loop_of, real_steps, search_again
from benchmarks.provenance import provenance
from benchmarks.tables import publish, table
from tests.support.ranks import run_on_ranks
from tests.support.recipe_runs import tiny_config
from torchtune_adaptive.engine.loop import Loop
from torchtune_adaptive.engine.search.strategies import SMALL_BATCH_SIZES, Probe, SearchResult, usable_bytes
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.plan.decide import BatchSizes, Device
from torchtune_adaptive.plan.gpu import Overhead
from torchtune_adaptive.plan.replay import StepMemory, exact
from torchtune_adaptive.plan.trace.step_events import StepEvents, TracedStep
from torchtune_adaptive.plan.trace.tracer import Tracer
from torchtune_adaptive.settings import STRATEGIES, Strategy
from torchtune_adaptive.tiny import MODEL_GEOMETRY, make_tiny_assets

RESULTS = Path(__file__).parent / "results" / "forecast_accuracy_cpu.md"
AIMED_ERROR = 1e-3  # as a fraction of the metered peak, at the largest size that fits
MARGIN = 0.05
MOST_ROWS, START_ROWS = 64, 4  # no search looks above the first; a binary search begins at the second
DRAWN_ROWS, DRAWN_LAYERS = 40, (2, 14)
DRAWN_TOKENS = (4, 16), (16, 80)
FEW_ROWS, FEW_LAYERS = 8, (2, 10)  # with more than ``FEW_RANKS`` ranks, which share the cores
FEW_RANKS = 2
FAMILIES = ("llama2", "qwen2", "gemma", "llama3", "llama3_2", "mistral", "phi3", "llama3_1", "gemma2")
TIED = ("gemma", "gemma2", "llama3_2")  # always; qwen2's embeddings may be
OWN_HEAD_DIM = ("gemma", "gemma2")
DRAWN_WORLD_SIZES = (2, 1, 2, 4)
LIMITS = ("just fits", "a byte short of one row more", "between")
OPTIMIZERS: tuple[dict[str, Any], ...] = (
    {"_component_": "torch.optim.AdamW", "fused": True},
    {"_component_": "torch.optim.AdamW", "foreach": True},
    {"_component_": "torch.optim.AdamW", "foreach": False},
    {"_component_": "torch.optim.AdamW"},
    {"_component_": "torch.optim.Adam", "fused": True},
    {"_component_": "torch.optim.Adam", "foreach": True, "amsgrad": True},
    {"_component_": "torch.optim.SGD"},
    {"_component_": "torch.optim.SGD", "momentum": 0.9, "foreach": True},
)
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "output_proj")


@dataclass(frozen=True)
class Case:
    """A recipe's options, with dotted keys, and where its limit lies.

    Attributes:
        rows: the rows that fit under the limit, unless one more row needs no more memory.
        limit: one of ``LIMITS``.
        place: between 0 and 1, where a limit lies that is "between".
    """

    number: int
    kind: str
    world_size: int
    seq_len: int
    options: dict[str, Any]
    rows: int
    limit: str = LIMITS[0]
    place: float = 0.0

    @property
    def name(self) -> str:
        """The case in words."""
        model, options = self.options["model"], self.options
        family = model["_component_"].rpartition(".")[2].removeprefix("lora_")
        shape = f"{model['num_layers']} x {model['embed_dim']}, {model['num_heads']}/{model['num_kv_heads']} heads"
        words = [f"{self.kind} {family} {shape}", f"vocabulary {model['vocab_size']}", f"{self.seq_len} tokens"]
        if self.kind == "lora":
            words.append(f"rank {model['lora_rank']} of {len(model['lora_attn_modules'])}")
            words += (
                ["DoRA"] * model.get("use_dora", False)
                + ["mlp"] * model["apply_lora_to_mlp"]
                + ["dropout"] * (model.get("lora_dropout", 0.0) > 0)
            )
        words += ["tied"] * model.get("tie_word_embeddings", family in TIED)
        return ", ".join([*words, *_words_for(options)])


def _words_for(options: dict[str, Any]) -> list[str]:
    optimizer, loss = options["optimizer"], options["loss"]
    kernels = [f"{key} {value}" for key, value in optimizer.items() if key not in ("_component_", "lr")]
    words = [" ".join([optimizer["_component_"].rpartition(".")[2], *kernels])]
    words.append(f"CE in {loss['num_output_chunks']}" if "num_output_chunks" in loss else "plain CE")
    words += ["AC"] * options["enable_activation_checkpointing"]
    if "ac_option" in options:
        words.append(f"AC of one layer in {options['ac_option']}")
    words += ["bf16"] * (options["dtype"] == "bf16") + ["no clip"] * (options["clip_grad_norm"] is None)
    if options["gradient_accumulation_steps"] > 1:
        words.append(f"accumulation {options['gradient_accumulation_steps']}")
    words += ["no reshard"] * (not options["fsdp_reshard_after_forward"])
    return words + ["embeddings sharded apart"] * (options["custom_sharded_layers"] is not None)


def draw_cases(seed: int, count: int) -> list[Case]:
    """``count`` cases; the same seed gives the same cases, and a larger count begins with those of a smaller one."""
    dice = random.Random(seed)
    return [_draw_case(number, dice) for number in range(count)]


def _draw_case(number: int, dice: random.Random) -> Case:
    kind, family = ("full", "lora")[dice.randrange(2)], FAMILIES[number % len(FAMILIES)]
    world_size, seq_len = DRAWN_WORLD_SIZES[number % len(DRAWN_WORLD_SIZES)], dice.randint(*dice.choice(DRAWN_TOKENS))
    most_rows, layers = (DRAWN_ROWS, DRAWN_LAYERS) if world_size <= FEW_RANKS else (FEW_ROWS, FEW_LAYERS)
    model = _draw_model(family, lora=kind == "lora", dice=dice)
    model |= {"num_layers": dice.randint(*layers), "max_seq_len": seq_len + dice.randint(0, 40)}
    tied = model.get("tie_word_embeddings", family in TIED)
    chunks = dice.choice([None, 1, 3, 4, 8, 8, 16])
    plain, chunked = "torch.nn.CrossEntropyLoss", "torchtune.modules.loss.CEWithChunkedOutputLoss"
    checkpointing = dice.choice(["none", "all", "all", "some" if kind == "full" else "none"])
    options: dict[str, Any] = {
        "model": model,
        "optimizer": dice.choice(OPTIMIZERS) | {"lr": 1e-4},
        "loss": {"_component_": plain} if chunks is None else {"_component_": chunked, "num_output_chunks": chunks},
        "dtype": dice.choice(["fp32", "fp32", "bf16"]),
        "clip_grad_norm": dice.choice([None, 1.0]),
        "gradient_accumulation_steps": dice.choice([1, 1, 1, 2, 3]),
        "enable_activation_checkpointing": checkpointing == "all",
        "fsdp_reshard_after_forward": dice.random() < 0.75,
        "custom_sharded_layers": ["tok_embeddings", "output"] if not tied and dice.random() < 0.3 else None,
    }
    if checkpointing == "some":
        options |= {"ac_mode": "selective", "ac_option": dice.choice([2, 3])}
    return Case(
        number=number,
        kind=kind,
        world_size=world_size,
        seq_len=seq_len,
        options=options,
        rows=round(math.exp(dice.uniform(0, math.log(most_rows)))),
        limit=dice.choice(LIMITS),
        place=dice.random(),
    )


def _draw_model(family: str, *, lora: bool, dice: random.Random) -> dict[str, Any]:
    kv_heads = dice.choice([1, 2, 3, 4])
    heads, head_dim = kv_heads * dice.choice([1, 2]), 2 * dice.randint(4, 12)
    embed_dim = heads * head_dim
    model: dict[str, Any] = {
        "_component_": f"torchtune.models.{family}.{'lora_' if lora else ''}{family}",
        "vocab_size": MODEL_GEOMETRY["vocab_size"] + dice.randint(0, 1000),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "embed_dim": embed_dim,
        "intermediate_dim": dice.randint(embed_dim, 4 * embed_dim),
    }
    if family in OWN_HEAD_DIM:
        model["head_dim"] = 2 * dice.randint(4, 12)
    if family == "qwen2":
        model["tie_word_embeddings"] = dice.random() < 0.5
    if lora:
        modules = dice.sample(PROJECTIONS, dice.randint(1, len(PROJECTIONS)))
        model |= {"lora_attn_modules": modules, "lora_rank": dice.choice([1, 2, 5, 8, 16]), "lora_alpha": 16}
        model |= {"apply_lora_to_mlp": dice.random() < 0.5, "lora_dropout": dice.choice([0.0, 0.1])}
        model["use_dora"] = dice.random() < 0.25
    return model


def config_of(case: Case, tiny_dir: Path, directory: Path) -> DictConfig:
    """The config of ``case``, whose checkpoint lies in ``directory`` once ``write_checkpoint`` has written it."""
    cfg = tiny_config(case.kind, tiny_dir, directory / "out", adaptive={"oom_recovery": False})
    cfg.tokenizer.max_seq_len = case.seq_len
    for key, value in case.options.items():
        OmegaConf.update(cfg, key, value, merge=False)
    cfg.checkpointer.checkpoint_dir = str(directory / f"model_{case.number}")
    return cfg


def write_checkpoint(cfg: DictConfig) -> None:
    """Fresh weights of the config's model, without adapters."""
    lora = ("apply_lora_to_mlp", "apply_lora_to_output", "use_dora", "quantize_base")
    base = {key: value for key, value in cfg.model.items() if not str(key).startswith("lora_") and key not in lora}
    base["_component_"] = base["_component_"].replace(".lora_", ".")
    directory = Path(cfg.checkpointer.checkpoint_dir)
    directory.mkdir(exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(cfg.seed)
        torch.save(config.instantiate(OmegaConf.create(base)).state_dict(), directory / "model.pt")


@dataclass(frozen=True)
class Truth:
    """What one rank measured of a case, in real steps.

    Attributes:
        limit_bytes: the limit of each rank; the margin is not taken off.
        probes: of 1, 2, 3, ... rows under the limit; the last does not fit, unless all up to ``MOST_ROWS`` do.
        above: the probe of one row more than was drawn, without any limit.
        searches: by strategy.
    """

    limit_bytes: int
    probes: tuple[Probe, ...]
    above: Probe
    searches: dict[str, SearchResult]

    @property
    def largest(self) -> int:
        """Rows of the largest step that fits on every rank."""
        return max((probe.batch_size for probe in self.probes if probe.fits), default=0)

    @property
    def complete(self) -> list[Probe]:
        """The steps that ran to their end."""
        return [*(probe for probe in self.probes if probe.fits), self.above]


def measure(rank: int, cases: list[Case], tiny_dir: Path, directory: Path) -> list[Truth]:
    """Real steps of every case. A collective of as many ranks as the cases are for."""
    logging.disable(logging.WARNING)
    return [_truth(case, tiny_dir, directory) for case in cases]


def step_probes(recipe: Any, loop: Loop, sizes: Iterable[int], *, limit_bytes: int | None) -> list[Probe]:
    """Whole steps of ``sizes`` rows under ``limit_bytes``, up to the first that does not fit. A collective."""
    with real_steps(recipe, loop, limit_bytes=limit_bytes) as prober:
        all(prober.fits(size) for size in sizes)
    return prober.probes


def limit_for(wanted_bytes: int) -> int:
    """The smallest limit of which ``wanted_bytes`` may be used."""
    limit_bytes = int(wanted_bytes / (1 - MARGIN)) - 2
    while usable_bytes(limit_bytes, MARGIN) < wanted_bytes:
        limit_bytes += 1
    return limit_bytes


def _truth(case: Case, tiny_dir: Path, directory: Path) -> Truth:
    recipe = live_recipe(config_of(case, tiny_dir, directory))
    loop = loop_of(recipe)
    limit_bytes, above = _limit(recipe, loop, case)
    sizes = range(1, MOST_ROWS + 1)
    probes = step_probes(recipe, loop, sizes, limit_bytes=usable_bytes(limit_bytes, MARGIN))
    searches = {strategy: searched(recipe, loop, strategy, limit_bytes) for strategy in STRATEGIES}
    recipe.consensus.close()
    del recipe, loop
    gc.collect()
    return Truth(limit_bytes, tuple(probes), above, searches)


def _limit(recipe: Any, loop: Loop, case: Case) -> tuple[int, Probe]:
    """The case's limit, by real steps without one, and the step of one row more than was drawn. A collective."""
    below, above = step_probes(recipe, loop, [case.rows, case.rows + 1], limit_bytes=None)
    fits, needs = (loop.consensus.max_over_ranks(probe.peak_bytes) for probe in (below, above))
    usable = {LIMITS[0]: fits, LIMITS[1]: max(fits, needs - 1), LIMITS[2]: int(fits + case.place * (needs - fits))}
    return limit_for(usable[case.limit]), above


def searched(recipe: Any, loop: Loop, strategy: Strategy, limit_bytes: int) -> SearchResult:
    """What the recipe's own search finds. A collective."""
    options = {"max_batch_size": MOST_ROWS, "power_of_two": False, "margin": MARGIN, "memory_limit_bytes": limit_bytes}
    return search_again(recipe, loop, wanted_rows=START_ROWS, strategy=strategy, **options)


@dataclass(frozen=True)
class Comparison:
    """A case's forecast, if there is one, against what its ranks measured."""

    case: Case
    forecast: TracedStep | str
    truths: list[Truth]

    @property
    def error_at_largest(self) -> float:
        """The error of the forecast peak at the largest size that fits, as a fraction of rank 0's metered peak."""
        largest = self.truths[0].largest
        return max((abs(error) for size, error in self._errors() if size == largest), default=0.0)

    @property
    def largest_error(self) -> float:
        """The largest such error over all sizes that ran to their end."""
        return max(abs(error) for _, error in self._errors())

    @property
    def phase_error_bytes(self) -> float:
        """The largest difference in any phase of any size."""
        return max(
            abs(self._memory(probe.batch_size).phases.get(phase, math.inf) - peak_bytes)
            for probe in self.truths[0].complete
            for phase, peak_bytes in probe.phase_peak_bytes.items()
            if phase  # no name: before the first phase
        )

    @property
    def forecast_largest(self) -> int:
        """The most rows that fit by the forecast."""
        limit_bytes = usable_bytes(self.truths[0].limit_bytes, MARGIN)
        device = Device(name="cpu", memory_bytes=limit_bytes, margin=0, overhead=Overhead.none())
        largest = BatchSizes(self._step, device).largest
        return MOST_ROWS if largest is None else min(largest, MOST_ROWS)

    def misses(self) -> list[str]:
        """The aims that the case missed, in words."""
        if isinstance(self.forecast, str):
            return [self.forecast]
        first, *peers = self.truths
        found = [result.exact_batch_size for result in first.searches.values()]
        above = [
            index
            for index, peer in enumerate(peers, start=1)
            if any(
                theirs.peak_bytes > ours.peak_bytes for ours, theirs in zip(first.complete, peer.complete, strict=True)
            )
        ]
        found_wrong = {
            f"peak {self.error_at_largest:.3%} off at the largest size": self.error_at_largest > AIMED_ERROR,
            f"forecast {self.forecast_largest} rows instead of {first.largest}": self.forecast_largest != first.largest,
            f"searches found {found} instead of {first.largest}": set(found) != {first.largest},
            f"ranks {above} were above rank 0": bool(above),
        }
        return [text for text, is_so in found_wrong.items() if is_so]

    def _errors(self) -> list[tuple[int, float]]:
        return [
            (probe.batch_size, self._memory(probe.batch_size).allocated_bytes / probe.peak_bytes - 1)
            for probe in self.truths[0].complete
        ]

    def _memory(self, batch_size: int) -> StepMemory:
        return exact(self._step.at(batch_size))

    @property
    def _step(self) -> StepEvents:
        assert isinstance(self.forecast, TracedStep)
        return self.forecast.lengths[0]


def compare(cases: list[Case], tiny_dir: Path, directory: Path) -> list[Comparison]:
    """Forecast and measure ``cases``."""
    configs = [config_of(case, tiny_dir, directory) for case in cases]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        made = pool.map(forecast, cases, configs)
        forecasts = list(tqdm(made, desc="forecasts", unit=" cases", total=len(cases)))
    for cfg in configs:
        write_checkpoint(cfg)
    truths: dict[int, list[Truth]] = {}
    for world_size in sorted({case.world_size for case in cases}):
        same = [case for case in cases if case.world_size == world_size]
        by_rank = run_on_ranks(measure, world_size, same, tiny_dir, directory, timeout_s=120.0 * len(same))
        truths |= {case.number: list(seen) for case, seen in zip(same, zip(*by_rank, strict=True), strict=True)}
    return [Comparison(case, one, truths[case.number]) for case, one in zip(cases, forecasts, strict=True)]


def forecast(case: Case, cfg: DictConfig) -> TracedStep | str:
    """The traced step of ``case``, or why there is none."""
    try:
        return Tracer().step(cfg, world_size=case.world_size, seq_lens=[case.seq_len])
    except InputError as error:
        return f"no forecast: {error}"


def main() -> None:
    """Measure the cases, write the table, and exit with status 1 if one missed its aim."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.forecast_accuracy")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--cases", type=int, default=32, help="default: %(default)s")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        os.environ |= {"HF_HOME": str(directory / "huggingface"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        make_tiny_assets(directory / "tiny", num_samples=1000)
        compared = compare(draw_cases(options.seed, options.cases), directory / "tiny", directory)
    _report(compared, seed=options.seed, seconds=time.perf_counter() - started)
    sys.exit(any(comparison.misses() for comparison in compared))


def _report(compared: list[Comparison], *, seed: int, seconds: float) -> None:
    header = ["", "case", "ranks", "layers traced", "limit", "may use, bytes", "largest", "forecast", "error there"]
    header += ["largest error", "in a phase, bytes", *STRATEGIES, "missed"]
    command = f"OMP_NUM_THREADS=1 python -m benchmarks.forecast_accuracy --seed {seed} --cases {len(compared)}"
    lines = [
        "# Forecast of a step's memory from fake tensors against real steps, CPU",
        "",
        provenance(command, ranks="gloo ranks of 1 thread", seconds=seconds),
        "",
        "Each case is drawn at random. Its limit lies where a drawn number of rows just fits, a byte short of one row"
        f" more, or between; margin {MARGIN:g}, no size above {MOST_ROWS} rows. The largest size that fits is by"
        " whole steps of 1, 2, 3, ... rows until one does not. Errors are of the forecast peak against the metered"
        " one of rank 0: at the largest size that fits; at any size from 1 to one row more than was drawn; and in any"
        " phase of these. Of each strategy: size found / probes / those of more than"
        f" {SMALL_BATCH_SIZES[-1]} rows / out-of-memory errors.",
        "",
        *(f"- {line}" for line in _summary(compared)),
        "",
        *table(header, map(_row, compared)),
    ]
    publish(lines, RESULTS)


def _summary(compared: list[Comparison]) -> list[str]:
    made = [one for one in compared if isinstance(one.forecast, TracedStep)]
    few = sum(len(one.forecast.traced_layers) > 1 for one in made if isinstance(one.forecast, TracedStep))
    exact = sum(one.largest_error == 0 and one.phase_error_bytes == 0 for one in made)
    maxima = sum(one.forecast_largest == one.truths[0].largest for one in made)
    sizes = sum(len(one.truths[0].complete) for one in made)
    lines = [
        f"{exact} of {len(compared)} forecasts are right to the byte in every phase of every size ({sizes} sizes);"
        f" the largest error is {max((one.largest_error for one in made), default=math.nan):.3%}, at the largest size"
        f" that fits {max((one.error_at_largest for one in made), default=math.nan):.3%}",
        f"{maxima} of {len(compared)} forecasts name the largest size that fits;"
        f" {few} of the forecasts are from models of fewer layers",
    ]
    for strategy in STRATEGIES:
        results = [one.truths[0].searches[strategy] for one in compared]
        right = sum(
            one.truths[0].largest == found.exact_batch_size for one, found in zip(compared, results, strict=True)
        )
        counts = [sum(numbers) / len(results) for numbers in zip(*map(_costs, results), strict=True)]
        probes, full, ooms = (f"{count:.1f}" for count in counts)
        lines.append(
            f"`{strategy}` is right in {right} of {len(compared)}, with {probes} probes, {full} of them of more than"
            f" {SMALL_BATCH_SIZES[-1]} rows, and {ooms} out-of-memory errors on average"
        )
    return lines


def _row(one: Comparison) -> list[str]:
    case, first = one.case, one.truths[0]
    cells = [str(case.number), case.name, str(case.world_size)]
    searches = [" / ".join(map(str, (result.exact_batch_size, *_costs(result)))) for result in first.searches.values()]
    limit = [case.limit, str(usable_bytes(first.limit_bytes, MARGIN)), str(first.largest)]
    if isinstance(one.forecast, str):
        return [*cells, "", *limit, "", "", "", "", *searches, *one.misses()]
    traced = f"{' and '.join(map(str, one.forecast.traced_layers))} of {one.forecast.num_layers}"
    errors = [f"{one.error_at_largest:.3%}", f"{one.largest_error:.3%}", f"{one.phase_error_bytes:.0f}"]
    return [*cells, traced, *limit, str(one.forecast_largest), *errors, *searches, "; ".join(one.misses())]


def _costs(result: SearchResult) -> tuple[int, int, int]:
    """Probes, those of more rows than the small ones, and out-of-memory errors of a search."""
    probes = result.probes
    full = sum(probe.batch_size > SMALL_BATCH_SIZES[-1] for probe in probes)
    return len(probes), full, sum(not probe.fits for probe in probes)


if __name__ == "__main__":
    main()
