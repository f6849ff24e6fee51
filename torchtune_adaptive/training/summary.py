"""The end of a run in its log, with a summary of what it has done."""

import shlex
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from torchtune import utils

from torchtune_adaptive.text import count_text
from torchtune_adaptive.training.run_log import RunLog

log = utils.get_logger("DEBUG")

_LONGEST_LIST = 4  # of batch sizes


def log_end(
    run_log: RunLog,
    how: str,
    *,
    step: int,
    epochs_run: int,
    rows: Mapping[str, str | None],
    checkpoints: Sequence[tuple[Path, int]],
    metrics: str | None,
) -> None:
    """Append the end of a run to ``run_log``, and log a summary: ``rows`` that have a text, then where its files are.

    Args:
        how: the run has ended: "complete" or "ended by a signal".
        step, epochs_run: optimizer steps and epochs done.
        checkpoints: those that were written, in order, with their steps.
        metrics: where the metric logger writes; None if it is not known.
    """
    run_log.append(event="ended", step=step, epoch=epochs_run, how=how)
    all_rows = {**rows, "last checkpoint": str(checkpoints[-1][0]) if checkpoints else "none", "metrics": metrics}
    if run_log.is_open:
        folder = shlex.quote(str(run_log.path.parent))
        all_rows |= {"report": str(run_log.path), "picture": f"tune-adaptive report {folder}"}
    there = {name: text for name, text in all_rows.items() if text is not None}
    width = max(map(len, there))
    title = f"Run {how}: {count_text(step, 'optimizer step')}, {count_text(epochs_run, 'epoch')}"
    log.info("\n".join([title, *(f"  {name:<{width}}  {text}" for name, text in there.items())]))


def arrows(values: Sequence[Any]) -> str:
    """How a value has changed; where it did so often, the last of it.

    >>> arrows([8, 8, 16]), arrows([1, 2, 3, 4]), arrows([1, 2, 3, 4, 5])
    ('8 -> 16', '1 -> 2 -> 3 -> 4', '1 -> ... -> 3 -> 4 -> 5')
    """
    changes = [str(value) for value, _ in groupby(values)]
    if len(changes) > _LONGEST_LIST:
        changes = [changes[0], "...", *changes[1 - _LONGEST_LIST :]]
    return " -> ".join(changes)
