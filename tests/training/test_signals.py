"""A signal to end only makes a request, and every process of a run ends when its launcher ends."""

import contextlib
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from torchtune_adaptive.training import signals
from torchtune_adaptive.training.signals import StopRequest


def handlers() -> dict[str, object]:
    return {kind.name: signal.getsignal(kind) for kind in signal.Signals}


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_only_makes_the_request_and_handlers_are_restored_also_after_an_error(kind: signal.Signals) -> None:
    before, during, request = handlers(), {}, StopRequest()
    with contextlib.suppress(ZeroDivisionError), request.listening():
        during = handlers()
        assert not request.is_made()
        for _ in range(2):
            signal.raise_signal(kind)
        raise ZeroDivisionError
    assert request.is_made()
    assert {name for name in before if during[name] != before[name]} == {"SIGTERM", "SIGUSR1", "SIGHUP"}
    assert handlers() == before


def test_a_hang_up_that_is_ignored_stays_ignored() -> None:
    """As under ``nohup``."""
    before, request = signal.signal(signal.SIGHUP, signal.SIG_IGN), StopRequest()
    with request.listening():
        signal.raise_signal(signal.SIGHUP)
    signal.signal(signal.SIGHUP, before)
    assert not request.is_made()


# Starts a rank, and waits.
LAUNCHER = """
import subprocess, sys
rank = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
sys.stdin.readline()
"""
# Prints its process id, and whether it is asked to end. It imports only the module `signals`, which is fast.
RANK = f"""
import importlib.util, os, signal, time
spec = importlib.util.spec_from_file_location("signals", {signals.__file__!r})
signals = importlib.util.module_from_spec(spec)
spec.loader.exec_module(signals)
def note(number, frame):
    os.write(1, b"asked to end")
    os._exit(0)
signal.signal(signal.SIGTERM, note)
signals.end_as_asked()
print(os.getpid(), flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_a_rank_is_asked_to_end_when_its_launcher_is_killed() -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, RANK],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"TORCHELASTIC_RUN_ID": "1"},
        text=True,
    )
    assert launcher.stdout is not None
    rank = int(launcher.stdout.readline())
    launcher.kill()
    said, _ = launcher.communicate(timeout=300)
    with contextlib.suppress(ProcessLookupError):
        os.kill(rank, signal.SIGKILL)
    assert said == "asked to end"


@pytest.mark.parametrize(
    ("run_id", "parents", "wanted", "asked"),
    [
        ("1", (7, 7), [(1, signal.SIGTERM)], []),
        ("1", (7, 1), [(1, signal.SIGTERM)], [signal.SIGTERM]),
        (None, (), [], []),
    ],
    ids=["lives", "has already ended", "is not torchrun"],
)
def test_a_rank_asks_for_a_signal_at_its_launchers_end(
    run_id: str | None,
    parents: tuple[int, ...],
    wanted: list[tuple[int, int]],
    asked: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raised: list[int] = []
    calls: list[tuple[int, ...]] = []
    numbers = iter(parents)
    library = SimpleNamespace(prctl=lambda *arguments: calls.append(arguments))
    environment = {} if run_id is None else {"TORCHELASTIC_RUN_ID": run_id}
    monkeypatch.setattr(signals, "os", SimpleNamespace(environ=environment, getppid=lambda: next(numbers)))
    monkeypatch.setattr(signals, "sys", SimpleNamespace(platform="linux"))
    monkeypatch.setattr(signals, "_LIBC", library)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(signal, "raise_signal", raised.append)
    signals.end_as_asked()
    assert (calls, raised) == (wanted, asked)


def test_a_process_ends_when_the_one_that_started_it_is_killed() -> None:
    """Its output is a pipe, which ends with the last process that can write to it."""
    program = (
        "import os, signal, subprocess, sys; from functools import partial\n"
        "from torchtune_adaptive.training.signals import end_with_parent\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],"
        " start_new_session=True, preexec_fn=partial(end_with_parent, os.getpid()))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    started = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert started.communicate() == (b"", None)
    assert started.returncode == -signal.SIGKILL
