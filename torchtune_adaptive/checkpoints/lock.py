"""A lock on a folder that ends with the process that holds it."""

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
_opened: list[FileIO] = []  # each once: when a process closes a file, it loses its lock on it, however it holds it


class FolderLock:
    """Held by this process from construction to ``release``, or to its end, however it ends.

    A record lock: the system drops it with its owner, also over NFS, and no child process keeps it. The process that
    holds it may lock again, which changes nothing.

    Raises:
        InputError: another process holds it, or the folder cannot be written into.
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
                log.warning(f"{folder} cannot be locked, so that another run could write into it: {reason_of(error)}.")
                return
            self._file.seek(0)
            owner = self._file.read().decode(errors="replace").strip() or "another process"
            self.release()
            raise InputError(
                f"`output_dir` must not be in use by another run, but {owner} writes into {str(folder)!r}."
            ) from error
        try:
            self._file.truncate(0)
            self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        except OSError as error:
            log.warning(f"{folder} is locked, but its lock does not name this process: {reason_of(error)}.")

    def release(self) -> None:
        """Let others write into the folder."""
        self._file.close()
        _opened[:] = [file for file in _opened if not file.closed]


@atexit.register
def _release_all() -> None:
    """Close what a refused recipe, or one that was never cleaned up, still holds: Python would warn of open files."""
    while _opened:
        _opened.pop().close()


def _open(path: Path) -> FileIO:
    for file in _opened:
        if path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno())):
            return file
    _opened.append(path.open("a+b", buffering=0))
    return _opened[-1]
