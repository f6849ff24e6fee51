"""A plan spares a search its tries, and never decides in its place."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from omegaconf import DictConfig

from tests.ranks import run_on_ranks
from tests.recipe_runs import adaptive_recipe, tiny_config
from torchtune_adaptive import expectation


def _searched(cfg: DictConfig, **patches: Any) -> tuple[int, list[tuple[int, bool]]]:
    """What a recipe's search finds where a plan pays, and what it tries."""
    recipe = adaptive_recipe("full")(cfg=cfg)
    with mock.patch.multiple(expectation, _pays=lambda *_: True, **patches):
        recipe.setup(cfg)
    result = recipe._report.result
    return result.exact_batch_size, [(probe.batch_size, probe.fits) for probe in result.probes]


def _no_plan(*_: Any, **__: Any) -> None:
    raise TimeoutError("too slow")


def _searches(rank: int, tiny_dir: Path, output_dir: Path) -> dict[str, Any]:
    limits = {"adaptive__memory_limit": "96MiB", "adaptive__power_of_two": False}
    cfg = tiny_config(
        "full", tiny_dir, output_dir, use_maximum_batch_size=True, adaptive__strategy="decrease_until_oom", **limits
    )
    traced = mock.Mock(side_effect=expectation.trace)
    planned = _searched(cfg, trace=traced)
    return {"planned": planned, "plans": traced.call_count, "not planned": _searched(cfg, trace=_no_plan)}


@pytest.fixture(scope="module")
def searches(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_on_ranks(_searches, 2, tiny_dir, tmp_path_factory.mktemp("output"), timeout_s=120.0)


def test_a_search_from_above_begins_at_what_the_plan_names_and_tries_the_size_above(
    searches: list[dict[str, Any]],
) -> None:
    for seen in searches:
        exact, tried = seen["planned"]
        assert tried == [(exact, True), (exact + 1, False)]


def test_without_a_plan_the_search_finds_the_same_by_more_tries(searches: list[dict[str, Any]]) -> None:
    for seen in searches:
        assert seen["not planned"][0] == seen["planned"][0]
        assert len(seen["not planned"][1]) > 2


def test_only_one_rank_plans(searches: list[dict[str, Any]]) -> None:
    assert [seen["plans"] for seen in searches] == [1, 0]
