"""Launch ranks of one module, end them in time, and keep what they printed last."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from benchmarks.on_gpu.nccl.group import STORE
from benchmarks.on_gpu.stage import Section, Stage

_GRACE_S = 10.0  # for the peers of a rank that has failed
_LINES, _LINE_CHARS = 8, 240  # of what a rank printed last
_WRONG = re.compile(r"NCCL WARN|Error\b|error:|exitcode")


class Stop(NamedTuple):
    """A signal to what has to end, and for how many seconds it may take."""

    number: int
    seconds: float


SHOW_STACKS = Stop(signal.SIGUSR1, 2.0)  # of a rank
END_RANKS = Stop(signal.SIGTERM, 40.0)  # of a launcher, which gives its ranks 30


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How a launch has ended.

    Attributes:
        ended: "done", or what was wrong.
        last_words: the last telling lines of each process that has failed.
        logs: all that the processes printed.
        statuses: with which they ended; None for one that had to be stopped.
    """

    ended: str
    seconds: float
    sections: list[Section] = field(default_factory=list)
    last_words: list[str] = field(default_factory=list)
    logs: list[str] = field(default_factory=list)
    statuses: list[int | None] = field(default_factory=list)


def run_ranks(stage: Stage, module: str, ranks: int, *, seconds: float, settings: Mapping[str, str]) -> Launch:
    """Run ``module`` of this package on ``ranks`` processes for at most ``seconds``."""
    directory = stage.directory / f"{module}_{ranks}_{time.monotonic_ns()}"
    directory.mkdir()
    ours = {"WORLD_SIZE": str(ranks), STORE: f"file://{directory}/store"}
    commands = [command_of(module, directory, seconds)] * ranks
    environments = [environment_of(stage, settings) | ours | {"RANK": str(rank)} for rank in range(ranks)]
    return run(commands, environments, directory, seconds=seconds)


def command_of(module: str, directory: Path, seconds: float) -> list[str]:
    """The command of one rank. What rank 0 measures is written into ``directory``."""
    part = f"{__package__}.{module}".removeprefix("benchmarks.on_gpu.")
    arguments = [part, str(directory / "sections.json"), str(seconds), str(directory)]
    return [sys.executable, "-m", "benchmarks.on_gpu", *arguments]


def environment_of(stage: Stage, settings: Mapping[str, str]) -> dict[str, str]:
    """The environment of a rank, with these ``settings`` of NCCL."""
    nccl = {} if stage.is_rehearsal else dict(settings)
    return os.environ | {"TEST_DEVICE": stage.device.type, "PYTHONUNBUFFERED": "1"} | nccl


def run(
    commands: Sequence[Sequence[str]],
    environments: Sequence[dict[str, str]],
    directory: Path,
    *,
    seconds: float,
    stop: Stop = SHOW_STACKS,
) -> Launch:
    """Run a process for each command; all end soon after one has failed, and when the ``seconds`` are over."""
    started = time.monotonic()
    paths = [directory / f"log_{number}.txt" for number in range(len(commands))]
    processes = []
    for command, environment, path in zip(commands, environments, paths, strict=True):
        with path.open("w") as log:
            processes.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment))
    hung = _end(processes, started + seconds, stop)
    logs = [path.read_text(errors="replace") for path in paths]
    statuses = [None if number in hung else process.returncode for number, process in enumerate(processes)]
    failed = [number for number, status in enumerate(statuses) if status]
    ended = [f"process {number} ended with status {statuses[number]}" for number in failed]
    ended += [f"process {number} had to be stopped after {time.monotonic() - started:.0f} s" for number in hung]
    return Launch(
        ended="; ".join(ended) or "done",
        seconds=time.monotonic() - started,
        sections=_sections(directory / "sections.json"),
        last_words=[f"process {number}: {last_words(logs[number])}" for number in failed]
        + [f"process {number}: {where_it_hung(logs[number])}" for number in hung],
        logs=logs,
        statuses=statuses,
    )


def _end(processes: "Sequence[subprocess.Popen[bytes]]", deadline: float, stop: Stop) -> list[int]:
    """Wait for the processes until ``deadline``, and end those that are left: their numbers."""
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            deadline = min(deadline, time.monotonic() + _GRACE_S)
        time.sleep(0.05)
    hung = [number for number, process in enumerate(processes) if process.poll() is None]
    for number in hung:
        processes[number].send_signal(stop.number)
    deadline = time.monotonic() + stop.seconds
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(0.05)
    for number in hung:
        processes[number].kill()
        processes[number].wait()
    return hung


def _sections(path: Path) -> list[Section]:
    return [Section(**section) for section in json.loads(path.read_text())] if path.exists() else []


def last_words(log: str) -> str:
    """The last lines that say what was wrong, or else the last lines.

    >>> last_words("a\\nNCCL WARN Duplicate GPU\\nb\\n")
    'NCCL WARN Duplicate GPU'
    """
    lines = _lines(log)
    return " / ".join((list(filter(_WRONG.search, lines)) or lines)[-_LINES:]) or "it printed nothing"


def where_it_hung(log: str) -> str:
    """What a process has printed of the stack of its main thread, the innermost function first."""
    _, found, stack = log.rpartition("Current thread")
    return " / ".join(_lines(stack)[1 : 1 + _LINES]) if found else last_words(log)


def _lines(log: str) -> list[str]:
    return [line.strip()[:_LINE_CHARS] for line in log.splitlines() if line.strip()]
