"""Memory limits of this process that the system sets, and the allocator setting that makes sizes reproducible there.

glibc keeps freed blocks of up to 32 MiB for later use. How much of them is wasted depends on all earlier allocations of
the process, so that a batch size that has just fitted may fail a step later. If each block is memory-mapped, it returns
to the system when it is freed. Then only live tensors count.
"""

import ctypes
import functools
import logging
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchtune_adaptive.logs import warn_on_rank_zero
from torchtune_adaptive.text import format_bytes

_COUNTED = {"RLIMIT_DATA": "VmData", "RLIMIT_AS": "VmSize"}  # the field of /proc/self/status that each limit counts
_M_MMAP_THRESHOLD = -3  # of malloc.h
_THRESHOLD_BYTES = 128 * 1024  # glibc's initial value; glibc raises it whenever it frees a larger block

log = logging.getLogger(__name__)


def room_bytes() -> int | None:
    """The memory that the limits leave to this process now; None without limits, or if the usage is unknown."""
    try:
        lines = Path("/proc/self/status").read_text(errors="replace").splitlines()
    except OSError:
        return None
    used = {
        name: int(value.split()[0]) * 1024
        for name, _, value in (line.partition(":") for line in lines)
        if name in _COUNTED.values()
    }
    rooms = [soft - used[_COUNTED[name]] for name, (soft, _) in _limits().items() if _COUNTED[name] in used]
    return min(rooms, default=None)


@contextmanager
def held_back(margin: float, *, enough_bytes: int) -> Iterator[bool]:
    """Context: if the system leaves this process less than ``enough_bytes``, lower its limits by ``margin``.

    Yields whether it does. If so, freed tensors return to the system from now on, which is logged. This setting stays
    until the process ends, because a size that fits in a search fits in training only if both allocate in the same
    way. A threshold that the user has set by an environment variable is left alone.
    """
    limits, more_bytes = _limits(), room_bytes()
    if more_bytes is None or more_bytes >= enough_bytes:
        yield False
        return
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ and "mmap_threshold" not in os.environ.get("GLIBC_TUNABLES", ""):
        _free_at_once(" and ".join(f"{name} of {format_bytes(soft)}" for name, (soft, _) in limits.items()))
    held_bytes = int(margin * max(0, more_bytes))
    for name, (soft, hard) in limits.items():
        resource.setrlimit(getattr(resource, name), (soft - held_bytes, hard))
    try:
        yield True
    finally:
        for name, limit in limits.items():
            resource.setrlimit(getattr(resource, name), limit)


def _limits() -> dict[str, tuple[int, int]]:
    """The limits that are set, in bytes: the current (soft) value, and the hard value up to which it can be raised."""
    limits = {name: resource.getrlimit(getattr(resource, name)) for name in _COUNTED}
    return {name: limit for name, limit in limits.items() if limit[0] != resource.RLIM_INFINITY}


@functools.cache
def _free_at_once(limits: str) -> None:
    c_library = ctypes.CDLL(None)
    if not hasattr(c_library, "mallopt") or c_library.mallopt(_M_MMAP_THRESHOLD, _THRESHOLD_BYTES) != 1:
        return  # an allocator of another kind
    c_library.malloc_trim(0)
    warn_on_rank_zero(
        log,
        f"The system limits this process's memory ({limits}). From now on freed tensors return to the system at once,"
        " so that the batch size found keeps fitting; steps may take longer. To train with it in another process, set"
        f" MALLOC_MMAP_THRESHOLD_={_THRESHOLD_BYTES} in its environment.",
    )
