"""Out of memory, the recipes continue in smaller micro-batches with the same result, and log, count and record it."""

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support.checkout import tune_run
from tests.support.faults import same_bits
from tests.support.ranks import run_on_ranks
from tests.support.recipe_runs import (
    SHALLOW,
    adaptive_recipe,
    finished,
    shallow_assets,
    tiny_config,
    with_micro_batches,
    without_saving,
)
from tests.support.run_logs import events_in
from torchtune_adaptive.testing import Fault, faults_in

SMALL = SHALLOW | {"tokenizer__max_seq_len": 64, "optimizer__lr": 1e-2}
UNMETERED = SMALL | {"adaptive__memory_limit": None, "log_every_n_steps": 1}


def _figures(steps: list[dict[str, float]]) -> list[tuple[float, ...]]:
    return [tuple(step[name] for name in ("step", "loss", "lr", "grad_norm", "micro_batch_size")) for step in steps]


def _faulty_and_configured(rank: int, kind: str, tiny_dir: Path, output_dir: Path) -> dict[str, Any]:
    """Two epochs of four steps; rank 1 fails in backward of the first, rank 0 twice in forward of the second."""
    dropout = {"model__lora_dropout": 0.1} if kind == "lora" else {"model__attn_dropout": 0.1}
    common: dict[str, Any] = UNMETERED | dropout | {"epochs": 2, "max_steps_per_epoch": 4, "batch_size": 4}
    common["gradient_accumulation_steps"] = 2
    recipe_class = without_saving(adaptive_recipe(kind))
    faults = {
        (1, 1): Fault(30, ranks=[1], phase="backward"),
        (5, 0): Fault(30, ranks=[0], phase="forward"),
        (5, 3): Fault(3, ranks=[0], phase="loss"),  # of its second attempt, with four micro-steps
    }
    with faults_in(recipe_class, faults):
        steps, parameters, recipe = finished(recipe_class, tiny_config(kind, tiny_dir, output_dir, **common))
    told = with_micro_batches(recipe_class, {1: 2, 5: 1, 6: 1, 7: 2}.get)
    told_steps, told_parameters, _ = finished(told, tiny_config(kind, tiny_dir, output_dir / "told", **common))
    return {
        "struck": [fault.has_struck for fault in faults.values()],
        "steps": (_figures(steps), _figures(told_steps)),
        "retries": [step["oom_retries"] for step in steps],
        "parameters equal": same_bits(parameters, told_parameters),
        "history": recipe.trainer.run_log.history,
        "on disk": events_in(output_dir, "sizes") if rank == 0 else None,
    }


@pytest.mark.parametrize("kind", ["full", pytest.param("lora", marks=pytest.mark.exhaustive)])
def test_a_recipe_with_faults_equals_one_configured_with_the_same_micro_batches(
    kind: str, tiny_dir: Path, tmp_path: Path
) -> None:
    ranks = run_on_ranks(_faulty_and_configured, 2, kind, shallow_assets(tiny_dir), tmp_path)
    assert [rank["struck"] for rank in ranks] == [[False, True, True], [True, False, False]]
    steps, told = ranks[0]["steps"]
    assert len(told) == 8
    assert steps == told
    assert [step[-1] for step in steps] == [4, 2, 4, 4, 4, 1, 1, 2]
    assert ranks[0]["retries"] == [0, 1, 1, 1, 1, 3, 3, 3]
    assert all(rank["parameters equal"] for rank in ranks)
    history = ranks[0]["history"]
    assert [(entry["epoch"], entry["step"], entry["batch_size"], entry["micro_batch_size"]) for entry in history] == [
        (0, 2, 4, 2),
        (0, 3, 4, 4),
        (1, 6, 4, 2),
        (1, 6, 4, 1),
        (1, 8, 4, 2),
    ]
    assert history[0]["reason"].startswith("micro-batch 4 -> 2 rows: in step 2 rank 1 ran out of memory in backward (")
    assert history[1]["reason"] == "micro-batch 2 -> 4 rows: fits again in step 3"
    assert ranks[0]["on disk"] == history
    assert ranks[1]["history"] == history


# ---- by the stock command line


def _tune_run_with_faults(
    plan: dict[str, Any], ranks: int, *overrides: str, config: str, directory: Path
) -> tuple[Any, list[float]]:
    """The finished launch, and the losses it logged."""
    environment = {"FAULTY_RECIPE": json.dumps(plan)}
    arguments = [f"output_dir={directory}", "adaptive.memory_limit=null", *overrides]
    with mock.patch.dict(os.environ, environment):
        run = tune_run(
            *("--nproc_per_node", str(ranks), "faulty_recipe", "--config", config), *arguments, directory=directory
        )
    logged = "".join(path.read_text() for path in sorted((directory / "logs").glob("*.txt")))
    return run, [float(line.partition(" loss:")[2].split()[0]) for line in logged.splitlines() if " loss:" in line]


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_tune_run_with_a_fault_in_each_epoch_has_the_losses_of_one_without(
    kind: str, ranks: int, tiny_dir: Path, tmp_path: Path
) -> None:
    losses = {}
    for name, faults in (("faulty", [[2, 0, ranks - 1, 500], [7, 0, 0, 900]]), ("fault-free", [])):
        output_dir = tmp_path / name
        output_dir.mkdir()
        plan = {"kind": kind, "faults": faults}
        short = (f"tiny_dir={tiny_dir}", "epochs=2", "max_steps_per_epoch=5")
        run, losses[name] = _tune_run_with_faults(plan, ranks, *short, config=f"tiny/{kind}", directory=output_dir)
        assert run.returncode == 0, run.stderr[-3000:]
        assert run.stderr.count("ran out of memory in") == len(faults)
    assert len(losses["fault-free"]) == 10
    assert losses["faulty"] == pytest.approx(losses["fault-free"], rel=1e-5)
