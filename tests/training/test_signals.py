"""A signal to end only makes a request, and every process of a run ends when its launcher ends."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from torchtune_adaptive.training import signals
from torchtune_adaptive.training.signals import StopRequest

# A child imports only the module `signals`, which is fast.
PRELUDE = f"""
import importlib.util, os, signal, subprocess, sys, time
spec = importlib.util.spec_from_file_location("signals", {signals.__file__!r})
signals = importlib.util.module_from_spec(spec)
spec.loader.exec_module(signals)
def say(*words):  # not print, which cannot be called again by a signal's handler
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""


class Child:
    """A Python process that prints one line at a time and continues on request."""

    def __init__(self, program: str, *arguments: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | environment,
            text=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> tuple[int, str]:
        """Waits for the process; returns its exit status and its standard error."""
        _, said = self.process.communicate(timeout=300)
        return self.process.returncode, said


@pytest.fixture
def start() -> Iterator[Callable[..., Child]]:
    """Starts children, and kills them after the test."""
    children: list[Child] = []

    def start(*arguments: str, **environment: str) -> Child:
        children.append(Child(*arguments, **environment))
        return children[-1]

    yield start
    for child in children:
        child.process.kill()
        child.process.communicate()


LISTENS = """
for _ in range(3):
    request = signals.StopRequest()
    with request.listening():
        say("listens", request.is_made())
        sys.stdin.readline()
        say("has heard", request.is_made())
    say("listens no more", request.is_made())
sys.stdin.readline()
"""


def test_a_signal_only_makes_the_request_and_later_ends_the_process_as_before(start: Callable[..., Child]) -> None:
    child = start(LISTENS)
    for asked in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        assert child.line() == "listens False"
        child.process.send_signal(asked)
        child.process.send_signal(asked)
        child.go_on()
        assert child.line() == "has heard True"
        assert child.line() == "listens no more True"
    child.process.send_signal(signal.SIGTERM)
    assert child.end() == (-signal.SIGTERM, "")


def test_a_hang_up_that_is_ignored_stays_ignored(start: Callable[..., Child]) -> None:
    """As under ``nohup``."""
    child = start(f"signal.signal(signal.SIGHUP, signal.SIG_IGN)\n{LISTENS}")
    for asked in (signal.SIGHUP, signal.SIGTERM):
        assert child.line() == "listens False"
        child.process.send_signal(asked)
        child.go_on()
        assert child.line() == f"has heard {asked == signal.SIGTERM}"
        assert child.line().startswith("listens no more")


def handlers() -> dict[str, object]:
    return {kind.name: signal.getsignal(kind) for kind in signal.Signals}


def test_without_a_signal_there_is_no_request_and_handlers_are_restored_also_after_an_error() -> None:
    before, request = handlers(), StopRequest()
    listening = request.listening()
    listening.__enter__()
    during = handlers()
    assert not listening.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    assert {name for name in before if during[name] != before[name]} == {"SIGTERM", "SIGUSR1", "SIGHUP"}
    assert handlers() == before
    assert not request.is_made()


ENDS_AS_ASKED = """
signals.end_as_asked()
say("waits")
sys.stdin.readline()
say("survived")
"""


def test_an_interrupt_ends_a_process_at_once_without_a_traceback(start: Callable[..., Child]) -> None:
    child = start(ENDS_AS_ASKED)
    assert child.line() == "waits"
    child.process.send_signal(signal.SIGINT)
    assert child.end() == (-signal.SIGINT, "")


# Starts a rank, and waits.
LAUNCHER = """
rank = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
sys.stdin.readline()
"""
# Prints its process id, and whether it is asked to end before it sees that its launcher has ended.
RANK = """
def note(number, frame):
    say("asked to end")
    os._exit(0)
signal.signal(signal.SIGTERM, note)
signals.end_as_asked()
launcher = os.getppid()
say(os.getpid())
while os.getppid() == launcher:
    time.sleep(0.01)
if "TORCHELASTIC_RUN_ID" in os.environ:
    time.sleep(60)  # it does not come to its end, but where the signal is missing
say("survived")
"""


@pytest.fixture
def end_ranks() -> Iterator[list[int]]:
    """Kills the processes whose ids are in the list, if they are still running."""
    ranks: list[int] = []
    yield ranks
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_a_rank_is_asked_to_end_when_its_launcher_is_killed(start: Callable[..., Child], end_ranks: list[int]) -> None:
    launcher = start(LAUNCHER, PRELUDE + RANK, TORCHELASTIC_RUN_ID="1")
    end_ranks.append(int(launcher.line()))
    launcher.process.kill()
    assert launcher.line() == "asked to end"
    assert launcher.line() == ""


def test_a_process_without_torchrun_outlives_its_parent(start: Callable[..., Child], end_ranks: list[int]) -> None:
    assert "TORCHELASTIC_RUN_ID" not in os.environ
    launcher = start(LAUNCHER, PRELUDE + RANK)
    end_ranks.append(int(launcher.line()))
    launcher.process.kill()
    assert launcher.line() == "survived"
    assert launcher.line() == ""


@pytest.mark.parametrize(("parents", "asked"), [((7, 7), []), ((7, 1), [signal.SIGTERM])], ids=["lives", "has ended"])
def test_a_rank_whose_launcher_has_already_ended_ends_too(
    parents: tuple[int, int], asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[int] = []
    wanted: list[tuple[int, ...]] = []
    numbers = iter(parents)
    library = SimpleNamespace(prctl=lambda *arguments: wanted.append(arguments))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setattr(signals, "os", SimpleNamespace(environ=os.environ, getppid=lambda: next(numbers)))
    monkeypatch.setattr(signals, "sys", SimpleNamespace(platform="linux"))
    monkeypatch.setattr(signals, "ctypes", SimpleNamespace(CDLL=lambda name: library))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(signal, "raise_signal", raised.append)
    signals.end_as_asked()
    assert wanted == [(1, signal.SIGTERM)]
    assert raised == asked
