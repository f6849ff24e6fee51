"""Signals that ask a run to end: it finishes its optimizer step, saves, and exits with status 75."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

# "Temporary failure, try again" (EX_TEMPFAIL) in sysexits.h: a job scheduler may submit the same command again.
STATUS_STOPPED = 75
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # loaded here, because a forked process must not


class StopRequest:
    """A request, by a signal, to end this process after its optimizer step."""

    def __init__(self) -> None:
        self._is_made = False

    def is_made(self) -> bool:
        """Whether there was a signal."""
        return self._is_made

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Context: SIGTERM, SIGUSR1 and SIGHUP make the request, as ``handled`` does it. Only in the main thread."""
        with handled(self._make, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            yield

    def _make(self, number: int, frame: FrameType | None) -> None:
        self._is_made = True


@contextmanager
def handled(handler: Callable[[int, FrameType | None], object], *kinds: signal.Signals) -> Iterator[None]:
    """Context: ``handler`` is called for signals of these kinds. Only in the main thread.

    A SIGHUP that is ignored, as under ``nohup``, stays ignored.
    """
    heard = [one for one in kinds if one != signal.SIGHUP or signal.getsignal(one) is not signal.SIG_IGN]
    before = {one: signal.signal(one, handler) for one in heard}
    try:
        yield
    finally:
        for one, way in before.items():
            signal.signal(one, way)


def end_as_asked() -> None:
    """Let SIGINT (Ctrl-C) end this process at once, and let torchrun's ranks receive SIGTERM when torchrun ends.

    Neither leaves incomplete files. Without the second, ranks would continue if only their launcher is killed.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(os.getppid())


def end_with_parent(parent: int) -> None:
    """Let this process receive SIGTERM when ``parent``, which has started it, ends. It does so on Linux only."""
    if sys.platform != "linux":
        return
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before the call
        signal.raise_signal(signal.SIGTERM)
