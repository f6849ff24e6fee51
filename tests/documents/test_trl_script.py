"""The script of the page on TRL trains, on one process and on two."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkout import REPOSITORY

SCRIPT = REPOSITORY / "examples" / "trl_sft.py"
pytestmark = pytest.mark.integrations


@pytest.mark.parametrize("launcher", [[], ["-m", "torch.distributed.run", "--nproc_per_node", "2"]], ids=["1", "2"])
def test_the_script_finds_its_micro_batch_and_trains(launcher: list[str], tmp_path: Path) -> None:
    command = [sys.executable, *launcher, str(SCRIPT)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "16 samples per process and step, at most 5 at once" in done.stdout


def test_the_page_shows_the_script_that_runs() -> None:
    assert SCRIPT.read_text() in (REPOSITORY / "docs" / "trl.md").read_text()
