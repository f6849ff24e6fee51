"""One process at a time owns a folder, and releases it however it ends."""

import contextlib
import errno
import fcntl
import gc
import multiprocessing
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.support.ranks import IMPORTED_ONCE
from tests.support.toys import STATE
from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.stock.resume import lock_output
from torchtune_adaptive.training.checkpoints import folder as folder_module
from torchtune_adaptive.training.checkpoints.folder import CheckpointFolder
from torchtune_adaptive.training.folder_lock import LOCK_NAME, FolderLock, FolderReplacedError


def own(folder: Path, connection: Connection) -> None:
    """Locks the folder, starts two processes that outlive this one and have its files open too, and sends their ids."""
    checkpoints = locked(folder)
    started = subprocess.Popen(["sleep", "600"], close_fds=False, stdout=subprocess.DEVNULL)
    forked = os.fork()
    if not forked:
        os.execlp("sleep", "sleep", "600")
    connection.send((started.pid, forked))
    connection.recv()
    del checkpoints


def locked(folder: Path) -> CheckpointFolder:
    checkpoints = CheckpointFolder(folder)
    checkpoints.lock()
    return checkpoints


def ask_stranger(folder: Path) -> str:
    """Whether another process could lock ``folder``."""
    program = f"import filelock\ntry: filelock.FileLock({str(folder / LOCK_NAME)!r}, timeout=0).acquire()\n"
    program += "except filelock.Timeout: print('refused')\nelse: print('locked')"
    return subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Any]:
    """A process that holds the lock, and has children that outlive it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED_ONCE)
    here, there = context.Pipe()
    process = context.Process(target=own, args=(tmp_path, there), daemon=True)
    process.start()
    children = here.recv()
    yield process
    process.kill()
    process.join()
    for child in children:
        os.kill(child, signal.SIGKILL)


def test_a_second_process_is_refused_by_the_owners_name_until_the_owner_is_killed(tmp_path: Path, owner: Any) -> None:
    for _ in range(2):  # a refusal leaves the lock as it is
        with pytest.raises(InputError) as refused:
            locked(tmp_path)
        assert str(refused.value) == (
            f"`output_dir` is in use: process {owner.pid} on {socket.gethostname()} writes to {str(tmp_path)!r}."
        )
    (tmp_path / LOCK_NAME).write_text("")
    with pytest.raises(InputError, match="in use: another process writes to"):
        locked(tmp_path)
    owner.kill()
    owner.join()
    folder = locked(tmp_path)
    assert (tmp_path / LOCK_NAME).read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"
    del folder


def test_the_same_process_may_lock_again_and_keeps_others_out(tmp_path: Path) -> None:
    """Even if it drops some of its locks, as with a recipe that was never cleaned up."""
    first = locked(tmp_path)
    second, third = locked(tmp_path), locked(tmp_path / ".." / tmp_path.name)
    del first, third
    gc.collect()
    assert ask_stranger(tmp_path) == "refused"
    del second
    gc.collect()
    assert ask_stranger(tmp_path) == "locked"


def test_the_folder_of_the_log_is_locked_as_long_as_the_run_keeps_the_lock(tmp_path: Path) -> None:
    kept = lock_output(OmegaConf.create({"output_dir": str(tmp_path)}), Consensus())
    gc.collect()
    assert ask_stranger(tmp_path) == "refused"
    del kept
    gc.collect()
    assert ask_stranger(tmp_path) == "locked"


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError) as refused:
        locked(tmp_path / "file" / "run")
    assert re.fullmatch(r"`output_dir` cannot be written: NotADirectoryError: .*\.", str(refused.value))


@pytest.mark.parametrize("make", [lambda path, other: path.symlink_to(other), lambda path, _: os.mkfifo(path)])
def test_a_lock_that_is_no_file_of_ours_is_refused_and_what_it_leads_to_stays(tmp_path: Path, make: Any) -> None:
    other = tmp_path / "notes"
    other.write_text("mine")
    make(tmp_path / LOCK_NAME, other)
    with pytest.raises(InputError, match=r"`output_dir` cannot be written: .*adaptive\.lock' must be a regular file"):
        locked(tmp_path)
    assert other.read_text() == "mine"


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_a_folder_on_which_nothing_can_be_locked_is_used_with_a_warning(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, "No locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    folder = locked(tmp_path / "new" / "run")
    folder.check()
    assert caplog.messages == [
        f"{tmp_path}/new/run cannot be locked, so that another run could write to it: OSError: [Errno {number}] No"
        " locks."
    ]
    del folder
    gc.collect()
    assert (tmp_path / "new" / "run" / LOCK_NAME).exists()  # it names the latest run


# ---- the folder itself


def replace_folder(path: Path) -> None:
    path.rename(path.with_name("moved"))
    path.mkdir()


def replace_and_lock(path: Path) -> None:
    """As by another run."""
    replace_folder(path)
    (path / LOCK_NAME).write_text("process 1 on elsewhere\n")


def remove_lock(path: Path) -> None:
    (path / LOCK_NAME).unlink()


def write_lock_again(path: Path) -> None:
    """As a program that writes files atomically, or a copy from a backup."""
    (path / "new").write_text((path / LOCK_NAME).read_text())
    (path / "new").rename(path / LOCK_NAME)


@pytest.mark.parametrize("replace", [replace_folder, replace_and_lock, remove_lock, write_lock_again])
def test_nothing_is_written_where_the_folder_is_no_longer_the_locked_one(
    replace: Callable[[Path], None], tmp_path: Path
) -> None:
    folder = locked(tmp_path / "run")
    directory = folder.start("step_1")
    (directory / "weights.bin").write_text("weights")
    folder.finish("step_1", STATE)
    folder.start("step_2")
    replace(tmp_path / "run")
    (tmp_path / "run" / "unfinished_step_2").mkdir(exist_ok=True)
    (tmp_path / "run" / "unfinished_step_2" / "of_another_run.bin").write_text("weights")
    before = sorted(tmp_path.rglob("*"))
    for write in (
        lambda: folder.start("step_3"),
        lambda: folder.finish("step_2", STATE),
        folder.discard_unfinished,
        folder.check,
    ):
        with pytest.raises(FolderReplacedError) as ended:
            write()
        assert str(ended.value) == (
            f"'{tmp_path}/run' must stay the folder that this run has locked, but is another one now or lacks its"
            f" {LOCK_NAME}; the run has ended, and what it has saved is untouched."
        )
    folder.discard("step_2")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_that_is_replaced_while_files_are_forced_to_disk_gets_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = locked(tmp_path / "run")
    folder.start("step_1")
    write_state = folder_module.write_state

    def write_and_replace(*args: Any, **options: Any) -> None:
        write_state(*args, **options)
        replace_folder(tmp_path / "run")
        (tmp_path / "run" / "unfinished_step_1").mkdir()

    monkeypatch.setattr(folder_module, "write_state", write_and_replace)
    with pytest.raises(FolderReplacedError):
        folder.finish("step_1", STATE)
    assert [one.name for one in (tmp_path / "run").iterdir()] == ["unfinished_step_1"]


def test_a_folder_that_comes_back_is_the_same(tmp_path: Path) -> None:
    """As after a disk was not mounted for a while, or where its path is a link."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    folder = locked(tmp_path / "run")
    (tmp_path / "disk").rename(tmp_path / "away")
    with pytest.raises(FileNotFoundError):
        folder.check()
    (tmp_path / "away").rename(tmp_path / "disk")
    folder.check()


def test_on_a_full_disk_the_lock_still_names_the_last_run(tmp_path: Path) -> None:
    """As where the space that an emptied file had is taken at once: files may have no bytes here."""
    FolderLock(tmp_path).claim("run_1")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        lock = FolderLock(tmp_path)
        lock.claim("run_1")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (lock.last_run, FolderLock(tmp_path).last_run) == ("run_1", "run_1")
    lock.claim("")  # shorter
    assert FolderLock(tmp_path).last_run == ""


def test_a_forked_process_does_not_get_the_lock_of_the_run(tmp_path: Path) -> None:
    """It closes its copy of the file, whose number another file may then get."""
    lock = FolderLock(tmp_path)
    child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(BaseException):
            others = [open(os.devnull) for _ in range(8)]  # noqa: SIM115
            try:
                FolderLock(tmp_path)
            except InputError as error:
                status = 0 if "`output_dir` is in use" in str(error) else 2
            del others
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    lock.check()
