"""Host memory that this process has."""

import os
from pathlib import Path

_STATM = Path("/proc/self/statm")
_RESIDENT, _OF_FILES = 1, 2  # fields of it, in pages


def anonymous_bytes() -> int | None:
    """Resident memory that belongs to no file: tensors on the host and Python's objects; None where it is not known.

    Without the pages of libraries and mapped checkpoints, which the system drops when memory gets short. On a CPU
    device the tensors that are computed with are among it. One read of a small file.
    """
    try:
        pages = _STATM.read_text().split()
    except OSError:
        return None
    return (int(pages[_RESIDENT]) - int(pages[_OF_FILES])) * os.sysconf("SC_PAGE_SIZE")
