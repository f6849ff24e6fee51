"""A set-up that fails ends with one sentence, and nothing else is printed."""

import sys
from typing import Any

import pytest

from torchtune_adaptive.errors import InputError
from torchtune_adaptive.stock.set_up import setting_up


class Logger:
    """Fails when it is created and again when it is deleted, as torchtune's loggers do without their folder."""

    def __init__(self, path: str) -> None:
        with open(path) as self._file:
            pass

    def __del__(self) -> None:
        self._file.close()


def test_deleting_a_partly_created_component_prints_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    with pytest.raises(InputError) as refused, setting_up():
        Logger("/no/such/file")
    assert str(refused.value).startswith("The config must be one that its recipe can set up, but failed: FileNotFound")
    refused.value.__cause__ = None
    assert printed == []
    assert sys.unraisablehook == printed.append


def test_a_refusal_is_passed_on_unchanged() -> None:
    with pytest.raises(InputError) as refused, setting_up():
        raise InputError("`x` is wrong.")
    assert str(refused.value) == "`x` is wrong."
