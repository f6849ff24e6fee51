"""The log of a run: one file, to which rank 0 appends a line of JSON for each decision, logged step and event.

Needs no torch, so that a report can be made where there is none.
"""

import json
import math
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torchtune_adaptive.engine.search.strategies import SearchResult
from torchtune_adaptive.engine.search.timing import Timing
from torchtune_adaptive.errors import reason_of
from torchtune_adaptive.files import write_atomically

LOG_NAME = "adaptive_log.jsonl"
SEARCH_ONLY, SEARCH, SIZES = "search only", "search", "sizes"  # events that are read again


class RunLog:
    """Appends lines to the log in ``output_dir``. A crash can cut short only the last line.

    If a line cannot be written, this is logged, the file is left alone from then on, and the run continues.

    Args:
        output_dir: the folder of the file; made by ``begin`` if it is not there.
        writes: whether this process writes: rank 0.
    """

    def __init__(self, output_dir: str | Path, *, writes: bool) -> None:
        self.path = Path(output_dir) / LOG_NAME
        self.history: list[dict[str, Any]] = []  # an entry for each ``note``, also of the run that is resumed
        self._writes = writes
        self._descriptor: int | None = None
        self._num_checkpoints = 0  # that are written

    @property
    def is_open(self) -> bool:
        """Whether lines are written: from ``begin`` on, as long as they can be."""
        return self._descriptor is not None

    def begin(self, *, step: int, run: str = "", search_only: bool = False, **values: Any) -> None:
        """Append the start of the run with the id ``run`` after ``step`` optimizer steps, with ``values``.

        Later lines are dropped, because their steps are trained again; at step 0 and those of another run all are, but
        for the search that ended without training (``search_only``) just before. Such a search keeps the lines of the
        run before it.
        """
        if not self._writes:
            return
        try:
            kept = _lines_up_to(math.inf if search_only else step, self.path) if step or search_only else []
            searched = [] if step or search_only else _search_before(self.path)
            if kept and not search_only and json.loads(kept[0]).get("run", "") != run:
                kept = []
            write_atomically(self.path, "".join(f"{line}\n" for line in kept))
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        except OSError as error:
            self._give_up(error)
            return
        weakref.finalize(self, os.close, self._descriptor)
        if not search_only:
            decisions = [line for line in map(json.loads, kept) if line.get("event") == SIZES and "batch_size" in line]
            self.history = [{name: line[name] for name in line if name != "event"} for line in decisions]
        self.append(
            event=SEARCH_ONLY if search_only else "resumed" if step else "started", step=step, run=run, **values
        )
        for search in searched:
            self.append(**search | {"before": True})

    def search(
        self,
        result: SearchResult,
        *,
        step: int,
        seq_len: int | None,
        of: str = "",
        chosen: Mapping[str, int] | None = None,
        timings: Mapping[str, Timing] | None = None,
    ) -> None:
        """Append the result of a search.

        Args:
            step: optimizer steps done.
            seq_len: tokens of a row.
            of: what was searched for, "" in a run with one search.
            chosen: other sizes that follow from it, by name.
            timings: by micro-batch, as in "8 rows".
        """
        timed = {size: asdict(one) for size, one in (timings or {}).items()}
        more = {"of": of, "seq_len": seq_len, "chosen": chosen or {}, "timings": timed}
        self.append(event=SEARCH, step=step, **more, **asdict(result))

    def note(self, reason: str, *, step: int, epoch: int, batch_size: int, **figures: int) -> None:
        """Append a decision about sizes, which holds from step number ``step`` on, and add it to ``history``."""
        entry = {"step": step, "epoch": epoch, "batch_size": batch_size} | figures | {"reason": reason}
        self.history.append(entry)
        self.append(event=SIZES, **entry)

    def checkpoints(self, finished: Sequence[tuple[Path, int]]) -> None:
        """Append those of ``finished``, all that this process has finished, that are new, with their steps."""
        for path, step in finished[self._num_checkpoints :]:
            self.append(event="checkpoint", step=step, path=str(path))
        self._num_checkpoints = len(finished)

    def append(self, **values: Any) -> None:
        """Append a line. A number that is not finite becomes null, which JSON can hold."""
        if self._descriptor is None:
            return
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }
        line = json.dumps(finite, separators=(",", ":"), default=float).encode() + b"\n"
        try:
            if (written := os.write(self._descriptor, line)) < len(line):
                raise OSError(f"{written} of {len(line)} bytes written")
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        from torchtune import utils  # needs torch

        self._descriptor = None  # closed with this object
        utils.get_logger("DEBUG").warning(f"The run is no longer recorded in {self.path}: {reason_of(error)}")


def _lines_up_to(step: float, path: Path) -> list[str]:
    """The whole lines of ``path`` up to ``step``, without those of a search without training; none if it is not there.

    Raises:
        OSError: it cannot be read.
    """
    kept: list[str] = []
    for line, values in _whole_lines(path):
        if values.get("event") == SEARCH_ONLY:
            break
        if values["step"] <= step:
            kept.append(line)
    return kept


def _search_before(path: Path) -> list[dict[str, Any]]:
    """The results in ``path`` of the last search without training, also if a run has been started since.

    Raises:
        OSError: it cannot be read.
    """
    found: list[dict[str, Any]] = []
    is_alone = False
    for _, values in _whole_lines(path):
        if values.get("event") == SEARCH_ONLY:
            found, is_alone = [], True
        elif values.get("event") == SEARCH and (is_alone or values.get("before")):
            found.append(values)
    return found


def _whole_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each line of ``path`` and its values; none if it is not there."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            values = json.loads(line)
            has_step = isinstance(values["step"], int)
        except (ValueError, TypeError, KeyError):
            continue  # cut short by a crash
        if has_step:
            yield line, values
