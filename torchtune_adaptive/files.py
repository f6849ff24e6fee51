"""Files that are there whole, or as they were before."""

import os
from pathlib import Path


def write_whole(path: Path, text: str, *, makes_folder: bool = True) -> Path:
    """Write ``text`` to ``path`` and return ``path``. A reader never sees half of it.

    Args:
        makes_folder: make the directory if it is not there, with those above it.

    Raises:
        OSError: it cannot be written; what was there before is left.
    """
    if makes_folder:
        path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.tmp")
    with unfinished.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
    return path


def sync(path: Path) -> None:
    """Have what ``path`` holds on the disk: a file's content, or a directory's names of new and renamed files."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
