"""How a recipe uses the sizes that a search finds: as rows, as tokens, as the fastest size, and beyond memory.

Which sizes are found, and from where the batch may grow, is tested in ``tests/training/test_sizes.py`` and
``test_start.py``.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support.ranks import run_on_ranks
from tests.support.recipe_runs import (
    SHALLOW,
    adaptive_recipe,
    set_up,
    shallow_assets,
    tiny_config,
    trained,
    without_saving,
)
from torchtune_adaptive.engine.search.timing import Timing
from torchtune_adaptive.training import sizes
from torchtune_adaptive.training.batch.limits import MicroBatchLimit, RowLimit, TokenLimit

pytestmark = pytest.mark.exhaustive
UNEQUAL = ("40MiB", "80MiB")  # rank 0's limit, the lower one, counts for both
DOUBLING = {"_component_": "torchtune_adaptive.schedule.geometric"}
SAMPLES = 120  # of an epoch, on both ranks
RATES = {4: 1000, 2: 985, 1: 500}
SEARCHED = {"use_maximum_batch_size": True}
SET_UPS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rows of a global batch": (SEARCHED, {"global_batch_size": 50}),
    "fastest that grows beyond memory": (
        SEARCHED | {"batch_increase_function": DOUBLING},
        {"objective": "speed", "growth_limit": 33},
    ),
    "tokens": (SEARCHED, {"max_tokens_per_micro_batch": "auto", "global_batch_size": 60}),
}


def _timings(loop: Any, steps: Mapping[MicroBatchLimit, Any], **_: Any) -> Mapping[MicroBatchLimit, Timing]:
    return {limit: Timing((1.0,), RATES[limit.size]) for limit in steps}


def _size_all(rank: int, tiny_dir: Path, output_dir: Path) -> dict[str, dict[str, Any]]:
    found = {}
    recipe_class = without_saving(adaptive_recipe("full"))
    common: dict[str, Any] = SHALLOW | {
        "tokenizer__max_seq_len": 128,
        "epochs": 1,
        "dataset__split": f"train[:{SAMPLES}]",
    }
    with mock.patch.object(sizes, "time_in_turns", _timings):
        for name, (keys, settings) in SET_UPS.items():
            adaptive = {"memory_limit": UNEQUAL[rank], "oom_recovery": name == "tokens"} | settings
            recipe = set_up(
                recipe_class, tiny_config("full", tiny_dir, output_dir, **common, **keys, adaptive=adaptive)
            )
            trainer = recipe.trainer
            found[name] = {
                "batch": trainer.loader.batch_size,
                "limit": trainer.micro_batches.limit,
                "exact": None if trainer.sizes.result is None else trainer.sizes.result.exact_batch_size,
                "maximum": trainer.growth.maximum,
                "steps": trainer.loader.steps_per_epoch,
            }
            if name == "tokens":
                steps, _ = trained(recipe)
                found["trained"] = {"retries": trainer.recoverable.retries, "steps": len(steps)}
    return found


@pytest.fixture(scope="module")
def ranks(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    return run_on_ranks(_size_all, 2, shallow_assets(tiny_dir), tmp_path_factory.mktemp("sizing"))


@pytest.mark.parametrize(
    ("name", "batch", "steps", "limit", "maximum"),
    [
        ("rows of a global batch", 50, SAMPLES // 50, RowLimit(4), 4),
        ("fastest that grows beyond memory", 2, SAMPLES // 4, RowLimit(2), 33),
    ],
)
def test_batch_and_micro_batch_are_what_was_asked_for(
    name: str,
    batch: int,
    steps: int,
    limit: MicroBatchLimit,
    maximum: int,
    ranks: list[dict[str, dict[str, Any]]],
) -> None:
    """Six rows of 128 tokens fit on rank 0; each rank has half of the samples."""
    expected = {"batch": batch, "limit": limit, "exact": 6, "maximum": maximum, "steps": steps}
    assert [rank[name] for rank in ranks] == [expected] * 2


def test_the_token_budget_is_that_of_the_lowest_limit_and_exceeds_whole_rows(
    ranks: list[dict[str, dict[str, Any]]],
) -> None:
    limits = [rank["tokens"]["limit"] for rank in ranks]
    assert limits[0] == limits[1]
    assert isinstance(limits[0], TokenLimit)
    assert 6 * 128 < limits[0].size < 7 * 128


def test_training_by_the_token_budget_stays_within_memory(ranks: list[dict[str, dict[str, Any]]]) -> None:
    assert ranks[0]["trained"] == {"retries": 0, "steps": SAMPLES // 60}
