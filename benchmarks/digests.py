"""What do the digests of a checkpoint cost: when it is saved, and when a run resumes from it?

    python -m benchmarks.digests

One process saves a model in turns with digests and without, and without them with torch's checksums, as before there
were digests. Then it compares the digests as a resume does, and loads the checkpoint. Prints a table and writes it to
``results/digests_cpu.md``, with an estimate for a model of 8 billion parameters from the rate that was measured.
"""

import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median
from unittest import mock

import torch
from torch import nn

from benchmarks.provenance import provenance
from benchmarks.tables import publish, spread, table
from tests.support.ranks import run_alone
from tests.support.toys import STATE
from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.files import sync
from torchtune_adaptive.settings import AdaptiveSettings
from torchtune_adaptive.training.checkpoints import folder as folder_module
from torchtune_adaptive.training.checkpoints import steps as steps_module
from torchtune_adaptive.training.checkpoints.digests import first_change
from torchtune_adaptive.training.checkpoints.folder import CheckpointFolder
from torchtune_adaptive.training.checkpoints.steps import StepCheckpoints

RESULTS = Path(__file__).parent / "results" / "digests_cpu.md"
COMMAND = "python -m benchmarks.digests"
MEGABYTES, SAVES = (16, 1024, 4096), 8  # of a checkpoint; times that each is saved
WITH, WITHOUT, COMPARE, LOAD = "with digests", "without", "compare", "load"
GB_OF_8B, RANKS = 48, 8  # 16 GB of weights, 32 GB of moments
GB_PER_S = (1, 2, 5)


def main() -> None:
    """Measure and write the table."""
    load, started = os.getloadavg()[0], time.perf_counter()
    found: dict[int, dict[str, list[float]]] = {}
    for megabytes in MEGABYTES:
        with tempfile.TemporaryDirectory() as directory:
            found[megabytes] = run_alone(_digests, Path(directory), megabytes)
    rows = [
        [
            f"{megabytes} MiB",
            *(f"{median(seconds[name]):.2f} s" for name in (WITHOUT, WITH)),
            spread([one / other for one, other in zip(seconds[WITH], seconds[WITHOUT], strict=True)]),
            *(f"{median(seconds[name]):.2f} s" for name in (COMPARE, LOAD)),
        ]
        for megabytes, seconds in found.items()
    ]
    processors = len(os.sched_getaffinity(0))
    rate = MEGABYTES[-1] * 2**20 / 1e9 / median(found[MEGABYTES[-1]][COMPARE]) / processors
    estimate = [
        [
            f"{threads}",
            f"{GB_OF_8B / RANKS / (rate * threads):.1f} s",
            *(f"{GB_OF_8B / RANKS / (rate * threads) / (GB_OF_8B / disk):.3f}" for disk in GB_PER_S),
        ]
        for threads in (1, 2, 4, 8)
    ]
    lines = [
        "# What the digests of a checkpoint cost, CPU",
        "",
        provenance(COMMAND, seconds=time.perf_counter() - started, load=load),
        "",
        f"One process saves a model without optimizer state, {SAVES} times with digests and {SAVES} times without, in"
        " turns, each first in half of the pairs; medians, and [quartiles] of the ratio of neighbours. Without digests"
        " torch computes its checksums, as by default; with digests it does not. Digests are computed while the files"
        " are forced to disk. To resume, the digests of files in memory are compared, then they are loaded.",
        "",
        *table(["checkpoint", "without digests", "with digests", "with / without", "compare", "load"], rows),
        "",
        f"Full finetuning of 8 billion parameters in bfloat16 with AdamW, an estimate: {GB_OF_8B} GB, of which each"
        f" of {RANKS} ranks writes its part, at the {rate:.2f} GB/s of a thread here. Not measured. The last columns"
        " are the time of the digests by that of the disk, which all ranks share, if nothing overlapped and torch's"
        " checksums had cost nothing. Resuming costs the same seconds.",
        "",
        *table(
            ["threads of a rank", "digests", *(f"/ writing, disk of {disk} GB/s" for disk in GB_PER_S)],
            estimate,
        ),
    ]
    publish(lines, RESULTS)


def _digests(directory: Path, megabytes: int) -> dict[str, list[float]]:
    """Seconds to save a model of that size with and without digests, to compare them, and to load the checkpoint."""
    logging.disable(logging.WARNING)
    piece = 2**20 // 4 * min(megabytes, 64)
    model = nn.ParameterList(torch.rand(piece) for _ in range(max(1, megabytes // 64)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    folder = CheckpointFolder(directory)
    steps = StepCheckpoints(folder, model, [optimizer], AdaptiveSettings(), Consensus())
    config = {"optimizer._component_": "torch.optim.SGD"}
    state = replace(STATE, optimizer=steps.options(), config=config)
    seconds: dict[str, list[float]] = {name: [] for name in (WITH, WITHOUT, COMPARE, LOAD)}

    def timed(name: str, work: Callable[[], object]) -> None:
        started = time.perf_counter()
        work()
        seconds[name].append(time.perf_counter() - started)

    for number in range(2 * SAVES):
        name = (WITH, WITHOUT)[(number + number // 2) % 2]  # each comes first in half of the pairs
        with ExitStack() as stack:
            if name == WITHOUT:
                stack.enter_context(mock.patch.object(steps_module, "_without_checksums", nullcontext))
                for module in (steps_module, folder_module):
                    stack.enter_context(mock.patch.object(module, "settle", _only_sync))
            timed(name, lambda: steps.save(state, at_once=True))
        if name == WITH:
            (checkpoint,) = folder.checkpoints()
            timed(COMPARE, lambda one=checkpoint: first_change(one.path, one.digests))
            timed(LOAD, lambda one=checkpoint: steps.load(one, config=config))
    return seconds


def _only_sync(folder: Path, names: Iterable[str]) -> dict[str, str]:
    for name in names:
        sync(folder / name)
    return dict.fromkeys(names, "")


if __name__ == "__main__":
    main()
