"""A search restores all state, the batch grows, and training stays within what the search has measured."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torchtune import training

from tests.recipes.test_methods import check_search
from tests.support.method_runs import QUICK, STRATEGIES, Trials
from tests.support.ranks import run_on_ranks
from tests.support.recipe_runs import (
    SHALLOW,
    adaptive_recipe,
    finished,
    set_up,
    shallow_assets,
    tiny_config,
    without_saving,
)
from torchtune_adaptive.errors import InputError


def _searched(rank: int, tiny_dir: Path, output_dir: Path) -> dict[str, Any]:
    return Trials("full", tiny_dir, output_dir, gradient_accumulation_steps=2).search(STRATEGIES[:1])


def test_a_search_restores_all_state_and_training_equals_a_run_with_that_size(tiny_dir: Path, tmp_path: Path) -> None:
    """Also with gradients that micro-steps accumulate."""
    check_search(run_on_ranks(_searched, 2, shallow_assets(tiny_dir), tmp_path), strategies=STRATEGIES[:1])


# ---- on one rank


def _train_packed(tiny_dir: Path, output_dir: Path) -> tuple[int, list[float]]:
    """Many micro-batches with masks, in memory at once, and a limit without margin that just allows the search."""
    common: dict[str, Any] = SHALLOW | {"dataset__packed": True, "gradient_accumulation_steps": 4}
    common |= {"epochs": 1, "max_steps_per_epoch": 2, "batch_size": 2}
    common |= {"tokenizer__max_seq_len": 128, "use_maximum_batch_size": True}
    settings = {"max_batch_size": 2, "power_of_two": False, "margin": 0.0}
    recipe_class = without_saving(adaptive_recipe("full"))
    cfg = tiny_config("full", tiny_dir, output_dir, **common, adaptive=settings | {"memory_limit": "2GiB"})
    peak_bytes = max(probe.peak_bytes for probe in set_up(recipe_class, cfg).trainer.sizes.result.probes)
    cfg = tiny_config("full", tiny_dir, output_dir, **common, adaptive=settings | {"memory_limit": peak_bytes})
    steps, _, recipe = finished(recipe_class, cfg)
    return recipe.trainer.sizes.result.batch_size, [step["peak_memory_bytes"] / peak_bytes for step in steps]


def _compiler_resets(tiny_dir: Path, output_dir: Path) -> list[int]:
    """How often the compiler is reset in a set-up with compilation, and in one without; nothing is really compiled."""
    resets = []
    for compiles in (True, False):
        with (
            mock.patch.object(training, "compile_model"),
            mock.patch.object(training, "compile_loss", lambda loss, **_: loss),
            mock.patch.object(torch.compiler, "reset") as reset,
        ):
            cfg = tiny_config("full", tiny_dir, output_dir, **SHALLOW, compile=compiles, adaptive=QUICK)
            set_up(adaptive_recipe("full"), cfg)
        resets.append(reset.call_count)
    return resets


def _keys_that_torchtune_ignores(tiny_dir: Path, output_dir: Path) -> tuple[float, str]:
    """The norm of a run with `clip_grad_norm`, and the refusal of `optimizer_in_bwd`."""
    options: dict[str, Any] = SHALLOW | {"epochs": 1, "max_steps_per_epoch": 1, "tokenizer__max_seq_len": 64}
    recipe_class = without_saving(adaptive_recipe("lora_dpo_single"))

    def config(**keys: Any) -> Any:
        return tiny_config("lora_dpo_single", tiny_dir, output_dir, **options, adaptive=QUICK, **keys)

    (step,), *_ = finished(recipe_class, config(clip_grad_norm=1e-3))
    with pytest.raises(InputError) as refusal:
        set_up(recipe_class, config(optimizer_in_bwd=True))
    return step["grad_norm"], str(refusal.value)


def _train_alone(rank: int, tiny_dir: Path, output_dir: Path) -> dict[str, Any]:
    return {
        "packed": _train_packed(tiny_dir, output_dir / "packed"),
        "compiler resets": _compiler_resets(tiny_dir, output_dir / "compiled"),
        "ignored keys": _keys_that_torchtune_ignores(tiny_dir, output_dir / "ignored"),
    }


@pytest.fixture(scope="module")
def alone(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (found,) = run_on_ranks(_train_alone, 1, shallow_assets(tiny_dir), tmp_path_factory.mktemp("alone"))
    return found


def test_training_never_needs_more_than_the_probe_did(alone: dict[str, Any]) -> None:
    batch_size, shares = alone["packed"]
    assert batch_size == 2
    assert len(shares) == 2
    assert 0.9 < max(shares) <= 1.0


def test_what_was_compiled_before_training_is_dropped(alone: dict[str, Any]) -> None:
    assert alone["compiler resets"] == [1, 0]


def test_keys_that_only_some_stock_recipes_read_are_used_or_refused(alone: dict[str, Any]) -> None:
    norm, refused = alone["ignored keys"]
    assert norm > 0
    assert refused == "`optimizer_in_bwd` must be False for this recipe, which lacks it, but is True instead."
