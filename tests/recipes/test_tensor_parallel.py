"""Full finetuning with tensor parallelism, alone and with FSDP2: parity, search, growth, recovery, resume, plan."""

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.recipes.test_methods import check_recovery, check_resume, check_search
from tests.support.method_runs import STRATEGIES, Trials
from tests.support.ranks import run_on_ranks
from tests.support.recipe_runs import shallow_assets, stock_recipe

TWO = {
    "tensor_parallel_dim": 2,
    "tensor_parallel_plan": {"_component_": "torchtune.models.llama3.base_llama_tp_plan"},
    "optimizer__fused": False,
    "clip_grad_norm": None,
}
RANKS = [2, pytest.param(4, marks=pytest.mark.exhaustive)]  # without and with FSDP2


def _use_one_mesh() -> None:
    """All recipes of a process use one mesh. torch keeps the mesh of the first one for operations that it knows."""
    names = stock_recipe("full")._setup_model.__globals__
    names["init_device_mesh"] = functools.cache(names["init_device_mesh"])


def _parity_and_search(rank: int, tiny_dir: Path, output_dir: Path) -> dict[str, Any]:
    _use_one_mesh()
    trials = Trials("full", tiny_dir, output_dir, **TWO)
    return {"parity": trials.parity(2), "search": trials.search(STRATEGIES[2:], max_batch_size=8)}


def _more_trials(rank: int, tiny_dir: Path, output_dir: Path) -> dict[str, Any]:
    _use_one_mesh()
    trials = Trials("full", tiny_dir, output_dir, **TWO, enable_activation_checkpointing=True)
    return {
        "parity": trials.parity(1),
        "search": trials.search(),
        "growth": trials.growth(),
        "resume": trials.resume(within_epoch=True),
    }


def _every_seventh_operation(rank: int, tiny_dir: Path, output_dir: Path, checkpointing: bool) -> dict[str, Any]:
    _use_one_mesh()
    trials = Trials("full", tiny_dir, output_dir, **TWO, enable_activation_checkpointing=checkpointing)
    return trials.recovery(points=None)


@pytest.fixture(scope="module")
def outcomes(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function from trials and the number of ranks to their outcomes by rank. Trials are run once."""
    return functools.cache(
        lambda trials, ranks: run_on_ranks(
            trials, ranks, shallow_assets(tiny_dir), tmp_path_factory.mktemp("tensor_parallel"), timeout_s=1200
        )
    )


def _check_parity(ranks: list[dict[str, Any]]) -> None:
    """On more than two ranks torchtune sums losses in another order of roundings."""
    assert all(rank["parameters equal"] for rank in ranks)
    stock_steps, steps = ranks[0]["steps"]
    assert len(stock_steps) == len(steps) == 4
    assert [step["loss"] for step in steps] == pytest.approx([step["loss"] for step in stock_steps], rel=1e-6)
    assert [step["lr"] for step in steps] == [step["lr"] for step in stock_steps]


@pytest.mark.parametrize("ranks", RANKS)
def test_training_equals_the_stock_recipe(ranks: int, outcomes: Any) -> None:
    _check_parity([rank["parity"] for rank in outcomes(_parity_and_search, ranks)])


@pytest.mark.parametrize("ranks", RANKS)
def test_a_search_finds_what_fits_and_restores_all_state(ranks: int, outcomes: Any) -> None:
    """Also where probes fail between a collective of the model and the use of its result."""
    check_search([rank["search"] for rank in outcomes(_parity_and_search, ranks)], strategies=STRATEGIES[2:])


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_strategy_growth_and_resume(ranks: int, tiny_dir: Path, tmp_path: Path) -> None:
    found = run_on_ranks(_more_trials, ranks, shallow_assets(tiny_dir), tmp_path, timeout_s=1200)
    _check_parity([rank["parity"] for rank in found])
    check_search([rank["search"] for rank in found], strategies=STRATEGIES)
    assert found[0]["growth"] == [2, 4, 6]
    check_resume([rank["resume"] for rank in found], steps_left=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_seventh_operation(ranks: int, checkpointing: bool, tiny_dir: Path, tmp_path: Path) -> None:
    assets = shallow_assets(tiny_dir)
    found = run_on_ranks(_every_seventh_operation, ranks, assets, tmp_path, checkpointing, timeout_s=3 * 3600)
    check_recovery(found)
    print(f"{found[0]['struck']} faults, and as many right results")
