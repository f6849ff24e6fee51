"""Run a function on several gloo ranks, each a process of its own."""

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

DEVICE = os.environ.get("TEST_DEVICE", "cpu")  # of the recipes in tests; "cuda" needs one GPU a rank, maybe simulated
# Limits that matter only when something hangs: a machine that others use too may be very slow.
_GROUP_TIMEOUT = timedelta(seconds=300)
_IMPORT_TIMEOUT_S = 600.0
# Imported only once, by the process that all ranks are forked from, if they are installed: imports take seconds, a fork
# does not. Tests of other packages may replace the list before ranks start.
IMPORTED_ONCE = [
    "adaptive_full_finetune_distributed",
    "adaptive_full_finetune_single_device",
    "adaptive_lora_finetune_distributed",
    "adaptive_lora_finetune_single_device",
    "tests.support.recipe_runs",
]
_LAST_WORDS = 8000  # characters
_GRACE_S = 5.0  # how long the peers of a failed rank may take to report what happened to them


def device_of_rank() -> Any:
    """The ``torch.device`` of this rank: ``DEVICE``, and one GPU for each rank."""
    import torch

    return torch.device(DEVICE, int(os.environ["LOCAL_RANK"])) if DEVICE == "cuda" else torch.device(DEVICE)


class RanksFailedError(AssertionError):
    """A rank raised, died or hung; the message has every such rank's traceback or stack."""


def run_on_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 600.0) -> list[Any]:
    """Calls ``function(rank, *args)`` in ``world_size`` new processes and returns what each returned, by rank.

    In each process the default process group is initialised (gloo, a file store, 300 s timeout), so that
    ``dist.get_rank()`` and collectives work. ``function`` must be a top-level function of an importable
    module; ``args`` and the returned values (tensors are fine) are pickled. Each process is a new fork of one that has
    imported the recipes. It has the test's environment, but neither its fixtures and monkeypatches nor its warning
    filters.

    A rank must not end by ``sys.exit``; it ends by ``os._exit(0)`` after it sent its result, because gloo's
    threads can abort an interpreter that shuts down. No process is left running.

    Args:
        timeout_s: from the end of all ranks' imports until the last rank must have returned.

    Raises:
        RanksFailedError: a rank raised (the message shows its traceback), died (its exit status), or had not
            returned in time (the stack it hung in). The ranks left are then killed.

    >>> def square_of_rank(rank: int, offset: int) -> int:  # at the top level of a test module
    ...     return rank * rank + offset
    >>> run_on_ranks(square_of_rank, 2, 10)  # doctest: +SKIP
    [10, 11]
    """
    calls = [(rank, *args) for rank in range(world_size)]
    return _run(function, calls, has_group=True, timeout_s=timeout_s)


def run_alone(function: Callable[..., Any], *args: Any, timeout_s: float = 600.0) -> Any:
    """Calls ``function(*args)`` in one new process, which has no process group; else as ``run_on_ranks``."""
    (value,) = _run(function, [args], has_group=False, timeout_s=timeout_s)
    return value


def _run(function: Callable[..., Any], calls: list[tuple[Any, ...]], *, has_group: bool, timeout_s: float) -> list[Any]:
    """What ``function`` returns for the arguments of each of ``calls``, in processes of their own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED_ONCE if DEVICE == "cpu" else [])  # torchtune's import starts CUDA
    with tempfile.TemporaryDirectory(prefix="ranks_") as directory:
        store = f"file://{directory}/store" if has_group else None
        ranks: list[_Rank] = []
        try:
            for rank, args in enumerate(calls):
                here, there = context.Pipe()
                stderr_path = Path(directory) / f"stderr_{rank}"
                task = pickle.dumps((function, args, dict(os.environ)))
                arguments = (there, rank, len(calls), store, str(stderr_path), task)
                process = context.Process(target=_child, args=arguments, daemon=True)
                process.start()
                there.close()
                ranks.append(_Rank(rank, process, here, stderr_path))
            _collect(ranks, timeout_s=_IMPORT_TIMEOUT_S, task="its imports")
            for rank in ranks:
                rank.connection.send_bytes(b"go")
            return _collect(ranks, timeout_s=timeout_s, task=f"{function.__name__}()")
        finally:
            for rank in ranks:
                rank.end()


class _Rank:
    def __init__(self, rank: int, process: Any, connection: Connection, stderr_path: Path) -> None:
        self.rank = rank
        self.connection = connection
        self._process = process
        self._stderr_path = stderr_path

    def receive(self) -> tuple[bool, Any]:
        """Whether the rank succeeded, and its value or a description of its failure."""
        try:
            return pickle.loads(self.connection.recv_bytes())
        except EOFError:
            self._process.join(timeout=_GRACE_S)
            return False, f"died with exit status {self._process.exitcode}; its last words:\n{self._last_words()}"

    def stack(self) -> str:
        """The present stack of each thread of the process."""
        before, deadline = self._last_words(), time.monotonic() + _GRACE_S
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGUSR1)
        while (words := self._last_words()) == before and time.monotonic() < deadline:
            time.sleep(0.1)
        return words

    def _last_words(self) -> str:
        """What the rank has written to standard error: warnings, an abort's message, the stacks of its threads."""
        words = self._stderr_path.read_text(errors="replace") if self._stderr_path.exists() else ""
        stacks = words.find("Fatal Python error")  # an abort's message stands above them
        start = len(words) - _LAST_WORDS if stacks < 0 else stacks - _LAST_WORDS // 4
        return words[max(start, 0) :][:_LAST_WORDS] or "(none)"

    def end(self) -> None:
        self._process.join(timeout=1.0)  # it ends by itself after its result
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()
        self.connection.close()


def _collect(ranks: list[_Rank], *, timeout_s: float, task: str) -> list[Any]:
    """The next answer of every rank."""
    deadline = time.monotonic() + timeout_s
    waiting = {rank.connection: rank for rank in ranks}
    values: dict[int, Any] = {}
    failures: dict[int, str] = {}
    while waiting and (left := deadline - time.monotonic()) > 0:
        for connection in wait(list(waiting), timeout=left):
            assert isinstance(connection, Connection)
            rank = waiting.pop(connection)
            succeeded, value = rank.receive()
            (values if succeeded else failures)[rank.rank] = value
            if not succeeded:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
    for rank in waiting.values():
        after = "while a peer had failed" if failures else f"after {timeout_s:g} s"
        failures[rank.rank] = f"had not finished {task} {after}; it was in\n{rank.stack()}"
    if failures:
        texts = [f"---- rank {rank} {failures[rank]}" for rank in sorted(failures)]
        raise RanksFailedError(f"{len(failures)} of {len(ranks)} ranks failed\n" + "\n".join(texts))
    return [values[rank.rank] for rank in ranks]


def _draw_first(world_size: int) -> None:
    """Draw a random DTensor: the first one in a process copies rank 0's generator to all ranks, later ones do not."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import rand

    rand(1, device_mesh=init_device_mesh(DEVICE, (world_size,)))


def _child(
    connection: Connection, rank: int, world_size: int, store: str | None, stderr_path: str, task: bytes
) -> None:
    with open(stderr_path, "w") as stderr:
        os.dup2(stderr.fileno(), 2)
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        try:
            function, args, environment = pickle.loads(task)
            os.environ.clear()
            os.environ.update(environment)
            import torch
            import torch.distributed as dist

            gc.freeze()  # garbage collections then skip all that the imports have made
            connection.send_bytes(pickle.dumps((True, None)))
            connection.recv_bytes()
            if store is not None:
                backends = "gloo"
                if DEVICE == "cuda":
                    os.environ["LOCAL_RANK"], backends = str(rank), "cuda:nccl,cpu:gloo"
                    torch.cuda.set_device(rank)
                dist.init_process_group(
                    backends, init_method=store, rank=rank, world_size=world_size, timeout=_GROUP_TIMEOUT
                )
                if DEVICE == "cuda":
                    _draw_first(world_size)
            answer = pickle.dumps((True, function(*args)))
        except BaseException:
            answer = pickle.dumps((False, f"raised\n{traceback.format_exc()}"))
        connection.send_bytes(answer)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
