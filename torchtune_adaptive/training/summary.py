"""What a run has done, logged when it ends."""

import shlex
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from torchtune import utils

from torchtune_adaptive.batch.loader import StepLoader
from torchtune_adaptive.search.sizes import Sizes
from torchtune_adaptive.text import count_text, format_bytes
from torchtune_adaptive.training.file_names import REPORT_NAME
from torchtune_adaptive.training.oom_retry import OomRetry
from torchtune_adaptive.training.record import RunRecord
from torchtune_adaptive.training.run_events import RunEvents
from torchtune_adaptive.training.step_log import StepLog, StepTotals

log = utils.get_logger("DEBUG")

_LONGEST_LIST = 4  # of batch sizes


class RunSummary:
    """Logs a summary on rank 0 when a run ends, and notes the end in the journal.

    Args:
        logs: where the metric logger writes; None if it is not known.
    """

    def __init__(
        self,
        step_log: StepLog,
        retry: OomRetry,
        loader: StepLoader,
        record: RunRecord,
        events: RunEvents,
        *,
        sizes: Sizes,
        logs: str | None,
    ) -> None:
        self._step_log = step_log
        self._retry = retry
        self._loader = loader
        self._record = record
        self._events = events
        self._sizes = sizes
        self._logs = logs

    def finish(self, how: str, *, step: int, epochs_run: int) -> None:
        """Log what was done up to ``step``.

        Args:
            how: the run has ended: "complete" or "ended by a signal".
        """
        if not self._step_log.writes:
            return
        self._events.look()
        self._events.journal.event("ended", step=step, epoch=epochs_run, how=how)
        log.info(summary_text(run_title(how, step=step, epochs_run=epochs_run), self._rows()))

    def _rows(self) -> dict[str, str | None]:
        journal = self._events.journal
        output_dir = journal.path.parent
        report = output_dir / REPORT_NAME if self._record.history else None
        files = [str(one) for one in (report, journal.path if journal.is_open else None) if one is not None]
        checkpoint = self._events.checkpoint
        return {
            self._loader.key: self._batch(),
            "micro-batch": f"at most {self._retry.micro_batches.limit} per rank{_found(self._sizes)}",
            "out of memory": _retries(self._retry),
            "throughput": _throughput(self._step_log.totals, self._loader.ranks),
            "peak memory": _peak(self._step_log.totals, self._record.memory_limit_bytes),
            "last checkpoint": "none" if checkpoint is None else str(checkpoint),
            "metrics": self._logs,
            "report": ", ".join(files) or None,
            "picture": report_command(output_dir) if files else None,
        }

    def _batch(self) -> str:
        """The batch sizes that the run has had."""
        sizes = [entry["batch_size"] for entry in self._record.history] + [self._loader.batch_size]
        return f"{arrows(sizes)}, {self._loader.samples_per_step} samples per optimizer step"


def run_title(how: str, *, step: int, epochs_run: int) -> str:
    """The first line of a summary.

    >>> run_title("complete", step=1, epochs_run=3)
    'Run complete: 1 optimizer step, 3 epochs'
    """
    return f"Run {how}: {count_text(step, 'optimizer step')}, {count_text(epochs_run, 'epoch')}"


def summary_text(title: str, rows: Mapping[str, str | None]) -> str:
    """The rows below ``title``, aligned; those without a text are left out.

    >>> print(summary_text("Run complete", {"batch_size": "8", "metrics": None, "picture": "none"}))
    Run complete
      batch_size  8
      picture     none
    """
    there = {name: text for name, text in rows.items() if text is not None}
    width = max(map(len, there), default=0)
    return "\n".join([title, *(f"  {name:<{width}}  {text}" for name, text in there.items())])


def report_command(output_dir: Path) -> str:
    """The command that draws the pictures of a run, for a shell.

    >>> report_command(Path("my runs/1"))
    "tune-adaptive report 'my runs/1'"
    """
    return f"tune-adaptive report {shlex.quote(str(output_dir))}"


def arrows(values: Sequence[Any]) -> str:
    """How a value has changed; where it did so often, the last of it.

    >>> arrows([8, 8, 16]), arrows([8]), arrows([1, 2, 3, 4, 5, 6])
    ('8 -> 16', '8', '1 -> ... -> 4 -> 5 -> 6')
    """
    changes = [str(value) for value, _ in groupby(values)]
    if len(changes) > _LONGEST_LIST:
        changes = [changes[0], "...", *changes[1 - _LONGEST_LIST :]]
    return " -> ".join(changes)


def _found(sizes: Sizes) -> str:
    result = sizes.result
    if result is None:
        return ""
    return f" (found {result.exact_batch_size}, used {result.batch_size}, by {result.strategy})"


def _retries(retry: OomRetry) -> str:
    return f"{count_text(retry.retries, 'time')}, run again in smaller micro-batches" if retry.retries else "never"


def _throughput(totals: StepTotals, ranks: int) -> str | None:
    if not totals.seconds:
        return None
    rate = totals.num_tokens / totals.seconds / ranks
    return f"{rate:,.0f} tokens/s per rank, mean of {count_text(totals.steps, 'step')} in {totals.seconds:,.1f} s"


def _peak(totals: StepTotals, limit_bytes: int | None) -> str:
    if not totals.peak_bytes:
        return "not measured (no limit)"  # on a CPU, where it would only cost time
    of = "" if limit_bytes is None else f" of {format_bytes(limit_bytes)}"
    return f"{format_bytes(totals.peak_bytes)}{of} on rank 0"
