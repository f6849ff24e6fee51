"""A folder that one run at a time writes to."""

import contextlib
import errno
import fcntl
import os
import socket
import stat
import weakref
from pathlib import Path
from typing import ClassVar

from torchtune import utils

from torchtune_adaptive.errors import CheckpointError, InputError, reason_of

log = utils.get_logger("DEBUG")

LOCK_NAME = "adaptive.lock"
_RUN = "run "
_LONGEST = 4096  # bytes of the file that are read
# Of a file system that has no locks: NFS without its lock daemon, others, Lustre mounted without the option `flock`.
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


class FolderReplacedError(CheckpointError):
    """The folder at a path is no longer the one that this run has locked. The run ends, and writes nothing there."""


class _OpenFile:
    """An open file. It is closed, which unlocks it, when its last user is gone. A forked process closes its own copy.

    While it is open, no other file gets its inode number.
    """

    _all: ClassVar = weakref.WeakValueDictionary[tuple[int, int], "_OpenFile"]()  # of this process

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._close = weakref.finalize(self, os.close, descriptor)

    @classmethod
    def at(cls, path: Path) -> "_OpenFile":
        """The file at ``path``, which is made if it is not there; one that is open already is shared."""
        try:
            opened = cls(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644))
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise OSError(f"{str(path)!r} must be a regular file, but is a symbolic link instead") from None
        there = os.fstat(opened.descriptor)
        if not stat.S_ISREG(there.st_mode):
            raise OSError(f"{str(path)!r} must be a regular file")
        return cls._all.setdefault((there.st_dev, there.st_ino), opened)

    @classmethod
    def close_all(cls) -> None:
        """Close what this process has open: a forked one must not keep the lock of the run that it outlives."""
        for opened in [*cls._all.values()]:
            opened._close()
        cls._all.clear()


os.register_at_fork(after_in_child=_OpenFile.close_all)


class FolderLock:
    """Keeps other runs out of a folder, from creation until this process ends in any way, and notices its replacement.

    A folder is known by its lock's file, not by its path: it may be renamed, and another made in its place.

    Attributes:
        last_run: the id of the run that has written here last, "" if there is none.

    Raises:
        InputError: another process holds the lock, or the folder is not writable; it is created if it does not exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.resolve() / LOCK_NAME
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._open = _OpenFile.at(self._file)
        except OSError as error:
            raise InputError(f"`output_dir` cannot be written: {reason_of(error)}.") from error
        try:
            fcntl.flock(self._open.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nothing new if this process has it
        except (BlockingIOError, PermissionError) as error:
            owner = (self._lines() or [""])[0] or "another process"
            raise InputError(f"`output_dir` is in use: {owner} writes to {str(path)!r}.") from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise InputError(f"`output_dir` cannot be written: {reason_of(error)}.") from error
            log.warning(f"{path} cannot be locked, so that another run could write to it: {reason_of(error)}.")
        self.last_run = next((line.removeprefix(_RUN) for line in self._lines() if line.startswith(_RUN)), "")
        self.claim(self.last_run)

    def claim(self, run_id: str) -> None:
        """Note that from now on the run ``run_id`` writes here.

        What is noted is written over: a file that is emptied first may find its space taken on a full disk, and then
        names no run at all.
        """
        lines = [f"process {os.getpid()} on {socket.gethostname()}", *([_RUN + run_id] if run_id else [])]
        content = "".join(f"{line}\n" for line in lines).encode()
        with contextlib.suppress(OSError):  # a full disk
            os.pwrite(self._open.descriptor, content, 0)
            os.truncate(self._open.descriptor, len(content))

    def check(self) -> None:
        """Check that the folder at the path is the locked one.

        Raises:
            FolderReplacedError: it is another one, or the lock's file was removed, so that another run may write here.
            OSError: there is no folder, as when its disk is not mounted.
        """
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self._file), os.fstat(self._open.descriptor)):
                return
        if not self._path.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self._path))
        raise FolderReplacedError(
            f"{str(self._path)!r} must stay the folder that this run has locked, but is another one now or lacks its"
            f" {LOCK_NAME}; the run has ended, and what it has saved is untouched."
        )

    def _lines(self) -> list[str]:
        try:
            return os.pread(self._open.descriptor, _LONGEST, 0).decode(errors="replace").splitlines()
        except OSError:
            return []
