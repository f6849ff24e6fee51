"""This checkout, and programs of it that tests start. Imports nothing but the standard library."""

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def environment(**variables: str) -> dict[str, str]:
    """The environment of a process that finds the package and all recipes, those of tests too, as if installed."""
    folders = (str(REPOSITORY / name) for name in ("", "recipes", "tests/support"))
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(folders)} | variables


def tune_run(*arguments: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """``tune run ARGUMENTS`` in ``directory``."""
    command = [str(Path(sys.executable).parent / "tune"), "run", *arguments]
    return subprocess.run(
        command, cwd=directory, env=environment(), capture_output=True, text=True, timeout=600, check=False
    )
