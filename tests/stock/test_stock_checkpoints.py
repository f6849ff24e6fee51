"""torchtune's checkpoints of epochs appear complete, where torchtune looks for them, and are found without a name."""

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from safetensors import SafetensorError
from torchtune import training

from tests.support.toys import STATE
from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.errors import CheckpointError, InputError, RunEnded
from torchtune_adaptive.stock.checkpoints import (
    WholeCheckpointClient,
    WholeCheckpointer,
    find_checkpoint_of,
    resuming,
    stock_checkpoint,
)
from torchtune_adaptive.training.checkpoints.folder import (
    RANK_STATES_NAME,
    STATE_NAME,
    Checkpoint,
    CheckpointFolder,
    write_state,
)

EPOCHS = 3


class Torchtunes:
    """Writes files as torchtune's checkpointers do; ``fail`` is called between the model and the recipe's state."""

    def __init__(self, output_dir: Path, *, adapter: bool = False) -> None:
        self._output_dir = output_dir
        self.adapter = adapter
        self.fail: Callable[[], None] = lambda: None

    def load_checkpoint(self) -> str:
        return "the base model"

    def save_checkpoint(self, state_dict: dict[str, Any], epoch: int, *, intermediate_checkpoint: bool) -> None:
        directory = self._output_dir / f"epoch_{epoch}"
        (directory / "original").mkdir(parents=True)
        (directory / "original" / "params.json").write_text("{}")
        (directory / "config.json").write_text("{}")
        torch.save(state_dict[training.MODEL_KEY], directory / "model-00001-of-00001.bin")
        if self.adapter:
            (directory / "adapter_model.pt").write_text("adapter")
            (directory / "adapter_model.safetensors").write_text("adapter")
        self.fail()
        if intermediate_checkpoint:
            path = self._output_dir / "recipe_state" / "recipe_state.pt"
            path.parent.mkdir(exist_ok=True)
            torch.save({training.EPOCHS_KEY: epoch + 1}, path)


class Recipe:
    """Saves epochs as an adaptive recipe does."""

    def __init__(self, path: Path, **options: Any) -> None:
        path.mkdir(exist_ok=True)
        self.path = path
        self.folder = CheckpointFolder(path)
        self.torchtunes = Torchtunes(path, **options)
        self.whole = WholeCheckpointer(self.torchtunes, self.folder)

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


def test_each_epoch_has_its_files_and_the_last_one_the_recipes_state(recipe: Recipe) -> None:
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


def test_each_epoch_is_a_checkpoint_of_its_state(recipe: Recipe) -> None:
    for epoch in range(EPOCHS):
        recipe.save(epoch)
    assert [(one.path.name, one.epochs_run, one.can_resume) for one in recipe.found()] == [
        ("epoch_0", 1, False),
        ("epoch_1", 2, True),
        ("epoch_2", 3, False),
    ]
    assert [one.state for one in recipe.found()] == [replace(STATE, epochs_run=epochs_run) for epochs_run in (1, 2, 3)]


def test_an_epoch_that_is_saved_again_replaces_the_one_before(recipe: Recipe) -> None:
    recipe.save(0)
    (recipe.path / "epoch_0" / "of_the_run_before.txt").touch()
    recipe.save(0)
    assert recipe.files() == [*of_epoch(0, "recipe_state.pt"), "recipe_state/recipe_state.pt"]


def test_without_hard_links_the_recipes_state_is_copied(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", refuse)
    for epoch in range(2):
        recipe.save(epoch)
    path = recipe.path / "recipe_state" / "recipe_state.pt"
    assert torch.load(path)[training.EPOCHS_KEY] == 2
    assert not os.path.samefile(path, recipe.path / "epoch_1" / "recipe_state.pt")
    assert list(path.parent.iterdir()) == [path]


def test_all_other_attributes_are_torchtunes(recipe: Recipe) -> None:
    assert recipe.whole.load_checkpoint() == "the base model"
    assert recipe.whole._output_dir == recipe.path
    recipe.save(0)
    assert recipe.torchtunes._output_dir == recipe.path  # unchanged


def test_a_checkpointer_that_is_not_torchtunes_saves_unchanged(tmp_path: Path) -> None:
    saved: list[tuple[Any, ...]] = []

    class Other:
        def save_checkpoint(self, state_dict: dict[str, Any], epoch: int, *args: Any, **options: Any) -> None:
            saved.append((state_dict, epoch, args, options))

    WholeCheckpointer(Other(), CheckpointFolder(tmp_path)).save_checkpoint({"model": 1}, 3, "more", option=2)
    assert saved == [({"model": 1}, 3, ("more",), {"option": 2})]
    assert list(tmp_path.iterdir()) == []


# ---- what cannot be saved


def fail_by(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


ERRORS = [
    (OSError(28, "No space left on device"), "OSError: [Errno 28] No space left on device"),
    (
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"),
        "RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598",
    ),
    (
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        "SafetensorError: Error while serializing: I/O error: No space left on device (os error 28)",
    ),
]


@pytest.mark.parametrize(("error", "reason"), ERRORS, ids=["by us", "by torch", "by safetensors"])
def test_an_epoch_that_cannot_be_saved_is_logged_and_earlier_ones_are_kept(
    recipe: Recipe,
    error: Exception,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=3 * 2**20))
    recipe.save(0)
    before = recipe.files()
    recipe.torchtunes.fail = fail_by(error)
    recipe.save(1)  # nothing is raised yet, because other ranks wait
    assert recipe.files() == before
    caplog.clear()
    sentence = (
        f"the checkpoint of an epoch could not be saved: {reason} (3.0 MiB free in {recipe.path})."
        " Earlier checkpoints are kept."
    )
    recipe.whole.check_saved(Consensus(), is_last=False)
    assert caplog.messages == [f"{sentence} Training continues and saves again after the next epoch."]
    with pytest.raises(CheckpointError) as failure:
        recipe.whole.check_saved(Consensus(), is_last=True)
    assert str(failure.value) == sentence
    recipe.torchtunes.fail = lambda: None
    recipe.save(1)
    recipe.whole.check_saved(Consensus(), is_last=True)
    assert recipe.weights_of(1) == [1, 1]


def test_an_epoch_that_cannot_be_saved_again_keeps_its_older_checkpoint(recipe: Recipe) -> None:
    recipe.save(0)
    (recipe.path / "epoch_0" / "of_the_run_before.txt").touch()
    before = recipe.files()
    recipe.torchtunes.fail = fail_by(OSError(28, "No space left on device"))
    recipe.save(0)
    assert recipe.files() == before
    assert [one.path.name for one in recipe.found()] == ["epoch_0"]


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_failure_after_torchtune_has_written_is_logged_and_no_checkpoint_is_partial(
    recipe: Recipe, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    call = getattr(os, name)
    number = 0
    while True:
        number += 1
        calls: list[int] = []

        def fail(*args: Any, calls: list[int] = calls, number: int = number) -> Any:
            calls.append(1)
            if len(calls) == number:
                raise OSError(28, "No space left on device")
            return call(*args)

        run = Recipe(recipe.path / str(number))
        run.save(0)
        with monkeypatch.context() as patch:
            patch.setattr(os, name, fail)
            run.save(1)
        caplog.clear()
        run.whole.check_saved(Consensus(), is_last=False)
        assert ("No space left" in caplog.text) == (len(calls) >= number)
        assert [one.path.name for one in run.found()] in (["epoch_0"], ["epoch_0", "epoch_1"])
        assert any(one.can_resume for one in run.found())
        assert [run.weights_of(epoch) for epoch in range(len(run.found()))] == [[0, 0], [1, 1]][: len(run.found())]
        if len(calls) < number:
            break
    assert number > 1


# ---- in torchtune's background


def test_a_failure_to_gather_is_logged_too(recipe: Recipe, caplog: pytest.LogCaptureFixture) -> None:
    recipe.whole.give_up("no gathering")
    assert not recipe.whole.check_saved(Consensus(), is_last=False)
    assert caplog.messages[-1].startswith(
        "the checkpoint of an epoch could not be saved: no gathering. Earlier checkpoints "
    )


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
    recipe: Recipe, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("torchtune_adaptive.stock.checkpoints.write_state", fail)
    recipe.whole.set_state(STATE)
    path = recipe.path / "dist_epoch_1"
    path.mkdir()
    (path / ".metadata").touch()
    recipe.whole.save_state("dist_epoch_1")
    (message,) = caplog.messages
    assert message.startswith(f"{recipe.path}/dist_epoch_1 has no adaptive_state.json, which could not be saved: ")
    assert stock_checkpoint(recipe.path, in_background=True) == Checkpoint(path, 0, None, 2, path / ".metadata")


# ---- what torchtune alone has saved


def save_by_stock(path: Path, *, epochs_run: int) -> None:
    (path / "recipe_state").mkdir(parents=True, exist_ok=True)
    for epoch in range(epochs_run):
        (path / f"epoch_{epoch}").mkdir(exist_ok=True)
        (path / f"epoch_{epoch}" / "model-00001-of-00001.bin").write_text("weights")
    torch.save({training.EPOCHS_KEY: epochs_run}, path / "recipe_state" / "recipe_state.pt")


def test_a_stock_checkpoint_is_that_of_its_recipe_state(tmp_path: Path) -> None:
    assert stock_checkpoint(tmp_path, in_background=False) is None
    save_by_stock(tmp_path, epochs_run=2)
    state = tmp_path / "recipe_state" / "recipe_state.pt"
    assert stock_checkpoint(tmp_path, in_background=False) == Checkpoint(tmp_path / "epoch_1", 0, None, 2, state)
    assert stock_checkpoint(tmp_path, in_background=True) is None


def test_a_truncated_recipe_state_is_skipped_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_by_stock(tmp_path, epochs_run=2)
    path = tmp_path / "recipe_state" / "recipe_state.pt"
    path.write_bytes(path.read_bytes()[:100])
    assert stock_checkpoint(tmp_path, in_background=False) is None
    (message,) = caplog.messages
    assert message.startswith(f"Skipped {path}, because it cannot be read: RuntimeError: ")
    assert "\n" not in message


@pytest.mark.parametrize("content", [{}, [1]], ids=["no epochs", "a list"])
def test_another_programs_recipe_state_is_skipped(
    tmp_path: Path, content: Any, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "recipe_state").mkdir()
    torch.save(content, tmp_path / "recipe_state" / "recipe_state.pt")
    assert stock_checkpoint(tmp_path, in_background=False) is None
    assert ", because it cannot be read: " in caplog.text


def test_a_recipe_state_whose_epoch_is_missing_is_skipped_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_by_stock(tmp_path, epochs_run=2)
    (tmp_path / "epoch_1").rename(tmp_path / "the_best_one")
    assert stock_checkpoint(tmp_path, in_background=False) is None
    assert caplog.messages == [
        f"Skipped {tmp_path / 'recipe_state' / 'recipe_state.pt'}, because {tmp_path / 'epoch_1'} is missing."
    ]


def test_in_the_background_the_latest_complete_one_is_found_with_or_without_an_adaptive_state(tmp_path: Path) -> None:
    assert stock_checkpoint(tmp_path, in_background=True) is None
    for epoch in (2, 9, 10, 11):
        (tmp_path / f"dist_epoch_{epoch}").mkdir()
        if epoch != 11:  # still being written when the run was killed
            (tmp_path / f"dist_epoch_{epoch}" / ".metadata").touch()
    path = tmp_path / "dist_epoch_10"
    assert stock_checkpoint(tmp_path, in_background=True) == Checkpoint(path, 0, None, 11, path / ".metadata")
    write_state(path, replace(STATE, epochs_run=11))
    found = stock_checkpoint(tmp_path, in_background=True)
    assert found is not None
    assert found.state == replace(STATE, epochs_run=11)


# ---- the config that a stock recipe is set up with

CONFIG = {
    "resume_from_checkpoint": "auto",
    "checkpointer": {"checkpoint_files": ["a.bin", "b.bin", "c.bin"], "recipe_checkpoint": None},
}


def config(**keys: Any) -> DictConfig:
    cfg = OmegaConf.create(CONFIG | keys)
    OmegaConf.set_struct(cfg, True)  # as after the command line is read
    return cfg


def changes(cfg: DictConfig, checkpoint: Checkpoint | None) -> dict[str, Any]:
    """The keys that `resuming` changes in its result; ``cfg`` itself stays unchanged."""
    before = OmegaConf.to_container(cfg)
    changed = resuming(cfg, checkpoint)
    assert OmegaConf.to_container(cfg) == before
    found: dict[str, Any] = {}
    for key in ("resume_from_checkpoint", "enable_async_checkpointing"):
        if changed.get(key) != cfg.get(key):
            found[key] = changed.get(key)
    for key in {*changed.checkpointer, *cfg.checkpointer}:
        if changed.checkpointer.get(key) != cfg.checkpointer.get(key):
            found[str(key)] = changed.checkpointer.get(key)
    return found


def test_a_new_run_and_one_resumed_from_a_step_are_set_up_as_new(tmp_path: Path) -> None:
    of_step = Checkpoint(tmp_path / "step_5", 1, STATE, 2)
    for checkpoint in (None, of_step):
        assert changes(config(), checkpoint) == {"resume_from_checkpoint": False}
    without_key = OmegaConf.create({"checkpointer": {}})
    assert resuming(without_key, of_step).resume_from_checkpoint is False


def test_a_run_resumed_from_an_epoch_gets_its_files(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    for epoch in range(2):
        recipe.save(epoch)
    epoch_1 = recipe.path / "epoch_1"
    for name in ("model-00003-of-00003.safetensors", "model-00002-of-00003.safetensors"):
        (epoch_1 / name).touch()
    expected = {
        "resume_from_checkpoint": True,
        "recipe_checkpoint": str(epoch_1 / "recipe_state.pt"),
        "checkpoint_files": [
            str(epoch_1 / name)
            for name in (
                "model-00001-of-00001.bin",
                "model-00002-of-00003.safetensors",
                "model-00003-of-00003.safetensors",
            )
        ],
    }
    assert changes(config(), recipe.found()[-1]) == expected
    monkeypatch.chdir(recipe.path)  # torchtune reads relative names from its own folders
    relative = CheckpointFolder(Path()).checkpoints()[-1]
    assert not relative.path.is_absolute()
    assert changes(config(), relative) == expected


def test_files_given_by_a_pattern_are_replaced_by_their_names(recipe: Recipe) -> None:
    recipe.save(0)
    cfg = config(checkpointer={"checkpoint_files": {"filename_format": "model-{}.bin", "max_filename": "00003"}})
    assert changes(cfg, recipe.found()[-1])["checkpoint_files"] == [
        str(recipe.path / "epoch_0" / "model-00001-of-00001.bin")
    ]


def test_a_run_of_adapters_gets_the_adapter_beside_its_own_base_model(tmp_path: Path) -> None:
    recipe = Recipe(tmp_path / "run", adapter=True)
    recipe.save(0)
    assert changes(config(), recipe.found()[-1]) == {
        "resume_from_checkpoint": True,
        "recipe_checkpoint": str(recipe.path / "epoch_0" / "recipe_state.pt"),
        "adapter_checkpoint": str(recipe.path / "epoch_0" / "adapter_model.pt"),
    }


def test_torchtune_itself_finds_what_it_has_written_in_the_background(tmp_path: Path) -> None:
    path = tmp_path / "dist_epoch_1"
    checkpoint = Checkpoint(path, 0, None, 2, path / ".metadata")
    cfg = config(enable_async_checkpointing=True)
    assert changes(cfg, checkpoint) == {"resume_from_checkpoint": True}


# ---- where a run resumes


def run_config(path: Path, resume: Any, **keys: Any) -> DictConfig:
    return OmegaConf.create({"resume_from_checkpoint": resume, "epochs": EPOCHS, "output_dir": str(path)} | keys)


def find(path: Path, resume: Any, **keys: Any) -> Checkpoint | None:
    """The checkpoint to resume from, in a folder that no run uses any more."""
    folder, cfg = CheckpointFolder(path), run_config(path, resume, **keys)
    try:
        return find_checkpoint_of(cfg, folder, is_last=lambda one: one.epochs_run >= cfg.epochs)
    finally:
        lock = folder._lock
        assert lock is not None
        lock.release()


def save_step(folder: CheckpointFolder, step: int, *, epochs_run: int) -> None:
    folder.start(f"step_{step}")
    folder.finish(f"step_{step}", replace(STATE, epochs_run=epochs_run, global_step=step))


def test_the_folder_is_locked_and_unfinished_checkpoints_are_removed(recipe: Recipe) -> None:
    recipe.save(0)
    recipe.folder.start("epoch_1")
    found = find(recipe.path, True)
    assert found is not None
    assert found.path.name == "epoch_0"
    assert (recipe.path / "adaptive.lock").exists()
    assert not recipe.folder.unfinished("epoch_1").exists()


def test_a_run_resumes_from_its_latest_checkpoint_whether_of_an_epoch_or_a_step(recipe: Recipe) -> None:
    assert find(recipe.path, "auto") is None
    for save, name in (
        (lambda: save_step(recipe.folder, 5, epochs_run=0), "step_5"),
        (lambda: recipe.save(0), "epoch_0"),
        (lambda: save_step(recipe.folder, 15, epochs_run=1), "step_15"),
        (lambda: recipe.save(1), "epoch_1"),
    ):
        save()
        found = find(recipe.path, True)
        assert found is not None
        assert (found.path.name, found.state is None) == (name, False)
    recipe.save(2)
    with pytest.raises(RunEnded):
        find(recipe.path, True)
    more = find(recipe.path, True, epochs=5)
    assert more is not None
    assert more.path.name == "epoch_1"  # the last one with the optimizer's state


def test_a_run_resumes_from_a_stock_checkpoint_also_one_saved_after_its_own(recipe: Recipe) -> None:
    save_by_stock(recipe.path, epochs_run=1)
    found = find(recipe.path, True)
    assert found is not None
    assert (found.path.name, found.state) == ("epoch_0", None)
    recipe.save(0)
    save_by_stock(recipe.path, epochs_run=2)
    found = find(recipe.path, True)
    assert found is not None
    assert (found.path.name, found.state) == ("epoch_1", None)


def test_a_run_that_is_to_resume_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="must be False or auto if there is no complete checkpoint"):
        find(tmp_path / "run", True)
    assert find(tmp_path / "run", False) is None
    assert find(tmp_path / "run", "auto", enable_async_checkpointing=True) is None


def test_a_new_run_in_the_folder_of_an_old_one_resumes_from_its_own_checkpoint(recipe: Recipe) -> None:
    for epoch in range(2):
        recipe.save(epoch)
    folder = CheckpointFolder(recipe.path)
    assert find_checkpoint_of(run_config(recipe.path, False), folder, is_last=lambda one: False) is None  # a new run
    save_step(folder, 5, epochs_run=0)
    assert folder._lock is not None
    folder._lock.release()
    found = find(recipe.path, True)
    assert found is not None
    assert found.path.name == "step_5"
