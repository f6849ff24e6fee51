"""Runs ``tune-adaptive`` in the process of the test."""

from typing import NamedTuple

import pytest

from torchtune_adaptive.cli import main


class Ended(NamedTuple):
    """Exit status and output of the program."""

    status: int
    out: str
    err: str


class Program:
    """Called with the arguments of ``tune-adaptive``."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str) -> Ended:
        with pytest.raises(SystemExit) as end:
            main(arguments)
        out, err = self._capsys.readouterr()
        if isinstance(end.value.code, str):  # which the interpreter prints as it ends
            return Ended(1, out, f"{err}{end.value.code}\n")
        return Ended(end.value.code or 0, out, err)

    def refuses(self, *arguments: str, sentence: str) -> None:
        """Check that the program prints nothing but one sentence on standard error, with ``sentence`` in it."""
        ended = self(*arguments)
        assert sentence in ended.err
        assert ended.err.startswith(f"tune-adaptive {arguments[0]}: ")
        assert ended.err.rstrip()[-1] in ".?"
        assert (ended.status, ended.out, ended.err.count("\n")) == (1, "", 1)
