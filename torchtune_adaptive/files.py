"""Files that are there whole, or as they were before."""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> Path:
    """Write ``text`` to ``path``, in a directory made for it, and return ``path``. A reader never sees half of it.

    Raises:
        OSError: it cannot be written; what was there before is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.tmp")
    unfinished.write_text(text)
    os.replace(unfinished, path)
    return path
