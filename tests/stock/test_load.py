"""Stock recipes as they are loaded and set up."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch.utils.data import DataLoader
from torchtune import config

from tests.support.ranks import run_alone
from tests.support.recipe_runs import adaptive_recipe, tiny_config
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.stock.load import connecting, setting_up, start_process_group, with_samples


def open_to_all() -> int:
    """The number of ports of this process that listen on every interface of the machine."""
    mine = {os.readlink(one) for one in Path("/proc/self/fd").iterdir() if one.is_symlink()}
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/self/net", name).read_text().splitlines()]
    listening = [line for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in mine]
    return sum(set(line[1].partition(":")[0]) == {"0"} for line in listening)


def started_alone(launcher: dict[str, str]) -> tuple[float, int, int]:
    """A sum over the ranks, the ports that are open to all, and those with a store of torch's own."""
    os.environ.update(launcher)
    start_process_group("gloo")
    dist.all_reduce(value := torch.ones(()))
    own_ports = open_to_all()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)  # pyright: ignore[reportPrivateImportUsage]  # public
    assert store.port
    return value.item(), own_ports, open_to_all()


@pytest.mark.parametrize(
    "left_over", [{"MASTER_ADDR": "no.such.host.invalid"}, {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "x"}]
)
def test_a_rank_that_is_alone_needs_no_address_and_opens_no_port(left_over: dict[str, str]) -> None:
    assert run_alone(started_alone, left_over) == (1.0, 0, 1)


def refused_group(variables: dict[str, str]) -> str:
    os.environ.update(variables)
    try:
        start_process_group("gloo")
    except InputError as refusal:
        return str(refusal)
    return "not refused"


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"MASTER_ADDR": "127.0.0.1", "RANK": "0", "WORLD_SIZE": "2"}, "MASTER_PORT expected, but not set."),
        ({"RANK": "0", "WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "no-such"}, "Unable to find address for: no-such."),
    ],
)
def test_a_group_that_cannot_start_is_refused_with_what_the_environment_says(
    variables: dict[str, str], reason: str
) -> None:
    said = run_alone(refused_group, variables)
    assert said.startswith(f"The ranks cannot connect with {str(variables)[:-1]}")
    assert said.endswith(reason)
    assert "\n" not in said


@pytest.mark.slow
def test_a_recipes_own_group_that_cannot_start_is_refused(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr("torchtune_adaptive.stock.recipe.Consensus", refuse)
    cfg = tiny_config("full_single", tiny_dir, tmp_path)
    with pytest.raises(InputError, match=r"The ranks cannot connect with .*Connection closed by peer"):
        adaptive_recipe("full_single")(cfg)


@pytest.mark.parametrize("rank", ["2", "-1"])
def test_a_rank_that_the_others_do_not_know_is_refused_and_waits_for_nobody(
    rank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        pytest.raises(InputError, match=rf"'RANK': '{rank}', 'WORLD_SIZE': '2'.*: `RANK` must be from 0 to below"),
        connecting(),
    ):
        pytest.fail("connected")


def test_what_is_no_error_of_a_connection_passes() -> None:
    with pytest.raises(ZeroDivisionError), connecting():
        raise ZeroDivisionError


class Logger:
    """Fails when it is created and again when it is deleted, as torchtune's loggers do without their folder."""

    def __init__(self, path: str) -> None:
        with open(path) as self._file:
            pass

    def __del__(self) -> None:
        self._file.close()


def test_an_error_of_a_component_is_refused_with_its_place_and_deleting_the_component_prints_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    printed: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    with pytest.raises(InputError) as refused, setting_up():
        Logger("/no/such/file")
    said = str(refused.value)
    assert said.startswith("The recipe cannot be set up: FileNotFound")
    assert said.count("(test_load.py, line ") == 1
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
        "`metric_logger` cannot be created from {'_component_': 'tests.stock.test_load.Logger',"
        " 'path': '/no/such/file'}: FileNotFoundError: "
    )


def test_samples_that_do_not_fill_a_batch_are_dropped_also_where_torchtune_trains_on_them() -> None:
    """As in distillation on several ranks: the learning rate schedule has a step for each batch of the loader."""
    dataset: Any = [1, 2, 3, 4, 5]
    sampler, loader = with_samples((None, DataLoader(dataset, batch_size=2)))
    assert (sampler, len(loader), [one.tolist() for one in loader]) == (None, 2, [[1, 2], [3, 4]])
