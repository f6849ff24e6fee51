"""However a step's samples are cut into micro-batches, on however many ranks, the training is the same."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.ranks import run_on_ranks
from tests.recipe_runs import adaptive_recipe, finished, tiny_config
from torchtune_adaptive.testing import Fault, faults_in

# By name: the overrides for a step of `rows` rows on each of two ranks, and where a rank runs out of memory.
WAYS: dict[str, tuple[Any, dict[tuple[int, int], Fault]]] = {
    "at once": (lambda rows: {"batch_size": rows}, {}),
    "in quarters": (lambda rows: {"batch_size": rows // 4}, {}),
    "single rows": (lambda rows: {"batch_size": 1}, {}),
    "not a multiple": (lambda rows: {"batch_size": rows // 3}, {}),
    "stock keys": (
        lambda rows: {
            "batch_size": rows // 4,
            "gradient_accumulation_steps": 4,
            "adaptive__global_batch_size": None,
        },
        {},
    ),
    "tokens": (lambda rows: {"adaptive__max_tokens_per_micro_batch": 3 * 64}, {}),
    "out of memory": (lambda rows: {"batch_size": rows}, {(0, 0): Fault(200, ranks=[1])}),
    "tokens, out of memory": (
        lambda rows: {"adaptive__max_tokens_per_micro_batch": 8 * 64},
        {(0, 1): Fault(200, ranks=[0]), (1, 0): Fault(500, ranks=[1])},
    ),
}
SIZES = [pytest.param(16, 4, id="small"), pytest.param(64, 20, marks=pytest.mark.exhaustive, id="whole")]


def _gradient_of_first_step(recipe_class: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """The recipe, and where it leaves the gradients of its first step, summed over tokens."""
    kept: dict[str, torch.Tensor] = {}

    class Keeping(recipe_class):
        def _finish_window(self, micro_steps: Any) -> Any:
            if self.global_step == 0 and not kept:
                for name, parameter in self._model.named_parameters():
                    if parameter.grad is not None:
                        gradient = parameter.grad
                        kept[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone()
            return super()._finish_window(micro_steps)

    return Keeping, kept


def _train(rank: int, tiny_dir: Path, output_dir: Path, ways: list[str], rows: int, num_steps: int) -> dict[str, Any]:
    found = {}
    for way in ways:
        overrides, faults = WAYS[way]
        common: dict[str, Any] = {
            "adaptive__memory_limit": None,
            "adaptive__global_batch_size": 2 * rows,
            "max_steps_per_epoch": num_steps,
            "epochs": 1,
            "tokenizer__max_seq_len": 64,
            "lr_scheduler__num_warmup_steps": 2,
        }
        cfg = tiny_config("full", tiny_dir, output_dir / way.replace(" ", "_"), **common | overrides(rows))
        recipe_class, gradient = _gradient_of_first_step(adaptive_recipe("full"))
        with faults_in(recipe_class, faults):
            steps, _, recipe = finished(recipe_class, cfg)
        found[way] = {
            "gradient": torch.cat([one.flatten() for one in gradient.values()]),
            "losses": [step["loss"] for step in steps],
            "retries": recipe._oom_retries,
            "struck": any(fault.has_struck for fault in faults.values()),
        }
    return found


def _farthest(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max() / one.abs().max())


@pytest.mark.parametrize(("rows", "num_steps"), SIZES)
def test_every_cut_has_the_same_gradient_and_the_same_losses(
    rows: int, num_steps: int, tiny_dir: Path, tmp_path: Path
) -> None:
    ranks = run_on_ranks(_train, 2, tiny_dir, tmp_path, list(WAYS), rows, num_steps, timeout_s=1200)
    runs, expected = ranks[0], ranks[0]["at once"]
    assert len(expected["losses"]) == num_steps
    gaps = {}
    for way, run in runs.items():
        losses = zip(run["losses"], expected["losses"], strict=True)
        gradient_gap = _farthest(expected["gradient"], run["gradient"])
        gaps[way] = gradient_gap, max(abs(mine / theirs - 1) for mine, theirs in losses)
        print(f"{way}: gradient {gaps[way][0]:.1e}, losses {gaps[way][1]:.1e}")
    assert max(gap for both in gaps.values() for gap in both) < 1e-5
    assert gaps["single rows"][0] > 0  # the cut is another one
    assert {way: run["retries"] for way, run in runs.items() if run["retries"]} == {
        "out of memory": 1,
        "tokens, out of memory": 2,
    }
    assert [runs[way]["struck"] or ranks[1][way]["struck"] for way in ("out of memory", "tokens, out of memory")] == [
        True,
        True,
    ]


def _train_anywhere(rank: int, tiny_dir: Path, output_dir: Path) -> list[list[float]]:
    """Steps of 31 samples, which no number of ranks above 1 divides; as rows, and grouped by length."""
    runs = []
    for tokens in (None, 300):
        cfg = tiny_config(
            "full",
            tiny_dir,
            output_dir,
            batch_size=4,
            max_steps_per_epoch=3,
            epochs=1,
            tokenizer__max_seq_len=64,
            adaptive={"global_batch_size": 31, "max_tokens_per_micro_batch": tokens},
        )
        steps, _, _ = finished(adaptive_recipe("full"), cfg)
        runs.append([step["loss"] for step in steps])
    return runs


def test_a_global_batch_is_the_same_on_one_rank_and_on_three(tiny_dir: Path, tmp_path: Path) -> None:
    (alone,) = run_on_ranks(_train_anywhere, 1, tiny_dir, tmp_path)
    together = run_on_ranks(_train_anywhere, 3, tiny_dir, tmp_path)[0]
    assert len(alone[0]) == 3
    for mine, theirs in zip(together, alone, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
