"""A warning before training about host memory that torch leaks in optimizer steps of a sharded model."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.ranks import run_on_ranks
from tests.test_assembly import Recipe
from torchtune_adaptive.assembly import build_trainer
from torchtune_adaptive.distributed.consensus import Consensus
from torchtune_adaptive.settings import AdaptiveSettings
from torchtune_adaptive.training.host_leak import leak_warning
from torchtune_adaptive.training.optimizers import OptimizerStep

LEAKING = ("2.10.", "2.11.")  # measured by benchmarks/host_growth.py
IMPLEMENTATIONS: list[dict[str, Any]] = [{"fused": True}, {"foreach": True}, {"foreach": False}]


@contextmanager
def leaks(kept: list[Any]) -> Iterator[None]:
    """Inside, each step of AdamW alone leaks an object of 100 bytes per parameter, or ten objects if fused."""
    step = torch.optim.AdamW.step

    def step_and_leak(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        group = optimizer.param_groups[0]
        kept.extend([bytes(100)] for _ in range((1 + 9 * bool(group["fused"])) * len(group["params"])))
        return step(optimizer, *args, **kwargs)

    with mock.patch.object(torch.optim.AdamW, "step", step_and_leak):
        yield


def _sharded() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model


def _warnings(rank: int) -> dict[str, list[str | None]]:
    model = _sharded()
    adamws = [torch.optim.AdamW(model.parameters(), lr=0.1, **options) for options in IMPLEMENTATIONS]
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    found = {"of torch": [leak_warning([one]) for one in [*adamws, sgd]]}
    with leaks([]):
        found["leaking"] = [leak_warning([one]) for one in adamws]
        found["not sharded"] = [leak_warning([torch.optim.AdamW(nn.Linear(4, 4).parameters())])]
        found["other kinds"] = [leak_warning([torch.optim.Adagrad(model.parameters())]), leak_warning([])]
    with mock.patch.object(torch.optim.AdamW, "step", mock.Mock(side_effect=RuntimeError("on purpose"))):
        found["fails"] = [leak_warning([adamws[0]])]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(one.state for one in adamws)
    return found


@pytest.fixture(scope="module")
def warnings() -> dict[str, list[str | None]]:
    [found] = run_on_ranks(_warnings, 1)
    return found


def test_versions_of_torch_that_leak_are_detected(warnings: dict[str, list[str | None]]) -> None:
    assert [line is not None for line in warnings["of torch"]] == [torch.__version__.startswith(LEAKING)] * 4


def test_the_warning_has_figures_and_names_what_leaks_less(warnings: dict[str, list[str | None]]) -> None:
    fused, foreach, for_loop = warnings["leaking"]
    assert fused is not None
    assert fused.startswith(f"AdamW of torch {torch.__version__} leaks ")
    assert "in 10000 steps: torch 2.12.1 does not, and optimizer.foreach=" in fused
    for line in (foreach, for_loop):
        assert line is not None
        assert line.count("\n") == 0


def test_models_that_are_not_sharded_and_other_optimizers_are_not_tried(warnings: dict[str, list[str | None]]) -> None:
    assert warnings["not sharded"] + warnings["other kinds"] == [None] * 3


def test_an_error_of_the_trial_is_left_to_the_real_step(warnings: dict[str, list[str | None]]) -> None:
    assert warnings["fails"] == [None]


def _logged_before_training(rank: int, directory: Path) -> list[str]:
    recipe = Recipe(directory)
    fully_shard(recipe.model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.AdamW(recipe.model.parameters(), lr=0.1, fused=True)
    stepping = OptimizerStep(recipe.model, [optimizer], ranks=1, max_grad_norm=1.0)
    logged: list[str] = []
    note = mock.patch.object(logging.Logger, "warning", lambda logger, text: logged.append(text))
    with leaks([]), note:
        build_trainer(replace(recipe.parts, stepping=stepping, scheduler=None), AdaptiveSettings(), Consensus())
    return [line for line in logged if "host memory" in line]


def test_a_recipe_logs_the_warning_in_one_line(tmp_path: Path) -> None:
    [[line]] = run_on_ranks(_logged_before_training, 1, tmp_path)
    assert line.startswith("AdamW of torch")
