"""Progress bars."""

import io
import threading

import pytest
from tqdm import tqdm

from torchtune_adaptive.engine.progress import Bar


def test_a_bar_starts_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tqdm, "monitor", None)  # which another bar may have started
    before = threading.active_count()
    for disable in (False, True):
        assert list(Bar(range(3), disable=disable, file=io.StringIO())) == [0, 1, 2]
    assert threading.active_count() == before
    assert Bar.monitor is None
