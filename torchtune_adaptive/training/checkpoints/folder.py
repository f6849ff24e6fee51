"""The checkpoints in a folder. A checkpoint is complete, or it does not exist.

A checkpoint is written under a temporary name, and renamed once all of its files are on disk. Its last file lists its
files and their sizes, so that a reader detects missing or truncated files, for example after an interrupted copy.
"""

import contextlib
import errno
import io
import json
import os
import re
import shutil
import socket
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import torch
from filelock import FileLock, Timeout
from torchtune import utils

from torchtune_adaptive.errors import InputError, reason_of
from torchtune_adaptive.files import sync, write_whole
from torchtune_adaptive.text import format_bytes
from torchtune_adaptive.training.run_state import AdaptiveState

log = utils.get_logger("DEBUG")

STATE_NAME = "adaptive_state.json"
RECIPE_STATE_NAME = "recipe_state.pt"
RANK_STATES_NAME = "adaptive_ranks.tensors"  # not .pt, as weights
LOCK_NAME = "adaptive.lock"
_UNFINISHED = "unfinished_"
_REMOVED, _REPLACED = "removed_", "replaced_"
_NAME = re.compile(r"(?:step|epoch)_\d+")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint.

    Attributes:
        path: its folder.
        serial: number of the checkpoint in its folder, in the order of writing.
        state: the run's state without that of each rank, None if a stock recipe wrote the checkpoint.
        epochs_run: epochs done.
        recipe_state: torchtune's file with the optimizer state, None if there is none.
    """

    path: Path
    serial: int
    state: AdaptiveState | None
    epochs_run: int
    recipe_state: Path | None = None

    @property
    def is_of_step(self) -> bool:
        """Whether it was saved after a step, in this package's format instead of torchtune's."""
        return is_of_step(self.path)

    @property
    def can_resume(self) -> bool:
        """Whether it includes the optimizer state, which torchtune does not save after the last epoch."""
        return self.is_of_step or self.recipe_state is not None


class CheckpointFolder:
    """Writes checkpoints into a folder, and lists them. Only rank 0 uses it, except ``unfinished``.

    Attributes:
        path: the folder.
        finished: the checkpoints that this process has finished, in order, each with its optimizer step.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.finished: list[tuple[Path, int]] = []
        self._serial = 0
        self._lock: FileLock | None = None

    def lock(self) -> None:
        """Lock the folder for this process, until it ends in any way. It is created if it does not exist.

        Raises:
            InputError: another process holds the lock, or the folder is not writable.
        """
        file = self.path.resolve() / LOCK_NAME
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(file, timeout=0, is_singleton=True)  # one lock for all that this process opens
            self._lock.acquire()
        except Timeout as error:
            owner = file.read_text(errors="replace").strip() or "another process"
            raise InputError(
                f"`output_dir` must not be in use by another run, but {owner} writes to {str(self.path)!r}."
            ) from error
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP):
                raise InputError(f"`output_dir` must be writable, but is not: {reason_of(error)}.") from error
            log.warning(f"{self.path} cannot be locked, so that another run could write to it: {reason_of(error)}.")
        with contextlib.suppress(OSError):  # a full disk
            file.write_text(f"process {os.getpid()} on {socket.gethostname()}\n")

    def unfinished(self, name: str) -> Path:
        """The path for the files of checkpoint ``name`` before ``finish``."""
        return self.path / f"{_UNFINISHED}{name}"

    def start(self, name: str) -> Path:
        """Create an empty folder for the files of checkpoint ``name``. Files of an earlier attempt are removed.

        Raises:
            OSError: it cannot be created, or the folder of checkpoints no longer exists.
        """
        path = self.unfinished(name)
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        return path

    def finish(self, name: str, state: AdaptiveState) -> Path:
        """Complete checkpoint ``name`` with ``state``. It replaces an existing one of that name.

        Raises:
            OSError: a file cannot be written; then there is no new checkpoint.
        """
        unfinished, path = self.unfinished(name), self.path / name
        self._serial += 1
        write_state(unfinished, state, serial=self._serial, lists_files=True)
        sync(unfinished)
        replaced = self._set_aside(path, _REPLACED) if path.exists() else None
        unfinished.rename(path)
        sync(self.path)
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)
        self.finished.append((path, state.global_step))
        return path

    def discard(self, name: str) -> None:
        """Remove the files of checkpoint ``name``, which could not be finished."""
        self._put_back()
        shutil.rmtree(self.unfinished(name), ignore_errors=True)

    def discard_unfinished(self) -> None:
        """Remove incomplete checkpoints of runs that were interrupted. No other run may be writing."""
        self._put_back()
        for path in self.path.glob(f"{_UNFINISHED}*"):
            log.info(f"Removed {path}, an incomplete checkpoint.")
            shutil.rmtree(path, ignore_errors=True)

    def paths(self) -> list[Path]:
        """The folders of all checkpoints that this package has written, complete or not."""
        names = [path for path in sorted(self.path.glob("*_*")) if _NAME.fullmatch(path.name)]
        return [path for path in names if (path / STATE_NAME).is_file()]

    def checkpoints(self) -> list[Checkpoint]:
        """All complete checkpoints in the order of writing. Incomplete ones are logged."""
        found: list[Checkpoint] = []
        for path in self.paths():
            try:
                found.append(read_checkpoint(path))
            except InputError as error:
                log.warning(f"Skipped checkpoint {path}. {error}")
        found.sort(key=lambda checkpoint: checkpoint.serial)
        self._serial = max([self._serial, *(one.serial for one in found)])
        return found

    def describe_space(self) -> str:
        """The free disk space as text, for the message about a failed write."""
        try:
            return f"{format_bytes(shutil.disk_usage(self.path).free)} free in {self.path}"
        except OSError:
            return f"no folder {self.path}"

    def prune(self, keep: int) -> None:
        """Keep the last ``keep`` checkpoints of steps, and remove older ones."""
        steps = [one.path for one in self.checkpoints() if one.is_of_step]
        for path in steps[:-keep]:
            shutil.rmtree(self._set_aside(path, _REMOVED), ignore_errors=True)

    def _set_aside(self, path: Path, why: str) -> Path:
        """Rename a checkpoint before it is removed, so that a partly removed one is not taken for a checkpoint."""
        aside = self.unfinished(f"{why}{path.name}")
        shutil.rmtree(aside, ignore_errors=True)
        return path.rename(aside)

    def _put_back(self) -> None:
        """Restore the name of a checkpoint whose replacement failed."""
        for aside in self.path.glob(f"{_UNFINISHED}{_REPLACED}*"):
            path = self.path / aside.name.removeprefix(f"{_UNFINISHED}{_REPLACED}")
            if not path.exists():
                aside.rename(path)


def is_of_step(path: Path) -> bool:
    """Whether the checkpoint in the folder ``path`` was saved after a step."""
    return path.name.startswith("step_")


def write_state(path: Path, state: AdaptiveState, *, serial: int = 0, lists_files: bool = False) -> None:
    """Write ``state`` into the folder ``path``.

    Args:
        lists_files: force the other files there to disk, and list their sizes.
    """
    content = io.BytesIO()
    torch.save(state.rank_states, content)
    write_whole(path / RANK_STATES_NAME, content.getvalue(), makes_folder=not lists_files)
    sizes: dict[str, int] = {}
    for one in [path, *sorted(path.rglob("*"))] if lists_files else []:
        sync(one)
        if one.is_file():
            sizes[one.relative_to(path).as_posix()] = one.stat().st_size
    values = asdict(replace(state, rank_states=[]))
    del values["rank_states"]
    write_whole(path / STATE_NAME, json.dumps({"serial": serial, "files": sizes, "state": values}, indent=1) + "\n")


def read_rank_states(path: Path) -> list[dict[str, Any]]:
    """The ``rank_states`` of the checkpoint in ``path``.

    Raises:
        InputError: their file is missing or damaged.
    """
    file = path / RANK_STATES_NAME
    try:
        with ZipFile(file) as archive:
            if part := archive.testzip():  # torch does not compare checksums
                raise BadZipFile(f"{part} has another checksum")
        return torch.load(file, weights_only=True)
    except Exception as error:  # a damaged file can raise any
        raise InputError(f"{file} must be a readable file, but reading it failed: {why_unreadable(error)}.") from error


def why_unreadable(error: BaseException) -> str:
    """As ``reason_of``, without torch's further sentences, which advise to load a damaged file unsafely."""
    return reason_of(error).split(". ")[0]


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in ``path``.

    Raises:
        InputError: it is incomplete, or not a checkpoint of this package; the message says what is wrong.
    """
    try:
        content = json.loads((path / STATE_NAME).read_text())
        state = AdaptiveState.from_json(content["state"])
        serial, sizes = int(content["serial"]), dict(content["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path / STATE_NAME} must be a state file that a run wrote, but reading it failed: {reason_of(error)}."
        ) from error
    for name, size in sizes.items():
        file = path / name
        if name == RECIPE_STATE_NAME and not file.exists():
            continue  # a later epoch has removed it
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            has = "is missing" if found is None else f"has {found}"
            raise InputError(f"{file} must have {size} bytes for its checkpoint to be complete, but {has}.")
    recipe_state = path / RECIPE_STATE_NAME
    return Checkpoint(path, serial, state, state.epochs_run, recipe_state if recipe_state.exists() else None)
