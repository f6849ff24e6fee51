"""Cache traces, so that a second plan of the same config is fast."""

import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, TypeVar

from omegaconf import DictConfig

from torchtune_adaptive.files import write_whole
from torchtune_adaptive.plan.plan import Trace
from torchtune_adaptive.plan.step_events import StepEvents
from torchtune_adaptive.plan.step_peaks import TracedStep
from torchtune_adaptive.stock.configs import resolved

_Kept = TypeVar("_Kept", TracedStep, StepEvents)

_PACKAGES = ("torch", "torchtune", "torchao")
_KNOWN = (*_PACKAGES, "bitsandbytes")  # their components change only with their versions
_KEPT_FILES = 512
_KEPT_EVENTS = 64  # a step with 80 layers takes 0.2 MB


class EventsTrace(Protocol):
    """Traces one step with all layers, as ``client.trace_events`` does."""

    def __call__(
        self, cfg: DictConfig, *, world_size: int, batch_size: int, seq_len: int, shows_progress: bool = False
    ) -> StepEvents: ...


class TraceCache:
    """Traces a step as ``trace`` does, with a progress bar, or reads it from memory or from a file in ``folder``.

    A step depends on its config, the ranks, the row lengths, the versions of torch, torchtune and torchao, and the
    files of this package. A config with components of other packages is traced again by each process. A file that
    cannot be read or written is ignored.
    """

    def __init__(self, trace: Trace, folder: Path) -> None:
        self._trace = trace
        self._files = _Files(folder, ending=".json", most=_KEPT_FILES)
        self._traced: dict[str, TracedStep] = {}

    def __call__(self, cfg: DictConfig, *, world_size: int, seq_lens: Sequence[int]) -> TracedStep:
        question = _Question(resolved(cfg), world_size, list(seq_lens))
        if question.name not in self._traced:
            self._traced[question.name] = self._files.answer(
                question,
                TracedStep.from_json,
                lambda: self._trace(cfg, world_size=world_size, seq_lens=seq_lens, shows_progress=True),
            )
        return self._traced[question.name]


class EventsCache:
    """Traces the events of a step as ``trace`` does, with a progress bar, or reads them from a file in ``folder``.

    Events are cached under the same rules as in ``TraceCache``, but fewer of them are kept.
    """

    def __init__(self, trace: EventsTrace, folder: Path) -> None:
        self._trace = trace
        self._files = _Files(folder, ending=".events.gz", most=_KEPT_EVENTS)

    def __call__(self, cfg: DictConfig, *, world_size: int, batch_size: int, seq_len: int) -> StepEvents:
        asked = {"world_size": world_size, "batch_size": batch_size, "seq_len": seq_len}
        return self._files.answer(
            _Question(resolved(cfg), *asked.values()),
            StepEvents.from_json,
            lambda: self._trace(cfg, **asked, shows_progress=True),
        )


class _Question:
    """The key of a cached trace: a config's content, the trace's arguments and the installed versions.

    Attributes:
        name: a different one for each question.
        is_kept: whether an answer may be cached: all components are of packages whose versions are in the key.
    """

    def __init__(self, content: Any, *asked: Any) -> None:
        text = json.dumps([_versions(), content, *asked], sort_keys=True, default=str)
        self.name = hashlib.sha256(text.encode()).hexdigest()
        self.is_kept = all(map(_is_known, _components(content)))


class _Files:
    """JSON values in files of ``folder`` with this ``ending``. Only the ``most`` newest files are kept.

    Args:
        ending: if it ends in ".gz", the files are compressed.
    """

    def __init__(self, folder: Path, *, ending: str, most: int) -> None:
        self._folder = folder
        self._ending = ending
        self._most = most

    def answer(self, question: _Question, from_json: Callable[[Any], _Kept], find: Callable[[], _Kept]) -> _Kept:
        """The cached answer to ``question``, else the answer of ``find``, which is then cached if it may be."""
        kept = self._read(question.name, from_json) if question.is_kept else None
        if kept is not None:
            return kept
        found = find()
        if question.is_kept:
            self._write(question.name, found.as_json())
        return found

    def _read(self, name: str, from_json: Callable[[Any], _Kept]) -> _Kept | None:
        """The file's value, converted by ``from_json``; None if there is no readable file."""
        try:
            content = (self._folder / f"{name}{self._ending}").read_bytes()
            return from_json(json.loads(gzip.decompress(content) if self._is_compressed else content))
        except (OSError, EOFError, zlib.error, ValueError, TypeError, LookupError):
            return None

    def _write(self, name: str, value: Any) -> None:
        """Write the file if possible, and remove the oldest files if there are too many."""
        content = json.dumps(value).encode()
        try:
            path = self._folder / f"{name}{self._ending}"
            write_whole(path, gzip.compress(content, mtime=0) if self._is_compressed else content)
            newest_first = sorted(self._folder.glob(f"*{self._ending}"), key=os.path.getmtime, reverse=True)
            for old in newest_first[self._most :]:
                old.unlink()
        except OSError:
            pass

    @property
    def _is_compressed(self) -> bool:
        return self._ending.endswith(".gz")


def user_cache_folder() -> Path:
    """The user's cache folder: ``XDG_CACHE_HOME``, or ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "torchtune_adaptive" / "plans"


@cache
def _versions() -> list[str]:
    """Versions of the packages on which a step depends, and a digest of this package's files."""
    package = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for path in sorted([*package.rglob("*.py"), *package.parent.glob("recipes/adaptive_*.py")]):
        digest.update(path.read_bytes())
    return [*map(version, _PACKAGES), digest.hexdigest()]


def _components(content: Any) -> Iterator[str]:
    """The names of all components of a config."""
    if isinstance(content, dict):
        if "_component_" in content:
            yield str(content["_component_"])
        content = list(content.values())
    if isinstance(content, list):
        for one in content:
            yield from _components(one)


def _is_known(component: str) -> bool:
    return component.partition(".")[0] in _KNOWN
