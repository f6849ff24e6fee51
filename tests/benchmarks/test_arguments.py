"""A benchmark, which may run for half an hour, begins with its arguments."""

import runpy
import sys
from pathlib import Path

import pytest

import benchmarks

PROGRAMS = [path.stem for path in sorted(Path(benchmarks.__path__[0]).glob("*.py")) if "__main__" in path.read_text()]


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")  # another one has imported it
@pytest.mark.parametrize("name", PROGRAMS)
def test_an_unknown_argument_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--no-such-argument"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")
    assert ended.value.code == 2
    assert "--no-such-argument" in capsys.readouterr().err
