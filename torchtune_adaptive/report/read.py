"""The log that a run wrote, as values."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torchtune_adaptive.engine.search.strategies import Probe, SearchResult
from torchtune_adaptive.engine.search.timing import Timing
from torchtune_adaptive.errors import InputError, quote, reason_of
from torchtune_adaptive.training.run_log import LOG_NAME, SEARCH, SEARCH_ONLY

OUT_OF_MEMORY, THRASHING = "out of memory", "thrashing"


@dataclass(frozen=True)
class Search:
    """A search for the largest batch.

    Attributes:
        of: what was searched for, "" in a run with one search.
        seq_len: tokens of a row; None if that is not known.
        chosen: other sizes that the search gave, by name.
        timings: by micro-batch, as in "8 rows".
        is_before: it was made by `tune-adaptive search`, before the run started.
    """

    of: str
    result: SearchResult
    seq_len: int | None
    chosen: Mapping[str, int]
    timings: Mapping[str, Timing]
    is_before: bool = False


@dataclass(frozen=True)
class Run:
    """What is known of a run; everything may be missing but the folder.

    Attributes:
        searches: the last one for each thing that was searched for.
        steps: the line of each logged optimizer step, with "step" and "epoch"; null is None.
        events: every other line, in order.
    """

    output_dir: Path
    searches: tuple[Search, ...] = ()
    steps: tuple[Mapping[str, Any], ...] = ()
    events: tuple[Mapping[str, Any], ...] = ()

    def column(self, name: str) -> list[tuple[int, float]]:
        """The figure ``name`` of each logged step that has it, with the step's number."""
        return [(one["step"], one[name]) for one in self.steps if isinstance(one.get(name), int | float)]

    def of_kind(self, *names: str) -> list[Mapping[str, Any]]:
        """The events of these names."""
        return [one for one in self.events if one["event"] in names]

    def last_value(self, name: str) -> Any:
        """A value of the run's last start or resumption; None if it is not known."""
        starts = self.of_kind("started", "resumed")
        return starts[-1].get(name) if starts else None


def read_run(output_dir: Path) -> Run:
    """What the run whose ``output_dir`` this is has logged so far.

    After a search without training this is the search, until the next run.

    Raises:
        InputError: it is no such folder, or its log cannot be understood.
    """
    path = output_dir / LOG_NAME
    if not path.exists():
        missing = f"has no {LOG_NAME}" if output_dir.exists() else "is not there"
        raise InputError(f"`OUTPUT_DIR` is not the `output_dir` of a run: {quote(str(output_dir))} {missing}.")
    with understanding(output_dir):
        return _run(output_dir, _whole_lines(path.read_text(encoding="utf-8")))


@contextmanager
def understanding(output_dir: Path) -> Iterator[None]:
    """Context of what uses the log of the run in ``output_dir``, in which something may be missing.

    Raises:
        InputError: the log cannot be understood.
    """
    try:
        yield
    except (OSError, ArithmeticError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"{output_dir / LOG_NAME} is no log of a run: {reason_of(error)}.") from error


def _run(output_dir: Path, lines: Sequence[Mapping[str, Any]]) -> Run:
    only = [number for number, line in enumerate(lines) if line.get("event") == SEARCH_ONLY]
    searches: dict[str, Search] = {}
    steps: list[Mapping[str, Any]] = []
    events: list[Mapping[str, Any]] = []
    for line in lines[only[-1] if only else 0 :]:
        name = line.get("event")
        if not isinstance(line["step"], int):
            raise TypeError(f"step is {quote(line['step'])}")
        if name is None:
            steps.append(line)
        elif name == SEARCH:
            searches[line["of"]] = _search(line)
        else:
            events.append(line)
    return Run(output_dir, tuple(searches.values()), tuple(steps), tuple(events))


def _search(content: Mapping[str, Any]) -> Search:
    """The search of an event; values of it that are not known here are left out."""
    given = {one.name: content[one.name] for one in fields(SearchResult) if one.name in content}
    given |= {"probes": tuple(Probe(**probe) for probe in given["probes"])}
    given |= {"forecast": tuple(map(tuple, given.get("forecast", ())))}
    timings = {size: Timing(tuple(one["seconds"]), one["num_tokens"]) for size, one in content["timings"].items()}
    is_before = content.get("before", False)
    return Search(content["of"], SearchResult(**given), content.get("seq_len"), content["chosen"], timings, is_before)


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
