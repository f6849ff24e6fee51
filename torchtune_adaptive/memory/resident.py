"""Host memory of this process."""

import os
from pathlib import Path

_STATM = Path("/proc/self/statm")
_RESIDENT, _OF_FILES = 1, 2  # fields of the file, in pages


def anonymous_bytes() -> int | None:
    """Anonymous resident memory: tensors in host memory and Python objects. None if it is unknown.

    Pages of libraries and memory-mapped checkpoints are not counted; the system drops them when memory gets short. On a
    CPU it includes the tensors of the computation. It takes one read of a small file.
    """
    try:
        pages = _STATM.read_text().split()
    except OSError:
        return None
    return (int(pages[_RESIDENT]) - int(pages[_OF_FILES])) * os.sysconf("SC_PAGE_SIZE")
