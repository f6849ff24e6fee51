"""One process at a time owns a folder, and releases it however it ends."""

import errno
import gc
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import filelock
import pytest

from torchtune_adaptive.errors import InputError
from torchtune_adaptive.training.checkpoints.folder import LOCK_NAME, CheckpointFolder

# Locks the folder, starts two processes that outlive it and have its files open too, and prints their process ids.
OWNER = """
import os, subprocess, sys, time
from torchtune_adaptive.training.checkpoints.folder import CheckpointFolder
folder = CheckpointFolder(sys.argv[1])
folder.lock()
started = subprocess.Popen(["sleep", "600"], close_fds=False, stdout=subprocess.DEVNULL)
forked = os.fork()
if not forked:
    time.sleep(600)
print(started.pid, forked, flush=True)
sys.stdin.read()
"""


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
def owner(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock, and has children that outlive it."""
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        children = map(int, process.stdout.readline().split())
        yield process
        process.kill()
        for child in children:
            os.kill(child, signal.SIGKILL)


def test_a_second_process_is_refused_by_the_owners_name_until_the_owner_is_killed(
    tmp_path: Path, owner: subprocess.Popen[str]
) -> None:
    for _ in range(2):  # a refusal leaves the lock as it is
        with pytest.raises(InputError) as refused:
            locked(tmp_path)
        assert str(refused.value) == (
            f"`output_dir` must not be in use by another run, but process {owner.pid} on {socket.gethostname()} writes"
            f" to {str(tmp_path)!r}."
        )
    (tmp_path / LOCK_NAME).write_text("")
    with pytest.raises(InputError, match="but another process writes to"):
        locked(tmp_path)
    owner.kill()
    owner.wait()
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


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError) as refused:
        locked(tmp_path / "file" / "run")
    assert str(refused.value).startswith("`output_dir` must be writable, but is not: NotADirectoryError: ")
    assert "\n" not in str(refused.value)


def test_a_folder_on_which_nothing_can_be_locked_is_used_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    assert locked(tmp_path / "new" / "run").path.is_dir()
    assert caplog.messages == [
        f"{tmp_path}/new/run cannot be locked, so that another run could write to it: "
        f"OSError: [Errno {errno.ENOLCK}] No locks available."
    ]
