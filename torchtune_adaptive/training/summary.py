"""What a run has done, as text for the log when it ends."""

import shlex
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from torchtune_adaptive.text import count_text

_LONGEST_LIST = 4  # of batch sizes


def summary_text(how: str, *, step: int, epochs_run: int, rows: Mapping[str, str | None]) -> str:
    """What was done, and the rows below it, aligned; those without a text are left out.

    Args:
        how: the run has ended: "complete" or "ended by a signal".
        step, epochs_run: optimizer steps and epochs done.

    >>> print(summary_text("complete", step=1, epochs_run=3, rows={"batch_size": "8", "metrics": None, "peak": "-"}))
    Run complete: 1 optimizer step, 3 epochs
      batch_size  8
      peak        -
    """
    there = {name: text for name, text in rows.items() if text is not None}
    width = max(map(len, there), default=0)
    title = f"Run {how}: {count_text(step, 'optimizer step')}, {count_text(epochs_run, 'epoch')}"
    return "\n".join([title, *(f"  {name:<{width}}  {text}" for name, text in there.items())])


def log_rows(path: Path) -> dict[str, str | None]:
    """Where the run's log is, and the command that draws its pictures, for a shell.

    >>> log_rows(Path("my runs/log"))
    {'report': 'my runs/log', 'picture': "tune-adaptive report 'my runs'"}
    """
    return {"report": str(path), "picture": f"tune-adaptive report {shlex.quote(str(path.parent))}"}


def arrows(values: Sequence[Any]) -> str:
    """How a value has changed; where it did so often, the last of it.

    >>> arrows([8, 8, 16]), arrows([8]), arrows([1, 2, 3, 4, 5, 6])
    ('8 -> 16', '8', '1 -> ... -> 4 -> 5 -> 6')
    """
    changes = [str(value) for value, _ in groupby(values)]
    if len(changes) > _LONGEST_LIST:
        changes = [changes[0], "...", *changes[1 - _LONGEST_LIST :]]
    return " -> ".join(changes)
