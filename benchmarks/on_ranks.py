"""Run a benchmark on several gloo ranks of one thread, in a directory with the tiny model and its data."""

import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tests.support.ranks import run_on_ranks

Measured = TypeVar("Measured")
_LONGEST_S = 3600.0


def measured_on_ranks(
    measure: Callable[..., Measured], ranks: int, *args: Any, make_assets: Callable[[Path], object]
) -> tuple[Measured, dict[str, Any]]:
    """Rank 0's ``measure(tiny_dir, *args)``, which runs on every rank; and arguments for ``provenance``."""
    started, load = time.perf_counter(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as directory:
        tiny_dir = Path(directory) / "tiny"
        os.environ |= {"HF_HOME": str(Path(directory) / "huggingface"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        make_assets(tiny_dir)
        measured, *_ = run_on_ranks(_measure, ranks, measure, tiny_dir, *args, timeout_s=_LONGEST_S)
    seconds = time.perf_counter() - started
    return measured, {"ranks": f"{ranks} gloo ranks of 1 thread", "seconds": seconds, "load": load}


def no_assets(_: Path) -> None:
    """For a benchmark that needs no data."""


def _measure(rank: int, measure: Callable[..., Measured], *args: Any) -> Measured | None:
    logging.disable(logging.WARNING)
    measured = measure(*args)
    return None if rank else measured
