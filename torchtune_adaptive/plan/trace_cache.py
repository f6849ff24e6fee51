"""Cache traces, so that a second plan of the same config is fast."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

from omegaconf import DictConfig

from torchtune_adaptive.plan.cache import KeptFiles, Question
from torchtune_adaptive.plan.decide import Trace
from torchtune_adaptive.plan.trace.events import StepEvents
from torchtune_adaptive.plan.trace.peaks import TracedStep
from torchtune_adaptive.stock.configs import resolved

_Kept = TypeVar("_Kept", TracedStep, StepEvents)

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
        self._files = KeptFiles(folder, ending=".json", most=_KEPT_FILES)
        self._traced: dict[str, TracedStep] = {}

    def __call__(self, cfg: DictConfig, *, world_size: int, seq_lens: Sequence[int]) -> TracedStep:
        question = Question(resolved(cfg), world_size, list(seq_lens))
        if question.name not in self._traced:
            self._traced[question.name] = _answer(
                self._files,
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
        self._files = KeptFiles(folder, ending=".events.gz", most=_KEPT_EVENTS)

    def __call__(self, cfg: DictConfig, *, world_size: int, batch_size: int, seq_len: int) -> StepEvents:
        asked = {"world_size": world_size, "batch_size": batch_size, "seq_len": seq_len}
        return _answer(
            self._files,
            Question(resolved(cfg), *asked.values()),
            StepEvents.from_json,
            lambda: self._trace(cfg, **asked, shows_progress=True),
        )


def _answer(
    files: KeptFiles, question: Question, from_json: Callable[[Any], _Kept], find: Callable[[], _Kept]
) -> _Kept:
    """What the file of ``question`` holds; if there is none, what ``find`` finds, which is kept if that is possible."""
    kept = files.read(question, from_json)
    if kept is not None:
        return kept
    found = find()
    with suppress(OSError):
        files.write(question, found.as_json())
    return found
