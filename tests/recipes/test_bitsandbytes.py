"""Optimizers of bitsandbytes, which many stock configs name: parity, search, recovery and resume on a CPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.recipes.test_methods import check_parity, check_recovery, check_resume, check_search
from tests.support.method_runs import STRATEGIES, Trials
from tests.support.ranks import run_alone
from tests.support.recipe_runs import shallow_assets


def _trials(name: str, assets: Path, output_dir: Path) -> Trials:
    optimizer = {"_component_": f"bitsandbytes.optim.{name}", "lr": 1e-2}
    return Trials("full_single", assets, output_dir, optimizer=optimizer)


def _one_fault(*where: Any) -> dict[str, Any]:
    return {"recovery": _trials(*where).recovery(points=1)}


def _all(*where: Any) -> dict[str, Any]:
    trials = _trials(*where)
    return {
        "parity": trials.parity(2),
        "search": trials.search(),
        "recovery": trials.recovery(points=8),
        "resume": trials.resume(within_epoch=True),
    }


def _outcomes(trials: Callable[..., dict[str, Any]], name: str, tiny_dir: Path, output_dir: Path) -> dict[str, Any]:
    return run_alone(trials, name, shallow_assets(tiny_dir), output_dir)


def test_a_step_with_an_8_bit_optimizer_recovers(tiny_dir: Path, tmp_path: Path) -> None:
    check_recovery([_outcomes(_one_fault, "PagedAdamW8bit", tiny_dir, tmp_path)["recovery"]])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["PagedAdamW", "PagedAdamW8bit"])
def test_all_that_recipes_do(name: str, tiny_dir: Path, tmp_path: Path) -> None:
    found = _outcomes(_all, name, tiny_dir, tmp_path)
    check_parity("full_single", [found["parity"]], accumulation=2)
    check_search([found["search"]], strategies=STRATEGIES)
    check_recovery([found["recovery"]])
    check_resume([found["resume"]], steps_left=2)
