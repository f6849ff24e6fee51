"""Trace a config's train step without a GPU, in a separate process."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig

from torchtune_adaptive.errors import InputError, TracingError, reason_of
from torchtune_adaptive.plan.trace.cache import Answers
from torchtune_adaptive.plan.trace.events import StepEvents
from torchtune_adaptive.plan.trace.keys import traced_content
from torchtune_adaptive.plan.trace.peaks import TracedStep
from torchtune_adaptive.stock.configs import resolved

_Answer = TypeVar("_Answer")
# The worker starts faster without garbage collection during imports, which create many objects and hardly any garbage.
# torchao warns about missing kernels, which a plan does not run.
_WORKER = """
import gc, logging
gc.disable()
logging.getLogger("torchao").setLevel(logging.ERROR)
from torchtune_adaptive.plan.trace import worker
gc.freeze()
gc.enable()
worker.main()
"""
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LAUNCHER_PREFIXES = ("LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_")


class Tracer:
    """Traces steps of configs on rank 0, which holds the most memory. It keeps its answers.

    Each step runs in a process of its own, on fake CPU tensors. It reads no weights, tokenizer or data set.

    Args:
        folder: where answers are kept for other programs, see ``Answers``; None: only this object keeps them.
        shows_progress: show a progress bar on standard error.
        timeout_s: give up after this many seconds; None: never.
    """

    def __init__(
        self, folder: Path | None = None, *, shows_progress: bool = False, timeout_s: float | None = None
    ) -> None:
        self._answers = Answers(folder)
        self._shows_progress = shows_progress
        self._timeout_s = timeout_s

    def step(self, cfg: DictConfig, *, world_size: int, seq_lens: Sequence[int]) -> TracedStep:
        """Trace a train step of the adaptive recipe for ``cfg``, with ``world_size`` ranks.

        Args:
            seq_lens: tokens per row; each length has its own peaks.

        Raises:
            InputError: the config cannot be planned; the message says why.
            TracingError: tracing it failed.
            TimeoutError: it took too long.
        """
        return self._answer(cfg, TracedStep.from_json, world_size=world_size, seq_lens=list(seq_lens))

    def events(self, cfg: DictConfig, *, world_size: int, batch_size: int, seq_len: int) -> StepEvents:
        """Trace one step with all layers of the model, and return each of its operations and allocations.

        Errors are those of ``step``.
        """
        return self._answer(cfg, StepEvents.from_json, world_size=world_size, batch_size=batch_size, seq_len=seq_len)

    def _answer(self, cfg: DictConfig, from_json: Callable[[Any], _Answer], **asked: Any) -> _Answer:
        question = traced_content(cfg) | {"asked": asked}
        with suppress(ValueError, TypeError, LookupError):  # a file with another content
            if (kept := self._answers.read(question)) is not None:
                return from_json(kept)
        request = {"config": resolved(cfg), "shows_progress": self._shows_progress, **asked}
        answer = _run_worker(request, timeout_s=self._timeout_s, shows_progress=self._shows_progress)
        self._answers.write(question, answer)
        return from_json(answer)


def _run_worker(request: dict[str, Any], *, timeout_s: float | None, shows_progress: bool) -> dict[str, Any]:
    """Start ``worker`` with ``request`` and return its answer.

    Raises:
        InputError: the worker refuses the request.
        TracingError: it fails, or writes no readable answer.
        TimeoutError: it took longer than ``timeout_s``.
    """
    with tempfile.TemporaryDirectory() as directory:
        answer_path, error_path = Path(directory) / "answer.json", Path(directory) / "error.log"
        try:
            ended = subprocess.run(
                [sys.executable, "-c", _WORKER, str(answer_path), str(error_path)],
                input=json.dumps(request),
                text=True,
                env=_environment(),
                stdout=subprocess.DEVNULL,
                stderr=None if shows_progress else subprocess.DEVNULL,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"tracing took longer than {timeout_s} s") from error
        answer = _answer(answer_path, ended.returncode)
        if "failed" in answer:
            kept_path = _keep(error_path)
            raise TracingError(
                "The config must be one whose train step can be traced, but tracing it failed:"
                f" {answer['failed']} (the whole error is in {kept_path})."
            )
    if "refused" in answer:
        raise InputError(answer["refused"])
    return answer


def _answer(path: Path, status: int) -> dict[str, Any]:
    """The answer in the file of a process that ended with ``status``, or the reason why there is none."""
    if not path.exists():
        return {"failed": _ending(status)}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return {"failed": f"its answer cannot be read: {reason_of(error)}"}


def _ending(status: int) -> str:
    """How a process with exit ``status`` ended, as part of a sentence."""
    if status < 0:
        return f"its process was terminated by {signal.Signals(-status).name}"
    return f"its process ended with status {status}"


def _keep(error_path: Path) -> Path:
    """A permanent copy of the file."""
    descriptor, kept_path = tempfile.mkstemp(prefix="tune_adaptive_plan_", suffix=".log")
    os.close(descriptor)
    if error_path.exists():
        shutil.copyfile(error_path, kept_path)
    return Path(kept_path)


def _environment() -> dict[str, str]:
    """This process's environment without the launcher's variables, without a GPU and with one thread."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCHER_VARIABLES and not name.startswith(_LAUNCHER_PREFIXES)
    }
    return kept | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
