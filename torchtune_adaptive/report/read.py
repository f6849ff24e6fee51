"""The files that a run wrote, as values."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from torchtune_adaptive.errors import InputError, quote, reason_of
from torchtune_adaptive.search.strategies import Probe, SearchResult
from torchtune_adaptive.training.file_names import JOURNAL_NAME, REPORT_NAME

_MEMORY_EVENTS = ("out of memory", "thrashing")
_NUMBERS = (int, float)

Read = TypeVar("Read")


@dataclass(frozen=True)
class Search:
    """A search for the largest batch.

    Attributes:
        of: what was searched for, "" in a run with one search.
        seq_len: tokens of a row; None if that is not known.
    """

    of: str
    result: SearchResult
    seq_len: int | None


@dataclass(frozen=True)
class MemoryShortage:
    """An optimizer step in which memory ran short. ``before`` and ``after`` are sizes of a micro-batch.

    Attributes:
        is_out: memory ran out; if not, the allocator released its cache in two steps in a row.
    """

    step: int
    is_out: bool
    ranks: tuple[int, ...]
    phase: str
    figures: str
    before: int
    after: int
    unit: str


@dataclass(frozen=True)
class Event:
    """The start or resumption of a run, a checkpoint, or the end, after so many optimizer steps."""

    name: str
    step: int
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """What is known of a run; everything may be missing but the folder.

    Attributes:
        history: the sizes decided on, in order.
        chosen: other sizes that the search gave, by name.
        search_only_at: when it ended after its search, in seconds since 1970; None if it was to train.
        steps: the figures of each logged optimizer step, with "step" and "epoch"; null is None.
    """

    output_dir: Path
    searches: tuple[Search, ...] = ()
    history: tuple[Mapping[str, Any], ...] = ()
    chosen: Mapping[str, int] | None = None
    rates: Mapping[int, float] | None = None
    search_only_at: float | None = None
    steps: tuple[Mapping[str, Any], ...] = ()
    shortages: tuple[MemoryShortage, ...] = ()
    events: tuple[Event, ...] = ()

    def column(self, name: str) -> list[tuple[int, float]]:
        """The figure ``name`` of each logged step that has it, with the step's number."""
        return [(one["step"], one[name]) for one in self.steps if isinstance(one.get(name), _NUMBERS)]

    def of_kind(self, *names: str) -> list[Event]:
        """The events of these names."""
        return [one for one in self.events if one.name in names]

    def last_value(self, name: str) -> Any:
        """A value of the run's last start or resumption; None if it is not known."""
        starts = self.of_kind("started", "resumed")
        return starts[-1].values.get(name) if starts else None

    @property
    def has_searched(self) -> bool:
        """Whether there is a search with probes."""
        return any(search.result.probes for search in self.searches)


def read_run(output_dir: Path) -> Run:
    """What the run whose ``output_dir`` this is has left there so far.

    Raises:
        InputError: it is no such folder, or a file of it cannot be understood.
    """
    paths = output_dir / REPORT_NAME, output_dir / JOURNAL_NAME
    if not any(path.exists() for path in paths):
        missing = "is not there" if not output_dir.exists() else f"has neither {REPORT_NAME} nor {JOURNAL_NAME}"
        raise InputError(f"`OUTPUT_DIR` must be the `output_dir` of a run, but {quote(str(output_dir))} {missing}.")
    report = _read(paths[0], _report) if paths[0].exists() else {}
    journal = _read(paths[1], _journal) if paths[1].exists() else {}
    run = Run(output_dir, **report, **journal)
    if run.search_only_at is not None:  # one of the files is of an earlier run in this folder
        return Run(output_dir, **(report if run.search_only_at >= (run.last_value("time") or 0) else journal))
    if run.last_value("searched") is False and run.searches:
        return Run(output_dir, **journal)  # the report is of an earlier run in this folder
    return run


def _read(path: Path, understand: Callable[[str], Read]) -> Read:
    try:
        return understand(path.read_text())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} must be as a run wrote it, but failed: {reason_of(error)}.") from error


def _report(text: str) -> dict[str, Any]:
    content = json.loads(text)
    searches: list[Search] = []
    if "probes" in content:
        searches.append(Search("", _search_result(content), content.get("seq_len")))
    for of, found in content.get("searches", {}).items():  # reinforcement learning searches twice
        searches.append(Search(of, _search_result(found), None))
    history = content.get("history", [])
    if not searches and not history:
        raise ValueError("neither a search nor a history")
    for entry in history:
        _require(entry, epoch=int, batch_size=int, reason=str)
    if "search_only_at" in content:
        _require(content, search_only_at=float)
    names = ("token_budget", "forward_batch_size", "gradient_accumulation_steps")
    chosen = {name: int(content[name]) for name in names if name in content}
    rates = {int(size): float(rate) for size, rate in content.get("tokens_per_second", {}).items()}
    return {
        "searches": tuple(searches),
        "history": tuple(history),
        "chosen": chosen or None,
        "rates": rates or None,
        "search_only_at": content.get("search_only_at"),
    }


def _search_result(content: Mapping[str, Any]) -> SearchResult:
    """The search of which ``content`` is what JSON has made; values of it that are not known here are left out."""
    given = {one.name: content[one.name] for one in fields(SearchResult) if one.name in content}
    probes = []
    for probe in given["probes"]:
        _require(probe, batch_size=int, fits=bool, peak_bytes=int, phase_peak_bytes=dict, seconds=float)
        probes.append(Probe(**probe))
    given |= {"probes": tuple(probes), "forecast": tuple(map(tuple, given.get("forecast", ())))}
    _require(given, exact_batch_size=int, batch_size=int, memory_limit_bytes=int, margin=float, strategy=str)
    return SearchResult(**given)


def _journal(text: str) -> dict[str, Any]:
    steps: list[Mapping[str, Any]] = []
    shortages: list[MemoryShortage] = []
    events: list[Event] = []
    for line in _whole_lines(text):
        name = line.get("event")
        if name is None:
            _require(line, step=int, epoch=int)
            steps.append(line)
        elif name in _MEMORY_EVENTS:
            _require(line, step=int, ranks=list, phase=str, figures=str, before=int, after=int, unit=str)
            names = ("phase", "figures", "before", "after", "unit")
            rest = {name: line[name] for name in names}
            shortages.append(MemoryShortage(line["step"], name == _MEMORY_EVENTS[0], tuple(line["ranks"]), **rest))
        else:
            _require(line, step=int, event=str)
            if "time" in line:
                _require(line, time=float)
            events.append(Event(name, line["step"], line))
    return {"steps": tuple(steps), "shortages": tuple(shortages), "events": tuple(events)}


def _whole_lines(text: str) -> list[dict[str, Any]]:
    """The lines' objects. A last line without an end is still being written, or was when the run was killed."""
    lines = text.split("\n")
    found = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            found.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"line {number}, {reason_of(error)}") from error
    if lines[-1] and not found:
        raise ValueError("no whole line")
    return found


def _require(values: Mapping[str, Any], **kinds: type) -> None:
    """Check that ``values`` has values of these types; an integer is a float too.

    Raises:
        TypeError: it has not.
    """
    for name, kind in kinds.items():
        value = values.get(name)
        wanted: Sequence[type] = _NUMBERS if kind is float else (kind,)
        if not isinstance(value, tuple(wanted)) or (isinstance(value, bool) and kind is not bool):
            raise TypeError(f"{name} is {quote(value)}")
