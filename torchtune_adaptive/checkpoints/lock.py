"""A lock on a folder that ends with the process that holds it."""

import errno
import fcntl
import os
import socket
from pathlib import Path

from torchtune import utils

from torchtune_adaptive.errors import InputError, reason_of

log = utils.get_logger("DEBUG")

LOCK_NAME = "adaptive.lock"


class FolderLock:
    """Held from construction to ``release``, or to the end of the process, however it ends.

    A record lock: the system drops it with its owner, also over NFS, and no child process keeps it.

    Raises:
        InputError: another process holds it, or the folder cannot be written into.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / LOCK_NAME).open("a+")
        except OSError as error:
            raise InputError(f"`output_dir` must be writable, but is not: {reason_of(error)}.") from error
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                log.warning(f"{folder} cannot be locked, so that another run could write into it: {reason_of(error)}.")
                return
            self._file.seek(0)
            owner = self._file.read().strip() or "another process"
            self._file.close()
            raise InputError(
                f"`output_dir` must not be in use by another run, but {owner} writes into {str(folder)!r}."
            ) from error
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._file.flush()

    def release(self) -> None:
        """Let others write into the folder."""
        self._file.close()
