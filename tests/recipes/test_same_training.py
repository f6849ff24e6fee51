"""Training is the same for every cut of a step into micro-batches and every number of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.support.growth_functions import Recording
from tests.support.method_runs import QUICK
from tests.support.ranks import run_on_ranks
from tests.support.recipe_runs import (
    SHALLOW,
    adaptive_recipe,
    finished,
    shallow_assets,
    tiny_config,
    without_saving,
)
from torchtune_adaptive.schedule import GradientNorms
from torchtune_adaptive.testing import Fault, faults_in

# By name: overrides for steps of `rows` rows on each of two ranks, and faults by optimizer step and micro-step.
WAYS: dict[str, tuple[Any, dict[tuple[int, int], Fault]]] = {
    "at once": (lambda rows: {"batch_size": rows}, {}),
    "single rows": (lambda rows: {"batch_size": 1}, {}),
    "not a multiple": (lambda rows: {"batch_size": rows // 3}, {}),
    "out of memory": (lambda rows: {"batch_size": rows}, {(0, 0): Fault(200, ranks=[1])}),
    "tokens, out of memory": (
        lambda rows: {"adaptive__max_tokens_per_micro_batch": 8 * 64},
        {(0, 1): Fault(200, ranks=[0]), (1, 0): Fault(500, ranks=[1])},
    ),
}
LEAST_ALIKE = ["at once", "single rows", "tokens, out of memory"]
# Ways, rows per rank and step, and the number of steps (at most three per epoch).
SIZES = [
    pytest.param(LEAST_ALIKE, 16, 2, id="small"),
    pytest.param(list(WAYS), 64, 21, marks=pytest.mark.exhaustive, id="whole"),
]


def _keeping_first_gradient(recipe_class: Any, kept: dict[str, torch.Tensor]) -> Any:
    """The recipe, which stores the gradients of its first step, summed over tokens, in ``kept``."""

    class Keeping(recipe_class):
        def optimizer_policy(self) -> Any:
            optimizer_policy = super().optimizer_policy()
            normalize = optimizer_policy.normalize

            def keep_and_normalize(weight: torch.Tensor) -> Any:
                for name, parameter in self._model.named_parameters():
                    if parameter.grad is not None and name not in kept:
                        gradient = parameter.grad
                        kept[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone()
                return normalize(weight)

            optimizer_policy.normalize = keep_and_normalize
            return optimizer_policy

    return Keeping


def _train(rank: int, tiny_dir: Path, output_dir: Path, ways: list[str], rows: int, num_steps: int) -> dict[str, Any]:
    """The first gradient and the losses of each way, where no first token of a row is masked.

    Nothing predicts that token. If it counted, a row would weigh more the shorter its micro-batch's rows are.
    """
    found = {}
    for way in ways:
        overrides, faults = WAYS[way]
        common: dict[str, Any] = SHALLOW | {
            "adaptive__memory_limit": None,
            "adaptive__oom_recovery": bool(faults),
            "adaptive__global_batch_size": 2 * rows,
            "max_steps_per_epoch": min(num_steps, 3),
            "epochs": num_steps // min(num_steps, 3),
            "tokenizer__max_seq_len": 64,
            "dataset__train_on_input": True,
            "lr_scheduler__num_warmup_steps": 2,
        }
        cfg = tiny_config("full", tiny_dir, output_dir / way.replace(" ", "_"), **common | overrides(rows))
        gradient: dict[str, torch.Tensor] = {}
        recipe_class = _keeping_first_gradient(without_saving(adaptive_recipe("full")), gradient)
        with faults_in(recipe_class, faults):
            steps, _, recipe = finished(recipe_class, cfg)
        found[way] = {
            "gradient": torch.cat([one.flatten() for one in gradient.values()]),
            "losses": [step["loss"] for step in steps],
            "retries": recipe.trainer.recoverable.retries,
            "struck": any(fault.has_struck for fault in faults.values()),
        }
    return found


def _farthest(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max() / one.abs().max())


@pytest.mark.parametrize(("ways", "rows", "num_steps"), SIZES)
def test_every_cut_has_the_same_gradient_and_the_same_losses(
    ways: list[str], rows: int, num_steps: int, tiny_dir: Path, tmp_path: Path
) -> None:
    ranks = run_on_ranks(_train, 2, shallow_assets(tiny_dir), tmp_path, ways, rows, num_steps, timeout_s=3600)
    runs, expected = ranks[0], ranks[0]["at once"]
    assert len(expected["losses"]) == num_steps
    gaps = {}
    for way, run in runs.items():
        losses = zip(run["losses"], expected["losses"], strict=True)
        gradient_gap = _farthest(expected["gradient"], run["gradient"])
        gaps[way] = gradient_gap, max(abs(mine / theirs - 1) for mine, theirs in losses)
        print(f"{way}: gradient {gaps[way][0]:.1e}, losses {gaps[way][1]:.1e}")
    assert max(gap for both in gaps.values() for gap in both) < 1e-5
    assert gaps["single rows"][0] > 0  # the cut does differ
    retries = {"out of memory": 1, "tokens, out of memory": 2}
    assert {way: run["retries"] for way, run in runs.items()} == {way: retries.get(way, 0) for way in ways}
    struck = {way for rank in ranks for way, run in rank.items() if run["struck"]}
    assert struck == retries.keys() & {*ways}


def _steps_of(tiny_dir: Path, output_dir: Path, **overrides: Any) -> list[dict[str, float]]:
    common: dict[str, Any] = SHALLOW | {"batch_size": 4, "max_steps_per_epoch": 2, "epochs": 1}
    cfg = tiny_config("full", tiny_dir, output_dir, **common | {"tokenizer__max_seq_len": 64} | overrides)
    return finished(without_saving(adaptive_recipe("full")), cfg)[0]


def _train_anywhere(rank: int, tiny_dir: Path, output_dir: Path) -> list[float]:
    """The losses of steps of 31 samples, which 3 ranks do not divide, cut by tokens."""
    adaptive = QUICK | {"global_batch_size": 31, "max_tokens_per_micro_batch": 300}
    return [step["loss"] for step in _steps_of(tiny_dir, output_dir, adaptive=adaptive)]


def test_a_global_batch_is_the_same_on_one_rank_and_on_three(tiny_dir: Path, tmp_path: Path) -> None:
    one, three = (run_on_ranks(_train_anywhere, ranks, shallow_assets(tiny_dir), tmp_path)[0] for ranks in (1, 3))
    assert len(one) == 2
    assert three == pytest.approx(one, rel=1e-5)


def _measured(rank: int, tiny_dir: Path, output_dir: Path) -> tuple[list[float], list[GradientNorms], list[float]]:
    """Norms that rank 0 logs, those that are measured, and that of a step of the first half of the samples."""
    adaptive = QUICK | {"growth_limit": 4}
    growth = {"_component_": "tests.support.growth_functions.Recording"}
    steps = _steps_of(tiny_dir, output_dir, adaptive=adaptive, batch_increase_function=growth)
    half = _steps_of(tiny_dir, output_dir, adaptive=QUICK, batch_size=2, max_steps_per_epoch=1)
    return [step["grad_norm"] for step in steps], Recording.last.seen, [step["grad_norm"] for step in half]


def test_measured_norms_are_those_of_the_step_and_of_its_first_half(tiny_dir: Path, tmp_path: Path) -> None:
    norms, seen, [norm_of_half] = run_on_ranks(_measured, 2, shallow_assets(tiny_dir), tmp_path)[0]
    assert [one.norm_squared**0.5 for one in seen] == pytest.approx(norms, rel=1e-5)
    assert [(one.small_samples, one.samples) for one in seen] == [(4, 8)] * 2
    assert seen[0].small_norm_squared ** 0.5 == pytest.approx(norm_of_half, rel=1e-5)
    assert seen[0].small_norm_squared != pytest.approx(seen[0].norm_squared, rel=1e-2)
