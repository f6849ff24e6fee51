"""The recipes on two ranks: a search leaves no trace, sizes are exact, growth and schedule hold, resuming works."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_on_ranks
from tests.recipe_runs import adaptive_recipe, finished, local_parameters, same_bits, tiny_config
from torchtune_adaptive.distributed.snapshot import keep_random_states
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.memory.devices import meter_for

LIMIT = "64MiB"
GROWING = {"_component_": "torchtune_adaptive.schedule.linear", "increment": 2}


def _everything(recipe: Any) -> dict[str, Any]:
    """All that a search could leave a trace in, as values that can be compared."""
    optimizer = recipe._optimizer
    return {
        "parameters": local_parameters(recipe._model),
        "buffers": {name: buffer.clone() for name, buffer in recipe._model.named_buffers()},
        "gradients": [name for name, parameter in recipe._model.named_parameters() if parameter.grad is not None],
        "optimizer state": len(optimizer.state),
        "options": [
            {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
        ],
        "random": torch.get_rng_state().tolist(),
        "schedule": recipe._lr_scheduler.state_dict()["last_epoch"],
        "steps": (recipe.global_step, recipe._steps_per_epoch, recipe._dataloader.batch_size),
        "data": recipe._dataloader.state_dict()["_sampler_iter_yielded"],
        "logged": recipe._metric_logger.steps if dist.get_rank() == 0 else [],
    }


def _set_up(kind: str, tiny_dir: Path, output_dir: Path, **overrides: Any) -> Any:
    cfg = tiny_config(kind, tiny_dir, output_dir, **overrides)
    recipe = adaptive_recipe(kind)(cfg=cfg)
    recipe.setup(cfg=cfg)
    return recipe


def _search_then_train(rank: int, kind: str, tiny_dir: Path, output_dir: Path) -> dict[str, Any]:
    """Once with a search, once told the size that it found; dropout makes the random state visible in every loss."""
    common: dict[str, Any] = {"epochs": 2, "max_steps_per_epoch": 10, "adaptive__memory_limit": "160MiB"}
    if kind == "lora":
        common["model__lora_dropout"] = 0.1
    else:
        common["model__attn_dropout"] = 0.1
    searched = _set_up(kind, tiny_dir, output_dir, **common, use_maximum_batch_size=True)
    found = searched._report.result
    after_search = _everything(searched)
    told = _set_up(kind, tiny_dir, output_dir, **common, batch_size=found.batch_size)
    after_setup = _everything(told)
    searched_run = finished(
        adaptive_recipe(kind), tiny_config(kind, tiny_dir, output_dir, **common, use_maximum_batch_size=True)
    )
    told_run = finished(
        adaptive_recipe(kind), tiny_config(kind, tiny_dir, output_dir, **common, batch_size=found.batch_size)
    )
    return {
        "found": (found.exact_batch_size, found.batch_size, len(found.probes)),
        "traces": [name for name in after_setup if not _equal(after_search[name], after_setup[name])],
        "steps": (_figures(searched_run[0]), _figures(told_run[0])),
        "parameters equal": same_bits(searched_run[1], told_run[1]),
        "parameters moved": not same_bits(searched_run[1], after_setup["parameters"]),
    }


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, dict) and left and isinstance(next(iter(left.values())), torch.Tensor):
        return same_bits(left, right)
    return left == right


def _figures(steps: list[dict[str, float]]) -> list[tuple[float, ...]]:
    names = ("step", "loss", "lr", "batch_size", "grad_norm")
    return [tuple(step[name] for name in names) for step in steps]


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_search_leaves_no_trace_and_training_equals_a_run_told_the_size(
    kind: str, tiny_dir: Path, tmp_path: Path
) -> None:
    ranks = run_on_ranks(_search_then_train, 2, kind, tiny_dir, tmp_path, timeout_s=120)
    assert ranks[0]["found"] == ranks[1]["found"]
    assert ranks[0]["found"][1] > 1
    searched, told = ranks[0]["steps"]
    assert len(told) == 20
    assert searched == told
    for rank in ranks:
        assert rank["traces"] == []
        assert rank["parameters equal"]
        assert rank["parameters moved"]


def _all_strategies(rank: int, tiny_dir: Path, output_dir: Path) -> dict[str, Any]:
    found = {}
    for strategy in ("linear_extrapolation", "binary_search", "decrease_until_oom"):
        recipe = _set_up(
            "full",
            tiny_dir,
            output_dir / strategy,
            use_maximum_batch_size=True,
            gradient_accumulation_steps=2,
            adaptive={"strategy": strategy, "memory_limit": LIMIT, "max_batch_size": 40},
        )
        found[strategy] = recipe._report.result
    recipe = _set_up("full", tiny_dir, output_dir, gradient_accumulation_steps=2, adaptive__memory_limit=None)
    usable_bytes = found["binary_search"].memory_limit_bytes * (1 - found["binary_search"].margin)
    return {
        "found": found,
        "peaks": _metered_peaks(recipe, found["binary_search"].exact_batch_size),
        "may": usable_bytes,
    }


def _metered_peaks(recipe: Any, batch_size: int) -> list[int]:
    """Peaks of steps of ``batch_size`` rows and of one more, on the longest rows, with the optimizer state there."""
    meter = meter_for(recipe._device, recipe._model, recipe._optimizer)
    peaks = []
    for rows in (1, batch_size, batch_size + 1):
        row = {"tokens": list(range(256)), "labels": list(range(256))}
        meter.reset()
        with meter, keep_random_states():
            recipe._run_micro_batches([[row] * rows] * 2)
        peaks.append(meter.peak_bytes)
    return peaks[1:]


def test_every_strategy_finds_the_largest_batch_that_a_metered_step_fits(tiny_dir: Path, tmp_path: Path) -> None:
    ranks = run_on_ranks(_all_strategies, 2, tiny_dir, tmp_path, timeout_s=120)
    for rank in ranks:
        fits_bytes, too_much_bytes = rank["peaks"]
        assert fits_bytes <= rank["may"] < too_much_bytes
    results = [result for rank in ranks for result in rank["found"].values()]
    assert len({(result.exact_batch_size, result.batch_size) for result in results}) == 1
    for result in results:
        tried = {probe.batch_size: probe.fits for probe in result.probes}
        assert tried[result.batch_size]
        assert tried[result.exact_batch_size]
        assert result.batch_size & (result.batch_size - 1) == 0
    assert len(ranks[0]["found"]["linear_extrapolation"].probes) <= 4
    assert all(probe.fits for probe in ranks[0]["found"]["linear_extrapolation"].probes)


def _train_packed(rank: int, tiny_dir: Path, output_dir: Path) -> tuple[int, list[float]]:
    """Many micro-batches with masks, held together, and a limit without any margin that just allows the search."""
    common: dict[str, Any] = {"dataset__packed": True, "gradient_accumulation_steps": 12, "epochs": 2, "batch_size": 2}
    common |= {"tokenizer__max_seq_len": 256, "use_maximum_batch_size": True}
    settings = {"max_batch_size": 2, "power_of_two": False, "margin": 0.0}
    probed = _set_up("full", tiny_dir, output_dir, **common, adaptive=settings | {"memory_limit": "2GiB"})
    peak_bytes = max(probe.peak_bytes for probe in probed._report.result.probes)
    cfg = tiny_config("full", tiny_dir, output_dir, **common, adaptive=settings | {"memory_limit": peak_bytes})
    steps, _, recipe = finished(adaptive_recipe("full"), cfg)
    return recipe._report.result.batch_size, [step["peak_memory_bytes"] / peak_bytes for step in steps]


def test_training_never_needs_more_than_the_probe_did(tiny_dir: Path, tmp_path: Path) -> None:
    ((batch_size, shares),) = run_on_ranks(_train_packed, 1, tiny_dir, tmp_path, timeout_s=120)
    assert batch_size == 2
    assert len(shares) >= 2
    assert 0.9 < max(shares) <= 1.0


def _tensor_rate(rank: int, tiny_dir: Path, output_dir: Path) -> list[float]:
    """The options of an optimizer whose rate is a tensor, as torchao's are, after a search and some steps."""
    cfg = tiny_config(
        "full", tiny_dir, output_dir, use_maximum_batch_size=True, adaptive__memory_limit="64MiB", epochs=1
    )
    cfg.max_steps_per_epoch = 3
    cfg.optimizer = {"_component_": "tests.recipe_runs.adamw_with_tensor_rate", "lr": 1e-3}
    _, _, recipe = finished(adaptive_recipe("full"), cfg)
    group = recipe._optimizer.param_groups[0]
    return [float(group["lr"]), float(group["initial_lr"])]


def test_a_rate_that_is_a_tensor_keeps_its_initial_value(tiny_dir: Path, tmp_path: Path) -> None:
    ((rate, initial_rate),) = run_on_ranks(_tensor_rate, 1, tiny_dir, tmp_path)
    assert rate < initial_rate == pytest.approx(1e-3)


def _grow(rank: int, tiny_dir: Path, output_dir: Path) -> dict[str, Any]:
    growing: dict[str, Any] = {
        "epochs": 4,
        "batch_size": 2,
        "batch_increase_function": GROWING,
        "dataset__split": "train[:48]",
        "lr_scheduler__num_warmup_steps": 5,
    }
    growing["adaptive"] = {"memory_limit": "160MiB", "power_of_two": False, "max_batch_size": 6}
    cfg = tiny_config("full", tiny_dir, output_dir, **growing)
    steps, _, _ = finished(adaptive_recipe("full"), cfg)
    return {"steps": steps}


@pytest.fixture(scope="module")
def growth(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    output_dir = tmp_path_factory.mktemp("growth")
    ranks = run_on_ranks(_grow, 2, tiny_dir, output_dir, timeout_s=120)
    return ranks[0], json.loads((output_dir / "adaptive_batch.json").read_text())


def test_growth_sets_sizes_and_steps_per_epoch(growth: tuple[dict[str, Any], dict[str, Any]]) -> None:
    steps, report = growth[0]["steps"], growth[1]
    # 24 samples per rank: 12 steps at 2 rows, 6 at 4, 4 at 6, and 4 again because 8 rows are refused
    assert [step["batch_size"] for step in steps] == [2] * 12 + [4] * 6 + [6] * 8
    assert [(entry["epoch"], entry["batch_size"]) for entry in report["history"]] == [(0, 2), (1, 4), (2, 6)]
    assert [step["step"] for step in steps] == list(range(1, 27))


def test_the_rate_is_one_function_of_the_fraction_of_training(growth: tuple[dict[str, Any], dict[str, Any]]) -> None:
    from torchtune.training.lr_schedulers import get_cosine_schedule_with_warmup

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    rate: Any = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=5, num_training_steps=48).lr_lambdas[0]
    per_epoch = [12] * 12 + [6] * 6 + [4] * 8
    epochs_done, expected = 0.0, []
    for steps_per_epoch in per_epoch:
        epochs_done += 1 / steps_per_epoch
        expected.append(1e-3 * rate(12 * epochs_done))
    assert [step["lr"] for step in growth[0]["steps"]] == pytest.approx(expected, rel=1e-9, abs=1e-12)


def _train_beyond_the_limit(rank: int, tiny_dir: Path, output_dir: Path) -> tuple[str, list[dict[str, float]]]:
    """A batch_size by hand that this "device" does not allow, and one on a device that allows no row at all."""
    common: dict[str, Any] = {"batch_size": 32, "max_steps_per_epoch": 2, "epochs": 1}
    with pytest.raises(InputError) as refusal:
        _set_up("full", tiny_dir, output_dir, **common, adaptive__memory_limit="16MiB")
    cfg = tiny_config("full", tiny_dir, output_dir, **common, adaptive__memory_limit="128MiB")
    steps, _, _ = finished(adaptive_recipe("full"), cfg)
    return str(refusal.value), steps


def test_training_by_hand_beyond_the_limit_takes_smaller_micro_batches(tiny_dir: Path, tmp_path: Path) -> None:
    ((refusal, steps),) = run_on_ranks(_train_beyond_the_limit, 1, tiny_dir, tmp_path)
    assert "the first rows of the data set must fit" in refusal
    assert "limit 16.0 MiB" in refusal
    assert [step["batch_size"] for step in steps] == [32, 32]
    assert 1 <= steps[-1]["micro_batch_size"] < 32
    assert steps[-1]["oom_retries"] >= 1
