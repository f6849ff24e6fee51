"""One process at a time owns a folder, and releases it however it ends."""

import errno
import fcntl
import gc
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import pytest

from torchtune_adaptive.checkpoints import lock as lock_module
from torchtune_adaptive.checkpoints.lock import LOCK_NAME, FolderLock
from torchtune_adaptive.errors import InputError

# Locks the folder, starts a process that has the file open too, and prints its process id.
OWNER = """
import subprocess, sys
from pathlib import Path
from torchtune_adaptive.checkpoints.lock import FolderLock
lock = FolderLock(Path(sys.argv[1]))
child = subprocess.Popen(["sleep", "600"], close_fds=False, stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
sys.stdin.read()
"""
# Prints whether the file could be locked.
STRANGER = """
import fcntl, sys
try:
    fcntl.lockf(open(sys.argv[1], "a"), fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("refused")
else:
    print("locked")
"""


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock, and has a child that outlives it."""
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        yield process
        process.kill()
        os.kill(child, signal.SIGKILL)


def ask_stranger(folder: Path) -> str:
    """Whether another process could lock ``folder``."""
    command = [sys.executable, "-c", STRANGER, str(folder / LOCK_NAME)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def test_a_second_process_is_refused_by_the_owners_name_until_the_owner_is_killed(
    tmp_path: Path, owner: subprocess.Popen[str]
) -> None:
    for _ in range(2):  # a refusal leaves the lock as it is
        with pytest.raises(InputError) as refused:
            FolderLock(tmp_path)
        assert str(refused.value) == (
            f"`output_dir` must not be in use by another run, but process {owner.pid} on {socket.gethostname()} writes"
            f" to {str(tmp_path)!r}."
        )
    owner.kill()
    owner.wait()
    lock = FolderLock(tmp_path)
    assert (tmp_path / LOCK_NAME).read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"
    lock.release()


def test_an_owner_that_has_not_written_its_name_is_called_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with pytest.raises(InputError) as refused:
        FolderLock(tmp_path)
    assert str(refused.value) == (
        f"`output_dir` must not be in use by another run, but another process writes to {str(tmp_path)!r}."
    )


def test_the_same_process_may_lock_again_and_keeps_others_out_until_it_releases(tmp_path: Path) -> None:
    """Even if it drops some of its locks, as with a recipe that was never cleaned up."""
    first = FolderLock(tmp_path)
    del first
    second, third = FolderLock(tmp_path), FolderLock(tmp_path / ".." / tmp_path.name)
    del third
    gc.collect()
    assert ask_stranger(tmp_path) == "refused"
    second.release()
    second.release()
    assert ask_stranger(tmp_path) == "locked"
    FolderLock(tmp_path).release()


def test_a_lock_that_was_never_released_is_closed_as_the_process_ends(tmp_path: Path) -> None:
    """Else the interpreter warns of open files."""
    left_over = FolderLock(tmp_path)
    lock_module._release_all()
    assert left_over._file.closed
    assert ask_stranger(tmp_path) == "locked"
    FolderLock(tmp_path).release()


def test_a_folder_that_was_removed_and_created_again_is_locked_again(tmp_path: Path) -> None:
    old = FolderLock(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    new = FolderLock(tmp_path / "run")
    assert ask_stranger(tmp_path / "run") == "refused"
    old.release()
    new.release()


def test_a_child_of_the_owner_is_refused(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    child = os.fork()
    if not child:
        try:
            FolderLock(tmp_path)
        except InputError:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0) == (child, 0)
    assert ask_stranger(tmp_path) == "refused"
    lock.release()


def test_a_folder_is_locked_even_if_a_full_disk_has_no_space_for_the_owners_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class FullDisk(FileIO):
        def write(self, *_: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "open", lambda path, *_, **__: FullDisk(path, "a+"))
    lock = FolderLock(tmp_path)
    assert caplog.messages == [
        f"{tmp_path} is locked, but this process cannot be named in its lock file: "
        f"OSError: [Errno {errno.ENOSPC}] No space left on device."
    ]
    assert ask_stranger(tmp_path) == "refused"
    lock.release()


def test_the_folder_is_created_with_its_parents(tmp_path: Path) -> None:
    FolderLock(tmp_path / "new" / "run").release()
    assert [path.name for path in (tmp_path / "new" / "run").iterdir()] == [LOCK_NAME]


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError) as refused:
        FolderLock(tmp_path / "file" / "run")
    assert str(refused.value).startswith("`output_dir` must be writable, but is not: NotADirectoryError: ")
    assert "\n" not in str(refused.value)


def test_a_folder_on_which_nothing_can_be_locked_is_used_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock_module.fcntl, "lockf", refuse)
    lock = FolderLock(tmp_path)
    assert caplog.messages == [
        f"{tmp_path} cannot be locked, so that another run could write to it: "
        f"OSError: [Errno {errno.ENOLCK}] No locks available."
    ]
    lock.release()
