"""Without out-of-memory errors, an adaptive step has no more collectives and tensor reads than a stock step."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.live import train_again
from benchmarks.loop import OFF, ON, STOCK, recipe_of
from benchmarks.step_counts import STEPS, Counts, StepCounter
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.exhaustive
VARIANTS = (STOCK, ON, OFF)
CASES = [
    {"gradient_accumulation_steps": accumulation, "clip_grad_norm": clip}
    for accumulation, clip in ((1, None), (1, 1.0), (2, None))
]


def _name(case: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in case.items())


def _count(rank: int, kind: str, tiny_dir: Path, output_dir: Path) -> dict[str, dict[str, Counts]]:
    found: dict[str, dict[str, Counts]] = {_name(case): {} for case in CASES}
    options: dict[str, Any] = {
        "kind": kind,
        "batch_size": 1,
        "tokenizer__max_seq_len": 32,
        "dataset__split": "train[:60]",
    }
    options |= {"max_steps_per_epoch": 1 + STEPS}
    for case, variant in product(CASES, VARIANTS):
        counter = StepCounter()
        recipe = recipe_of(variant, tiny_dir=tiny_dir, output_dir=output_dir, watch=counter, **options, **case)
        counter.count()
        train_again(recipe, seed=0)
        found[_name(case)][variant] = counter.counts
    return found


@pytest.fixture(scope="module", params=["full", "lora"])
def counted(
    request: pytest.FixtureRequest, tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, dict[str, Counts]]]:
    return run_on_ranks(_count, 2, request.param, tiny_dir, tmp_path_factory.mktemp("loop"))


@pytest.fixture(params=[_name(case) for case in CASES])
def by_variant(request: pytest.FixtureRequest, counted: list[dict[str, dict[str, Counts]]]) -> dict[str, Counts]:
    first, second = (rank[request.param] for rank in counted)
    assert first == second
    return first


def test_a_step_has_no_more_collectives_than_a_stock_one_and_fewer_reads(by_variant: dict[str, Counts]) -> None:
    """Loss and tokens share one collective; recovery adds one on the CPU group, and the reading of its answer."""
    stock, on, off = (by_variant[variant] for variant in VARIANTS)
    assert off == (stock.training - STEPS, 0, STEPS)
    assert on == (off.training, STEPS, off.reads + STEPS)
    assert (stock.agreement, stock.reads) == (0, 2 * STEPS)
    assert off.training > 10 * STEPS


def test_the_collectives_of_each_micro_step_and_of_clipping_are_counted(
    counted: list[dict[str, dict[str, Counts]]],
) -> None:
    """This checks the counter itself."""
    for variant in VARIANTS:
        once, once_clipped, twice = (counted[0][_name(case)][variant].training for case in CASES)
        assert once_clipped - once == (2 if torch.__version__.startswith("2.9.") else 1) * STEPS
        assert twice > once + 10 * STEPS
