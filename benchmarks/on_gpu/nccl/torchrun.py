"""Launch ranks by torchrun, one of which is killed, and see how the run ends."""

import re
import sys
import time
from collections.abc import Mapping
from dataclasses import replace

from benchmarks.on_gpu.nccl.launch import END_RANKS, Launch, command_of, environment_of, last_words, run
from benchmarks.on_gpu.stage import Section, Stage

KILLED_RANK, KILLED_STEP = 1, 3
KILLED_AT = "killed_at"  # a file with the time
HEADER = ["ranks", "killed", "seconds until the launcher ended", "its status", "it names"]


def launch_killed(stage: Stage, ranks: int, *, seconds: float, settings: Mapping[str, str]) -> Launch:
    """Launch ``killed`` as ``tune run`` launches a recipe. "done": the launcher ended by itself and named the rank."""
    directory = stage.directory / "killed"
    directory.mkdir()
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    command = [sys.executable, *torchrun, *command_of("killed", directory, seconds)[1:]]
    launch = run([command], [environment_of(stage, settings)], directory, seconds=seconds, stop=END_RANKS)
    ended_at, killed_at = time.time(), directory / KILLED_AT
    if not killed_at.exists():
        return replace(launch, ended=f"no rank was killed: {launch.ended}")
    (log,), (status,) = launch.logs, launch.statuses
    named = re.findall(r"rank +: (\d+) .*\n +exitcode +: (-?\d+) ", log)
    cells = [
        str(ranks),
        f"rank {KILLED_RANK} in backward of step {KILLED_STEP}",
        f"{ended_at - float(killed_at.read_text()):.1f}",
        "was stopped" if status is None else str(status),
        "; ".join(f"rank {rank}, exit code {code}" for rank, code in named) or "nobody",
    ]
    text = ["Full finetuning of random weights, launched by torchrun. The last words: " + last_words(log)]
    section = Section(title="A rank is killed", header=HEADER, rows=[cells], text=text)
    launch = replace(launch, sections=[section])
    if status and (str(KILLED_RANK), "-9") in named:
        return replace(launch, ended="done", last_words=[])
    return launch
