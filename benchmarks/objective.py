"""What does ``adaptive.objective=throughput`` choose, against ``memory``?

    OMP_NUM_THREADS=1 python -m benchmarks.objective

On two CPU ranks and under a memory limit, with a model so wide and rows so long that a few rows keep the processor
busy: more rows take more memory and train no faster. Sizes the batch once by memory and several times by throughput,
whose choice depends on timed steps and should be the same every time. Prints tables and writes them to
``results/objective_cpu.md``.
"""

import gc
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchtune.models.llama2 import llama2

from benchmarks.live import live_recipe
from benchmarks.on_ranks import measured_on_ranks
from benchmarks.provenance import provenance
from benchmarks.tables import publish, table
from tests.support.recipe_runs import tiny_config
from torchtune_adaptive.engine.search.strategies import SearchResult
from torchtune_adaptive.engine.search.throughput import smallest_near_best
from torchtune_adaptive.settings import Objective
from torchtune_adaptive.text import format_bytes
from torchtune_adaptive.tiny import MODEL_GEOMETRY, MODEL_NAME, make_tiny_assets

RESULTS = Path(__file__).parent / "results" / "objective_cpu.md"
RANKS = 2
COMMAND = "OMP_NUM_THREADS=1 python -m benchmarks.objective"
LIMIT = "768MiB"  # per rank
SEQ_LEN = 512
GEOMETRY = MODEL_GEOMETRY | {"num_layers": 2, "embed_dim": 256, "intermediate_dim": 1536}
OBJECTIVES: tuple[Objective, ...] = ("memory", "throughput", "throughput", "throughput")


@dataclass(frozen=True)
class Sized:
    """What a set-up has found: the batch size to train with, and the figures behind it."""

    objective: Objective
    batch_size: int
    result: SearchResult
    tokens_per_second: dict[int, float]  # per rank, empty where memory decides
    seconds: float


def main() -> None:
    """Size by both objectives and write the tables."""
    _report(*measured_on_ranks(_measure, RANKS, make_assets=_make_assets))


def _measure(tiny_dir: Path) -> list[Sized]:
    return [_sized(objective, tiny_dir) for objective in OBJECTIVES]


def _make_assets(tiny_dir: Path) -> None:
    """The tiny assets, with a larger model of random weights instead of the tiny one."""
    make_tiny_assets(tiny_dir, num_samples=2000)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        torch.save(llama2(**GEOMETRY).state_dict(), tiny_dir / MODEL_NAME)


def _sized(objective: Objective, tiny_dir: Path) -> Sized:
    """Set up a recipe as for training, and keep only what it has found. A collective."""
    options: dict[str, Any] = {f"model__{name}": value for name, value in GEOMETRY.items()}
    options |= {"tokenizer__max_seq_len": SEQ_LEN, "adaptive__memory_limit": LIMIT, "adaptive__objective": objective}
    cfg = tiny_config("full", tiny_dir, tiny_dir.parent / "out", use_maximum_batch_size=True, **options)
    started = time.perf_counter()
    trainer = live_recipe(cfg).trainer
    seconds = time.perf_counter() - started
    batch_size, sizes = trainer.loader.batch_size, trainer.sizes
    found = Sized(objective, batch_size, sizes.result, sizes.tokens_per_second or {}, seconds)
    del trainer
    gc.collect()
    if dist.get_rank() == 0:
        print(f"{objective}: batch_size {found.batch_size}, {seconds:.0f} s", flush=True)
    return found


def _speeds(sized: Sized) -> list[str]:
    """The tokens per second of each size, and their share of the best; the chosen size in bold."""
    rates = sized.tokens_per_second
    assert not rates or sized.batch_size == smallest_near_best(rates)
    cells = [f"{rate:.0f} ({rate / max(rates.values()):.1%})" for rate in rates.values()]
    return [f"**{cell}**" if size == sized.batch_size else cell for size, cell in zip(rates, cells, strict=True)]


def _report(found: list[Sized], run: dict[str, Any]) -> None:
    geometry = ", ".join(f"{name} {value}" for name, value in GEOMETRY.items())
    by_memory, *by_speed = found
    sizes = list(by_speed[0].tokens_per_second)
    chosen = ", ".join(str(sized.batch_size) for sized in by_speed)
    exact = {sized.result.exact_batch_size for sized in found}
    rows = [
        [sized.objective, str(sized.batch_size), f"{sized.seconds:.0f}", *(_speeds(sized) or [""] * len(sizes))]
        for sized in found
    ]
    probes = [
        [str(probe.batch_size), format_bytes(probe.peak_bytes), "yes" if probe.fits else "no"]
        for probe in by_memory.result.probes
    ]
    lines = [
        "# The batch size by throughput against that by memory, CPU",
        "",
        provenance(COMMAND, **run),
        "",
        f"Full finetuning of a Llama of random weights ({geometry}) on rows of up to {SEQ_LEN} tokens, limit"
        f" {LIMIT} per rank, margin {by_memory.result.margin:g}, power of two.",
        "",
        f"Memory chooses {by_memory.batch_size}; throughput, in {len(by_speed)} set-ups, {chosen}."
        f" The largest size that fits was {' or '.join(map(str, sorted(exact)))} in all {len(found)} searches."
        " The search's probes on rank 0, in their order:",
        "",
        *table(["batch_size", "peak", "fits"], probes),
        "",
        "Steps as in training, timed after the search: tokens per second of a rank, median of 5 interleaved steps, and"
        " their share of the best. The smallest size within 2 % of the best is chosen, in bold:",
        "",
        *table(["objective", "batch_size", "set-up, s", *(f"{size} rows" for size in sizes)], rows),
    ]
    publish(lines, RESULTS)


if __name__ == "__main__":
    main()
