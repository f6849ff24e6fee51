"""A run that is killed goes on from its last checkpoint as if nothing had been; what is not as it was is said."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torchtune.training.lr_schedulers import get_cosine_schedule_with_warmup

from tests.ranks import RanksFailedError, run_on_ranks
from tests.recipe_runs import (
    SHALLOW,
    adaptive_recipe,
    finished,
    local_parameters,
    resuming_config,
    same_bits,
    set_up,
    shallow_assets,
    stock_recipe,
    tiny_config,
)
from torchtune_adaptive.errors import InputError

# 34 samples a rank are 17 micro-batches of 2 rows: with an accumulation of 2 one is left over at the first epoch's end.
MEASURING = {"_component_": "torchtune_adaptive.schedule.gradient_noise_scale", "every_steps": 2, "min_measurements": 2}
RUN: dict[str, Any] = SHALLOW | {
    "epochs": 4,
    "batch_size": 2,
    "gradient_accumulation_steps": 2,
    "dataset__split": "train[:68]",
    "tokenizer__max_seq_len": 64,
    "lr_scheduler__num_warmup_steps": 5,
    "batch_increase_function": MEASURING,
    "adaptive": {"memory_limit": "96MiB", "growth_limit": 4, "lr_scaling": "sqrt", "max_batch_size": 3},
}
PLAIN: dict[str, Any] = SHALLOW | {"epochs": 3, "max_steps_per_epoch": 2, "batch_size": 2, "tokenizer__max_seq_len": 64}
# What every version so far has written and reads: a run may go on with the next version.
STATE_FIELDS = {
    "epochs_run",
    "schedule_steps",
    "batch_size",
    "is_global",
    "reference_samples",
    "samples_per_step",
    "global_step",
    "micro_batch",
    "micro_batch_unit",
    "longest_row_tokens",
    "left_over",
    "dataset_samples",
    "ranks",
    "memory_limit_bytes",
    "schedule",
    "history",
}
FIGURES = ("step", "batch_size", "global_batch_size", "micro_batch_size", "lr", "loss", "grad_norm", "padding")


def _die(rank: int, tiny_dir: Path, output_dir: Path) -> None:
    """Killed in the midst of the third epoch."""

    class Dying(adaptive_recipe("full")):
        def before_step(self, step: int) -> None:
            if self.trainer.epochs_run == 2 and step > 14:
                os.kill(os.getpid(), signal.SIGKILL)

    finished(Dying, tiny_config("full", tiny_dir, output_dir, **RUN))


def _go_on(rank: int, tiny_dir: Path, died_in: Path, output_dir: Path) -> dict[str, Any]:
    """The killed run and a whole one; the killed one with other data and memory; stock after us, and we after it."""
    ours, stock = adaptive_recipe("full"), stock_recipe("full")
    whole, whole_parameters, _ = finished(ours, tiny_config("full", tiny_dir, output_dir, **RUN))
    changed = RUN | {"dataset__split": "train[:60]", "epochs": 3}
    changed["adaptive"] = changed["adaptive"] | {"memory_limit": "128MiB"}
    changed_steps, _, changed_recipe = finished(
        ours, resuming_config("full", tiny_dir, died_in, epochs_run=2, **changed)
    )
    other: dict[str, Any] = RUN | {"batch_increase_function": {"_component_": "tests.growth_functions.Stubborn"}}
    with pytest.raises(InputError) as refusal:
        set_up(ours, resuming_config("full", tiny_dir, died_in, epochs_run=2, **other))
    resumed, parameters, _ = finished(ours, resuming_config("full", tiny_dir, died_in, epochs_run=2, **RUN))
    opened = []
    for recipe_class in (stock, ours):
        recipe = set_up(recipe_class, resuming_config("full", tiny_dir, died_in, epochs_run=2, **PLAIN))
        opened.append(local_parameters(recipe._model))
    finished(stock, tiny_config("full", tiny_dir, output_dir / "stock", **PLAIN))
    after_stock = [
        finished(one, resuming_config("full", tiny_dir, output_dir / "stock", epochs_run=2, **PLAIN))[0]
        for one in (stock, ours)
    ]
    return {
        "whole": [[step[name] for name in FIGURES] for step in whole],
        "resumed": [[step[name] for name in FIGURES] for step in resumed],
        "parameters equal": same_bits(whole_parameters, parameters),
        "changed": (changed_recipe.trainer.record.history, [step["global_batch_size"] for step in changed_steps]),
        "refusal": str(refusal.value),
        "opened by stock": same_bits(*opened),
        "after stock": [[(step["step"], step["lr"], step["loss"]) for step in steps] for steps in after_stock],
    }


@pytest.fixture(scope="module")
def died_in(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("died")
    with pytest.raises(RanksFailedError) as failure:
        run_on_ranks(_die, 2, shallow_assets(tiny_dir), directory)
    assert "died with exit status -9" in str(failure.value)
    return directory


@pytest.fixture(scope="module")
def ranks(tiny_dir: Path, died_in: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_on_ranks(_go_on, 2, shallow_assets(tiny_dir), died_in, tmp_path_factory.mktemp("whole"))


def test_a_killed_run_goes_on_as_the_uninterrupted_one(ranks: list[dict[str, Any]]) -> None:
    """Each figure and each bit, with growth by a schedule that measures, and with samples left over by an epoch."""
    whole, resumed = ranks[0]["whole"], ranks[0]["resumed"]
    assert len({step[FIGURES.index("batch_size")] for step in whole}) > 1
    assert len(resumed) == 8
    assert resumed == whole[-8:]
    assert all(rank["parameters equal"] for rank in ranks)


def test_the_state_that_a_run_goes_on_from_has_the_fields_of_every_version_so_far(
    ranks: list[dict[str, Any]], died_in: Path
) -> None:
    states = json.loads((died_in / "recipe_state" / "adaptive_state.json").read_text())
    assert set(states) >= {"1", "2"}  # what was left by the run that died, and added to by the one that went on
    assert all(state.keys() == STATE_FIELDS for state in states.values())
    assert states["2"]["global_step"] == ranks[0]["resumed"][0][0] - 1


def test_the_rate_is_that_of_its_place_scaled_by_the_root_of_the_batch(ranks: list[dict[str, Any]]) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    rate: Any = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=5, num_training_steps=32).lr_lambdas[0]
    names = dict(zip(FIGURES, zip(*ranks[0]["whole"], strict=True), strict=True))
    epochs_done, expected = 0.0, []
    for samples in names["global_batch_size"]:
        epochs_done += samples / 64  # of 68, in whole steps of 8 or 16
        expected.append(1e-3 * rate(8 * epochs_done) * (samples / 8) ** 0.5)
    assert names["lr"] == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_other_data_and_another_limit_are_noticed_and_the_batch_stays(ranks: list[dict[str, Any]]) -> None:
    history, sizes = ranks[0]["changed"]
    assert history[-2]["reason"] == (
        "resumed with changes: samples in the data set 68 -> 60; bytes of memory per rank 100663296 -> 134217728"
    )
    assert history[-1]["reason"] == "config, resumed at epoch 2"
    assert sizes == [16] * 3  # 30 samples a rank


def test_a_schedule_that_does_not_take_the_state_of_another_is_said(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "must take the state of the run that is resumed, but does not take {'measure" in rank["refusal"]
        assert rank["refusal"].endswith(": KeyError: 'seen'.")


def test_stock_opens_our_checkpoints_and_we_those_of_stock(ranks: list[dict[str, Any]]) -> None:
    assert all(rank["opened by stock"] for rank in ranks)
    by_stock, by_ours = ranks[0]["after stock"]
    assert [step for step, *_ in by_stock] == [5, 6]
    assert by_ours == by_stock


def _resume_alone(rank: int, tiny_dir: Path, died_in: Path) -> tuple[list[str], list[dict[str, float]]]:
    steps, _, recipe = finished(
        adaptive_recipe("full"), resuming_config("full", tiny_dir, died_in, epochs_run=3, **RUN)
    )
    return [entry["reason"] for entry in recipe.trainer.record.history], steps


def test_another_number_of_ranks_is_noticed_and_the_rate_goes_with_the_batch(
    ranks: list[dict[str, Any]], tiny_dir: Path, died_in: Path
) -> None:
    """A single rank takes half the samples a step, those that the config was written for: its rate is the config's."""
    ((reasons, steps),) = run_on_ranks(_resume_alone, 1, shallow_assets(tiny_dir), died_in)
    assert reasons[-2] == "resumed with changes: ranks 2 -> 1; samples per optimizer step 16 -> 8"
    assert {step["global_batch_size"] for step in steps} == {8}
    # after a quarter of the last epoch, which is its first step on two ranks and its second on one
    (together,) = (step[FIGURES.index("lr")] for step in ranks[0]["whole"] if step[0] == 17)
    assert len(steps) == 8
    assert steps[1]["lr"] == pytest.approx(together / 2**0.5, rel=1e-9)
    assert steps[-1]["lr"] == pytest.approx(0, abs=1e-12)
