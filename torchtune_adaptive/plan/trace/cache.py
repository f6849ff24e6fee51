"""Keep traced steps as small files in a user's cache folder, for programs that ask the same again."""

import gzip
import hashlib
import json
import logging
import os
import zlib
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torchtune_adaptive
from torchtune_adaptive.files import write_atomically
from torchtune_adaptive.plan.trace.step_events import TracedStep

_log = logging.getLogger(__name__)
_PACKAGES = ("torch", "torchtune", "torchao", "bitsandbytes")  # whose components do not change without a new version
_MOST_FILES = 512  # with all operations of a step of 80 layers, one takes 0.2 MB
_ENDING = ".json.gz"


class Answers:
    """Traced steps by the question, in memory and as JSON in files in ``folder``. None: in memory alone.

    An answer depends on the question, on the versions of torch, torchtune and torchao, and on the files of this
    package. If the question names components of other packages, it is kept in memory only. Several programs may use the
    folder at the same time. A file that cannot be read is ignored, and one that cannot be written gives a warning.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._in_memory: dict[str, TracedStep] = {}
        self._has_warned = False

    def read(self, question: Any) -> TracedStep | None:
        """The answer; None if there is none."""
        name = _digest(question)
        if name not in self._in_memory and (path := self._path(question, name)) is not None:
            with suppress(
                OSError, EOFError, zlib.error, ValueError, TypeError, LookupError, AttributeError, RecursionError
            ):
                self._in_memory[name] = TracedStep.from_json(json.loads(gzip.decompress(path.read_bytes())))
        return self._in_memory.get(name)

    def write(self, question: Any, answer: TracedStep) -> None:
        """Keep the answer, and remove the oldest files if there are too many."""
        name = _digest(question)
        self._in_memory[name] = answer
        path = self._path(question, name)
        if path is None:
            return
        try:
            write_atomically(path, gzip.compress(json.dumps(answer.as_json()).encode(), mtime=0))
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                _log.warning("What was traced cannot be kept for the next plan: %s", error)
            return
        with suppress(OSError):  # another program may remove the same file
            newest_first = sorted(path.parent.glob(f"*{_ENDING}"), key=os.path.getmtime, reverse=True)
            for old in newest_first[_MOST_FILES:]:
                old.unlink()

    def _path(self, question: Any, name: str) -> Path | None:
        is_kept = all(component.partition(".")[0] in _PACKAGES for component in _components(question))
        return self._folder / f"{name}{_ENDING}" if is_kept and self._folder is not None else None


def user_cache_folder(name: str) -> Path | None:
    """Where a user's programs keep what they can make again: ``name`` below ``XDG_CACHE_HOME``, or ``~/.cache``.

    None for a user without a home directory: what lies in a folder for all users may be of another one.
    """
    home = os.path.expanduser("~")
    base = os.environ.get("XDG_CACHE_HOME") or (None if home == "~" else f"{home}/.cache")
    return Path(base) / "torchtune_adaptive" / name if base else None


def _digest(question: Any) -> str:
    text = json.dumps([_versions(), question], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def _versions() -> list[str]:
    """Versions of the packages that a step depends on, and a digest of the files of this one."""
    package = Path(torchtune_adaptive.__file__).parent
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
