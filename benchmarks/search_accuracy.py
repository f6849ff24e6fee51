"""Does each strategy find the largest batch that fits, and at what cost?

    python -m benchmarks.search_accuracy

Runs the real recipes on two CPU ranks with a memory limit, once by each strategy, and compares with an
exhaustive search: a metered step without any limit at 1, 2, 3, ... rows, until one needs more than may be
used on a rank, and at two sizes more. Prints a table and writes it to ``results/search_accuracy_cpu.md``.
"""

import argparse
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.live import live_recipe, real_steps
from benchmarks.on_ranks import measured_on_ranks
from benchmarks.provenance import provenance
from benchmarks.tables import publish, table
from tests.support.recipe_runs import loop_of, tiny_config
from torchtune_adaptive.engine.search.options import STRATEGIES
from torchtune_adaptive.engine.search.strategies import SearchResult
from torchtune_adaptive.tiny import make_tiny_assets

RESULTS = Path(__file__).parent / "results" / "search_accuracy_cpu.md"
RANKS = 2
COMMAND = "OMP_NUM_THREADS=1 python -m benchmarks.search_accuracy"
BEYOND = 2  # sizes tried above the first that is too large, to see that none of them fits again


@dataclass(frozen=True)
class Case:
    """A recipe's options, and the limit per rank under which to search."""

    kind: str
    seq_len: int
    limit: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The case in words."""
        words = {"enable_activation_checkpointing": "AC", "gradient_accumulation_steps": "accumulation"}
        options = [
            f"{words.get(key, key.split('.')[-1])}{'' if value is True else f' {value}'}"
            for key, value in self.options.items()
        ]
        return ", ".join([self.kind, f"{self.seq_len} tokens", *options])


AC = {"enable_activation_checkpointing": True}
FOREACH = {"optimizer.foreach": True, "optimizer.fused": False}
CASES = [
    Case("full", 256, "192MiB", {"optimizer.fused": True}),
    Case("full", 256, "96MiB", AC | {"optimizer.fused": True}),
    Case("full", 64, "96MiB", FOREACH),
    Case("full", 100, "64MiB", AC | FOREACH),
    Case("full", 128, "128MiB", {"gradient_accumulation_steps": 2}),
    Case("full", 200, "80MiB", AC | {"dtype": "bf16"}),
    Case("full", 128, "96MiB", {"clip_grad_norm": None, "loss._component_": "torch.nn.CrossEntropyLoss"}),
    Case("full", 33, "48MiB", AC | FOREACH | {"gradient_accumulation_steps": 3}),
    Case("lora", 256, "160MiB", {"optimizer.fused": True}),
    Case("lora", 128, "64MiB", AC | FOREACH),
    Case("lora", 48, "64MiB", FOREACH),
    Case("lora", 256, "96MiB", AC | {"gradient_accumulation_steps": 2}),
    Case("lora", 256, "128MiB", {"dataset.packed": True}),
    Case("full", 256, "24MiB", AC),
]


def main() -> None:
    """Measure every case, write the table, and exit with status 1 if a search is wrong."""
    argparse.ArgumentParser(description=__doc__).parse_args()  # refuses arguments
    rows, run = measured_on_ranks(_measure, RANKS, CASES, make_assets=partial(make_tiny_assets, num_samples=2000))
    wrong = sum("WRONG" in cell for row in rows for cell in row)
    _report(rows, wrong, run)
    sys.exit(wrong > 0)


def _measure(tiny_dir: Path, cases: list[Case]) -> list[list[str]]:
    return [_row(case, tiny_dir) for case in cases]


def _row(case: Case, tiny_dir: Path) -> list[str]:
    results = {strategy: _search(case, strategy, tiny_dir) for strategy in STRATEGIES}
    usable_bytes = results[STRATEGIES[0]].usable_bytes
    largest = _exhaustive(case, usable_bytes, tiny_dir)
    cells = [case.name, case.limit, str(largest)]
    for result in results.values():
        ooms = sum(not probe.fits for probe in result.probes)
        exact = "" if result.exact_batch_size == largest else " WRONG"
        cells += [f"{result.exact_batch_size}{exact}", f"{len(result.probes)}", f"{ooms}"]
    if dist.get_rank() == 0:
        print(" | ".join(cells), flush=True)
    return cells


def _recipe(case: Case, tiny_dir: Path, **keys: Any) -> Any:
    options = {"metric_logger": {"_component_": "torchtune.training.metric_logging.StdoutLogger"}} | case.options
    options |= {"tokenizer.max_seq_len": case.seq_len}
    return live_recipe(tiny_config(case.kind, tiny_dir, tiny_dir.parent / "out", **options, **keys))


def _search(case: Case, strategy: str, tiny_dir: Path) -> SearchResult:
    settings = {"strategy": strategy, "memory_limit": case.limit, "power_of_two": False, "max_batch_size": 200}
    return _recipe(case, tiny_dir, use_maximum_batch_size=True, adaptive=settings).trainer.sizes.result


def _exhaustive(case: Case, usable_bytes: int, tiny_dir: Path) -> int:
    """Largest number of rows whose metered peak is at most ``usable_bytes`` on every rank, by trying them all."""
    recipe = _recipe(case, tiny_dir, adaptive={"oom_recovery": False})
    peaks: list[int] = [0]
    too_large = 0
    with real_steps(recipe, loop_of(recipe), limit_bytes=None) as prober:
        while too_large <= BEYOND:
            prober.fits(len(peaks))
            peaks.append(recipe.consensus.max_over_ranks(prober.probes[-1].peak_bytes))
            too_large += peaks[-1] > usable_bytes
    fitting = [rows for rows, peak_bytes in enumerate(peaks) if peak_bytes <= usable_bytes]
    assert fitting == list(range(len(fitting))), f"memory does not grow with the batch: {peaks}"
    return fitting[-1]


def _report(rows: list[list[str]], wrong: int, run: dict[str, Any]) -> None:
    header = ["case", "limit", "exhaustive"]
    for strategy in STRATEGIES:
        header += [strategy, "probes", "OOMs"]
    publish(
        RESULTS,
        "Largest batch size by each strategy against exhaustive search, CPU",
        provenance(COMMAND, **run),
        "Margin 0.05, no rounding. Probes are whole train steps; each search also takes one step of two rows before its"
        " first probe.",
        f"{len(rows) * len(STRATEGIES) - wrong} of {len(rows) * len(STRATEGIES)} searches exact.",
        table(header, rows),
    )


if __name__ == "__main__":
    main()
