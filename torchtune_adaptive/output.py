"""Standard output and error that never end a run, without messages that a user can do nothing about."""

import contextlib
import io
import logging
import os
import select
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

_NAMES = {1: "Standard output", 2: "Standard error"}
_LONGEST_WAIT_S = 1.0  # for the reader of a full pipe, if writing into it does not block


def tolerate_lost_output() -> None:
    """From now on, writing to standard output or error raises no error in this process. Further calls are harmless.

    They may be closed, on a full disk, files of the largest size that is allowed, or without a reader. The first loss
    is reported on the other one. Streams that are something else, such as those of a notebook, stay as they are.
    """
    _occupy_closed()
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None:  # it was closed when Python started
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - for the rest of the process
            continue
        file = _file_of(stream, number)
        if file is not None:
            # An attribute of the file, instead of another stream: loggers may already hold this one.
            vars(file)["write"] = _TolerantWrite(number, file.write)
    escape_unknown_characters()  # this flushes them, too


def escape_unknown_characters() -> None:
    """From now on, a character that the encoding of standard output or error lacks is written as an escape."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Within the context nothing is printed, logged or warned of: messages of other packages are about a real run."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


class _TolerantWrite:
    """Writes to a file, and returns as if all were written.

    Args:
        number: the file's descriptor.
        write: the file's own method.
    """

    def __init__(self, number: int, write: Callable[[Any], int | None]) -> None:
        self._number = number
        self._write = write
        self._is_lost = False  # the end of what was written last
        self._is_reported = False

    def __call__(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        size, reason = len(rest), ""
        while rest and not reason:
            try:
                written = self._write(rest) or (self._waits() and self._write(rest)) or 0
                rest, reason = rest[written:], "" if written else "its reader has stopped reading"
            except OSError as error:
                reason = str(error.strerror)
        self._is_lost = reason != ""
        if self._is_lost and not self._is_reported:
            self._is_reported = True
            self._report(reason)
        return size

    def _waits(self) -> bool:
        """Wait for the reader of a full pipe, unless that was in vain the last time."""
        return not self._is_lost and select.select([], [self._number], [], _LONGEST_WAIT_S)[1] != []

    def _report(self, reason: str) -> None:
        """Say on the other stream that this one is lost: by its descriptor, because another thread may lock it."""
        if os.environ.get("LOCAL_RANK", "0") == "0":
            line = f"{_NAMES[self._number]} cannot be written: {reason}. This does not end the run.\n"
            with contextlib.suppress(OSError):
                os.write(3 - self._number, line.encode())


def _occupy_closed() -> None:
    """Open the null device as each of the descriptors 0 to 2 that is closed.

    Otherwise the next file that is opened gets its number, and a checkpoint might get the messages of C++ libraries.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def _file_of(stream: Any, number: int) -> io.FileIO | None:
    """The file below one of Python's own streams; None for anything else, or if its descriptor is not ``number``."""
    buffer = getattr(stream, "buffer", None)
    file = getattr(buffer, "raw", buffer)  # unbuffered output has no buffer
    return file if isinstance(file, io.FileIO) and file.fileno() == number else None


def filter_messages() -> None:
    """Filter messages of other libraries in this process that a user can do nothing about."""
    # torchao below 0.16, the last that torchtune 0.6.1 can import, has C++ extensions for older versions of torch only.
    # The recipes use none of them.
    skipped = "Skipping import of cpp extensions due to incompatible torch version"
    logging.getLogger("torchao").addFilter(lambda record: not record.getMessage().startswith(skipped))
    # torchdata's data loader calls it on every pass. It does nothing.
    warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning, r"torchdata\.")
