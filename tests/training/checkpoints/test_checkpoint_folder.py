"""A checkpoint is complete or not there, whatever fails while it is written, replaced or removed."""

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.full_disk import FullDisk, full_in_each_call
from tests.support.toys import STATE
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.training.checkpoints import folder as folder_module
from torchtune_adaptive.training.checkpoints.digests import first_change
from torchtune_adaptive.training.checkpoints.folder import (
    RANK_STATES_NAME,
    RECIPE_STATE_NAME,
    STATE_NAME,
    Checkpoint,
    CheckpointFolder,
    read_checkpoint,
    write_state,
)
from torchtune_adaptive.training.run_state import AdaptiveState, RunIdentity

FILES = {"weights.bin": "weights", "more/.metadata": "1", RECIPE_STATE_NAME: "moments"}
OTHER = {"other.bin": "other"}


def state_at(step: int) -> AdaptiveState:
    return replace(STATE, global_step=step)


def save(
    folder: CheckpointFolder, name: str, files: dict[str, str] = FILES, *, state: AdaptiveState | None = None
) -> Path:
    """Write a checkpoint of ``files``; by default its state is at the step in its name."""
    directory = folder.start(name)
    for file, text in files.items():
        (directory / file).parent.mkdir(exist_ok=True)
        (directory / file).write_text(text)
    return folder.finish(name, state or state_at(int(name.rpartition("_")[2])))


def names(folder: CheckpointFolder) -> list[str]:
    return [one.path.name for one in folder.checkpoints()]


def contents(path: Path) -> dict[str, str]:
    """The files of a checkpoint except its state."""
    files = [one for one in path.rglob("*") if one.is_file() and one.name not in (STATE_NAME, RANK_STATES_NAME)]
    return {one.relative_to(path).as_posix(): one.read_text() for one in files}


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    (tmp_path / "run").mkdir()
    return CheckpointFolder(tmp_path / "run")


# ---- complete checkpoints


def test_a_checkpoint_is_there_with_all_its_files_once_it_is_finished(folder: CheckpointFolder) -> None:
    directory = folder.start("step_10")
    (directory / "of_an_attempt_before.bin").write_text("half")
    assert folder.start("step_10") == directory
    (directory / "weights.bin").write_text("weights")
    assert names(folder) == []
    path = folder.finish("step_10", state_at(10))
    assert path == folder.path / "step_10"
    assert sorted(one.name for one in folder.path.iterdir()) == ["step_10"]
    assert contents(path) == {"weights.bin": "weights"}
    assert folder.checkpoints() == [Checkpoint(path, 1, state_at(10), 2, is_of_step=True)]


def test_checkpoints_are_listed_in_the_order_in_which_they_were_written_also_by_another_process(
    folder: CheckpointFolder,
) -> None:
    for name in ("step_9", "step_10", "epoch_0", "step_2"):
        save(folder, name)
    assert names(folder) == ["step_9", "step_10", "epoch_0", "step_2"]
    another = CheckpointFolder(folder.path)
    assert names(another) == ["step_9", "step_10", "epoch_0", "step_2"]
    save(another, "step_1")
    assert names(folder) == ["step_9", "step_10", "epoch_0", "step_2", "step_1"]


def test_other_files_and_folders_are_not_listed(folder: CheckpointFolder) -> None:
    save(folder, "step_1")
    (folder.path / "epoch_7").mkdir()  # a stock recipe's
    (folder.path / "step_x").mkdir()
    shutil.copytree(folder.path / "step_1", folder.path / "step_1_copy")
    (folder.path / "step_2").write_text("a file")
    assert names(folder) == ["step_1"]
    assert names(CheckpointFolder(folder.path / "none")) == []


# ---- unfinished checkpoints


def test_an_unfinished_checkpoint_is_not_listed_and_can_be_removed(
    folder: CheckpointFolder, caplog: pytest.LogCaptureFixture
) -> None:
    save(folder, "step_1")
    (folder.start("step_2") / "weights.bin").write_text("half")
    write_state(folder.unfinished("step_2"), state_at(2))
    assert names(CheckpointFolder(folder.path)) == ["step_1"]
    folder.start("step_3")
    for name in ("step_3", "step_4"):  # the second has never begun
        folder.discard(name)
    assert [path.name for path in folder.path.glob("unfinished_*")] == ["unfinished_step_2"]
    CheckpointFolder(folder.path).discard_unfinished()
    assert caplog.messages == [f"Removed {folder.path}/unfinished_step_2, an incomplete checkpoint."]
    assert [one.name for one in folder.path.iterdir()] == ["step_1"]


# ---- torn checkpoints


@pytest.mark.parametrize(
    ("file", "spoil", "sentence"),
    [
        ("weights.bin", lambda path: path.write_text("weigh"), "7 bytes, but has 5: its checkpoint is not complete."),
        ("weights.bin", lambda path: (path.unlink(), path.mkdir()), "7 bytes, but is missing: .*"),
        ("more/.metadata", Path.unlink, "1 bytes, but is missing: .*"),
    ],
    ids=["cut short", "a folder", "missing"],
)
def test_a_torn_checkpoint_is_skipped_and_the_reason_is_named(
    file: str,
    spoil: Callable[[Path], object],
    sentence: str,
    folder: CheckpointFolder,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As after an interrupted copy, or on a failing disk."""
    save(folder, "step_1")
    path = save(folder, "epoch_2")
    spoil(path / file)
    with pytest.raises(InputError) as refused:
        read_checkpoint(path)
    assert re.fullmatch(f"{path}/{file} must have {sentence}", str(refused.value))
    assert names(folder) == ["step_1"]
    assert caplog.messages == [f"Skipped checkpoint {path}. {refused.value}"]


def written(**values: Any) -> bytes:
    """The content of a state file, with its digest."""
    content = {"format": 2, "serial": 1, "of_step": True, "files": {}, "state": json.loads(json.dumps(asdict(STATE)))}
    content |= values
    return json.dumps({**content, "sha256": folder_module._digest_of(content)}).encode()


def state_with(**values: Any) -> bytes:
    return written(state=json.loads(json.dumps(asdict(replace(STATE, rank_states=[])))) | values)


STATE_CONTENTS: dict[str, bytes] = {
    "cut short": b'{"format": 2, "serial": 1, "files": {',
    "a list": b"[1, 2]",
    "of an earlier version": json.dumps({"serial": 1, "files": {}, "state": {}}).encode(),
    "edited": written().replace(b'"serial": 1', b'"serial": 2'),
    "of a later version": state_with(more=1),
}


def test_a_state_as_it_is_written_is_read(tmp_path: Path) -> None:
    (tmp_path / STATE_NAME).write_bytes(state_with())
    assert read_checkpoint(tmp_path).state == STATE


def test_a_step_without_its_state_is_skipped_with_a_word(
    folder: CheckpointFolder, caplog: pytest.LogCaptureFixture
) -> None:
    save(folder, "step_1")
    path = save(folder, "step_2")
    (path / STATE_NAME).unlink()
    for _ in range(2):
        assert [one.path.name for one in folder.checkpoints()] == ["step_1"]
    assert caplog.messages == [f"Skipped checkpoint {path}. It has no {STATE_NAME}."]


@pytest.mark.parametrize("content", STATE_CONTENTS.values(), ids=list(STATE_CONTENTS))
def test_a_state_that_no_run_wrote_is_refused_by_its_path(
    content: bytes, folder: CheckpointFolder, caplog: pytest.LogCaptureFixture
) -> None:
    path = save(folder, "step_1")
    (path / STATE_NAME).write_bytes(content)
    with pytest.raises(InputError) as refused:
        read_checkpoint(path)
    assert re.fullmatch(rf"{path / STATE_NAME} is no state of a run: .*\.", str(refused.value))
    assert names(folder) == []
    assert caplog.messages == [f"Skipped checkpoint {path}. {refused.value}"]


def test_a_bit_that_changes_in_any_file_is_noticed_in_one_share_of_the_files(folder: CheckpointFolder) -> None:
    path = save(folder, "step_1", state=replace(STATE, rank_states=[{"cpu": torch.get_rng_state()}]))
    checkpoint = read_checkpoint(path)
    assert sorted(checkpoint.digests) == sorted([*FILES, RANK_STATES_NAME])
    for name in checkpoint.digests:
        content = (path / name).read_bytes()
        (path / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert read_checkpoint(path) == checkpoint  # sizes are equal
        said = [first_change(path, checkpoint.digests, share=share, shares=3) for share in range(3)]
        changed = f"{path}/{name} must be as the run wrote it, but its content has changed."
        assert sorted(said) == ["", "", changed]
        (path / name).write_bytes(content)
    assert first_change(path, checkpoint.digests) == ""


def test_a_bit_that_changes_in_the_state_is_refused_or_changes_nothing(folder: CheckpointFolder) -> None:
    path = save(folder, "step_1")
    checkpoint, content = read_checkpoint(path), (path / STATE_NAME).read_bytes()
    places, refused = range(0, len(content), 5), 0
    for place in places:
        (path / STATE_NAME).write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        try:
            assert read_checkpoint(path) == checkpoint  # as where a space becomes another
        except InputError:
            refused += 1
    assert refused > len(places) / 2


def test_files_whose_digests_are_known_are_not_read_again(folder: CheckpointFolder) -> None:
    directory = folder.start("step_1")
    (directory / "weights.bin").write_text("weights")
    (directory / "notes.txt").write_text("notes")
    path = folder.finish("step_1", state_at(1), digests={"weights.bin": "f00"})
    digests = read_checkpoint(path).digests
    assert digests["weights.bin"] == "f00"
    assert list(digests) == [RANK_STATES_NAME, "notes.txt", "weights.bin"]


# ---- only what was written here is removed


def test_folders_with_other_names_are_left_alone(folder: CheckpointFolder) -> None:
    others = ["epoch_best"] + [f"unfinished_{one}" for one in ("thesis", "step_x", "replaced_by_bob", "removed_")]
    for name in others:
        (folder.path / name).mkdir()
        (folder.path / name / RECIPE_STATE_NAME).write_text("mine")
    for name in ("step_1", "shared_" + "0" * 32, "replaced_step_1", "removed_step_2"):
        folder.unfinished(name).mkdir()
    (folder.unfinished("replaced_step_1") / STATE_NAME).write_text("{}")
    folder.discard_unfinished()
    save(folder, "epoch_0")
    folder.drop_recipe_states(save(folder, "epoch_1"))
    assert sorted(one.name for one in folder.path.iterdir()) == sorted([*others, "epoch_0", "epoch_1", "step_1"])
    assert all((folder.path / name / RECIPE_STATE_NAME).exists() for name in (*others, "epoch_1"))
    assert not (folder.path / "epoch_0" / RECIPE_STATE_NAME).exists()


def test_files_that_a_user_adds_outlive_their_checkpoint(folder: CheckpointFolder) -> None:
    for name in ("step_1", "step_2", "epoch_0"):
        save(folder, name)
        (folder.path / name / "mine").mkdir()
        (folder.path / name / "mine" / "scores.txt").write_text(name)
    folder.prune(1)
    save(folder, "epoch_0", {"other.bin": "other"})
    assert names(folder) == ["step_2", "epoch_0"]
    assert sorted(one.name for one in folder.path.iterdir()) == ["epoch_0", "step_1", "step_2"]
    assert contents(folder.path / "step_1") == {"mine/scores.txt": "step_1"}
    assert contents(folder.path / "epoch_0") == {"other.bin": "other", "mine/scores.txt": "epoch_0"}
    save(folder, "step_1")
    assert contents(folder.path / "step_1") == {**FILES, "mine/scores.txt": "step_1"}


def test_of_a_checkpoint_that_a_user_has_moved_and_linked_only_the_link_is_removed(
    folder: CheckpointFolder, tmp_path: Path
) -> None:
    for name in ("step_1", "step_2", "step_3"):
        save(folder, name)
    for name in ("step_1", "step_2"):
        (folder.path / name).rename(tmp_path / f"kept_{name}")
        (folder.path / name).symlink_to(tmp_path / f"kept_{name}")
    before = [contents(tmp_path / f"kept_{name}") for name in ("step_1", "step_2")]
    save(folder, "step_2")
    folder.prune(1)
    assert [one.name for one in folder.path.iterdir()] == ["step_2"]
    assert [contents(tmp_path / f"kept_{name}") for name in ("step_1", "step_2")] == before
    shutil.rmtree(tmp_path / "kept_step_1")
    (folder.path / "step_1").symlink_to(tmp_path / "kept_step_1")  # which is no longer there
    save(folder, "step_1")
    assert names(folder) == ["step_2", "step_1"]


def test_what_another_run_has_written_is_not_removed(folder: CheckpointFolder) -> None:
    for name in ("step_1", "epoch_0"):
        save(folder, name, state=replace(STATE, run=RunIdentity("other", "full_finetune")))
    for name in ("step_2", "epoch_1", "step_3"):
        save(folder, name)
    folder.prune(1)
    folder.drop_recipe_states(folder.path / "step_3")
    assert names(folder) == ["step_1", "epoch_0", "epoch_1", "step_3"]
    assert [one.can_resume for one in folder.checkpoints()] == [True, True, False, True]


# ---- the last checkpoints are kept


def test_the_last_checkpoints_of_steps_are_kept_and_all_of_epochs(folder: CheckpointFolder) -> None:
    for name in ("step_30", "epoch_0", "step_4", "step_5", "epoch_1"):
        save(folder, name)
    folder.prune(9)
    assert len(names(folder)) == 5
    for _ in range(2):
        folder.prune(2)
        assert names(folder) == ["epoch_0", "step_4", "step_5", "epoch_1"]
    assert len(list(folder.path.iterdir())) == 4


def test_a_checkpoint_that_cannot_be_removed_keeps_no_other_one(folder: CheckpointFolder) -> None:
    for name in ("step_1", "step_2", "step_3", "step_4"):
        save(folder, name)
    with FullDisk(Path, "rename"), pytest.raises(OSError, match="No space left"):
        folder.prune(1)
    assert names(folder) == ["step_1", "step_4"]


def test_a_partly_removed_checkpoint_is_not_listed(folder: CheckpointFolder, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("step_1", "step_2"):
        save(folder, name)
    with FullDisk(os, "unlink", 2, stays_full=True):
        folder.prune(1)
    assert names(folder) == ["step_2"]
    assert caplog.messages == []
    folder.discard_unfinished()
    assert [one.name for one in folder.path.iterdir()] == ["step_2"]


# ---- failures


OWNERS: dict[str, Any] = {"fsync": os, "rename": Path, "mkdir": Path, "write_atomically": folder_module}


def replace_save_and_prune(folder: CheckpointFolder) -> None:
    save(folder, "step_1", OTHER)
    save(folder, "step_3")
    folder.prune(2)


@pytest.mark.parametrize("stays_full", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("name", OWNERS)
def test_after_a_failure_earlier_checkpoints_are_there_and_a_new_or_replaced_one_is_whole_or_as_before(
    name: str, stays_full: bool, tmp_path: Path
) -> None:
    for number, disk in enumerate(full_in_each_call(OWNERS[name], name, stays_full=stays_full)):
        folder = CheckpointFolder(tmp_path / str(number))
        folder.path.mkdir()
        for earlier in ("step_1", "step_2", "epoch_0"):
            save(folder, earlier)
        with disk:
            try:
                replace_save_and_prune(folder)
            except OSError:
                assert disk.has_struck
        CheckpointFolder(folder.path).discard_unfinished()  # by the next run
        found = names(CheckpointFolder(folder.path))
        if disk.has_struck:
            assert {*found} >= {"step_1", "step_2", "epoch_0"}
        else:
            assert found == ["epoch_0", "step_1", "step_3"]
        for one in found:
            wanted = [OTHER, *[FILES] * disk.has_struck] if one == "step_1" else [FILES]
            assert contents(folder.path / one) in wanted
        assert len(list(folder.path.iterdir())) == len(found)
        save(folder, "step_4")  # the next attempt succeeds
        assert names(folder) == [*found, "step_4"]


def test_files_and_their_names_are_on_the_disk_before_a_checkpoint_has_its_own_name(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def note_sync(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        own = [one for one in (STATE_NAME, RANK_STATES_NAME) if name.startswith(one)]  # before they are renamed
        events.append(f"sync {own[0] if own else name}")
        fsync(descriptor)

    def note_rename(path: Path, target: Path) -> Path:
        events.append(f"rename {path.name} {target.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "rename", note_rename)
    save(folder, "step_1")
    renamed = events.index("rename unfinished_step_1 step_1")
    before = {"weights.bin", "more", ".metadata", RECIPE_STATE_NAME, RANK_STATES_NAME}
    assert {event.removeprefix("sync ") for event in events[: renamed - 2]} == before
    assert events[renamed - 2 :] == [
        f"sync {STATE_NAME}",
        "sync unfinished_step_1",
        "rename unfinished_step_1 step_1",
        "sync run",
    ]


def test_a_folder_that_has_vanished_is_not_created_again(folder: CheckpointFolder) -> None:
    """As when a disk is no longer mounted: checkpoints must not go to the disk below."""
    save(folder, "step_1")
    folder.start("step_2")
    shutil.rmtree(folder.path)
    with pytest.raises(FileNotFoundError):
        folder.finish("step_2", state_at(2))
    with pytest.raises(FileNotFoundError):
        folder.start("step_3")
    assert not folder.path.exists()


def test_files_that_cannot_be_removed_are_left_without_an_error(folder: CheckpointFolder) -> None:
    save(folder, "step_1")
    folder.start("step_2")
    with FullDisk(os, "rmdir", stays_full=True), FullDisk(os, "unlink", stays_full=True):
        folder.discard("step_2")
        folder.discard_unfinished()
    assert names(folder) == ["step_1"]
