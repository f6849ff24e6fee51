"""PPO resumes from any checkpoint as if it had never stopped, with both models from the same one."""

import errno
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from filelock import FileLock, Timeout
from omegaconf import DictConfig, OmegaConf
from torch import nn

from tests.support.faults import same_bits
from tests.support.ppo_runs import (
    ANSWERS,
    LIMIT_BYTES,
    PROMPT_TOKENS,
    logged_steps,
    ppo_assets,
    ppo_config,
)
from tests.support.ranks import run_alone
from tests.support.recipe_runs import RecordingLogger, local_parameters
from tests.support.run_logs import events_in
from tests.support.toys import STATE
from tests.training.checkpoints.test_checkpoint_folder import save
from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.errors import InputError, RunEnded
from torchtune_adaptive.ppo import recipe as ppo
from torchtune_adaptive.ppo.checkpoints import resuming_with_value_model
from torchtune_adaptive.training.checkpoints.folder import CheckpointFolder, read_checkpoint
from torchtune_adaptive.training.folder_lock import LOCK_NAME
from torchtune_adaptive.training.run_state import AdaptiveState
from torchtune_adaptive.training.signals import STATUS_STOPPED

Recipe: Any = ppo.AdaptivePPOFullFinetuneRecipeSingleDevice
# An epoch has two turns of two optimizer steps; the run ends after the first turn of the third epoch.
TURNS = 5
IN_A_TURN = 2
RUN: dict[str, Any] = {
    "dataset__split": "train[:5]",
    "batch_size": IN_A_TURN,
    "num_steps": TURNS * IN_A_TURN,
    "ppo_epochs": 2,
    "ppo_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "enable_activation_checkpointing": False,
    "max_generated_tokens": 4,
    "tokenizer__max_seq_len": 24,
    "forward_batch_size": 2,
    "resume_from_checkpoint": "auto",
}
# Turns that take a while, in which the sizes of a search differ.
LARGE = {"dataset__split": "train[:28]", "batch_size": ANSWERS, "ppo_batch_size": 6, "forward_batch_size": 6}
FINISH = CheckpointFolder.finish
IN_BACKWARD = {"optimizer_in_bwd": True, "gradient_accumulation_steps": 1}


class _KilledError(Exception):
    """Simulates the sudden end of a process."""


@dataclass
class Outcome:
    """What a run has logged, its last weights, and the checkpoint that it resumed from."""

    steps: list[dict[str, float]]
    weights: dict[str, torch.Tensor]
    resumed_from: str | None
    sizes: tuple[int, int]

    def continues_as(self, whole: "Outcome", *, after_turns: int) -> bool:
        return self.steps == whole.steps[after_turns:] and same_bits(self.weights, whole.weights)


def killed_in(turn: int, recipe_class: Any = Recipe) -> Any:
    """A recipe that dies in a turn, counted from 0."""

    class Killed(recipe_class):
        def generate_trajectory_batched(self, *args: Any) -> Any:
            if self._steps_run == turn:
                raise _KilledError
            return super().generate_trajectory_batched(*args)

    return Killed


def killed_after_value_model(*, epoch: int) -> Any:
    """A recipe that dies after the value model of an epoch is saved, but before its policy is."""

    class Killed(Recipe):
        def save_checkpoint(self, saved_epoch: int, is_intermediate_checkpoint: bool = False) -> None:
            policy = self._policy_checkpointer
            save_now = mock.Mock(side_effect=_KilledError) if saved_epoch == epoch else policy.save_now
            with mock.patch.object(policy, "save_now", save_now):
                super().save_checkpoint(saved_epoch, is_intermediate_checkpoint)

    return Killed


def asked_to_end_in(turn: int) -> Any:
    """A recipe that is asked to end in a turn, as by SIGTERM."""

    class Asked(Recipe):
        def generate_trajectory_batched(self, *args: Any) -> Any:
            if self._steps_run == turn:
                self._stop_request._make(0, None)
            return super().generate_trajectory_batched(*args)

    return Asked


def trained(recipe_class: Any, cfg: DictConfig) -> Outcome:
    """The outcome of a run, also of one that is killed."""
    recipe = recipe_class(cfg)
    recipe.setup(cfg)
    try:
        recipe.train()
    except _KilledError:
        pass
    finally:
        recipe._steps.wait()  # otherwise two runs in this process would write and remove the same files
        recipe._folder._lock = recipe._output_lock = None  # released as at the end of its process
    weights = local_parameters(nn.ModuleList([recipe._policy_model, recipe._value_model]))
    resumed_from = recipe._resumed and recipe._resumed.path.name
    return Outcome(logged_steps(), weights, resumed_from, (recipe._forward_batch_size, recipe._ppo_backward_batch_size))


# ---- runs resume bit for bit

# By name: what ends the run, the run's keys, the checkpoint that it resumes from, and the turns that are in it.
CASES: dict[str, tuple[Any, dict[str, Any], str, int]] = {
    "within an epoch, in the background": (
        killed_in(3),
        {"adaptive": {"save_every_n_steps": 2, "save_in_background": True, "keep_last_n_checkpoints": 2}},
        "step_6",
        3,
    ),
    "at an epoch's end, before it is saved": (
        killed_after_value_model(epoch=1),
        {"adaptive__save_every_n_steps": 2},
        "step_8",
        4,
    ),
    "between the value model and the policy": (killed_after_value_model(epoch=1), {}, "epoch_0", 2),
}


def _resumed(assets: Path, output_dir: Path, keys: dict[str, Any]) -> dict[str, Any]:
    whole = trained(Recipe, ppo_config(assets, output_dir / "whole", **RUN | keys))
    found = {}
    for number, (name, (killed, saves, *_)) in enumerate(CASES.items()):
        cfg = ppo_config(assets, output_dir / str(number), **RUN | keys | saves)
        before = trained(killed, cfg)
        after = trained(Recipe, cfg)
        turns = TURNS - len(after.steps)
        checkpoints = [Path(one["path"]).name for one in events_in(output_dir / str(number), "checkpoint")]
        found[name] = {
            "resumed from": after.resumed_from,
            "turns": turns,
            "last checkpoint": checkpoints[-1],
            "equal": before.steps == whole.steps[: len(before.steps)] and after.continues_as(whole, after_turns=turns),
        }
    return found


@pytest.fixture(scope="module")
def assets(tiny_dir: Path) -> Path:
    return ppo_assets(tiny_dir)


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param({}, id="step after backward"),
        pytest.param(IN_BACKWARD, id="in backward", marks=pytest.mark.exhaustive),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one(keys: dict[str, Any], assets: Path, tmp_path: Path) -> None:
    found = run_alone(_resumed, assets, tmp_path, keys)
    for name, (*_, checkpoint, turns) in CASES.items():
        expected = {"resumed from": checkpoint, "turns": turns, "last checkpoint": "epoch_2", "equal": True}
        assert found[name] == expected, name


def _asked_to_end(assets: Path, output_dir: Path) -> dict[str, Any]:
    """A run with a search is asked to end, and is resumed, also with more memory."""
    adaptive: dict[str, Any] = {"memory_limit": LIMIT_BYTES, "margin": 0.0}
    searched = RUN | LARGE | {"num_steps": 2 * ANSWERS, "tokenizer__max_seq_len": PROMPT_TOKENS}
    searched |= {"max_generated_tokens": 8, "use_maximum_batch_size": True, "adaptive": adaptive}
    searched |= {"enable_activation_checkpointing": True}
    whole = trained(Recipe, ppo_config(assets, output_dir / "whole", **searched))
    cfg = ppo_config(assets, output_dir / "part", **searched)
    with pytest.raises(RunEnded) as end:
        trained(asked_to_end_in(0), cfg)
    shutil.copytree(output_dir / "part", output_dir / "roomy")
    with mock.patch.object(Recipe, "_find_sizes", side_effect=AssertionError("a search")):
        after = trained(Recipe, cfg)
    adaptive["memory_limit"] = "96MiB"
    roomy = trained(Recipe, ppo_config(assets, output_dir / "roomy", **searched))
    return {
        "end": (end.value.status, str(end.value)),
        "resumed from": (after.resumed_from, roomy.resumed_from),
        "sizes": (whole.sizes, after.sizes, roomy.sizes),
        "equal": after.continues_as(whole, after_turns=1),
        "searches": [len(events_in(output_dir / name, "search")) for name in ("whole", "part")],
    }


@pytest.mark.exhaustive
def test_a_run_that_is_asked_to_end_saves_its_turn_and_resumes_with_the_same_sizes(
    assets: Path, tmp_path: Path
) -> None:
    found = run_alone(_asked_to_end, assets, tmp_path)
    status, sentence = found["end"]
    assert status == STATUS_STOPPED
    assert sentence.startswith("a signal ended the run after step 4, and a checkpoint is saved")
    assert found["resumed from"] == ("step_4", "step_4")
    assert found["sizes"] == ((6, 2), (6, 2), (12, 6))
    assert found["equal"]
    assert found["searches"] == [2, 2]


# ---- checkpoints that cannot be saved or resumed from


def _bad_days(assets: Path, output_dir: Path) -> dict[str, Any]:
    keys = RUN | {"num_steps": 3 * IN_A_TURN}  # an epoch of two turns, and one turn
    cfg = ppo_config(assets, output_dir, **keys)
    found: dict[str, Any] = {}

    with mock.patch.object(CheckpointFolder, "finish", _no_space_for_values):
        trained(killed_in(2), cfg)
    found["without a value model"] = trained(killed_in(0), cfg).resumed_from
    try:
        FileLock(output_dir / "value" / LOCK_NAME, timeout=0).acquire()
    except Timeout:
        found["values are locked"] = True

    shutil.rmtree(output_dir)
    trained(killed_in(2), cfg)
    found["refused"] = {
        key: _refusal(ppo_config(assets, output_dir, **keys | {key: value}))
        for key, value in (("ppo_epochs", 1), ("num_steps", 2 * IN_A_TURN))
    }
    half_written = CheckpointFolder(output_dir / "value").unfinished("epoch_9")
    half_written.mkdir()
    trained(asked_to_end_in(2), cfg)  # in its last turn, so the run is complete all the same
    found["half-written values"] = half_written.exists()
    with pytest.raises(RunEnded) as end:
        Recipe(cfg)
    found["complete"] = end.value.status, str(end.value)
    return found


def _no_space_for_values(folder: CheckpointFolder, name: str, state: AdaptiveState, **options: Any) -> Path:
    if folder.path.name == "value":
        raise OSError(errno.ENOSPC, "No space left on device")
    return FINISH(folder, name, state, **options)


def _refusal(cfg: DictConfig) -> str:
    with pytest.raises(InputError) as refused:
        Recipe(cfg).setup(cfg)
    return str(refused.value)


@pytest.fixture(scope="module")
def bad_days(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    output_dir = tmp_path_factory.mktemp("bad") / "out"
    return run_alone(_bad_days, assets, output_dir), output_dir


def test_value_models_are_saved_with_their_policies_or_not_at_all(bad_days: tuple[dict[str, Any], Path]) -> None:
    found, output_dir = bad_days
    assert found["without a value model"] is None
    assert found["values are locked"]
    assert not found["half-written values"]
    assert found["complete"] == (0, f"The run is complete: {output_dir / 'epoch_1'} is its last checkpoint.")


def test_another_kind_of_turn_is_refused(bad_days: tuple[dict[str, Any], Path]) -> None:
    found, output_dir = bad_days
    assert found["refused"] == {
        "ppo_epochs": "`ppo_epochs` must be 2 as in the checkpoint, but is 1 instead.",
        "num_steps": f"`num_steps` must be at least 6 to resume from '{output_dir / 'epoch_0'}', but is 4 instead.",
    }


def test_a_value_model_must_be_that_of_the_policys_epoch(tmp_path: Path) -> None:
    def save_value_model(state: AdaptiveState) -> Path:
        return save(CheckpointFolder(tmp_path / "value"), "epoch_0", {"model.bin": "weights"}, state=state)

    def refusal() -> str:
        with pytest.raises(InputError) as refused:
            resuming_with_value_model(cfg, policy, Consensus())
        return str(refused.value)

    blocks = {"checkpointer": tmp_path, "value_checkpointer": tmp_path / "value"}
    cfg = OmegaConf.create({name: {"output_dir": str(path)} for name, path in blocks.items()})
    (tmp_path / "value").mkdir()
    policy = read_checkpoint(save(CheckpointFolder(tmp_path), "epoch_0", state=STATE))
    lacks = f"`resume_from_checkpoint` '{policy.path}' lacks its value model: "
    assert refusal() == f"{lacks}there is no '{tmp_path}/value/epoch_0'."
    values = save_value_model(replace(STATE, run=replace(STATE.run, id="other")))
    assert refusal() == f"{lacks}that in '{values}' is of another run."
    save_value_model(STATE)
    resuming = resuming_with_value_model(cfg, policy, Consensus())
    assert resuming.value_checkpointer.checkpoint_files == [f"{values}/model.bin"]
    (values / "model.bin").write_text("WEIGHTS")
    assert refusal() == f"{values}/model.bin must be as the run wrote it, but its content has changed."
    policy = replace(policy, state=None)  # torchtune's, as is a value model beside a copied state of other weights
    resuming = resuming_with_value_model(cfg, policy, Consensus())
    assert resuming.value_checkpointer.checkpoint_files == [f"{values}/model.bin"]
    save_value_model(STATE)
    assert refusal().endswith("is of another run.")


def _of_stock(assets: Path, output_dir: Path) -> tuple[str | None, list[float], list[float]]:
    """A run of torchtune's own recipe that the adaptive one resumes: the checkpoint, and the steps that each logs."""
    keys = RUN | {"num_steps": 3 * IN_A_TURN, "resume_from_checkpoint": False}
    cfg = ppo_config(assets, output_dir, **keys)
    stock = killed_in(2, ppo.StockRecipe)(cfg)
    stock.setup(cfg)
    with pytest.raises(_KilledError):
        stock.train()
    before = [step["step"] for step in RecordingLogger.last.steps]
    after = trained(Recipe, ppo_config(assets, output_dir, **keys | {"resume_from_checkpoint": True}))
    return after.resumed_from, before, [step["step"] for step in after.steps]


def test_a_run_resumes_from_a_checkpoint_of_torchtunes_own_recipe(assets: Path, tmp_path: Path) -> None:
    assert run_alone(_of_stock, assets, tmp_path) == ("epoch_0", [2, 4], [6])
