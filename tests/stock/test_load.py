"""Stock recipes as they are loaded and set up."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torchtune import config

from benchmarks.support.ranks import run_alone
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.stock.load import setting_up, start_process_group


def open_to_all() -> int:
    """The number of ports of this process that listen on every interface of the machine."""
    mine = {os.readlink(one) for one in Path("/proc/self/fd").iterdir() if one.is_symlink()}
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/self/net", name).read_text().splitlines()]
    listening = [line for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in mine]
    return sum(set(line[1].partition(":")[0]) == {"0"} for line in listening)


def group_of_one(launcher: dict[str, str]) -> tuple[float, int]:
    os.environ.update(launcher)
    start_process_group("gloo")
    dist.all_reduce(value := torch.ones(()))
    return value.item(), open_to_all()


def test_without_a_launcher_no_port_is_open_to_others() -> None:
    assert run_alone(group_of_one, {}) == (1.0, 0)
    launcher = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    assert run_alone(group_of_one, launcher) == (1.0, 1)  # torch's store


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
