"""Host memory: what this process holds, and what its machine has left."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtune_adaptive.text import count_text, format_bytes

_PROC, _CGROUP = Path("/proc"), Path("/sys/fs/cgroup")
_RESIDENT, _OF_FILES = 1, 2  # fields of /proc/self/statm, in pages
# Limit, usage, and the field of memory.stat that counts pages which the kernel drops first: of version 2, and of 1.
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_USABLE = 0.9  # of the available memory: data loaders and other processes grow too


def anonymous_bytes() -> int | None:
    """Anonymous resident memory: tensors in host memory and Python objects. None if it is unknown.

    Pages of libraries and memory-mapped checkpoints are not counted; the system drops them when memory gets short. On a
    CPU it includes the tensors of the computation. It takes one read of a small file.
    """
    try:
        pages = (_PROC / "self/statm").read_text().split()
    except OSError:
        return None
    return (int(pages[_RESIDENT]) - int(pages[_OF_FILES])) * os.sysconf("SC_PAGE_SIZE")


def available_bytes() -> int | None:
    """Memory that processes here can still take: the machine's, or less if a control group has a limit.

    Pages of files that the system can drop count as available. None if it is unknown.
    """
    try:
        fields = _fields(_PROC / "meminfo")
    except OSError:
        return None
    return min([1024 * fields["MemAvailable:"], *_left_in_control_groups()])


@dataclass(frozen=True)
class RankMemory:
    """Host memory that a rank needs, beside what is available on its machine (None: unknown)."""

    machine: str
    needed_bytes: int
    available_bytes: int | None

    @classmethod
    def here(cls, needed_bytes: int) -> "RankMemory":
        """That of this rank. The machine is known by the number that Linux draws when it boots."""
        try:
            machine = (_PROC / "sys/kernel/random/boot_id").read_text()
        except OSError:
            machine = ""
        return cls(machine, needed_bytes, available_bytes())


def why_no_room(ranks: Sequence[RankMemory]) -> str:
    """Why the memory that ``ranks`` need is not there, for the first machine that lacks it; "" if there is room.

    >>> why_no_room([RankMemory("node 0", 6 * 2**30, 40 * 2**30)] * 8)
    '8 ranks need 48.0 GiB of host memory, of which at most 36.0 GiB are usable'
    """
    for machine in dict.fromkeys(one.machine for one in ranks):
        here = [one for one in ranks if one.machine == machine]
        needed = sum(one.needed_bytes for one in here)
        known = [one.available_bytes for one in here if one.available_bytes is not None]
        if needed > _USABLE * min(known, default=0):
            ranks_need = f"{count_text(len(here), 'rank')} need{'s' if len(here) == 1 else ''}"
            usable = (
                f"at most {format_bytes(_USABLE * min(known))} are usable" if known else "it is unknown what is free"
            )
            return f"{ranks_need} {format_bytes(needed)} of host memory, of which {usable}"
    return ""


def _left_in_control_groups() -> Iterator[int]:
    """What each memory limit of this process's control groups leaves, also of the groups that contain them."""
    try:
        lines = (_PROC / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number != "0" and "memory" not in controllers.split(","):
            continue
        root, names = (_CGROUP, _VERSION_2) if number == "0" else (_CGROUP / "memory", _VERSION_1)
        group = root / path.lstrip("/")  # not there in a container, which sees its own group at the root
        for folder in (group, *group.parents):
            if folder.is_relative_to(root) and (left_bytes := _left_in(folder, *names)) is not None:
                yield left_bytes


def _left_in(folder: Path, limit_name: str, used_name: str, droppable_name: str) -> int | None:
    """What the limit of a control group leaves; None without a limit."""
    try:
        limit, used = ((folder / name).read_text().strip() for name in (limit_name, used_name))
        droppable = _fields(folder / "memory.stat").get(droppable_name, 0)
    except OSError:
        return None
    return None if limit == "max" else max(0, int(limit) - int(used) + droppable)


def _fields(path: Path) -> dict[str, int]:
    """The first number of each line, by the line's first word."""
    return {words[0]: int(words[1]) for words in map(str.split, path.read_text().splitlines()) if len(words) > 1}
