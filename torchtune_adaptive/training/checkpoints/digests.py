"""Digests of files, by which a changed one is noticed.

A digest is the SHA-256 of the SHA-256 digests of a file's pieces of 64 MiB. Pieces are read side by side, because one
processor reads a file more slowly than a good disk writes it.
"""

import hashlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from torchtune_adaptive.files import sync

_PIECE_BYTES = 2**26
_READ_BYTES = 2**20
_MOST_THREADS = 8  # of a rank


def digests_of(files: Sequence[Path]) -> list[str]:
    """The digest of each file's content, in hexadecimal digits.

    Raises:
        OSError: a file cannot be read.
    """
    with _reading(files) as digests:
        return list(digests)


def settle(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Force the files ``names`` of ``folder`` to disk. Returns their digests, which are computed meanwhile.

    Raises:
        OSError: a file cannot be written or read.
    """
    names = sorted(names)
    with _reading([folder / name for name in names]) as digests:
        for name in names:
            sync(folder / name)
        return dict(zip(names, digests, strict=True))


def first_change(folder: Path, digests: Mapping[str, str], *, share: int = 0, shares: int = 1) -> str:
    """Which file of ``folder`` has another digest, as a sentence; "" if none has. Missing files are left out.

    Args:
        share: the part of the files that is read here, of ``shares`` parts.
    """
    names = [name for name in sorted(digests)[share::shares] if (folder / name).is_file()]
    try:
        found = digests_of([folder / name for name in names])
    except OSError as error:
        return f"{error.filename or folder} must be readable, but is not: {error.strerror}."
    changed = next((name for name, now in zip(names, found, strict=True) if now != digests[name]), None)
    return "" if changed is None else f"{folder / changed} must be as the run wrote it, but its content has changed."


@contextmanager
def _reading(files: Sequence[Path]) -> Iterator[Iterator[str]]:
    """Context: the digest of each file, which threads compute."""
    processors = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    threads = max(1, min(_MOST_THREADS, processors // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
    with ThreadPoolExecutor(threads) as pool:
        pieces = [
            [
                pool.submit(_digest_of_piece, file, start)
                for start in range(0, max(file.stat().st_size, 1), _PIECE_BYTES)
            ]
            for file in files
        ]
        yield (hashlib.sha256(b"".join(one.result() for one in of_file)).hexdigest() for of_file in pieces)


def _digest_of_piece(file: Path, start: int) -> bytes:
    digest, left = hashlib.sha256(), _PIECE_BYTES
    with file.open("rb") as content:
        content.seek(start)
        while left and (read := content.read(min(left, _READ_BYTES))):
            digest.update(read)
            left -= len(read)
    return digest.digest()
