"""torchtune's checkpoints of epochs appear complete, where torchtune looks for them."""

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors import SafetensorError
from torchtune import training

from tests.support.full_disk import FullDisk, full_in_each_call
from tests.support.toys import STATE
from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.errors import CheckpointError
from torchtune_adaptive.stock.checkpoints import RECIPE_STATE, AtomicCheckpointer, WholeCheckpointClient
from torchtune_adaptive.stock.resume import stock_checkpoint
from torchtune_adaptive.training.checkpoints.folder import RANK_STATES_NAME, STATE_NAME, Checkpoint, CheckpointFolder
from torchtune_adaptive.training.folder_lock import FolderReplacedError

EPOCHS = 3


class Torchtunes:
    """Writes files as torchtune's checkpointers do; ``error`` is raised between the model and the recipe's state."""

    def __init__(self, output_dir: Path) -> None:
        self._output_dir = output_dir
        self.error: Exception | None = None

    def save_checkpoint(self, state_dict: dict[str, Any], epoch: int, *, intermediate_checkpoint: bool) -> None:
        directory = self._output_dir / f"epoch_{epoch}"
        (directory / "original").mkdir(parents=True)
        (directory / "original" / "params.json").write_text("{}")
        (directory / "config.json").write_text("{}")
        torch.save(state_dict[training.MODEL_KEY], directory / "model-00001-of-00001.bin")
        if self.error is not None:
            raise self.error
        if intermediate_checkpoint:
            path = self._output_dir / "recipe_state" / "recipe_state.pt"
            path.parent.mkdir(exist_ok=True)
            torch.save({training.EPOCHS_KEY: epoch + 1}, path)


class Recipe:
    """Saves epochs as an adaptive recipe does."""

    def __init__(self, path: Path) -> None:
        path.mkdir(exist_ok=True)
        self.path = path
        self.folder = CheckpointFolder(path)
        self.torchtunes = Torchtunes(path)
        self.whole = AtomicCheckpointer(self.torchtunes, self.folder)

    def save(self, epoch: int) -> None:
        self.whole.set_state(replace(STATE, epochs_run=epoch + 1))
        content = {training.MODEL_KEY: {"weight": torch.full((2,), float(epoch))}}
        self.whole.save_checkpoint(content, epoch=epoch, intermediate_checkpoint=epoch + 1 < EPOCHS)

    def files(self) -> list[str]:
        return sorted(path.relative_to(self.path).as_posix() for path in self.path.rglob("*") if path.is_file())

    def weights_of(self, epoch: int) -> list[float]:
        return torch.load(self.path / f"epoch_{epoch}" / "model-00001-of-00001.bin")["weight"].tolist()

    def found(self) -> list[Checkpoint]:
        return CheckpointFolder(self.path).checkpoints()


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return Recipe(tmp_path / "run")


OF_AN_EPOCH = [RANK_STATES_NAME, STATE_NAME, "config.json", "model-00001-of-00001.bin", "original/params.json"]


def of_epoch(epoch: int, *more: str) -> list[str]:
    return [f"epoch_{epoch}/{name}" for name in sorted([*OF_AN_EPOCH, *more])]


# ---- saving


def test_each_epoch_is_a_checkpoint_with_its_files_and_the_last_one_has_the_recipes_state(recipe: Recipe) -> None:
    recipe.save(0)
    link = "recipe_state/recipe_state.pt"
    assert recipe.files() == [*of_epoch(0, "recipe_state.pt"), link]
    recipe.save(1)
    assert recipe.files() == [*of_epoch(0), *of_epoch(1, "recipe_state.pt"), link]
    assert os.path.samefile(recipe.path / "epoch_1" / "recipe_state.pt", recipe.path / link)  # takes no space twice
    recipe.save(2)  # torchtune saves no recipe state after the last epoch
    assert recipe.files() == [*of_epoch(0), *of_epoch(1, "recipe_state.pt"), *of_epoch(2), link]
    assert [recipe.weights_of(epoch) for epoch in range(3)] == [[0, 0], [1, 1], [2, 2]]
    assert torch.load(recipe.path / link)[training.EPOCHS_KEY] == 2
    assert [one.path.name for one in recipe.found()] == ["epoch_0", "epoch_1", "epoch_2"]
    assert [one.can_resume for one in recipe.found()] == [False, True, False]
    assert [one.state for one in recipe.found()] == [replace(STATE, epochs_run=epochs_run) for epochs_run in (1, 2, 3)]


def test_a_base_models_folder_may_have_folders_of_a_run(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the output folder of an earlier run, which torchtune copies into each epoch."""
    folders = ("epoch_0", "recipe_state", "step_1")
    save = Torchtunes.save_checkpoint

    def copying(torchtunes: Torchtunes, state_dict: dict[str, Any], epoch: int, **options: Any) -> None:
        save(torchtunes, state_dict, epoch, **options)
        for name in folders:
            (torchtunes._output_dir / f"epoch_{epoch}" / name).mkdir()
            (torchtunes._output_dir / f"epoch_{epoch}" / name / STATE_NAME).write_text("{}")

    monkeypatch.setattr(Torchtunes, "save_checkpoint", copying)
    for epoch in range(EPOCHS):
        recipe.save(epoch)
        recipe.whole.check_saved(Consensus(), is_last=True)
    assert [one.path.name for one in recipe.found()] == ["epoch_0", "epoch_1", "epoch_2"]
    copied = [f"{name}/{STATE_NAME}" for name in folders]
    assert recipe.files() == sorted(
        [*of_epoch(0, *copied), *of_epoch(1, *copied, "recipe_state.pt"), *of_epoch(2, *copied), str(RECIPE_STATE)]
    )


def test_without_hard_links_the_recipes_state_is_copied(recipe: Recipe) -> None:
    with FullDisk(os, "link", stays_full=True):
        for epoch in range(2):
            recipe.save(epoch)
    path = recipe.path / "recipe_state" / "recipe_state.pt"
    assert torch.load(path)[training.EPOCHS_KEY] == 2
    assert not os.path.samefile(path, recipe.path / "epoch_1" / "recipe_state.pt")
    assert list(path.parent.iterdir()) == [path]


def test_without_hard_links_a_copy_that_does_not_fit_leaves_no_partial_file(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy_half(source: Path, target: Path) -> None:
        target.write_bytes(source.read_bytes()[:100])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    recipe.save(0)
    monkeypatch.setattr(shutil, "copyfile", copy_half)
    with FullDisk(os, "link", stays_full=True):
        recipe.save(1)
    path = recipe.path / "recipe_state" / "recipe_state.pt"
    assert list(path.parent.iterdir()) == [path]
    assert torch.load(path)[training.EPOCHS_KEY] == 1


def test_a_checkpointer_that_is_not_torchtunes_saves_unchanged(tmp_path: Path) -> None:
    saved: list[tuple[Any, ...]] = []

    class Other:
        def save_checkpoint(self, state_dict: dict[str, Any], epoch: int, *args: Any, **options: Any) -> None:
            saved.append((state_dict, epoch, args, options))

    AtomicCheckpointer(Other(), CheckpointFolder(tmp_path)).save_checkpoint({"model": 1}, 3, "more", option=2)
    assert saved == [({"model": 1}, 3, ("more",), {"option": 2})]
    assert list(tmp_path.iterdir()) == []


# ---- what cannot be saved


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
    ids=["by us", "by torch", "by safetensors"],
)
def test_an_epoch_that_cannot_be_saved_is_logged_and_earlier_ones_are_kept(
    recipe: Recipe, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=3 * 2**20))
    recipe.save(0)
    before = recipe.files()
    recipe.torchtunes.error = error
    recipe.save(1)  # nothing is raised yet, because other ranks wait
    assert recipe.files() == before
    caplog.clear()
    reason = f"{type(error).__name__}: {error} (3.0 MiB free in {recipe.path})"
    sentence = f"the checkpoint of an epoch could not be saved: {reason}. Earlier checkpoints are kept."
    recipe.whole.check_saved(Consensus(), is_last=False)
    assert caplog.messages == [f"{sentence} Training continues and saves again after the next epoch."]
    with pytest.raises(CheckpointError) as failure:
        recipe.whole.check_saved(Consensus(), is_last=True)
    assert str(failure.value) == sentence
    recipe.torchtunes.error = None
    recipe.save(1)
    recipe.whole.check_saved(Consensus(), is_last=True)
    assert recipe.weights_of(1) == [1, 1]


def test_a_run_ends_where_its_folder_is_replaced(recipe: Recipe, tmp_path: Path) -> None:
    recipe.folder.lock()
    recipe.save(0)
    recipe.path.rename(tmp_path / "moved")
    another = Recipe(recipe.path)  # in a new folder
    another.save(0)
    before = another.files()
    for epoch in (0, 1):
        recipe.save(epoch)
        with pytest.raises(FolderReplacedError):
            recipe.whole.check_saved(Consensus(), is_last=False)
    recipe.whole.set_state(STATE)
    with pytest.raises(FolderReplacedError):
        recipe.whole.save_state("dist_epoch_1")
    assert another.files() == before


def test_only_a_shortage_of_space_is_said_with_the_space(recipe: Recipe) -> None:
    assert recipe.folder.describe_space(OSError(errno.EMFILE, "Too many open files")) == ""
    assert " free in " in recipe.folder.describe_space(OSError(errno.ENOSPC, "No space left on device"))
    assert recipe.folder.describe_space(RuntimeError("by torch, which does not say why")).endswith(
        f" in {recipe.path})"
    )
    recipe.path.rmdir()
    assert recipe.folder.describe_space(FileNotFoundError(errno.ENOENT, "No such file")) == ""
    assert recipe.folder.describe_space(CheckpointError("no folder")) == f" (no folder {recipe.path})"


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_failure_after_torchtune_has_written_is_logged_and_no_checkpoint_is_partial(
    recipe: Recipe, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    for number, disk in enumerate(full_in_each_call(os, name)):
        run = Recipe(recipe.path / str(number))
        run.save(0)
        with disk:
            run.save(1)
        caplog.clear()
        run.whole.check_saved(Consensus(), is_last=False)
        assert ("No space left" in caplog.text) == disk.has_struck
        assert [one.path.name for one in run.found()] in (["epoch_0"], ["epoch_0", "epoch_1"])
        assert any(one.can_resume for one in run.found())
        assert [run.weights_of(epoch) for epoch in range(len(run.found()))] == [[0, 0], [1, 1]][: len(run.found())]


def test_a_failure_to_gather_is_logged_too(recipe: Recipe, caplog: pytest.LogCaptureFixture) -> None:
    recipe.whole.give_up("no gathering")
    assert not recipe.whole.check_saved(Consensus(), is_last=False)
    assert "could not be saved: no gathering. Earlier" in caplog.text


# ---- in torchtune's background


def test_in_the_background_the_state_of_the_run_is_beside_what_torchtune_writes(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = OmegaConf.create({"device": "cpu", "enable_async_checkpointing": True, "resume_from_checkpoint": False})
    client = WholeCheckpointClient(cfg, recipe.whole)
    assert client._get_checkpointer() is recipe.whole
    written: list[tuple[Any, ...]] = []

    def write(client: Any, *arguments: Any) -> None:
        written.append(arguments)
        (recipe.path / "dist_epoch_1" / ".metadata").touch()

    monkeypatch.setattr(WholeCheckpointClient.__bases__[0], "_save_checkpoint_async", write)
    recipe.whole.set_state(replace(STATE, epochs_run=2))
    client._save_checkpoint_async("model", "optimizer", "progress", 1)
    assert written == [("model", "optimizer", "progress", 1)]
    found = stock_checkpoint(recipe.path, in_background=True)
    path = recipe.path / "dist_epoch_1"
    assert found == Checkpoint(path, 0, replace(STATE, epochs_run=2), 2, path / ".metadata")


def test_where_the_state_of_the_run_cannot_be_saved_torchtunes_checkpoint_is_left(
    recipe: Recipe, caplog: pytest.LogCaptureFixture
) -> None:
    recipe.whole.set_state(STATE)
    path = recipe.path / "dist_epoch_1"
    path.mkdir()
    for name in (".metadata", STATE_NAME):  # of an earlier run
        (path / name).touch()
    with FullDisk(os, "fsync"):
        recipe.whole.save_state("dist_epoch_1")
    assert stock_checkpoint(recipe.path, in_background=True) is None
    (path / ".metadata").touch()  # by torchtune
    (message,) = caplog.messages
    assert message.startswith(f"{recipe.path}/dist_epoch_1 has no adaptive_state.json, which could not be saved: ")
    assert stock_checkpoint(recipe.path, in_background=True) == Checkpoint(path, 0, None, 2, path / ".metadata")
