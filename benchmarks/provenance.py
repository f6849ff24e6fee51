"""How a result was measured: command, date, commit, machine and versions."""

import os
import platform
import subprocess
import time
from collections.abc import Sequence
from importlib.metadata import version

_WRITTEN = ("benchmarks/results",)  # by benchmarks
PACKAGES = ("torch", "torchtune", "torchao")


def commit() -> str:
    """The present commit's short name, and whether the working tree differs from it, but for results."""

    def git(*command: str) -> str:
        return subprocess.run(["git", *command], capture_output=True, text=True, check=False).stdout.strip()

    but_results = (".", *(f":(exclude){path}" for path in _WRITTEN))
    differs = git("status", "--porcelain", "--", *but_results)
    return git("rev-parse", "--short", "HEAD") + (" with changes" if differs else "")


def provenance(
    command: str,
    *,
    ranks: str = "",
    seconds: float | None = None,
    load: float | None = None,
    commit_name: str | None = None,
    device: str = "no GPU",
    packages: Sequence[str] = PACKAGES,
) -> str:
    """Command, date, commit, machine and versions in a sentence or two, for the head of a document.

    Args:
        ranks: how many processes took part, and of what kind.
        seconds: how long the command took.
        load: the machine's load before the command; the load after it is read now.
        commit_name: the commit of the tree, if it is not a repository.
        packages: the packages whose versions matter.
    """
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {device}" + (f", {ranks}" if ranks else "")
    versions = [f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in packages)]
    day = time.strftime("%Y-%m-%d")
    text = f"`{command}`, {day}, commit {commit_name or commit()}, {machine}, {', '.join(versions)}"
    if seconds is not None:
        text += f"; {seconds:.0f} s"
    if load is not None:
        text += f". The machine's load was {load:.1f} before and {os.getloadavg()[0]:.1f} after"
    return text + "."
