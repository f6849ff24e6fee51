"""The file in which a run records its steps and events, one line each."""

import json
import math
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchtune import utils

from torchtune_adaptive.errors import reason_of
from torchtune_adaptive.files import write_whole
from torchtune_adaptive.training.file_names import JOURNAL_NAME

log = utils.get_logger("DEBUG")


class RunJournal:
    """Appends lines to a file of JSON lines.

    A line that cannot be written is logged, the file is left alone from then on, and the run continues.

    Args:
        output_dir: the folder of the file; made if it is not there.
        writes: whether this process writes: rank 0 of a run that trains.
    """

    def __init__(self, output_dir: str | Path, *, writes: bool) -> None:
        self._path = Path(output_dir) / JOURNAL_NAME
        self._writes = writes
        self._descriptor: int | None = None

    @property
    def path(self) -> Path:
        """The path of the file."""
        return self._path

    @property
    def is_open(self) -> bool:
        """Whether lines are written: from ``begin`` on, as long as they can be."""
        return self._descriptor is not None

    def begin(self, *, step: int, **values: Any) -> None:
        """Keep the lines up to ``step``, 0 for a run from the start, and append an event with ``values``.

        Later lines are of steps that are now trained again.
        """
        if not self._writes:
            return
        try:
            kept = "".join(f"{line}\n" for line in _lines_up_to(step, self._path)) if step else ""
            write_whole(self._path, kept)
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        except OSError as error:
            self._give_up(error)
            return
        weakref.finalize(self, os.close, self._descriptor)
        self.event("resumed" if step else "started", step=step, **values)

    def event(self, name: str, **values: Any) -> None:
        """Append an event."""
        self.append(event=name, **values)

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
        self._descriptor = None  # closed with this object
        log.warning(f"Steps are no longer recorded in {self._path}: {reason_of(error)}")


def _lines_up_to(step: int, path: Path) -> Iterator[str]:
    """The whole lines of ``path`` up to ``step``; none if it is not there.

    Raises:
        OSError: it cannot be read.
    """
    if not path.exists():
        return
    for line in path.read_text(errors="replace").splitlines():
        try:
            values = json.loads(line)
            is_kept = values["step"] <= step
        except (ValueError, TypeError, KeyError):
            continue  # cut short by a crash
        if is_kept:
            yield line
