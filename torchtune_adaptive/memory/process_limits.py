"""Limits that the system sets on the memory of this process, and how the allocator must work for a size to hold there.

glibc keeps freed blocks of up to 32 MiB for later use. How much of them is lost depends on all that the process has
allocated before, so that a batch size that has just fitted may fail a step later. Blocks that are mapped one by one go
back to the system when they are freed: then the tensors count, and nothing else.
"""

import ctypes
import functools
import os
import resource
from pathlib import Path

from torchtune import utils

from torchtune_adaptive.text import format_bytes

_COUNTED = {"RLIMIT_DATA": "VmData", "RLIMIT_AS": "VmSize"}  # by what /proc/self/status calls that which each counts
_M_MMAP_THRESHOLD = -3  # of malloc.h
_THRESHOLD_BYTES = 128 * 1024  # glibc's own at first; it raises it whenever it frees a larger block

log = utils.get_logger("DEBUG")


def room_bytes() -> int | None:
    """What the limits leave to this process now; None without limits, or where the system does not say what is used."""
    limits, status = _limits(), Path("/proc/self/status")
    if not limits or not status.exists():
        return None
    fields = dict(line.split(":", maxsplit=1) for line in status.read_text().splitlines())
    return min(nbytes - int(fields[_COUNTED[name]].split()[0]) * 1024 for name, nbytes in limits.items())


def free_at_once_if_limited() -> bool:
    """Whether the system limits this process's memory; if so, freed tensors go back to the system from now on.

    That is logged. It lasts as long as the process: what fits in a search fits in training only if both allocate alike.
    An allocator whose threshold the user has set by an environment variable is left alone.
    """
    limits = _limits()
    set_by_user = "MALLOC_MMAP_THRESHOLD_" in os.environ or "mmap_threshold" in os.environ.get("GLIBC_TUNABLES", "")
    if limits and not set_by_user:
        _free_at_once(" and ".join(f"{name} of {format_bytes(nbytes)}" for name, nbytes in limits.items()))
    return bool(limits)


def _limits() -> dict[str, int]:
    """The limits that are set, in bytes."""
    limits = {name: resource.getrlimit(getattr(resource, name))[0] for name in _COUNTED}
    return {name: nbytes for name, nbytes in limits.items() if nbytes != resource.RLIM_INFINITY}


@functools.cache
def _free_at_once(limits: str) -> None:
    c_library = ctypes.CDLL(None)
    if not hasattr(c_library, "mallopt"):  # not glibc
        return
    c_library.mallopt(_M_MMAP_THRESHOLD, _THRESHOLD_BYTES)
    c_library.malloc_trim(0)
    utils.log_rank_zero(
        log,
        f"The system limits this process's memory ({limits}): from now on it gets freed tensors back at once, so that"
        " the batch size found holds; steps may take longer. Another process needs"
        f" MALLOC_MMAP_THRESHOLD_={_THRESHOLD_BYTES} in its environment for that size.",
    )
