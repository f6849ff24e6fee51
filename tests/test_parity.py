"""With adaptation off our recipes train exactly as the stock ones: every logged figure and every parameter bit."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_on_ranks
from tests.recipe_runs import adaptive_recipe, finished, same_bits, stock_recipe, tiny_config

# Rows are 2: with an accumulation of 4, 36 samples on 2 ranks and 18 on one device leave one micro-batch over at an
# epoch's end.
COMMON: dict[str, Any] = {
    "batch_size": 2,
    "epochs": 2,
    "optimizer__lr": 1e-2,
    "lr_scheduler__num_warmup_steps": 2,
    "adaptive__memory_limit": None,
}
SAMPLES = {"full": 36, "lora": 36, "full_single": 18, "lora_single": 34}
IN_BACKWARD = {"gradient_accumulation_steps": 1, "clip_grad_norm": None, "optimizer_in_bwd": True}


def _accumulating_and_clipping(kind: str, **overrides: Any) -> list[dict[str, Any]]:
    return [
        {"kind": kind, "gradient_accumulation_steps": accumulation, "clip_grad_norm": clip} | overrides
        for accumulation, clip in product((1, 4), (None, 1.0))
    ]


ON_TWO_RANKS: list[dict[str, Any]] = [
    *_accumulating_and_clipping("full"),
    *_accumulating_and_clipping("lora"),
    {"kind": "full"} | IN_BACKWARD,
    {
        "kind": "full",
        "gradient_accumulation_steps": 2,
        "enable_activation_checkpointing": True,
        "max_steps_per_epoch": 2,
    },
    {"kind": "lora", "gradient_accumulation_steps": 1, "dataset__packed": True, "dataset__split": "train[:60]"},
    {"kind": "full", "gradient_accumulation_steps": 3, "loss": {"_component_": "torch.nn.CrossEntropyLoss"}},
]
ON_ONE_DEVICE: list[dict[str, Any]] = [
    *_accumulating_and_clipping("full_single"),
    {"kind": "full_single"} | IN_BACKWARD,
    # A single epoch, because on the CPU the stock recipe merges the adapters into the weights it trains as it saves.
    *_accumulating_and_clipping("lora_single", epochs=1),
]


def _name(case: dict[str, Any]) -> str:
    return " ".join(f"{key.rpartition('__')[2]}={value}" for key, value in case.items())


def _train_both(case: dict[str, Any], tiny_dir: Path, output_dir: Path) -> tuple[list[Any], list[Any], bool]:
    """What the stock recipe and ours log, and whether their parameters are equal."""
    overrides = {"dataset__split": f"train[:{SAMPLES[case['kind']]}]"} | COMMON | case
    kind = overrides.pop("kind")
    cfg = tiny_config(kind, tiny_dir, output_dir, **overrides)
    stock_steps, stock_parameters, _ = finished(stock_recipe(kind), cfg)
    steps, parameters, _ = finished(adaptive_recipe(kind), cfg)
    return stock_steps, steps, same_bits(stock_parameters, parameters)


def _check(stock_steps: list[dict[str, float]], steps: list[dict[str, float]], parameters_equal: bool) -> None:
    assert len(stock_steps) >= 4
    figures = stock_steps[0].keys() - {"tokens_per_second_per_gpu"}
    assert figures >= {"step", "loss", "lr"}
    assert [{key: step[key] for key in figures} for step in steps] == [
        {key: step[key] for key in figures} for step in stock_steps
    ]
    assert ("grad_norm" in steps[0]) == ("grad_norm" in stock_steps[0])
    assert parameters_equal


def _train_all(rank: int, tiny_dir: Path, output_dir: Path) -> list[tuple[list[Any], list[Any], bool]]:
    return [_train_both(case, tiny_dir, output_dir / str(number)) for number, case in enumerate(ON_TWO_RANKS)]


@pytest.fixture(scope="module")
def outcomes(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[Any], list[Any], bool]]:
    ranks = run_on_ranks(_train_all, 2, tiny_dir, tmp_path_factory.mktemp("parity"))
    return {
        _name(case): (first[0], first[1], first[2] and second[2])
        for case, first, second in zip(ON_TWO_RANKS, *ranks, strict=True)
    }


@pytest.mark.parametrize("case", [_name(case) for case in ON_TWO_RANKS])
def test_every_figure_and_every_parameter_equals_the_stock_recipe(
    case: str, outcomes: dict[str, tuple[list[Any], list[Any], bool]]
) -> None:
    _check(*outcomes[case])


@pytest.mark.parametrize("case", ON_ONE_DEVICE, ids=_name)
def test_on_one_device_every_figure_and_every_parameter_equals_the_stock_recipe(
    case: dict[str, Any], tiny_dir: Path, tmp_path: Path
) -> None:
    _check(*_train_both(case, tiny_dir, tmp_path))
