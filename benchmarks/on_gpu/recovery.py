"""Ranks that share the device and really run out of its memory, one at a time."""

import json
import subprocess
import sys
from collections.abc import Iterator
from statistics import median
from typing import Any

from benchmarks.on_gpu.ranks import BACKWARD_STEP, BATCH_SIZE, FORWARD_STEP, STEPS
from benchmarks.on_gpu.stage import Section, Stage

_WORLD_SIZES = (2, 4)
HEADER = ["ranks", "OOMs survived", "micro-batches by step", "losses equal", "parameters equal", "usual step, s"]
HEADER += [f"step {step} (OOM), s" for step in (FORWARD_STEP, BACKWARD_STEP)] + ["micro-batches set: s"]


def measure(stage: Stage) -> Iterator[list[Section]]:
    """Launch the ranks of each world size, one launch after the other."""
    text = [about(stage) + " FSDP2's collectives are staged through gloo on the host."]
    section = Section(title="Out of memory on one of several ranks", header=HEADER, text=text)
    failed: list[int] = []
    for world_size in _WORLD_SIZES:
        output = stage.directory / f"ranks_{world_size}.json"
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world_size)]
        part = ["-m", "benchmarks.on_gpu", "ranks", str(output), str(stage.seconds_left), str(stage.directory)]
        with subprocess.Popen([sys.executable, *launch, *part]) as ranks:
            try:
                ended = f"status {ranks.wait(timeout=max(1.0, stage.seconds_left))}"
            except subprocess.TimeoutExpired:
                ended = "no time was left"
                ranks.terminate()  # which ends the ranks too
        if ranks.returncode or not output.exists():
            text.append(f"{world_size} ranks did not come to their end: {ended}.")
            yield [section]
            failed.append(world_size)
            continue
        (seen,) = json.loads(output.read_text())[0]["data"]
        section.data.append(seen)
        section.rows.append(cells(seen, has_values=stage.has_values))
        text += [f"{world_size} ranks: {event}." for event in seen["events"]]
        yield [section]
    if failed:
        raise SystemExit(f"launches of {failed} ranks failed")


def about(stage: Stage) -> str:
    """What the ranks do."""
    return (
        f"Full finetuning, {BATCH_SIZE} rows per rank of {stage.seq_len} random tokens, ranks of"
        f" {stage.limit_text(stage.rank_limit_bytes)} on one device. Before step {FORWARD_STEP} a tensor takes memory"
        f" on rank 1 until its forward no longer fits, before the backward of step {BACKWARD_STEP} one on rank 0; both"
        f" go at the epoch's end, after step {STEPS}. *Equal*: bit for bit with a run that has nothing in the way and"
        " has these micro-batches set, whose times are in the last column; all with deterministic algorithms."
    )


def cells(seen: dict[str, Any], *, has_values: bool) -> list[str]:
    """The cells below ``HEADER``."""
    seconds, resized = seen["seconds"], seen["resized_seconds"]
    failed = [seconds[step - 1] for step in (FORWARD_STEP, BACKWARD_STEP)]
    equals = (seen["losses"] == seen["resized_losses"], seen["same_parameters"])
    return [
        str(seen["ranks"]),
        str(seen["ooms"]),
        " ".join(str(rows) for rows in seen["micro_batches"].values()),
        *(("yes" if equal else "no") if has_values else "not computed" for equal in equals),
        f"{median(seconds[STEPS:]):.2f}",
        *(f"{one:.2f}" for one in failed),
        ", ".join(f"{resized[step - 1]:.2f}" for step in (FORWARD_STEP, BACKWARD_STEP)),
    ]
