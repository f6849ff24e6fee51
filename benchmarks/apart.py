"""What the benchmarks of plans share: parts in processes of their own, on a simulated GPU, and errors in tables."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

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


def median_and_worst(errors: Iterable[float]) -> list[str]:
    """Two cells of a table: the median size of the errors, and the largest of them."""
    by_size = sorted(errors, key=abs)
    return [f"{median(map(abs, by_size)):.2%}", f"{by_size[-1]:+.2%}"]
