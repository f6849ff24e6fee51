"""A lock on a folder that is released when its process ends."""

import atexit
import errno
import fcntl
import os
import socket
from io import FileIO
from pathlib import Path

from torchtune import utils

from torchtune_adaptive.errors import InputError, reason_of

log = utils.get_logger("DEBUG")

LOCK_NAME = "adaptive.lock"
_opened: list[FileIO] = []  # one per file: when a process closes any handle of a file, it loses its lock on it


class FolderLock:
    """A lock held by this process from construction to ``release``, or until the process ends in any way.

    It is a record lock: the system releases it with its owner, also over NFS, and child processes do not inherit it.
    If the owner locks again, nothing changes.
    Raises:
        InputError: another process holds the lock, or the folder is not writable.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = _open(folder / LOCK_NAME)
        except OSError as error:
            raise InputError(f"`output_dir` must be writable, but is not: {reason_of(error)}.") from error
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                log.warning(f"{folder} cannot be locked, so that another run could write to it: {reason_of(error)}.")
                return
            self._file.seek(0)
            owner = self._file.read().decode(errors="replace").strip() or "another process"
            self.release()
            raise InputError(
                f"`output_dir` must not be in use by another run, but {owner} writes to {str(folder)!r}."
            ) from error
        try:
            self._file.truncate(0)
            self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        except OSError as error:
            log.warning(f"{folder} is locked, but this process cannot be named in its lock file: {reason_of(error)}.")

    def release(self) -> None:
        """Release the lock."""
        self._file.close()
        _opened[:] = [file for file in _opened if not file.closed]


@atexit.register
def _release_all() -> None:
    """Close files that a refused or unfinished recipe still holds, so that Python does not warn of open files."""
    while _opened:
        _opened.pop().close()


def _open(path: Path) -> FileIO:
    for file in _opened:
        if path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno())):
            return file
    _opened.append(path.open("a+b", buffering=0))
    return _opened[-1]
