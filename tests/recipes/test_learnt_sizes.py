"""A recipe learns from an error which micro-batches are too large, and still knows it when it is killed and resumed."""

import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Dataset

from tests.support.ranks import RanksFailedError, run_on_ranks
from tests.support.recipe_runs import (
    SHALLOW,
    adaptive_recipe,
    finished,
    resuming_config,
    same_bits,
    shallow_assets,
    tiny_config,
)
from torchtune_adaptive.testing import out_of_memory

pytestmark = pytest.mark.exhaustive  # the engine's own tests are in the suite
CAPACITY = 700  # tokens; micro-batches of four rows have up to 1024
RUN: dict[str, Any] = SHALLOW | {
    "epochs": 2,
    "batch_size": 4,
    "gradient_accumulation_steps": 2,
    "model__attn_dropout": 0.1,
    "dataset": {"_component_": f"{__name__}.Rows"},
    "adaptive": {"memory_limit": None, "save_every_n_steps": 2},
}
DIES_BEFORE = 5  # steps done, in the first epoch of six; then step 4 is the last checkpoint
FIGURES = ("step", "micro_batch_size", "lr", "loss", "grad_norm", "padding")


class Rows(Dataset):
    """Rows of random tokens; the tiny data set's lengths differ between versions of Python."""

    def __init__(self, tokenizer: Any) -> None:
        draw = random.Random(1)
        lengths = [draw.randrange(16, 128) ** 2 // 64 for _ in range(96)]
        self._rows = [[draw.randrange(3, 2000) for _ in range(length)] for length in lengths]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"tokens": self._rows[index], "labels": self._rows[index]}


def with_capacity(capacity: int, limits: dict[int, int | None] | None = None) -> Any:
    """The recipe on a device where ``capacity`` tokens fit; or told the sizes from which on micro-batches are cut."""

    class WithCapacity(adaptive_recipe("full")):
        limits: dict[int, int | None]

        def setup(self, cfg: Any) -> None:
            super().setup(cfg)
            step, self.limits = self.trainer.step, {}
            objective = step.objective

            def within_capacity(batch: Any) -> Any:
                if batch["tokens"].numel() > capacity:
                    out_of_memory()
                return objective(batch)

            step.objective = within_capacity

        def before_step(self, step: int) -> None:
            super().before_step(step)
            sizes = self.trainer.recoverable.sizes
            self.limits[step] = sizes.smallest_failed  # after the step before
            if limits is not None:
                sizes.smallest_failed, sizes.is_tried = limits[step + 1], False

    return WithCapacity


def _die(rank: int, tiny_dir: Path, output_dir: Path) -> None:
    class Dying(with_capacity(CAPACITY)):
        def before_step(self, step: int) -> None:
            if step == DIES_BEFORE:
                os.kill(os.getpid(), signal.SIGKILL)

    finished(Dying, tiny_config("full", tiny_dir, output_dir, **RUN))


def _runs(rank: int, tiny_dir: Path, died_in: Path, copy: Path, output_dir: Path) -> dict[str, Any]:
    """A whole run, the killed one resumed, also with more memory, and one that is told when to cut what."""
    recipe_class = with_capacity(CAPACITY)
    whole, whole_parameters, recipe = finished(recipe_class, tiny_config("full", tiny_dir, output_dir, **RUN))
    limits = recipe.limits | {len(recipe.limits): recipe.trainer.recoverable.sizes.smallest_failed}
    told, told_parameters, told_recipe = finished(
        with_capacity(10**6, limits), tiny_config("full", tiny_dir, output_dir / "told", **RUN)
    )
    more = RUN | {"adaptive": RUN["adaptive"] | {"memory_limit": "2GiB"}, "epochs": 1}
    resumed_with_more = finished(recipe_class, resuming_config("full", tiny_dir, copy, **more))[2]
    resumed, parameters, resumed_recipe = finished(recipe_class, resuming_config("full", tiny_dir, died_in, **RUN))
    return {
        "events": [(one.step, one.ranks, one.too_large) for one in recipe.trainer.recoverable.events],
        "events after": [(one.step, one.ranks, one.too_large) for one in resumed_recipe.trainer.recoverable.events],
        "fitted": recipe.trainer.recoverable.sizes.largest_fitted,
        "whole": [[step[name] for name in FIGURES] for step in whole],
        "told": [[step[name] for name in FIGURES] for step in told],
        "told events": told_recipe.trainer.recoverable.events,
        "resumed": [[step[name] for name in FIGURES] for step in resumed],
        "told equal": same_bits(whole_parameters, told_parameters),
        "resumed equal": same_bits(whole_parameters, parameters),
        "reasons": [entry["reason"] for entry in resumed_with_more.trainer.run_log.history],
    }


@pytest.fixture(scope="module")
def runs(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    directory = tmp_path_factory.mktemp("learnt")
    died_in, copy, assets = directory / "died", directory / "copy", shallow_assets(tiny_dir)
    with pytest.raises(RanksFailedError):
        run_on_ranks(_die, 2, assets, died_in)
    shutil.copytree(died_in, copy)
    return run_on_ranks(_runs, 2, assets, died_in, copy, directory / "whole")


def test_only_steps_with_a_micro_batch_that_is_too_large_are_repeated(runs: list[dict[str, Any]]) -> None:
    for rank in runs:
        assert rank["events"] == [(1, (0,), 944), (1, (0,), 868), (2, (0, 1), 728), (7, (0, 1), 728)]
        assert rank["fitted"] < 700
    assert {step[1] for step in runs[0]["whole"]} == {4}  # rows per micro-batch


def test_training_equals_that_of_a_run_told_the_same_cuts(runs: list[dict[str, Any]]) -> None:
    assert runs[0]["whole"] == runs[0]["told"]
    assert len(runs[0]["whole"]) == 12
    for rank in runs:
        assert rank["told events"] == ()
        assert rank["told equal"]


def test_a_killed_run_still_knows_it_when_it_is_resumed(runs: list[dict[str, Any]]) -> None:
    assert runs[0]["resumed"] == runs[0]["whole"][4:]
    for rank in runs:
        assert rank["resumed equal"]
        assert rank["events after"] == [(7, (0, 1), 728)]  # in the second epoch, when larger ones are tried


def test_with_more_memory_it_is_forgotten_with_one_line(runs: list[dict[str, Any]]) -> None:
    reasons, forgets = runs[0]["reasons"], "; micro-batches of 728 tokens or more are tried again"
    (number,) = (number for number, reason in enumerate(reasons) if reason.endswith(forgets))
    assert reasons[number + 1].startswith("micro-batches of 960 tokens or more are cut from now on: in step 5 ranks 0")
