"""Signals that ask a run to end: it finishes its optimizer step, saves, and ends with a status of its own."""

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# "Temporary failure, try again" in sysexits.h: a job scheduler may submit the same command again.
STATUS_STOPPED = 75
_PR_SET_PDEATHSIG = 1


class StopRequest:
    """Whether a signal has asked this process to end after its optimizer step."""

    def __init__(self) -> None:
        self._is_made = False

    def is_made(self) -> bool:
        """Whether there was such a signal."""
        return self._is_made

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, SIGTERM and SIGUSR1 make the request. Only in the main thread."""
        before = {one: signal.signal(one, self._make) for one in (signal.SIGTERM, signal.SIGUSR1)}
        try:
            yield
        finally:
            for one, way in before.items():
                signal.signal(one, way)

    def _make(self, number: int, frame: FrameType | None) -> None:
        self._is_made = True


def end_as_asked() -> None:
    """Have SIGINT (Ctrl-C) end this process at once, and a rank of torchrun receive SIGTERM when torchrun ends.

    No file is torn by either. Without the latter, ranks would go on when their launcher is killed alone.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if "TORCHELASTIC_RUN_ID" not in os.environ or sys.platform != "linux":
        return
    launcher = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != launcher:  # it ended before the call
        signal.raise_signal(signal.SIGTERM)
