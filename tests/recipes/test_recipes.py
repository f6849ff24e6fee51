"""The recipes on two ranks: a search restores all state; sizes, growth, learning rates and figures are right."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from torch.utils.data import DistributedSampler

from tests.support.method_runs import QUICK, ROWS_THAT_FIT, STRATEGIES, Trials
from tests.support.ranks import run_alone, run_on_ranks
from tests.support.recipe_runs import (
    SHALLOW,
    Step,
    adaptive_recipe,
    finished,
    set_up,
    shallow_assets,
    tiny_config,
    without_saving,
)
from tests.support.run_logs import events_in
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.training import trainer

LIMIT = "64MiB"
GROWING = {"_component_": "torchtune_adaptive.schedule.linear", "increment": 2}


def _grow(tiny_dir: Path, output_dir: Path) -> list[dict[str, float]]:
    growing: dict[str, Any] = SHALLOW | {
        "epochs": 4,
        "batch_size": 2,
        "batch_increase_function": GROWING,
        "dataset__split": "train[:24]",
        "lr_scheduler__num_warmup_steps": 5,
        "tokenizer__max_seq_len": 64,
    }
    growing["adaptive"] = QUICK | {"memory_limit": "160MiB", "power_of_two": False, "max_batch_size": 6}
    steps, _, _ = finished(
        without_saving(adaptive_recipe("full")), tiny_config("full", tiny_dir, output_dir, **growing)
    )
    return steps


def _train_on_two_ranks(rank: int, tiny_dir: Path, output_dir: Path) -> dict[str, Any]:
    return {
        "full": Trials("full", tiny_dir, output_dir / "full", gradient_accumulation_steps=2).search(STRATEGIES[:1]),
        "lora": Trials("lora", tiny_dir, output_dir / "lora").search(STRATEGIES[:1], objective="throughput"),
        "growth": _grow(tiny_dir, output_dir / "growth"),
    }


@pytest.fixture(scope="module")
def two_ranks(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    output_dir = tmp_path_factory.mktemp("two_ranks")
    ranks = run_on_ranks(_train_on_two_ranks, 2, shallow_assets(tiny_dir), output_dir)
    return [rank | {"decisions": events_in(output_dir / "growth", "sizes")} for rank in ranks]


@pytest.mark.parametrize(("kind", "timed"), [("full", None), ("lora", [6, 3, 1])])
def test_a_search_restores_all_state_and_training_equals_a_run_with_that_size(
    kind: str, timed: list[int] | None, two_ranks: list[dict[str, Any]]
) -> None:
    """Also with gradients that micro-steps accumulate, and where steps of several sizes are timed."""
    for rank in (rank[kind] for rank in two_ranks):
        assert rank["found"] == [ROWS_THAT_FIT]
        assert rank["timed"] == timed
        assert rank["traces"] == []
        assert rank["parameters equal"]
    searched, told = two_ranks[0][kind]["figures"]
    assert len(told) == 2
    assert searched == told


def test_growth_sets_sizes_and_steps_per_epoch(two_ranks: list[dict[str, Any]]) -> None:
    steps, decisions = two_ranks[0]["growth"], two_ranks[0]["decisions"]
    # 12 samples per rank: 6 steps at 2 rows, 3 at 4, 2 at 6, and 2 again because 8 rows are refused
    assert [step["batch_size"] for step in steps] == [2] * 6 + [4] * 3 + [6] * 4
    assert [step["global_batch_size"] for step in steps] == [4] * 6 + [8] * 3 + [12] * 4
    assert [(entry["epoch"], entry["batch_size"]) for entry in decisions] == [(0, 2), (1, 4), (2, 6)]
    assert [step["step"] for step in steps] == list(range(1, 14))


# ---- on one rank


def _train_packed(tiny_dir: Path, output_dir: Path) -> tuple[int, list[float]]:
    """Many micro-batches with masks, in memory at once, and a limit without margin that just allows the search."""
    common: dict[str, Any] = SHALLOW | {"dataset__packed": True, "gradient_accumulation_steps": 12}
    common |= {"epochs": 1, "max_steps_per_epoch": 2, "batch_size": 2}
    common |= {"tokenizer__max_seq_len": 256, "use_maximum_batch_size": True}
    settings = {"max_batch_size": 2, "power_of_two": False, "margin": 0.0}
    recipe_class = without_saving(adaptive_recipe("full"))
    cfg = tiny_config("full", tiny_dir, output_dir, **common, adaptive=settings | {"memory_limit": "2GiB"})
    peak_bytes = max(probe.peak_bytes for probe in set_up(recipe_class, cfg).trainer.sizes.result.probes)
    cfg = tiny_config("full", tiny_dir, output_dir, **common, adaptive=settings | {"memory_limit": peak_bytes})
    steps, _, recipe = finished(recipe_class, cfg)
    return recipe.trainer.sizes.result.batch_size, [step["peak_memory_bytes"] / peak_bytes for step in steps]


def _tensor_rate(tiny_dir: Path, output_dir: Path) -> list[float]:
    """The options of an optimizer whose rate is a tensor, as torchao's are, after a search and some steps."""
    options: dict[str, Any] = SHALLOW | {"epochs": 1, "max_steps_per_epoch": 3, "tokenizer__max_seq_len": 64}
    options |= {"use_maximum_batch_size": True, "adaptive__memory_limit": LIMIT, "adaptive__max_batch_size": 4}
    options["optimizer"] = {"_component_": "tests.support.recipe_runs.adamw_with_tensor_rate", "lr": 1e-3}
    _, _, recipe = finished(
        without_saving(adaptive_recipe("full")), tiny_config("full", tiny_dir, output_dir, **options)
    )
    group = recipe._optimizer.param_groups[0]
    return [float(group["lr"]), float(group["initial_lr"])]


def _train_beyond_the_limit(tiny_dir: Path, output_dir: Path) -> tuple[str, list[dict[str, float]]]:
    """A batch_size without a search, under a limit that it exceeds, and under a limit where not even one row fits."""
    common: dict[str, Any] = SHALLOW | {"batch_size": 32, "max_steps_per_epoch": 2, "epochs": 1}
    recipe_class = without_saving(adaptive_recipe("full"))
    with pytest.raises(InputError) as refusal:
        set_up(recipe_class, tiny_config("full", tiny_dir, output_dir, **common, adaptive__memory_limit="14MiB"))
    cfg = tiny_config("full", tiny_dir, output_dir, **common, adaptive__memory_limit="128MiB")
    steps, _, _ = finished(recipe_class, cfg)
    return str(refusal.value), steps


def _train_alone(rank: int, tiny_dir: Path, output_dir: Path) -> dict[str, Any]:
    return {
        "packed": _train_packed(tiny_dir, output_dir / "packed"),
        "tensor rate": _tensor_rate(tiny_dir, output_dir / "tensor_rate"),
        "beyond the limit": _train_beyond_the_limit(tiny_dir, output_dir / "beyond"),
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


def test_a_rate_that_is_a_tensor_keeps_its_initial_value(alone: dict[str, Any]) -> None:
    rate, initial_rate = alone["tensor rate"]
    assert rate < initial_rate == pytest.approx(1e-3)


def test_training_without_a_search_beyond_the_limit_takes_smaller_micro_batches(alone: dict[str, Any]) -> None:
    refusal, steps = alone["beyond the limit"]
    assert "the first rows of the data set must fit" in refusal
    assert "limit 14.0 MiB" in refusal
    assert [step["batch_size"] for step in steps] == [32, 32]
    assert 1 <= steps[-1]["micro_batch_size"] < 32
    assert steps[-1]["oom_retries"] >= 1


# ---- what is logged


def _log_figures(tiny_dir: Path, output_dir: Path) -> tuple[list[Step], list[int], list[int]]:
    """Steps, and each sample's tokens, and those that count in the loss, in the order of training."""
    options: dict[str, Any] = SHALLOW | {"batch_size": 3, "gradient_accumulation_steps": 2, "epochs": 1}
    options |= {"dataset__split": "train[:36]", "tokenizer__max_seq_len": 64, "log_every_n_steps": 2}
    cfg = tiny_config("full_single", tiny_dir, output_dir, **options, adaptive__memory_limit=None)
    seconds = itertools.count(step=0.5)  # of a wait for samples, and of the step on them: together one
    with mock.patch.object(trainer, "time", SimpleNamespace(perf_counter=lambda: next(seconds))):
        steps, _, recipe = finished(without_saving(adaptive_recipe("full_single")), cfg)
    dataset = recipe.trainer.loader.dataset
    samples = [dataset[place] for place in DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=True, seed=0)]
    counted = [sum(label != recipe._loss_fn.ignore_index for label in sample["labels"]) for sample in samples]
    return steps, [len(sample["tokens"]) for sample in samples], counted


def test_logged_figures_are_those_of_the_samples(tiny_dir: Path, tmp_path: Path) -> None:
    """Every second step is logged: with the padding of both steps' micro-batches, and with its own tokens."""
    steps, lengths, counted = run_alone(_log_figures, shallow_assets(tiny_dir), tmp_path)
    assert len(set(lengths)) > 1
    assert [step["step"] for step in steps] == [2, 4, 6]
    assert [step["padding"] for step in steps] == pytest.approx(
        [_padding(lengths[start : start + 12], rows=3) for start in (0, 12, 24)]
    )
    assert [step["tokens_per_second_per_gpu"] for step in steps] == [
        sum(counted[end - 6 : end]) for end in (12, 24, 36)
    ]
    for step in steps:
        assert step["global_batch_size"] == 3 * 2 * 1
        assert (step["batch_size"], step["micro_batch_size"], step["oom_retries"]) == (3, 3, 0)


def _keys_that_torchtune_ignores(tiny_dir: Path, output_dir: Path) -> tuple[list[Step], str]:
    options: dict[str, Any] = SHALLOW | {"epochs": 1, "max_steps_per_epoch": 2, "adaptive__memory_limit": None}
    recipe_class = without_saving(adaptive_recipe("lora_dpo_single"))
    options |= {"tokenizer__max_seq_len": 64}
    steps, *_ = finished(
        recipe_class, tiny_config("lora_dpo_single", tiny_dir, output_dir, **options, clip_grad_norm=1e-3)
    )
    with pytest.raises(InputError) as refusal:
        set_up(recipe_class, tiny_config("lora_dpo_single", tiny_dir, output_dir, **options, optimizer_in_bwd=True))
    return steps, str(refusal.value)


def test_keys_that_only_some_stock_recipes_read_are_used_or_refused(tiny_dir: Path, tmp_path: Path) -> None:
    steps, refused = run_alone(_keys_that_torchtune_ignores, shallow_assets(tiny_dir), tmp_path)
    assert [step["grad_norm"] > 0 for step in steps] == [True, True]
    assert refused == "`optimizer_in_bwd` must be False for this recipe, which lacks it, but is True instead."


def _padding(lengths: Sequence[int], *, rows: int) -> float:
    """The share of padding in micro-batches of ``rows`` samples."""
    micro_batches = [lengths[start : start + rows] for start in range(0, len(lengths), rows)]
    padded = sum(len(one) * max(one) for one in micro_batches)
    return (padded - sum(lengths)) / padded
