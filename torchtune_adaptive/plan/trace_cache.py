"""Keep what was traced, so that a question about the same config is answered at once."""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from torchtune_adaptive.files import write_whole
from torchtune_adaptive.plan.plan import Trace
from torchtune_adaptive.plan.step_peaks import TracedStep
from torchtune_adaptive.stock.configs import resolved

_PACKAGES = ("torch", "torchtune", "torchao")
_KNOWN = (*_PACKAGES, "bitsandbytes")  # whose components do not change without a new version
_KEPT_FILES = 512


class TraceCache:
    """Traces a step as ``trace`` does, with a progress bar, or takes it from memory or from a file of ``folder``.

    What a step is depends on its config, the ranks, the lengths of rows, the versions of torch, torchtune and torchao,
    and the files of this package. A config with components of other packages is traced anew by each process. A file
    that cannot be read or written is as good as none.
    """

    def __init__(self, trace: Trace, folder: Path) -> None:
        self._trace = trace
        self._folder = folder
        self._traced: dict[str, TracedStep] = {}

    def __call__(self, cfg: DictConfig, *, world_size: int, seq_lens: Sequence[int]) -> TracedStep:
        content = resolved(cfg)
        asked = json.dumps([_versions(), content, world_size, list(seq_lens)], sort_keys=True, default=str)
        name = hashlib.sha256(asked.encode()).hexdigest()
        if name not in self._traced:
            path = self._folder / f"{name}.json" if all(map(_is_known, _components(content))) else None
            self._traced[name] = _read(path) or self._trace_and_write(path, cfg, world_size, seq_lens)
        return self._traced[name]

    def _trace_and_write(
        self, path: Path | None, cfg: DictConfig, world_size: int, seq_lens: Sequence[int]
    ) -> TracedStep:
        step = self._trace(cfg, world_size=world_size, seq_lens=seq_lens, shows_progress=True)
        if path is not None:
            try:
                write_whole(path, json.dumps(step.as_json()))
                newest_first = sorted(self._folder.glob("*.json"), key=os.path.getmtime, reverse=True)
                for old in newest_first[_KEPT_FILES:]:
                    old.unlink()
            except OSError:
                pass
        return step


def user_cache_folder() -> Path:
    """Where a user's programs keep what they can make again: ``XDG_CACHE_HOME``, or ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "torchtune_adaptive" / "plans"


def _read(path: Path | None) -> TracedStep | None:
    if path is None:
        return None
    try:
        return TracedStep.from_json(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, KeyError):
        return None


@cache
def _versions() -> list[str]:
    """Versions of the packages that a step depends on, and a digest of the files of this one."""
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
