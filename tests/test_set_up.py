"""What a recipe's set-up fails with is one sentence, and nothing else is printed."""

import sys
from typing import Any

import pytest

from torchtune_adaptive.errors import InputError
from torchtune_adaptive.stock.set_up import setting_up


class Logger:
    """Fails as it is made, and again as it is thrown away, as torchtune's loggers do without their folder."""

    def __init__(self, path: str) -> None:
        with open(path) as self._file:
            pass

    def __del__(self) -> None:
        self._file.close()


def test_a_component_that_is_half_made_is_thrown_away_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    with pytest.raises(InputError) as refused, setting_up():
        Logger("/no/such/file")
    assert str(refused.value).startswith("The config must be one that its recipe can set up, but failed: FileNotFound")
    refused.value.__cause__ = None
    assert printed == []
    assert sys.unraisablehook == printed.append


def test_a_refusal_stays_as_it_is() -> None:
    with pytest.raises(InputError) as refused, setting_up():
        raise InputError("`x` is wrong.")
    assert str(refused.value) == "`x` is wrong."
