"""Where a run resumes, for each value of ``resume_from_checkpoint``, and with which config torchtune is then set up."""

import io
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from torchtune import training

from tests.support.toys import STATE
from tests.training.checkpoints.test_checkpoint_folder import save
from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.errors import InputError, RunEnded
from torchtune_adaptive.stock.resume import (
    check_epochs,
    content_digest,
    find_checkpoint,
    latest_epoch,
    resuming,
    stock_checkpoint,
)
from torchtune_adaptive.training.checkpoints.folder import (
    RANK_STATES_NAME,
    RECIPE_STATE_NAME,
    STATE_NAME,
    Checkpoint,
    CheckpointFolder,
    read_checkpoint,
    write_state,
)
from torchtune_adaptive.training.folder_lock import LOCK_NAME
from torchtune_adaptive.training.run_state import RunIdentity

EPOCHS = 4


def save_by_stock(path: Path, *, epochs_run: int) -> None:
    (path / "recipe_state").mkdir(parents=True, exist_ok=True)
    for epoch in range(epochs_run):
        (path / f"epoch_{epoch}").mkdir(exist_ok=True)
        (path / f"epoch_{epoch}" / "model-00001-of-00001.bin").write_text("weights")
    torch.save({training.EPOCHS_KEY: epochs_run}, path / "recipe_state" / "recipe_state.pt")


class Run:
    """A run's folder."""

    def __init__(self, path: Path) -> None:
        path.mkdir()
        self.folder = CheckpointFolder(path)

    def save(
        self,
        name: str,
        *,
        epochs_run: int,
        with_recipe_state: bool = False,
        files: Sequence[str] = (),
        run: RunIdentity = STATE.run,
    ) -> Path:
        names = [*files, *([RECIPE_STATE_NAME] if with_recipe_state else [])]
        state = replace(STATE, epochs_run=epochs_run, run=run)
        return save(self.folder, name, dict.fromkeys(names, "content"), state=state)

    def find(self, wanted: Any, *, epochs: int = EPOCHS, folder: CheckpointFolder | None = None, **keys: Any) -> Any:
        """The checkpoint for a new process."""
        return find_checkpoint(
            OmegaConf.create({"resume_from_checkpoint": wanted} | keys),
            folder or CheckpointFolder(self.folder.path),
            Consensus(),
            method=STATE.run.method,
            is_last=lambda one: one.epochs_run >= epochs,
        )

    def name_of(self, wanted: Any, *, epochs: int = EPOCHS) -> str | None:
        found = self.find(wanted, epochs=epochs)
        return found and found.path.name

    def refusal(self, wanted: Any) -> str:
        with pytest.raises(InputError) as refused:
            self.find(wanted)
        return str(refused.value)


def save_with_link(run: Run, recipe_state: dict[str, Any], **files: str) -> tuple[Path, Path]:
    """The second epoch, saved with ``recipe_state``, and the other name of that file."""
    directory = run.folder.start("epoch_1")
    for name, content in files.items():
        (directory / f"{name}.bin").write_text(content)
    torch.save({training.EPOCHS_KEY: 2} | recipe_state, directory / RECIPE_STATE_NAME)
    path = run.folder.finish("epoch_1", replace(STATE, epochs_run=2))
    link = run.folder.path / "recipe_state" / RECIPE_STATE_NAME
    link.parent.mkdir()
    os.link(path / RECIPE_STATE_NAME, link)
    return path, link


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


# ---- a new run


@pytest.mark.parametrize("wanted", [False, None, 0])
def test_a_new_run_starts_at_the_beginning_even_with_checkpoints_of_epochs(run: Run, wanted: Any) -> None:
    assert run.find(wanted) is None
    run.save("epoch_0", epochs_run=1, with_recipe_state=True)
    save_by_stock(run.folder.path, epochs_run=2)
    assert run.find(wanted) is None


def test_a_new_run_is_refused_where_it_would_lose_checkpoints_of_steps_also_damaged_ones(run: Run) -> None:
    run.save("step_5", epochs_run=0)
    path = run.save("step_6", epochs_run=0)
    run.save("epoch_0", epochs_run=1)
    (path / STATE_NAME).write_text("{")
    assert run.refusal(False) == (
        f"With `resume_from_checkpoint: False` a new run would overwrite '{path}': set it to True or auto, or"
        " `output_dir` to a new folder."
    )


# ---- the latest checkpoint


@pytest.mark.parametrize("wanted", [True, "auto", 1])
def test_a_run_resumes_from_the_checkpoint_that_was_written_last(run: Run, wanted: Any) -> None:
    run.save("step_900", epochs_run=0)
    assert run.name_of(wanted) == "step_900"
    run.save("epoch_0", epochs_run=1, with_recipe_state=True)
    assert run.name_of(wanted) == "epoch_0"
    run.save("step_1100", epochs_run=EPOCHS - 1)  # of 1100 steps: its last epoch is not saved
    assert run.name_of(wanted) == "step_1100"


def test_without_a_checkpoint_auto_starts_a_new_run_and_true_is_refused(run: Run) -> None:
    run.folder.start("step_1")  # never finished
    assert run.find("auto") is None
    assert [path.name for path in run.folder.path.iterdir()] == [LOCK_NAME]
    assert run.find("auto", enable_async_checkpointing=True) is None
    assert run.refusal(True) == (
        f"`resume_from_checkpoint: True` finds no complete checkpoint in {str(run.folder.path)!r}; auto would start a"
        " new run."
    )


def test_an_epoch_without_optimizer_state_is_skipped_for_the_latest_checkpoint_that_has_it(run: Run) -> None:
    """The last epoch of a run whose number of epochs has been raised."""
    run.save("epoch_2", epochs_run=3, with_recipe_state=True)
    run.save("step_90", epochs_run=3)
    run.save("epoch_3", epochs_run=4)
    assert run.name_of(True, epochs=5) == "step_90"
    (run.folder.path / "step_90" / "adaptive_state.json").unlink()
    assert run.name_of(True, epochs=5) == "epoch_2"


@pytest.mark.parametrize("wanted", [True, "auto"])
@pytest.mark.parametrize("name", ["step_7", "epoch_1"])
def test_a_run_is_refused_where_it_would_overwrite_checkpoints_that_cannot_be_resumed(
    run: Run, name: str, wanted: Any
) -> None:
    """A state of another version, a file that cannot be read, or epochs without optimizer state."""
    path = run.save(name, epochs_run=2)
    if name == "step_7":
        state = path / "adaptive_state.json"
        state.write_text(state.read_text().replace('"global_step"', '"field_of_tomorrow"'))
    assert run.refusal(wanted) == (
        f"No checkpoint of the latest run can be resumed, and a new run would overwrite '{path}': set `output_dir` to a"
        " new folder."
    )


def test_a_run_that_has_trained_all_epochs_is_over(run: Run) -> None:
    run.save("step_90", epochs_run=3)
    path = run.save("epoch_3", epochs_run=4)
    with pytest.raises(RunEnded) as end:
        run.find(True)
    assert (str(end.value), end.value.status) == (f"The run is complete: {path} is its last checkpoint.", 0)


def test_a_search_for_a_run_that_is_over_is_refused_because_it_would_find_nothing(run: Run) -> None:
    path = run.save("epoch_3", epochs_run=4)
    with pytest.raises(InputError, match=re.escape(f"needs a run to continue. The run is complete: {path} is its")):
        run.find("auto", adaptive={"search_only": True})


def test_torchtunes_own_checkpoint_is_taken_if_it_has_more_epochs(run: Run) -> None:
    path = run.folder.path
    state = path / "recipe_state" / "recipe_state.pt"
    save_by_stock(path, epochs_run=1)
    assert run.find(True) == Checkpoint(path / "epoch_0", 0, None, 1, state)
    run.save("epoch_0", epochs_run=1, with_recipe_state=True)
    assert run.find(True).state == replace(STATE, epochs_run=1)  # the adaptive one
    run.save("step_30", epochs_run=1)
    assert run.name_of(True) == "step_30"
    save_by_stock(path, epochs_run=2)
    assert run.find(True) == Checkpoint(path / "epoch_1", 0, None, 2, state)


# ---- the checkpoints of other runs

OTHER = RunIdentity("other", "full_finetune")


@pytest.mark.parametrize("wanted", [True, "auto"])
def test_an_older_run_in_the_same_folder_is_never_resumed(
    run: Run, wanted: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither where the latest run has no optimizer state, nor where its checkpoint is damaged."""
    for epoch in range(3):
        run.save(f"epoch_{epoch}", epochs_run=epoch + 1, with_recipe_state=True, run=OTHER)
    path = run.save("epoch_0", epochs_run=1)
    caplog.clear()
    refusal = (
        "No checkpoint of the latest run can be resumed, and a new run would overwrite"
        f" '{run.folder.path}/epoch_2': set `output_dir` to a new folder."
    )
    assert run.refusal(wanted) == refusal
    skipped = f"{run.folder.path}/epoch_1, {run.folder.path}/epoch_2"
    assert caplog.messages == [f"Skipped checkpoints of another run than the latest: {skipped}"]
    with pytest.raises(RunEnded):
        run.find(wanted, epochs=1)
    run.save("epoch_0", epochs_run=1, with_recipe_state=True)
    assert run.name_of(wanted) == "epoch_0"
    (path / RECIPE_STATE_NAME).write_text("CONTENT")
    assert run.refusal(wanted) == refusal
    assert run.name_of(str(run.folder.path / "epoch_2")) == "epoch_2"  # which the user names


def test_a_run_that_was_killed_before_it_saved_is_not_taken_for_the_one_before_it(run: Run) -> None:
    run.save("epoch_3", epochs_run=EPOCHS, with_recipe_state=True, run=OTHER)
    run.folder.lock()
    run.folder.claim("of the killed run")
    for _ in range(2):  # a refusal keeps the name of that run
        assert "a new run would overwrite" in run.refusal(True)
    assert run.find(False) is None
    run.folder.claim(OTHER.id)
    assert run.name_of(True) == "epoch_3"


def test_torchtunes_run_before_this_one_is_never_resumed(run: Run) -> None:
    save_by_stock(run.folder.path, epochs_run=3)
    stock = stock_checkpoint(run.folder.path, in_background=False)
    assert stock is not None
    run.save("epoch_0", epochs_run=1, run=RunIdentity("1f3a", "full_finetune", stock_before=content_digest(stock)))
    assert "a new run would overwrite" in run.refusal(True)
    torch.save({training.EPOCHS_KEY: 3, "later": 1}, run.folder.path / "recipe_state" / "recipe_state.pt")
    assert run.find(True) == replace(stock, epochs_run=3)  # torchtune has continued


def test_a_run_that_continues_torchtunes_and_was_killed_before_it_saved_continues_it_again(run: Run) -> None:
    """A new run in that folder does not."""
    save_by_stock(run.folder.path, epochs_run=1)
    stock = stock_checkpoint(run.folder.path, in_background=False)
    run.folder.lock()
    run.folder.claim("of the killed run", resumed=stock)
    assert run.find("auto") == stock
    run.folder.claim("of the killed run")
    assert run.find("auto") is None


def test_a_damaged_epoch_is_not_taken_for_one_of_torchtune(run: Run) -> None:
    """Unless torchtune has written it again, in a folder that has our state from before."""
    path, state = save_with_link(run, {}, model="weights")
    (path / "model.bin").write_text("shorter")
    assert stock_checkpoint(run.folder.path, in_background=False) is None
    (path / STATE_NAME).rename(path / "kept.json")
    (path / STATE_NAME).write_text("{")
    assert stock_checkpoint(run.folder.path, in_background=False) is None
    (path / "kept.json").rename(path / STATE_NAME)
    torch.save({training.EPOCHS_KEY: 2, "again": 1}, state)
    assert stock_checkpoint(run.folder.path, in_background=False) == Checkpoint(path, 0, None, 2, state)


# ---- torchtune's epochs with the state of the base model, which it copies


def save_by_stock_on(base: Path, path: Path, *, epochs_run: int) -> Checkpoint:
    """As torchtune, whose `checkpoint_dir` is the epoch ``base`` of a run of this package. Sizes stay."""
    save_by_stock(path, epochs_run=epochs_run)
    for epoch in range(epochs_run):
        (path / f"epoch_{epoch}" / "model-00001-of-00001.bin").write_text("trained")
        for name in (STATE_NAME, RANK_STATES_NAME):
            shutil.copy2(base / name, path / f"epoch_{epoch}")
    return Checkpoint(path / f"epoch_{epochs_run - 1}", 0, None, epochs_run, path / "recipe_state" / RECIPE_STATE_NAME)


@pytest.mark.parametrize("has_optimizer_state", [True, False], ids=["of an epoch", "of the last epoch"])
@pytest.mark.parametrize("epochs_run", [1, 2, 3])
def test_torchtunes_epochs_are_its_own_also_with_a_copy_of_the_state_of_their_base_model(
    run: Run, epochs_run: int, has_optimizer_state: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """That state is of a run of two epochs, which is complete, or has more epochs than torchtune's."""
    model = "model-00001-of-00001.bin"
    base = run.save("epoch_1", epochs_run=2, with_recipe_state=has_optimizer_state, files=[model])
    new = Run(tmp_path / "new")
    stock = save_by_stock_on(base, new.folder.path, epochs_run=epochs_run)
    for epochs in (2, 5):
        for wanted in (True, "auto", str(stock.path)):
            assert new.find(wanted, epochs=epochs) == stock
    assert f"Skipped checkpoint {stock.path}." not in caplog.text
    (stock.path / STATE_NAME).write_text("{}")  # of another version
    assert new.find(str(stock.path)) == stock
    own = new.save("epoch_3", epochs_run=4, with_recipe_state=True, run=OTHER)
    assert new.find("auto").path == own


# ---- damage


def test_a_run_whose_last_epoch_is_damaged_is_not_complete(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    run.save("step_90", epochs_run=3)
    path = run.save("epoch_3", epochs_run=4, files=["weights.bin"])
    (path / "weights.bin").write_text("CONTENT")
    caplog.clear()
    assert run.name_of("auto") == "step_90"
    change = f"{path}/weights.bin must be as the run wrote it, but its content has changed."
    assert caplog.messages == [f"Skipped checkpoint {path}. {change}"]


def test_damaged_optimizer_state_is_not_taken_for_torchtunes(run: Run) -> None:
    run.save("epoch_0", epochs_run=1)
    path, state = save_with_link(run, {"moment": 1})
    assert run.name_of("auto") == "epoch_1"
    torch.save({training.EPOCHS_KEY: 2, "moment": 2}, state)  # of the same size
    assert "a new run would overwrite" in run.refusal("auto")
    assert run.refusal(str(path)).endswith("its content has changed.")


def test_a_checkpoint_whose_content_has_changed_is_skipped_with_the_files_name(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run.save("step_5", epochs_run=0)
    paths = [run.save(name, epochs_run=1, files=["weights.bin"]) for name in ("step_6", "step_7")]
    for path in paths:
        (path / "weights.bin").write_text("CONTENT")
    caplog.clear()
    assert run.name_of(True) == "step_5"
    changes = [f"{path}/weights.bin must be as the run wrote it, but its content has changed." for path in paths]
    assert caplog.messages == [f"Skipped checkpoint {paths[at]}. {changes[at]}" for at in (1, 0)]
    assert run.refusal(str(paths[0])) == changes[0]


# ---- another method


def test_a_checkpoint_of_another_method_is_refused(run: Run) -> None:
    path = run.save("step_5", epochs_run=0, run=RunIdentity("1f3a", "lora_finetune"))
    refusal = f"`resume_from_checkpoint` needs a checkpoint of full_finetune, but '{path}' is of lora_finetune."
    assert [run.refusal(wanted) for wanted in (True, "auto", str(path))] == [refusal] * 3


def test_torchtunes_checkpoint_with_adapters_is_refused_by_a_recipe_without(run: Run) -> None:
    save_by_stock(run.folder.path, epochs_run=1)
    assert run.name_of(True) == "epoch_0"
    (run.folder.path / "epoch_0" / "adapter_model.pt").touch()
    assert run.refusal(True).endswith("/epoch_0' is of a LoRA recipe.")


# ---- a checkpoint by its path


def test_a_checkpoint_is_what_its_content_says_under_any_name_and_in_any_folder(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = run.save("step_5", epochs_run=0)
    epoch = run.save("epoch_0", epochs_run=1, with_recipe_state=True)
    run.save("step_6", epochs_run=1)
    (tmp_path / "link").symlink_to(step)
    for name, path in (("copy", step), ("epoch_7_copy", step), ("step_9", epoch), ("best", epoch)):
        shutil.copytree(path, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    elsewhere = Run(tmp_path / "elsewhere")
    for path in (step, epoch, Path("run/step_5"), *map(Path, ("link", "copy", "epoch_7_copy", "step_9", "best"))):
        for one in (run, elsewhere):
            found = one.find(str(path))
            assert found.path == path
            assert found.is_of_step == (path.name not in ("epoch_0", "step_9", "best"))
            assert found.is_of_step or found.recipe_state == path / RECIPE_STATE_NAME


def test_a_run_from_another_folder_is_refused_where_it_would_lose_another_runs_checkpoints_of_steps(
    run: Run, tmp_path: Path
) -> None:
    path, elsewhere = run.save("step_5", epochs_run=0), Run(tmp_path / "elsewhere")
    elsewhere.save("epoch_0", epochs_run=1, run=RunIdentity("other", STATE.run.method))
    elsewhere.save("step_3", epochs_run=1)  # of the same run
    assert elsewhere.find(str(path)).path == path
    lost = elsewhere.save("step_4", epochs_run=1, run=RunIdentity("other", STATE.run.method))
    assert elsewhere.refusal(str(path)) == (
        f"The run of `resume_from_checkpoint` {str(path)!r} would overwrite {str(lost)!r}, which is of another run: set"
        " `output_dir` to a new folder, or `resume_from_checkpoint: True` to continue that run."
    )
    for name in ("step_3", "step_4"):
        assert elsewhere.find(str(elsewhere.folder.path / name)).path.name == name


def test_torchtunes_checkpoint_may_be_named_by_its_path(run: Run, tmp_path: Path) -> None:
    save_by_stock(tmp_path / "stock", epochs_run=2)
    path = tmp_path / "stock" / "epoch_1"
    assert run.find(str(path)) == Checkpoint(path, 0, None, 2, tmp_path / "stock" / "recipe_state" / "recipe_state.pt")
    assert run.refusal(str(tmp_path / "stock" / "epoch_0")).startswith(f"{tmp_path}/stock/epoch_0/adaptive_state.json ")


@pytest.mark.parametrize("old", ["step", "epoch"])
def test_the_latest_checkpoint_is_that_of_the_last_run_also_beside_later_ones_of_an_earlier_run(
    run: Run, old: str
) -> None:
    """The last run has begun at an earlier checkpoint, or is a new one in the folder of an old one."""
    for number in (5, 6, 7):
        run.save(f"{old}_{number}", epochs_run=1, with_recipe_state=True)
    folder = CheckpointFolder(run.folder.path)
    run.find(str(folder.path / "step_5") if old == "step" else False, folder=folder)
    folder.start("step_1")
    folder.finish("step_1", STATE)
    assert run.name_of(True) == "step_1"


def test_a_checkpoint_without_optimizer_state_cannot_be_resumed(run: Run) -> None:
    path = str(run.save("epoch_3", epochs_run=4))
    assert run.refusal(path) == (
        f"`resume_from_checkpoint` needs optimizer state, which {path!r} lacks, as do the last epoch and any that a"
        " later one follows."
    )


@pytest.mark.parametrize("wanted", ["", "no/such", "True", 2, ["step_1"]])
def test_a_value_without_a_meaning_is_refused(run: Run, wanted: Any) -> None:
    run.save("step_1", epochs_run=0)
    assert run.refusal(wanted) == (
        f"`resume_from_checkpoint` must be True, False, auto or a checkpoint path, but is {wanted!r} instead."
    )


@pytest.mark.parametrize(("name", "epochs_run", "needed"), [("step_8", 1, 2), ("epoch_1", 2, 2)])
def test_fewer_epochs_than_a_checkpoint_has_are_refused(run: Run, name: str, epochs_run: int, needed: int) -> None:
    path = run.save(name, epochs_run=epochs_run, with_recipe_state=True)
    checkpoint = run.find(str(path))
    check_epochs(None, 1)
    check_epochs(checkpoint, needed)
    with pytest.raises(InputError) as refused:
        check_epochs(checkpoint, needed - 1)
    assert str(refused.value) == f"`epochs` must be at least 2 to resume from {str(path)!r}, but is 1 instead."


# ---- what torchtune alone has saved


def content_of(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (content_of({training.EPOCHS_KEY: 2})[:100], "it cannot be read: RuntimeError: PytorchStreamReader .*"),
        (content_of([1]), "it cannot be read: TypeError: .*"),
        (content_of({training.EPOCHS_KEY: 3}), ".*/epoch_2 is missing"),
    ],
    ids=["truncated", "a list", "of an epoch that is gone"],
)
def test_a_recipe_state_that_is_of_no_use_is_skipped_and_logged(
    content: bytes, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_by_stock(tmp_path, epochs_run=2)
    path = tmp_path / "recipe_state" / "recipe_state.pt"
    path.write_bytes(content)
    assert stock_checkpoint(tmp_path, in_background=False) is None
    (message,) = caplog.messages
    assert re.fullmatch(rf"Skipped {path}, because {reason}\.", message)


def test_in_the_background_the_latest_complete_one_is_found(tmp_path: Path) -> None:
    assert stock_checkpoint(tmp_path, in_background=True) is None
    for epoch in (2, 9, 10, 11):
        (tmp_path / f"dist_epoch_{epoch}").mkdir()
        if epoch != 11:  # still being written when the run was killed
            (tmp_path / f"dist_epoch_{epoch}" / ".metadata").touch()
    path = tmp_path / "dist_epoch_10"
    assert stock_checkpoint(tmp_path, in_background=True) == Checkpoint(path, 0, None, 11, path / ".metadata")


def save_in_background(folder: Path, epoch: int, run: RunIdentity) -> Path:
    """A checkpoint of `enable_async_checkpointing`."""
    path = folder / f"dist_epoch_{epoch}"
    write_state(path, replace(STATE, epochs_run=epoch + 1, run=run))
    (path / ".metadata").touch()
    return path


def test_in_the_background_the_latest_one_of_the_last_run_is_found_beside_those_of_an_earlier_run(run: Run) -> None:
    """A new run does not come as far as an earlier one in its folder."""
    for epoch in (2, 3):
        save_in_background(run.folder.path, epoch, OTHER)
    for epoch in (0, 1):
        save_in_background(run.folder.path, epoch, STATE.run)
    run.folder.lock().claim(STATE.run.id)
    found = run.find("auto", enable_async_checkpointing=True)
    assert (found.path.name, found.run_id, found.epochs_run) == ("dist_epoch_1", STATE.run.id, 2)
    run.folder.claim(OTHER.id)
    assert run.find(True, enable_async_checkpointing=True).path.name == "dist_epoch_3"


def test_in_the_background_a_changed_one_is_skipped(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    paths = [save_in_background(run.folder.path, epoch, STATE.run) for epoch in (0, 1)]
    ranks = paths[1] / RANK_STATES_NAME
    ranks.write_bytes(bytes(ranks.stat().st_size))
    assert run.find("auto", enable_async_checkpointing=True).path == paths[0]
    (message,) = caplog.messages
    assert message.startswith(f"Skipped checkpoint {paths[1]}. {ranks} must be as the run wrote it")


def test_one_in_the_background_may_be_named_by_its_path(run: Run) -> None:
    first, _ = (save_in_background(run.folder.path, epoch, STATE.run) for epoch in (0, 1))
    assert run.find(str(first), enable_async_checkpointing=True).path == first
    assert run.refusal(str(first)) == (
        f"`resume_from_checkpoint` {str(first)!r} needs `enable_async_checkpointing: True`, which wrote it."
    )


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
    changed: Any = OmegaConf.to_container(resuming(cfg, checkpoint))
    assert OmegaConf.to_container(cfg) == before
    given: Any = before
    found = {key: value for key, value in changed.items() if key != "checkpointer" and value != given.get(key)}
    block = given["checkpointer"]
    return found | {key: value for key, value in changed["checkpointer"].items() if value != block.get(key)}


def test_a_new_run_and_one_resumed_from_a_step_are_set_up_as_new(tmp_path: Path) -> None:
    of_step = Checkpoint(tmp_path / "step_5", 1, STATE, 2, is_of_step=True)
    for checkpoint in (None, of_step):
        assert changes(config(), checkpoint) == {"resume_from_checkpoint": False}
    assert resuming(OmegaConf.create({"checkpointer": {}}), of_step).resume_from_checkpoint is False


MODEL_FILES = ["model-00001-of-00001.bin", "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors"]


@pytest.mark.parametrize(
    "given", [["a.bin", "b.bin", "c.bin"], {"filename_format": "model-{}.bin", "max_filename": "00003"}]
)
def test_a_run_resumed_from_an_epoch_gets_its_files(run: Run, given: object, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run.save("epoch_1", epochs_run=2, with_recipe_state=True, files=["config.json", *reversed(MODEL_FILES)])
    expected = {
        "resume_from_checkpoint": True,
        "recipe_checkpoint": str(path / RECIPE_STATE_NAME),
        "checkpoint_files": [str(path / name) for name in MODEL_FILES],
    }
    cfg = config(checkpointer={"checkpoint_files": given, "recipe_checkpoint": None})
    in_background = config(enable_async_checkpointing=True, checkpointer=cfg.checkpointer)  # as one of one device
    assert changes(in_background, run.folder.checkpoints()[-1]) == expected
    assert changes(cfg, run.folder.checkpoints()[-1]) == expected
    monkeypatch.chdir(run.folder.path)  # torchtune reads relative names from its own folders
    relative = CheckpointFolder(Path()).checkpoints()[-1]
    assert not relative.path.is_absolute()
    assert changes(cfg, relative) == expected


def test_only_the_trained_model_is_read_from_the_epoch(run: Run) -> None:
    """The reference model of DPO stays, also if its files are interpolated."""
    run.save("epoch_1", epochs_run=2, with_recipe_state=True, files=MODEL_FILES)
    reference = {"checkpoint_files": "${checkpointer.checkpoint_files}"}
    resumed = resuming(config(ref_checkpointer=reference), run.folder.checkpoints()[-1])
    assert resumed.ref_checkpointer.checkpoint_files == ["a.bin", "b.bin", "c.bin"]
    assert resumed.checkpointer.checkpoint_files != ["a.bin", "b.bin", "c.bin"]


def test_torchtune_itself_finds_what_it_has_written_in_the_background(tmp_path: Path) -> None:
    path = tmp_path / "dist_epoch_1"
    checkpoint = Checkpoint(path, 0, None, 2, path / ".metadata")
    cfg = config(enable_async_checkpointing=True)
    assert changes(cfg, checkpoint) == {"resume_from_checkpoint": True}


def test_an_epoch_is_the_only_one_that_torchtune_sees_in_its_set_up(run: Run, tmp_path: Path) -> None:
    """It reads the latest epoch of `output_dir`, which may have none, or one of another run."""
    path = run.save("epoch_1", epochs_run=2, with_recipe_state=True, files=[*MODEL_FILES, "adapter_model.pt"])
    torchtunes = {"_component_": "torchtune.training.FullModelHFCheckpointer", "output_dir": str(tmp_path / "new")}
    background = save_in_background(tmp_path / "background", 2, STATE.run)
    for checkpoint, checkpointer, is_shown in (
        (read_checkpoint(path), torchtunes, True),
        (Checkpoint(background, 0, None, 3, background / ".metadata"), torchtunes, True),
        (read_checkpoint(path), torchtunes | {"_component_": "mine.Checkpointer"}, False),
        (replace(read_checkpoint(path), is_of_step=True), torchtunes, False),
        (None, torchtunes, False),
    ):
        cfg = resuming(config(checkpointer=checkpointer), checkpoint)
        name = "dist_epoch_2" if checkpoint is not None and checkpoint.path == background else "epoch_0"
        with latest_epoch(cfg, checkpoint):
            folder = Path(cfg.checkpointer.output_dir)
            assert (folder != tmp_path / "new") is is_shown
            if is_shown and checkpoint is not None:
                assert [(one.resolve(), one.name) for one in folder.iterdir()] == [(checkpoint.path, name)]
        assert cfg.checkpointer.output_dir == str(tmp_path / "new")
        assert not folder.exists()
