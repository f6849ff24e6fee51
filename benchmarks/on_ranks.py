"""Run a benchmark on several gloo ranks, as processes that its own command starts."""

import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

Measured = TypeVar("Measured")


def run_on_ranks_of(
    module: str,
    ranks: int,
    *,
    prepare: Callable[[Path], object],
    measure: Callable[[Path], Measured],
    report: Callable[[Measured, float, float], object],
) -> None:
    """``measure`` on every rank of ``python -m MODULE``, in a directory that rank 0 has prepared; does not return.

    ``report`` is called on rank 0, with the seconds that it all took and the machine's load before.
    """
    if "RANK" not in os.environ:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
        raise SystemExit(subprocess.run([*launcher, "-m", module, *sys.argv[1:]], check=False).returncode)
    dist.init_process_group("gloo")
    logging.disable(logging.WARNING)
    started, load = time.perf_counter(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as directory:
        tiny_dir = Path(directory) / "tiny"
        if dist.get_rank() == 0:
            prepare(tiny_dir)
        shared = [tiny_dir]
        dist.broadcast_object_list(shared)
        measured = measure(shared[0])
        dist.barrier()
    if dist.get_rank() == 0:
        report(measured, time.perf_counter() - started, load)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads can abort an interpreter that shuts down
