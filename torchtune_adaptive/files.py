"""Files that are there whole, or as they were before."""

import errno
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchtune_adaptive.errors import InputError, quote, reason_of


def write_whole(path: Path, content: str | bytes, *, makes_folder: bool = True) -> Path:
    """Write ``content`` to ``path`` and return ``path``. A reader never sees half of it, whoever else writes it.

    Args:
        makes_folder: make the directory if it is not there, with those above it.

    Raises:
        OSError: it cannot be written; what was there before is left.
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
    """Check that ``write_whole`` could write ``path`` now, and leave nothing there.

    Raises:
        OSError: something else than a file is there, or the nearest directory above it that is there takes no file.
        ValueError: it is no path of a file.
    """
    if "\0" in str(path):
        raise ValueError("embedded null byte")
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, "something else than a file is there", str(path))
    above = next(folder for folder in path.absolute().parents if os.path.lexists(folder))
    with tempfile.TemporaryFile(dir=above):
        pass


@contextmanager
def writing(name: str, path: Path) -> Iterator[None]:
    """Inside, an error of writing becomes a refusal of ``path``, the value of the option ``name``.

    Raises:
        InputError: it cannot be written.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or reason_of(error)
        raise InputError(
            f"`{name}` must be a file that can be written, but is {quote(str(path))}: {reason}."
        ) from error


def sync(path: Path) -> None:
    """Have what ``path`` holds on the disk: a file's content, or a directory's names of new and renamed files."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
