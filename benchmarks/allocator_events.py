"""Does a step's plan match the allocator's own events for eager code, compiled code and torchao's optimizers?

    python -m benchmarks.allocator_events [--seed SEED] [--cases CASES]

Draws cases as ``benchmarks.forecast_accuracy`` does, for one rank. The real recipe takes whole steps without a dispatch
mode, while PyTorch's profiler records every allocation. Each case runs as it is, with ``compile``, and with one of
torchao's optimizers. Prints a table and writes it to ``results/allocator_events_cpu.md``.
"""

import logging
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from benchmarks.forecast_accuracy import Case, arguments_of, assets, config_of, draw_cases, write_checkpoint
from benchmarks.live import live_recipe, probe_maker
from benchmarks.provenance import provenance
from benchmarks.tables import publish, table
from tests.support.allocator import rises_by_events
from tests.support.ranks import run_on_ranks
from tests.support.recipe_runs import loop_of
from torchtune_adaptive.engine.memory.devices import meter_for
from torchtune_adaptive.plan.replay import exact
from torchtune_adaptive.plan.trace.tracer import Tracer

RESULTS = Path(__file__).parent / "results" / "allocator_events_cpu.md"
SIZES = (3, 9)
TORCHAO = ("AdamW8bit", "AdamW4bit", "AdamWFp8", "Adam8bit", "Adam4bit", "AdamFp8")
EAGER, COMPILED = "eager", "compiled"


@dataclass(frozen=True)
class Comparison:
    """Peaks of steps of ``SIZES`` rows, in bytes: planned, and by the allocator's events."""

    planned: list[float]
    seen: list[int]

    @property
    def error(self) -> float:
        """The largest error of a planned peak, as a fraction of the peak by events."""
        return max((plan / seen - 1 for plan, seen in zip(self.planned, self.seen, strict=True)), key=abs)


def variants(case: Case, cfg: DictConfig) -> Iterator[tuple[str, DictConfig]]:
    """The configs in which a case runs, by name."""
    optimizer = TORCHAO[case.number % len(TORCHAO)]
    changes: dict[str, dict[str, Any]] = {
        EAGER: {},
        COMPILED: {"compile": True},
        optimizer: {"optimizer": {"_component_": f"torchao.optim.{optimizer}", "lr": 1e-4}},
    }
    for name, change in changes.items():
        yield name, OmegaConf.create(dict(cfg) | change)


def peaks_by_events(_: int, cfg: DictConfig) -> list[int]:
    """Peak bytes of real steps of ``SIZES`` rows: what model and optimizer hold, and the rise above it."""
    logging.disable(logging.WARNING)
    recipe = live_recipe(cfg)
    loop = loop_of(recipe, is_metered=False)
    batch_of = probe_maker(recipe)
    return [_peak_by_events(loop, batch_of(size)) for size in SIZES]


def _peak_by_events(loop: Any, batch: Any) -> int:
    torch.compiler.reset()  # code compiled for another size would make PyTorch compile for dynamic sizes
    for _ in range(2):
        loop.step(batch)
    held = meter_for(torch.device("cpu"), loop.model, loop.optimizers).peak_bytes
    _, rises = rises_by_events(lambda: loop.step(batch))
    return held + max(rises)


def compare(case: Case, tiny_dir: Path, directory: Path) -> dict[str, Comparison]:
    """The comparison of each variant of ``case``."""
    case = replace(case, ranks=1)
    plain = config_of(case, tiny_dir, directory)
    write_checkpoint(plain)
    found: dict[str, Comparison] = {}
    for name, cfg in variants(case, plain):
        step = Tracer().step(cfg, world_size=1, seq_lens=[case.seq_len])
        seen = run_on_ranks(peaks_by_events, 1, cfg, timeout_s=1200)[0]
        found[name] = Comparison([exact(step.lengths[0].at(size)).allocated_bytes for size in SIZES], seen)
    return found


def main() -> None:
    """Measure the cases, and write the table."""
    options = arguments_of("allocator_events", cases=8)
    started = time.perf_counter()
    cases = draw_cases(options.seed, options.cases)
    with assets() as directory:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(directory / "inductor")
        compared = [compare(case, directory / "tiny", directory) for case in tqdm(cases, unit=" cases")]
    _report(cases, compared, seed=options.seed, seconds=time.perf_counter() - started)


def _report(cases: list[Case], compared: list[dict[str, Comparison]], *, seed: int, seconds: float) -> None:
    command = f"OMP_NUM_THREADS=1 python -m benchmarks.allocator_events --seed {seed} --cases {len(cases)}"
    rows = [
        [str(case.number), case.name, name, _list(map(round, one.planned)), _list(one.seen), f"{one.error:+.2%}"]
        for case, found in zip(cases, compared, strict=True)
        for name, one in found.items()
    ]
    publish(
        RESULTS,
        "Plans of a step against the allocator's own events, CPU",
        provenance(command, ranks="one rank of 1 thread", seconds=seconds),
        f"Peaks of whole steps of {' and '.join(map(str, SIZES))} rows, in bytes. No dispatch mode is active, so that"
        " autograd adds up gradients as in training, and memory that a kernel or compiled code takes within itself is"
        " seen. The error is the larger one of both sizes.",
        [f"- {line}" for line in _summary(compared)],
        table(["", "case", "run", "planned", "seen", "error"], rows),
    )


def _list(sizes: Iterable[int]) -> str:
    return " ".join(map(str, sizes))


def _summary(compared: list[dict[str, Comparison]]) -> Iterator[str]:
    for kind, title in ((EAGER, EAGER), (COMPILED, COMPILED), (None, "torchao's optimizers")):
        of_kind = [
            one for found in compared for name, one in found.items() if kind == name or (not kind and name in TORCHAO)
        ]
        errors = [abs(one.error) for one in of_kind]
        exact = sum(one.planned == one.seen for one in of_kind)
        worst = max((one.error for one in of_kind), key=abs)
        yield f"{title}: {exact} of {len(of_kind)} to the byte; median error {median(errors):.2%}, worst {worst:+.2%}"


if __name__ == "__main__":
    main()
