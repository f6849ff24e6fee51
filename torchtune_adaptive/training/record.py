"""The report that a run writes about its batch sizes."""

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torchtune import utils

from torchtune_adaptive.errors import reason_of
from torchtune_adaptive.files import write_whole
from torchtune_adaptive.search.sizes import Sizes
from torchtune_adaptive.training.file_names import REPORT_NAME

log = utils.get_logger("DEBUG")


class RunRecord:
    """Owns the history of batch sizes and micro-batch sizes, and writes the report. Only rank 0 writes.

    If a report cannot be written, this is logged, and the run continues.

    Args:
        output_dir: the folder of the report. The first report creates it if it does not exist. If it disappears later,
            for example because a disk is unmounted, it is not created again.
        sizes: the sizes that the search found.
        memory_limit_bytes: the lowest limit of all ranks, None without a limit.
        writes: whether this is rank 0.
        search_only: the run ends after its search.
    """

    def __init__(
        self,
        output_dir: str | Path,
        sizes: Sizes,
        *,
        memory_limit_bytes: int | None,
        writes: bool,
        search_only: bool = False,
    ) -> None:
        self._output_dir = Path(output_dir)
        self._search_only = search_only
        self._memory_limit_bytes = memory_limit_bytes
        self._writes = writes
        self._sizes = sizes
        self._history: list[dict[str, Any]] = []
        self._makes_folder = not os.path.isdir(output_dir)

    @property
    def history(self) -> list[dict[str, Any]]:
        """An entry for each decision, in order, with ``epoch``, ``batch_size`` and ``reason``."""
        return list(self._history)

    @property
    def memory_limit_bytes(self) -> int | None:
        """The least that a rank may use, None if nothing limits it."""
        return self._memory_limit_bytes

    def note(self, reason: str, *, epoch: int, batch_size: int, **figures: int) -> None:
        """Add an entry to the history, with more ``figures``, and write the report."""
        self._history.append({"epoch": epoch, "batch_size": batch_size} | figures | {"reason": reason})
        if self._writes:
            write_report(
                self._output_dir, self._report(), search_only=self._search_only, makes_folder=self._makes_folder
            )
            self._makes_folder = False

    def state_dict(self) -> dict[str, Any]:
        """The state for a resumed run."""
        return {"history": self.history, "memory_limit_bytes": self._memory_limit_bytes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state."""
        self._history = list(state["history"])

    def _report(self) -> dict[str, Any]:
        sizes = self._sizes
        found = {} if sizes.result is None else asdict(sizes.result) | {"seq_len": sizes.seq_len}
        if sizes.result is not None and sizes.token_budget is not None:
            found |= {"token_budget": sizes.token_budget}
        if sizes.tokens_per_second is not None:
            found |= {"tokens_per_second": sizes.tokens_per_second}
        return found | {"history": self._history}


def write_report(output_dir: Path, report: dict[str, Any], *, search_only: bool, makes_folder: bool = True) -> None:
    """Write ``report`` as JSON. If it cannot be written, this is logged, and the run continues.

    Args:
        search_only: the run ends after its search; the report then has the time, as ``search_only_at``.
        makes_folder: create ``output_dir`` if it does not exist.
    """
    if search_only:
        report = report | {"search_only_at": time.time()}
    content = json.dumps(report, indent=2) + "\n"
    try:
        log.info(f"Report written to {write_whole(output_dir / REPORT_NAME, content, makes_folder=makes_folder)}")
    except OSError as error:
        log.warning(f"Report not written: {reason_of(error)}")
