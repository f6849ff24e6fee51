"""With adaptation off, the adaptive recipes equal the stock ones in every logged figure and every parameter bit.

The adaptive recipes also save after steps: in turn at once and in the background.
"""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from omegaconf import OmegaConf

from tests.support.faults import same_bits
from tests.support.ranks import run_alone, run_on_ranks
from tests.support.recipe_runs import (
    SHALLOW,
    adaptive_recipe,
    finished,
    shallow_assets,
    stock_recipe,
    tiny_config,
    without_saving,
)

COMMON: dict[str, Any] = {
    "batch_size": 2,
    "epochs": 2,
    "optimizer__lr": 1e-2,
    "lr_scheduler__num_warmup_steps": 2,
    "adaptive__memory_limit": None,
    "tokenizer__max_seq_len": 64,
} | SHALLOW
IN_BACKWARD = {"gradient_accumulation_steps": 1, "clip_grad_norm": None, "optimizer_in_bwd": True}


UNCLIPPED = {"gradient_accumulation_steps": 4, "clip_grad_norm": None}  # the config clips
ON_TWO_RANKS: list[dict[str, Any]] = [
    {"kind": "lora"} | UNCLIPPED,
    {"kind": "full"} | IN_BACKWARD,
    {
        "kind": "lora",
        "gradient_accumulation_steps": 1,
        "dataset__packed": True,
        "dataset__split": "train[:60]",
        "max_steps_per_epoch": 2,
    },
    {
        "kind": "full",
        "gradient_accumulation_steps": 3,
        "enable_activation_checkpointing": True,
        "loss": {"_component_": "torch.nn.CrossEntropyLoss"},
        "max_steps_per_epoch": 2,
    },
]
ON_ONE_DEVICE: list[dict[str, Any]] = [
    {"kind": "full_single"} | IN_BACKWARD,
    {"kind": "lora_single"} | UNCLIPPED,
    {
        "kind": "full_single",
        "dataset": {"_component_": "tests.support.loaders.Augmented"},
        "dataset__packed": False,
    }
    | UNCLIPPED,
]
Outcome = tuple[list[dict[str, float]], list[dict[str, float]], bool]  # stock steps, adaptive steps, equal parameters


def _name(case: dict[str, Any]) -> str:
    return " ".join(f"{key.rpartition('__')[2]}={value}" for key, value in case.items())


def _train_both(number: int, case: dict[str, Any], tiny_dir: Path, output_dir: Path) -> Outcome:
    ranks = 1 if case["kind"].endswith("_single") else 2
    # In an epoch, on each rank; with an accumulation of 4, one micro-batch is left over.
    micro_batches = 5 if case["gradient_accumulation_steps"] == 1 else 9
    samples = COMMON["batch_size"] * micro_batches * ranks
    overrides = {"dataset__split": f"train[:{samples}]"} | COMMON | case
    kind = overrides.pop("kind")
    cfg = tiny_config(kind, tiny_dir, output_dir / str(number), **overrides)
    # Saving would merge the adapters into the weights that the stock recipe trains. So only the adaptive recipe saves.
    stock = without_saving(stock_recipe(kind)) if kind == "lora_single" else stock_recipe(kind)
    stock_steps, stock_parameters, _ = finished(stock, cfg)
    saving = {"save_every_n_steps": 2, "keep_last_n_checkpoints": 1, "save_in_background": number % 2 == 1}
    for key, value in saving.items():
        OmegaConf.update(cfg, f"adaptive.{key}", value)
    steps, parameters, recipe = finished(adaptive_recipe(kind), cfg)
    last_step = recipe.trainer.global_step // 2 * 2
    assert [path.name for path in (output_dir / str(number)).glob("step_*")] == [f"step_{last_step}"]
    return stock_steps, steps, same_bits(stock_parameters, parameters)


def _train_on_ranks(rank: int, tiny_dir: Path, output_dir: Path) -> list[Outcome]:
    return [_train_both(number, case, tiny_dir, output_dir) for number, case in enumerate(ON_TWO_RANKS)]


def _train_on_one_device(tiny_dir: Path, output_dir: Path) -> list[Outcome]:
    outcomes = [_train_both(number, case, tiny_dir, output_dir) for number, case in enumerate(ON_ONE_DEVICE)]
    assert not dist.is_initialized()
    return outcomes


@pytest.fixture(scope="module")
def outcomes(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    assets = shallow_assets(tiny_dir)
    on_ranks = run_on_ranks(_train_on_ranks, 2, assets, tmp_path_factory.mktemp("ranks"))
    found = {
        _name(case): (first[0], first[1], first[2] and second[2])
        for case, first, second in zip(ON_TWO_RANKS, *on_ranks, strict=True)
    }
    on_one_device = run_alone(_train_on_one_device, assets, tmp_path_factory.mktemp("one_device"))
    return found | {_name(case): outcome for case, outcome in zip(ON_ONE_DEVICE, on_one_device, strict=True)}


@pytest.mark.parametrize("case", [_name(case) for case in ON_TWO_RANKS + ON_ONE_DEVICE])
def test_every_figure_and_every_parameter_equals_the_stock_recipe(case: str, outcomes: dict[str, Outcome]) -> None:
    stock_steps, steps, parameters_equal = outcomes[case]
    assert len(stock_steps) >= 4
    figures = stock_steps[0].keys() - {"tokens_per_second_per_gpu"}  # which differs between any two runs
    assert figures >= {"step", "loss", "lr"}
    assert [{key: step[key] for key in figures} for step in steps] == [
        {key: step[key] for key in figures} for step in stock_steps
    ]
    assert ("grad_norm" in steps[0]) == ("grad_norm" in stock_steps[0])
    assert parameters_equal
