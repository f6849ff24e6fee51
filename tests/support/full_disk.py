"""A disk that is full in one call of a function, or from then on."""

import errno
import itertools
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock


class FullDisk:
    """Within it, call ``number`` of ``owner.name``, counted from 1, fails; if the disk stays full, later ones too."""

    def __init__(self, owner: Any, name: str, number: int = 1, *, stays_full: bool = False) -> None:
        self.has_struck = False
        call, calls = getattr(owner, name), itertools.count(1)

        def fail(*args: Any, **options: Any) -> Any:
            count = next(calls)
            if count == number or (stays_full and count > number):
                self.has_struck = True
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return call(*args, **options)

        self._patch = mock.patch.object(owner, name, fail)

    def __enter__(self) -> "FullDisk":
        self._patch.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._patch.stop()


def full_in_each_call(owner: Any, name: str, *, stays_full: bool = False) -> Iterator[FullDisk]:
    """A disk that is full in the first call, in the second, and so on; the last one is full in none."""
    for number in itertools.count(1):
        disk = FullDisk(owner, name, number, stays_full=stays_full)
        yield disk
        if not disk.has_struck:
            assert number > 1, "it was never called"
            return
