"""Write files atomically: a file is complete, or as it was before."""

import errno
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchtune_adaptive.errors import InputError, quote, reason_of


def write_atomically(path: Path, content: str | bytes, *, makes_folder: bool = True) -> Path:
    """Write ``content`` to ``path`` and return ``path``. A reader never sees a partial file, whoever else writes it.

    Args:
        makes_folder: create the directory and its parents if they do not exist.

    Raises:
        OSError: the file cannot be written; an existing file is kept.
    """
    if makes_folder:
        path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")  # each writer has its own
    try:
        with unfinished.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def check_writable(path: Path) -> None:
    """Check that ``write_atomically`` could write ``path`` now, without writing it.

    Raises:
        OSError: ``path`` is not a regular file, or its nearest existing parent directory is not writable.
        ValueError: ``path`` is not a path of a file.
    """
    if "\0" in str(path):
        raise ValueError("embedded null byte")
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, "it exists and is not a file", str(path))
    above = next(folder for folder in path.absolute().parents if os.path.lexists(folder))
    with tempfile.TemporaryFile(dir=above):
        pass


@contextmanager
def writing(name: str, path: Path, *, kind: str = "file") -> Iterator[None]:
    """Context: a write error becomes an ``InputError`` about ``path``, a "file" or "folder", the value of ``name``.

    Raises:
        InputError: ``path`` cannot be written.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or reason_of(error)
        raise InputError(f"`{name}` cannot be written: {kind} {quote(str(path))}: {reason}.") from error


def sync(path: Path) -> None:
    """Flush ``path`` to disk: a file's content, or a directory's entries of new and renamed files."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
