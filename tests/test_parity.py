"""With adaptation off our recipes train exactly as the stock ones: every logged figure and every parameter bit."""

from itertools import product
from pathlib import Path

import pytest

from tests.ranks import run_on_ranks
from tests.recipe_runs import adaptive_recipe, finished, same_bits, stock_recipe, tiny_config

# 36 samples are 9 micro-batches of 2 rows on 2 ranks: with an accumulation of 4 one is left over at an epoch's end.
CASES = [
    {"kind": kind, "gradient_accumulation_steps": accumulation, "clip_grad_norm": clip}
    for kind, accumulation, clip in product(("full", "lora"), (1, 4), (None, 1.0))
] + [
    {"kind": "full", "gradient_accumulation_steps": 1, "clip_grad_norm": None, "optimizer_in_bwd": True},
    {
        "kind": "full",
        "gradient_accumulation_steps": 2,
        "enable_activation_checkpointing": True,
        "max_steps_per_epoch": 2,
    },
    {"kind": "lora", "gradient_accumulation_steps": 1, "dataset__packed": True, "dataset__split": "train[:60]"},
    {"kind": "full", "gradient_accumulation_steps": 3, "loss": {"_component_": "torch.nn.CrossEntropyLoss"}},
]
COMMON = {
    "batch_size": 2,
    "epochs": 2,
    "optimizer__lr": 1e-2,
    "lr_scheduler__num_warmup_steps": 2,
    "adaptive__memory_limit": None,
}


def _name(case: dict) -> str:
    return " ".join(f"{key.rpartition('__')[2]}={value}" for key, value in case.items())


def _train_both(rank: int, tiny_dir: Path, output_dir: Path) -> list[tuple]:
    outcomes = []
    for case in CASES:
        overrides = {"dataset__split": "train[:36]"} | COMMON | case
        kind = overrides.pop("kind")
        runs = []
        for recipe_class in (stock_recipe(kind), adaptive_recipe(kind)):
            cfg = tiny_config(kind, tiny_dir, output_dir / _name(case), **overrides)
            steps, parameters, _ = finished(recipe_class, cfg)
            runs.append((steps, parameters))
        (stock_steps, stock_parameters), (steps, parameters) = runs
        outcomes.append((stock_steps, steps, same_bits(stock_parameters, parameters)))
    return outcomes


@pytest.fixture(scope="module")
def outcomes(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple]:
    ranks = run_on_ranks(_train_both, 2, tiny_dir, tmp_path_factory.mktemp("parity"), timeout_s=240)
    return {
        _name(case): (first[0], first[1], first[2] and second[2])
        for case, first, second in zip(CASES, *ranks, strict=True)
    }


@pytest.mark.parametrize("case", [_name(case) for case in CASES])
def test_every_figure_and_every_parameter_equals_the_stock_recipe(case: str, outcomes: dict[str, tuple]) -> None:
    stock_steps, steps, parameters_equal = outcomes[case]
    figures = ("step", "loss", "lr", "grad_norm")
    assert len(stock_steps) >= 4
    assert [{key: step[key] for key in figures if key in step} for step in steps] == [
        {key: step[key] for key in figures if key in step} for step in stock_steps
    ]
    assert ("grad_norm" in steps[0]) == ("grad_norm" in stock_steps[0])
    assert parameters_equal
