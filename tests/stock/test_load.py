"""A set-up that fails ends with one sentence, and nothing else is printed."""

import sys
from typing import Any

import pytest
from omegaconf import OmegaConf
from torchtune import config

from torchtune_adaptive.errors import InputError
from torchtune_adaptive.stock.load import setting_up


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


def test_a_block_that_torchtune_cannot_create_is_named_with_its_values() -> None:
    cfg = OmegaConf.create({"metric_logger": {"_component_": "tests.stock.test_load.Logger", "path": "/no/such/file"}})
    with pytest.raises(InputError) as refused, setting_up():
        config.instantiate(cfg.metric_logger)
    assert str(refused.value).startswith(
        "`metric_logger` must be one that can be created, but failed with {'_component_': "
        "'tests.stock.test_load.Logger', 'path': '/no/such/file'}: FileNotFoundError: "
    )
