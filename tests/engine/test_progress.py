"""A progress bar shows what it can, and never ends the work that it shows."""

import errno
import io
import sys
from typing import Any

import pytest

from torchtune_adaptive.engine.progress import Bar


class FullAfter(io.StringIO):
    """Output with room for some writes."""

    def __init__(self, writes: int) -> None:
        super().__init__()
        self._left = writes

    def write(self, text: str) -> int:
        self._left -= 1
        if self._left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(text)

    def flush(self) -> None:
        if self._left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")


def closed() -> io.StringIO:
    output = io.StringIO()
    output.close()
    return output


@pytest.mark.parametrize("make", [*(lambda n=n: FullAfter(n) for n in range(9)), closed, lambda: None])
def test_output_that_is_lost_at_any_moment_ends_nothing(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", make())
    assert list(Bar(range(3), mininterval=0, miniters=1)) == [0, 1, 2]
    with Bar(total=3, mininterval=0) as bar:
        for step in range(3):
            bar.update(1)
            bar.set_description(f"step {step}")


def test_output_that_is_not_lost_shows_the_whole_work(monkeypatch: pytest.MonkeyPatch) -> None:
    output = FullAfter(1000)
    monkeypatch.setattr(sys, "stderr", output)
    assert list(Bar(range(3))) == [0, 1, 2]
    assert "3/3" in output.getvalue()
