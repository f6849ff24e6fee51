"""What the benchmarks of plans share: parts in processes of their own, on a simulated GPU or by ranks, and errors."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.tables import table

CARD_GIB = 200  # memory of the simulated GPU: all measured steps fit


def arguments_of(cases: Iterable[str]) -> argparse.Namespace:
    """The arguments of a benchmark of plans, and of its processes: a case, a step of it, and where to write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path)
    parser.add_argument("--cases", default=";".join(cases))
    parser.add_argument("--case")
    parser.add_argument("--step")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def in_process(module: str, arguments: Sequence[str], out: Path, *, ranks: int = 1, **environment: str) -> Any:
    """What a process of its own, or one for each rank, writes to ``out`` as JSON.

    Raises:
        RuntimeError: it failed; the message has its last lines.
    """
    launch = [sys.executable, "-W", "ignore", "-m"]
    if ranks > 1:
        launch += ["torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "-m"]
    environment |= {"OMP_NUM_THREADS": "1", "SIMULATED_GPU_GIB": str(CARD_GIB), "SIMULATED_GPUS": str(ranks)}
    out.unlink(missing_ok=True)
    done = subprocess.run(
        [*launch, module, *arguments, "--out", str(out)],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode or not out.exists():
        raise RuntimeError(" ".join([*arguments, *done.stdout.splitlines()[-12:]]))
    return json.loads(out.read_text())


def write_and_end(found: Any, out: Path) -> None:
    """Write what a process of ``in_process`` has found, if it is rank 0, and end it."""
    if int(os.environ.get("RANK", "0")) == 0:
        out.write_text(json.dumps(found))
    os._exit(0)  # threads of a process group can abort an interpreter that shuts down


def batch_sizes(step: Any, *, gib: float = CARD_GIB, expandable: bool = False) -> Any:
    """The ``BatchSizes`` of a traced step on a simulated GPU with so much memory."""
    from torchtune_adaptive.plan.decide import BatchSizes, Device
    from torchtune_adaptive.plan.gpu import Card, Overhead

    card = Card.named("A100 80GB").overhead(1)  # whose workspaces and threads the simulated GPU has, too
    overhead = Overhead(workspaces=card.workspaces, threads=card.threads, expandable=expandable, caches=True)
    return BatchSizes(step, Device(name="", memory_bytes=int(gib * 2**30), margin=0, overhead=overhead))


def planned_bytes(sizes: Any, rows: Sequence[int]) -> dict[str, list[int]]:
    """Allocated and reserved bytes of a step of each number of rows, by its ``BatchSizes``."""
    memory = {str(number): sizes.memory(number) for number in rows}
    return {number: [one.allocated_bytes, one.reserved_bytes] for number, one in memory.items()}


@dataclass(frozen=True)
class Steps:
    """Allocated and reserved bytes of a case's steps, by their rows: planned and measured."""

    case: str
    planned: dict[str, list[int]]
    measured: dict[str, list[int]]

    def errors(self, place: int) -> dict[str, float]:
        """By rows, the plan's error of allocated (0) or of reserved (1) bytes."""
        return {rows: self.planned[rows][place] / figures[place] - 1 for rows, figures in self.measured.items()}

    def told(self, place: int) -> str:
        """The errors, for a line of a log."""
        return " ".join(f"{rows}: {error:+.2%}" for rows, error in self.errors(place).items())


def table_of_steps(every: Iterable[Steps]) -> list[str]:
    """A table of all steps: the reserved bytes in GiB, and the plan's errors of reserved and of allocated bytes."""
    rows = [
        [one.case, rows, f"{one.measured[rows][1] / 2**30:.2f}", f"{error:+.2%}", f"{one.errors(0)[rows]:+.2%}"]
        for one in every
        for rows, error in one.errors(1).items()
    ]
    return table(["case", "rows", "reserved", "plan", "allocated"], rows)


def measured_by_ranks(measure: Callable[..., list[Any]], cases: Sequence[Any], *args: Any) -> list[list[Any]]:
    """For each case what each of its ranks has measured, where ``measure(rank, cases, *args)`` is for several cases."""
    from tests.support.ranks import run_on_ranks

    found: dict[int, list[Any]] = {}
    for ranks in sorted({case.ranks for case in cases}):
        same = [case for case in cases if case.ranks == ranks]
        by_rank = run_on_ranks(measure, ranks, same, *args, timeout_s=120.0 * len(same))
        found |= {case.number: list(seen) for case, seen in zip(same, zip(*by_rank, strict=True), strict=True)}
    return [found[case.number] for case in cases]


def median_and_worst(errors: Iterable[float]) -> list[str]:
    """Two cells of a table: the median size of the errors, and the largest of them."""
    by_size = sorted(errors, key=abs)
    return [f"{median(map(abs, by_size)):.2%}", f"{by_size[-1]:+.2%}"]
