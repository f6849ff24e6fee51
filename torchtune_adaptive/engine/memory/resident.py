"""Host memory that this process holds."""

import os
from pathlib import Path

_PROC = Path("/proc")
_RESIDENT, _OF_FILES = 1, 2  # fields of /proc/self/statm, in pages


def anonymous_bytes() -> int | None:
    """Anonymous resident memory: tensors in host memory and Python objects. None if it is unknown.

    Pages of libraries and memory-mapped checkpoints are not counted; the system drops them when memory gets short. On a
    CPU it includes the tensors of the computation. It takes one read of a small file.
    """
    try:
        with open(_PROC / "self/statm", "rb", buffering=0) as figures:
            pages = figures.read().split()
    except OSError:
        return None
    return (int(pages[_RESIDENT]) - int(pages[_OF_FILES])) * os.sysconf("SC_PAGE_SIZE")
