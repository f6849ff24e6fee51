"""A run never continues with damaged files or on other frozen weights, nor writes where another run does."""

import fcntl
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import run_on_ranks
from tests.support.recipe_runs import (
    COMMON,
    TEACHER_NAME,
    adaptive_recipe,
    finished,
    same_bits,
    set_up,
    shallow_assets,
    tiny_config,
)
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.tiny import MODEL_NAME
from torchtune_adaptive.training.checkpoints.folder import STATE_NAME
from torchtune_adaptive.training.folder_lock import LOCK_NAME

RUN: dict[str, Any] = COMMON | {
    "epochs": 2,
    "batch_size": 4,
    "dataset__split": "train[:16]",
    "adaptive__save_every_n_steps": 3,
    "adaptive__oom_recovery": False,
}
CHECKPOINTS = ("step_6", "epoch_0")  # of 8 steps
# The checkpointer that reads a method's frozen weights.
FROZEN = {
    "full": None,
    "lora": "checkpointer",
    "full_dpo": "ref_checkpointer",
    "lora_dpo": "checkpointer",
    "lora_kd": "teacher_checkpointer",
}
KINDS = [kind if kind == "lora" else pytest.param(kind, marks=pytest.mark.exhaustive) for kind in FROZEN]


class BadDays:
    """A run, and what becomes of it."""

    def __init__(self, kind: str, assets: Path, path: Path) -> None:
        self.kind, self.assets, self.path = kind, assets, path
        self.recipe = adaptive_recipe(kind)
        self.steps, self.weights, _ = finished(self.recipe, tiny_config(kind, assets, path / "run", **RUN))

    def resuming(self, checkpoint: Path, **keys: Any) -> Any:
        """The config of a run that resumes in a new folder."""
        new = self.path / "new"
        shutil.rmtree(new, ignore_errors=True)
        return tiny_config(self.kind, self.assets, new, resume_from_checkpoint=str(checkpoint), **RUN | keys)

    def continues(self, checkpoint: Path, **keys: Any) -> bool:
        """Whether a resumed run ends with the same bits."""
        steps, weights, _ = finished(self.recipe, self.resuming(checkpoint, **keys))
        losses = [step["loss"] for step in steps]
        return same_bits(weights, self.weights) and losses == [step["loss"] for step in self.steps][-len(losses) :]

    def refusal(self, checkpoint: Path, **keys: Any) -> str:
        """Why a run cannot resume."""
        with pytest.raises(InputError) as refused:
            set_up(self.recipe, self.resuming(checkpoint, **keys))
        return str(refused.value)

    def in_use(self) -> str:
        """What is said where another run writes its log, although it saves its checkpoints elsewhere."""
        used = self.path / "used"
        used.mkdir()
        keys = RUN | {"checkpointer__output_dir": str(self.path / "elsewhere")}
        with (used / LOCK_NAME).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with pytest.raises(InputError) as refused:
                self.recipe(tiny_config(self.kind, self.assets, used, **keys))
        return str(refused.value)

    def damage(self) -> dict[str, str]:
        """What is said of each file in whose middle one bit is another."""
        said: dict[str, str] = {}
        for checkpoint in CHECKPOINTS:
            folder = self.path / "run" / checkpoint
            for file in (one for one in folder.rglob("*") if one.is_file()):
                content = file.read_bytes()
                middle = len(content) // 2
                file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
                said[f"{checkpoint}/{file.relative_to(folder)}"] = self.refusal(folder)
                file.write_bytes(content)
        return said

    def other_weights(self) -> dict[str, Any]:
        """How a run resumes from each checkpoint with other weights in the files that are not trained."""
        name = TEACHER_NAME if self.kind == "lora_kd" else MODEL_NAME
        other = self.path / "other"
        other.mkdir()
        torch.save({key: value + 0.01 for key, value in torch.load(self.assets / name).items()}, other / name)
        block = FROZEN[self.kind]
        keys = {f"{block or 'checkpointer'}__checkpoint_dir": str(other)}
        if block is None:
            return {one: self.continues(self.path / "run" / one, **keys) for one in CHECKPOINTS}
        return {one: self.refusal(self.path / "run" / one, **keys) for one in CHECKPOINTS}


def _bad_days(rank: int, kind: str, assets: Path, path: Path) -> dict[str, Any]:
    days = BadDays(kind, assets, path)
    for one in CHECKPOINTS:
        shutil.copytree(path / "run" / one, path / f"a_copy_of_{one}")
    return {
        "in use": days.in_use(),
        "damage": days.damage(),
        "other weights": days.other_weights(),
        "continues": [days.continues(path / f"a_copy_of_{one}") for one in CHECKPOINTS],
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_continues_with_what_it_has_saved_and_with_nothing_else(
    kind: str, tiny_dir: Path, tmp_path: Path
) -> None:
    assets = shallow_assets(tiny_dir)
    (found,) = run_on_ranks(_bad_days, 1, kind, assets, tmp_path)
    assert found["in use"] == (f"`output_dir` is in use: another process writes to '{tmp_path}/used'.")
    assert {one.partition("/")[0] for one in found["damage"]} == {*CHECKPOINTS}
    assert len(found["damage"]) >= 8
    for name, sentence in found["damage"].items():
        file = tmp_path / "run" / name
        if file.name == STATE_NAME:
            assert sentence.startswith(f"{file} is no state of a run: ")
        else:
            assert sentence == f"{file} must be as the run wrote it, but its content has changed."
    assert found["continues"] == [True, True]
    block, other = FROZEN[kind], found["other weights"]
    if block is None:
        assert other == dict.fromkeys(CHECKPOINTS, True)  # all weights are in the checkpoint
        return
    name = TEACHER_NAME if kind == "lora_kd" else MODEL_NAME
    for checkpoint in CHECKPOINTS:
        assert other[checkpoint] == (
            f"`{block}` must have the weights that '{tmp_path}/run/{checkpoint}' was trained on, but has"
            f" '{tmp_path}/other/{name}' instead of '{assets}/{name}'."
        )
