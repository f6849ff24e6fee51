"""Small files in a user's cache folder: what programs found, kept for later ones that ask the same question."""

import gzip
import hashlib
import json
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from torchtune_adaptive.files import write_whole

_Kept = TypeVar("_Kept")

_PACKAGES = ("torch", "torchtune", "torchao", "bitsandbytes")  # whose components do not change without a new version


class Question:
    """A question about the content of a config, with the versions of the packages installed now.

    Attributes:
        name: a digest of all of it.
        is_kept: whether an answer may be kept: every component is of a package whose version is part of the digest.
    """

    def __init__(self, content: Any, *asked: Any) -> None:
        text = json.dumps([_versions(), content, *asked], sort_keys=True, default=str)
        self.name = hashlib.sha256(text.encode()).hexdigest()
        self.is_kept = all(map(_is_known, _components(content)))


class KeptFiles:
    """Keeps values as JSON files in ``folder``.

    Several programs may read and write them at the same time.

    Args:
        ending: of the files' names; those that end with ".gz" are compressed.
        most: how many files stay, the newest ones.
    """

    def __init__(self, folder: Path, *, ending: str, most: int) -> None:
        self._folder = folder
        self._ending = ending
        self._most = most

    def read(self, question: Question, from_json: Callable[[Any], _Kept]) -> _Kept | None:
        """What ``from_json`` makes of the question's file; None if there is none that can be read."""
        if not question.is_kept:
            return None
        try:
            content = self._path(question).read_bytes()
            return from_json(json.loads(gzip.decompress(content) if self._is_compressed else content))
        except (OSError, EOFError, zlib.error, ValueError, TypeError, LookupError, RecursionError):
            return None

    def write(self, question: Question, value: Any) -> None:
        """Write the question's file if its answer may be kept, and remove the oldest if there are too many.

        Raises:
            OSError: it cannot be written.
        """
        if not question.is_kept:
            return
        content = json.dumps(value).encode()
        write_whole(self._path(question), gzip.compress(content, mtime=0) if self._is_compressed else content)
        with suppress(OSError):  # another program may remove the same
            newest_first = sorted(self._folder.glob(f"*{self._ending}"), key=os.path.getmtime, reverse=True)
            for old in newest_first[self._most :]:
                old.unlink()

    def _path(self, question: Question) -> Path:
        return self._folder / f"{question.name}{self._ending}"

    @property
    def _is_compressed(self) -> bool:
        return self._ending.endswith(".gz")


def user_cache_folder(name: str) -> Path:
    """Where a user's programs keep what they can make again: ``name`` below ``XDG_CACHE_HOME``, or ``~/.cache``.

    For a user without a home directory it is below the system's directory for temporary files.
    """
    home = os.path.expanduser("~")
    base = os.environ.get("XDG_CACHE_HOME") or (tempfile.gettempdir() if home == "~" else f"{home}/.cache")
    return Path(base) / "torchtune_adaptive" / name


@cache
def _versions() -> list[str]:
    """Versions of the packages that a step depends on, and a digest of the files of this one."""
    package = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for path in sorted([*package.rglob("*.py"), *package.parent.glob("recipes/adaptive_*.py")]):
        digest.update(path.read_bytes())
    return [*map(_version, _PACKAGES), digest.hexdigest()]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _components(content: Any) -> Iterator[str]:
    """The names of all components of a config, nested or by dotted keys."""
    if isinstance(content, dict):
        yield from (str(value) for key, value in content.items() if str(key).endswith("_component_"))
        content = list(content.values())
    if isinstance(content, list):
        for one in content:
            yield from _components(one)


def _is_known(component: str) -> bool:
    return component.partition(".")[0] in _PACKAGES
