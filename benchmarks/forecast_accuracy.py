"""Is the memory forecast from fake tensors right?

    python -m benchmarks.forecast_accuracy [--seed SEED] [--cases CASES]

Draws models, ranks and options at random. For each case the plan's tracer forecasts a step's memory; then the real
recipe on gloo ranks takes whole steps of 1, 2, 3, ... rows. Prints a table and writes it to
``results/forecast_accuracy_cpu.md``; the exit status is not 0 if a forecast missed its aim.
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
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torchtune import config
from tqdm import tqdm

from benchmarks.apart import measured_by_ranks
from benchmarks.live import live_recipe, real_steps
from benchmarks.provenance import provenance
from benchmarks.tables import publish, table
from tests.support.recipe_runs import loop_of, tiny_config
from torchtune_adaptive.engine.search.strategies import Probe
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.plan.replay import StepMemory, exact
from torchtune_adaptive.plan.trace.step_events import TracedStep
from torchtune_adaptive.plan.trace.tracer import Tracer
from torchtune_adaptive.tiny import MODEL_GEOMETRY, make_tiny_assets

RESULTS = Path(__file__).parent / "results" / "forecast_accuracy_cpu.md"
DRAWN_ROWS, DRAWN_LAYERS = 40, (2, 14)
DRAWN_TOKENS = (4, 16), (16, 80)
FEW_ROWS, FEW_LAYERS = 8, (2, 10)  # with more than ``FEW_RANKS`` ranks, which share the cores
FEW_RANKS = 2
FAMILIES = ("llama2", "qwen2", "gemma", "llama3", "llama3_2", "mistral", "phi3", "llama3_1", "gemma2")
TIED = ("gemma", "gemma2", "llama3_2")  # always; qwen2's embeddings may be
OWN_HEAD_DIM = ("gemma", "gemma2")
DRAWN_RANKS = (2, 1, 2, 4)
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
    """A recipe's options, with dotted keys; steps of up to ``rows`` rows are taken."""

    number: int
    kind: str
    ranks: int
    seq_len: int
    options: dict[str, Any]
    rows: int

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


def arguments_of(program: str, *, cases: int) -> argparse.Namespace:
    """The arguments of a ``program`` that draws cases, by default so many."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{program}")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--cases", type=int, default=cases, help="default: %(default)s")
    return parser.parse_args()


@contextmanager
def assets() -> Iterator[Path]:
    """Context: a temporary folder in which ``tiny`` has tokenizer and data. Messages are not shown from now on."""
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        os.environ |= {"HF_HOME": str(directory / "huggingface"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        make_tiny_assets(directory / "tiny", num_samples=1000)
        yield directory


def draw_cases(seed: int, count: int) -> list[Case]:
    """``count`` cases; the same seed gives the same cases, and a larger count begins with those of a smaller one."""
    dice = random.Random(seed)
    return [_draw_case(number, dice) for number in range(count)]


def _draw_case(number: int, dice: random.Random) -> Case:
    kind, family = ("full", "lora")[dice.randrange(2)], FAMILIES[number % len(FAMILIES)]
    ranks, seq_len = DRAWN_RANKS[number % len(DRAWN_RANKS)], dice.randint(*dice.choice(DRAWN_TOKENS))
    most_rows, layers = (DRAWN_ROWS, DRAWN_LAYERS) if ranks <= FEW_RANKS else (FEW_ROWS, FEW_LAYERS)
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
        ranks=ranks,
        seq_len=seq_len,
        options=options,
        rows=round(math.exp(dice.uniform(0, math.log(most_rows)))),
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


def measure(rank: int, cases: list[Case], tiny_dir: Path, directory: Path) -> list[list[Probe]]:
    """Whole steps of every case. A collective of as many ranks as the cases are for."""
    logging.disable(logging.WARNING)
    return [_probes(case, tiny_dir, directory) for case in cases]


def _probes(case: Case, tiny_dir: Path, directory: Path) -> list[Probe]:
    recipe = live_recipe(config_of(case, tiny_dir, directory))
    with real_steps(recipe, loop_of(recipe), limit_bytes=None) as prober:
        for size in range(1, case.rows + 1):
            prober.fits(size)
    recipe.consensus.close()
    del recipe
    gc.collect()
    return prober.probes


@dataclass(frozen=True)
class Comparison:
    """A case's forecast, if there is one, against what its ranks measured."""

    case: Case
    forecast: TracedStep | str
    ranks: list[list[Probe]]

    @property
    def largest_error(self) -> float:
        """The largest error of the forecast peak over all sizes, as a fraction of rank 0's metered peak."""
        return max(abs(self._memory(probe).allocated_bytes / probe.peak_bytes - 1) for probe in self.ranks[0])

    @property
    def phase_error_bytes(self) -> float:
        """The largest difference in any phase of any size."""
        return max(
            abs(self._memory(probe).phases.get(phase, math.inf) - peak_bytes)
            for probe in self.ranks[0]
            for phase, peak_bytes in probe.phase_peak_bytes.items()
            if phase  # no name: before the first phase
        )

    def misses(self) -> list[str]:
        """The aims that the case missed, in words."""
        if isinstance(self.forecast, str):
            return [self.forecast]
        first, *others = self.ranks
        above = [
            index
            for index, other in enumerate(others, start=1)
            if any(theirs.peak_bytes > ours.peak_bytes for ours, theirs in zip(first, other, strict=True))
        ]
        missed = [f"peak {self.largest_error:.3%} off"] * (self.largest_error > 0)
        missed += [f"{self.phase_error_bytes:.0f} bytes off in a phase"] * (self.phase_error_bytes > 0)
        return missed + [f"ranks {above} were above rank 0"] * bool(above)

    def _memory(self, probe: Probe) -> StepMemory:
        assert isinstance(self.forecast, TracedStep)
        return exact(self.forecast.lengths[0].at(probe.batch_size))


def compare(cases: list[Case], tiny_dir: Path, directory: Path) -> list[Comparison]:
    """Forecast and measure ``cases``."""
    configs = [config_of(case, tiny_dir, directory) for case in cases]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        made = pool.map(forecast, cases, configs)
        forecasts = list(tqdm(made, desc="forecasts", unit=" cases", total=len(cases)))
    for cfg in configs:
        write_checkpoint(cfg)
    return [*map(Comparison, cases, forecasts, measured_by_ranks(measure, cases, tiny_dir, directory))]


def forecast(case: Case, cfg: DictConfig) -> TracedStep | str:
    """The traced step of ``case``, or why there is none."""
    try:
        return Tracer().step(cfg, world_size=case.ranks, seq_lens=[case.seq_len])
    except InputError as error:
        return f"no forecast: {error}"


def main() -> None:
    """Measure the cases, write the table, and exit with status 1 if one missed its aim."""
    options = arguments_of("forecast_accuracy", cases=32)
    started = time.perf_counter()
    with assets() as directory:
        compared = compare(draw_cases(options.seed, options.cases), directory / "tiny", directory)
    _report(compared, seed=options.seed, seconds=time.perf_counter() - started)
    sys.exit(any(comparison.misses() for comparison in compared))


def _report(compared: list[Comparison], *, seed: int, seconds: float) -> None:
    header = ["", "case", "ranks", "layers traced", "rows", "largest error", "in a phase, bytes", "missed"]
    command = f"OMP_NUM_THREADS=1 python -m benchmarks.forecast_accuracy --seed {seed} --cases {len(compared)}"
    made = [one for one in compared if isinstance(one.forecast, TracedStep)]
    exact = sum(one.largest_error == 0 and one.phase_error_bytes == 0 for one in made)
    sizes = sum(len(one.ranks[0]) for one in made)
    few = sum(len(one.forecast.traced_layers) > 1 for one in made if isinstance(one.forecast, TracedStep))
    publish(
        RESULTS,
        "Forecast of a step's memory from fake tensors against real steps, CPU",
        provenance(command, ranks="gloo ranks of 1 thread", seconds=seconds),
        "Each case is drawn at random, and takes whole steps of 1 row, 2 rows and so on. Errors are of the forecast"
        " peak against the metered one of rank 0, over all sizes, and in any phase of these.",
        f"{exact} of {len(compared)} forecasts are right to the byte in every phase of every size ({sizes} sizes);"
        f" {few} of them are from models of fewer layers.",
        table(header, map(_row, compared)),
    )


def _row(one: Comparison) -> list[str]:
    cells = [str(one.case.number), one.case.name, str(one.case.ranks)]
    if isinstance(one.forecast, str):
        return [*cells, "", str(one.case.rows), "", "", *one.misses()]
    traced = f"{' and '.join(map(str, one.forecast.traced_layers))} of {one.forecast.num_layers}"
    errors = [f"{one.largest_error:.3%}", f"{one.phase_error_bytes:.0f}"]
    return [*cells, traced, str(one.case.rows), *errors, "; ".join(one.misses())]


if __name__ == "__main__":
    main()
