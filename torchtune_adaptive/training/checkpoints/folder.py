"""The checkpoints in a folder. A checkpoint is complete, or it does not exist.

A checkpoint is written under a temporary name, and renamed once all of its files are on disk. Its last file lists the
others with sizes and digests, so that a reader notices missing, truncated and changed ones, for example after an
interrupted copy. It also says which run wrote the checkpoint.
"""

import contextlib
import errno
import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torchtune import utils

from torchtune_adaptive.errors import InputError, reason_of
from torchtune_adaptive.files import sync, write_atomically
from torchtune_adaptive.text import format_bytes
from torchtune_adaptive.training.checkpoints.digests import settle
from torchtune_adaptive.training.folder_lock import FolderLock, FolderReplacedError
from torchtune_adaptive.training.run_state import AdaptiveState

log = utils.get_logger("DEBUG")

STATE_NAME = "adaptive_state.json"
RECIPE_STATE_NAME = "recipe_state.pt"
RANK_STATES_NAME = "adaptive_ranks.tensors"  # not .pt, as weights
_FORMAT = 2
_UNFINISHED = "unfinished_"
_REMOVED, _REPLACED, _SHARED = "removed_", "replaced_", "shared_"
_NAME = re.compile(r"(?:step|epoch)_\d+")
_MADE_HERE = re.compile(rf"{_UNFINISHED}(?:(?:{_REMOVED}|{_REPLACED})?{_NAME.pattern}|{_SHARED}[0-9a-f]{{32}})")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint.

    Attributes:
        path: its folder.
        serial: number of the checkpoint in its folder, in the order of writing.
        state: the run's state without that of each rank, None if a stock recipe wrote the checkpoint.
        epochs_run: epochs done.
        recipe_state: torchtune's file with the optimizer state, None if there is none.
        is_of_step: whether it was saved after a step, in this package's format instead of torchtune's.
        digests: those of its files, by name.
    """

    path: Path
    serial: int
    state: AdaptiveState | None
    epochs_run: int
    recipe_state: Path | None = None
    is_of_step: bool = False
    digests: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def can_resume(self) -> bool:
        """Whether it includes the optimizer state, which torchtune does not save after the last epoch."""
        return self.is_of_step or self.recipe_state is not None

    @property
    def run_id(self) -> str:
        """The id of the run that wrote it; "" for a stock recipe's."""
        return "" if self.state is None else self.state.run.id


class CheckpointFolder:
    """Writes checkpoints into a folder, and lists them. Only rank 0 uses it, except ``unfinished``.

    Every method that writes or removes raises FolderReplacedError if the folder is no longer the locked one.

    Attributes:
        path: the folder.
        finished: the checkpoints that this process has finished, in order, each with its optimizer step.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.finished: list[tuple[Path, int]] = []
        self._skipped: set[Path] = set()  # incomplete checkpoints that were logged
        self._serial = 0
        self._lock: FolderLock | None = None

    def lock(self) -> FolderLock:
        """Lock the folder for this process, until it ends in any way. It is created if it does not exist.

        Raises:
            InputError: another process holds the lock, or the folder is not writable.
        """
        self._lock = self._lock or FolderLock(self.path)
        return self._lock

    def claim(self, run_id: str, *, resumed: Checkpoint | None = None) -> None:
        """As ``FolderLock.claim``, if the folder is locked.

        A run that ``resumed`` from torchtune's own checkpoint is not named before it saves. That checkpoint names no
        run, and would be taken for another run's.
        """
        if self._lock is not None:
            self._lock.claim("" if resumed is not None and resumed.state is None else run_id)

    def check(self) -> None:
        """As ``FolderLock.check``, if the folder is locked."""
        if self._lock is not None:
            self._lock.check()

    def unfinished(self, name: str) -> Path:
        """The path for the files of checkpoint ``name`` before ``finish``."""
        return self.path / f"{_UNFINISHED}{name}"

    def start(self, name: str) -> Path:
        """Create an empty folder for the files of checkpoint ``name``. Files of an earlier attempt are removed.

        Raises:
            OSError: it cannot be created, or the folder of checkpoints no longer exists.
        """
        self.check()
        path = self.unfinished(name)
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        return path

    def finish(self, name: str, state: AdaptiveState, *, digests: Mapping[str, str] | None = None) -> Path:
        """Complete checkpoint ``name`` with ``state``. It replaces an existing one of that name.

        Args:
            digests: those of files that are on disk already; other files are forced to disk here.

        Raises:
            OSError: a file cannot be written; then there is no new checkpoint.
        """
        self.check()
        unfinished, path = self.unfinished(name), self.path / name
        self._serial += 1
        is_of_step = name.startswith("step_")
        write_state(unfinished, state, serial=self._serial, is_of_step=is_of_step, digests=digests or {})
        self.check()  # writing has taken a while
        replaced = self._set_aside(path, _REPLACED) if os.path.lexists(path) else None
        unfinished.rename(path)
        sync(self.path)
        if replaced is not None:
            _clear(replaced, keeps_in=path)
        self.finished.append((path, state.global_step))
        return path

    def discard(self, name: str) -> None:
        """Remove the files of checkpoint ``name``, which could not be finished."""
        with contextlib.suppress(OSError, FolderReplacedError):
            self.check()
            self._put_back()
            shutil.rmtree(self.unfinished(name), ignore_errors=True)

    def discard_unfinished(self) -> None:
        """Remove incomplete checkpoints of runs that were interrupted. No other run may be writing."""
        self.check()
        self._put_back()
        for path in self.path.glob(f"{_UNFINISHED}*"):
            if not _MADE_HERE.fullmatch(path.name):
                continue
            log.info(f"Removed {path}, an incomplete checkpoint.")
            name = path.name.removeprefix(_UNFINISHED)
            if name.startswith((_REMOVED, _REPLACED)):
                _clear(path, keeps_in=self.path / name.partition("_")[2])
            else:
                shutil.rmtree(path, ignore_errors=True)

    def paths(self) -> list[Path]:
        """The folders of all checkpoints that this package has written, complete or not."""
        return [path for path in self._named() if (path / STATE_NAME).is_file()]

    def _named(self) -> list[Path]:
        """The folders with the name of a checkpoint, torchtune's own among them."""
        return [path for path in sorted(self.path.glob("*_*")) if _NAME.fullmatch(path.name)]

    def checkpoints(self) -> list[Checkpoint]:
        """All complete checkpoints in the order of writing. Each incomplete one is logged once."""
        found: list[Checkpoint] = []
        for path in self._named():
            reason = ""
            if (path / STATE_NAME).is_file():
                try:
                    found.append(read_checkpoint(path))
                except InputError as error:
                    reason = str(error)
            elif path.name.startswith("step_"):  # an epoch without it is torchtune's own
                reason = f"It has no {STATE_NAME}."
            if reason and path not in self._skipped:
                self._skipped.add(path)
                log.warning(f"Skipped checkpoint {path}. {reason}")
        found.sort(key=lambda checkpoint: checkpoint.serial)
        self._serial = max([self._serial, *(one.serial for one in found)])
        return found

    def describe_space(self, error: BaseException) -> str:
        """The space in the folder, as text, for the message about a failed write.

        Args:
            error: why it failed; one that has nothing to do with space gives "".
        """
        if isinstance(error, OSError) and error.errno not in (None, errno.ENOSPC, errno.EDQUOT):
            return ""
        try:
            return f" ({format_bytes(shutil.disk_usage(self.path).free)} free in {self.path})"
        except OSError:
            return f" (no folder {self.path})"

    def prune(self, keep: int) -> None:
        """Keep the last ``keep`` checkpoints of steps of the latest run, and remove its older ones.

        Raises:
            OSError: one cannot be removed; the others are.
        """
        found = self.checkpoints()
        steps = [one.path for one in found if one.is_of_step and one.run_id == found[-1].run_id]
        failures: list[OSError] = []
        for path in steps[:-keep]:
            self.check()
            try:
                _clear(self._set_aside(path, _REMOVED), keeps_in=path)
            except OSError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def drop_recipe_states(self, latest: Path) -> None:
        """Remove torchtune's optimizer state from the epochs of a run, except from its ``latest``.

        Raises:
            OSError: one cannot be removed.
        """
        run_id = read_checkpoint(latest).run_id
        for path in self.paths():
            with contextlib.suppress(InputError):  # a damaged one
                if path != latest and not (one := read_checkpoint(path)).is_of_step and one.run_id == run_id:
                    (path / RECIPE_STATE_NAME).unlink(missing_ok=True)

    def _set_aside(self, path: Path, why: str) -> Path:
        """Rename a checkpoint before it is removed, so that a partly removed one is not taken for a checkpoint."""
        aside = self.unfinished(f"{why}{path.name}")
        shutil.rmtree(aside, ignore_errors=True)
        return path.rename(aside)

    def _put_back(self) -> None:
        """Restore the name of a checkpoint whose replacement failed."""
        for aside in self.path.glob(f"{_UNFINISHED}{_REPLACED}*"):
            path = self.path / aside.name.removeprefix(f"{_UNFINISHED}{_REPLACED}")
            if _NAME.fullmatch(path.name) and not path.exists():
                aside.rename(path)


def write_state(
    path: Path,
    state: AdaptiveState,
    *,
    serial: int = 0,
    is_of_step: bool = False,
    digests: Mapping[str, str] | None = None,
) -> None:
    """Write ``state`` into the folder ``path``.

    Args:
        digests: those of files that are on disk already. All other files there are forced to disk, and listed too. None
            lists no files, because others still write them.
    """
    content = io.BytesIO()
    torch.save(state.rank_states, content)
    write_atomically(path / RANK_STATES_NAME, content.getvalue(), makes_folder=digests is None)
    there = [RANK_STATES_NAME]
    if digests is not None:
        files = [one for one in sorted(path.rglob("*")) if one.is_file() and one != path / STATE_NAME]
        there = [one.relative_to(path).as_posix() for one in files]
    all_digests = {**settle(path, {*there} - {*(digests or {})}), **(digests or {})}
    values = asdict(replace(state, rank_states=[]))
    del values["rank_states"]
    listed = {name: {"bytes": (path / name).stat().st_size, "sha256": all_digests[name]} for name in there}
    written = {"format": _FORMAT, "serial": serial, "of_step": is_of_step, "files": listed, "state": values}
    read = json.loads(json.dumps(written))  # with the types that a reader sees
    for folder in (one for one in path.rglob("*") if one.is_dir()):
        sync(folder)
    write_atomically(path / STATE_NAME, json.dumps({**read, "sha256": _digest_of(read)}, indent=1) + "\n")
    sync(path)


def read_rank_states(path: Path) -> list[dict[str, Any]]:
    """The ``rank_states`` of the checkpoint in ``path``.

    Raises:
        InputError: their file is missing or damaged.
    """
    file = path / RANK_STATES_NAME
    try:
        return torch.load(file, weights_only=True)
    except Exception as error:  # a damaged file can raise any
        raise InputError(f"{file} cannot be read: {why_unreadable(error)}.") from error


def why_unreadable(error: BaseException) -> str:
    """As ``reason_of``, without torch's further sentences, which advise to load a damaged file unsafely."""
    return reason_of(error).split(". ")[0]


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in ``path``, all of whose files have their sizes. Their digests are not compared.

    Raises:
        InputError: it is incomplete, or not a checkpoint of this package; the message says what is wrong.
    """
    checkpoint, sizes = read_state(path)
    for name, size in sizes.items():
        file = path / name
        if name == RECIPE_STATE_NAME and not file.exists():
            continue  # a later epoch has removed it
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            has = "is missing" if found is None else f"has {found}"
            raise InputError(f"{file} must have {size} bytes, but {has}: its checkpoint is not complete.")
    return checkpoint


def read_state(path: Path) -> tuple[Checkpoint, dict[str, int]]:
    """The checkpoint in ``path`` by its state file, and the sizes that its files must have."""
    file = path / STATE_NAME
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content.get("format") != _FORMAT:
            raise ValueError(f"its format is {content.get('format')}, not {_FORMAT}")
        if content.pop("sha256") != _digest_of(content):
            raise ValueError("its content has changed")
        state = AdaptiveState.from_json(content["state"])
        files = {name: (one["bytes"], one["sha256"]) for name, one in content["files"].items()}
        serial, is_of_step = int(content["serial"]), bool(content["of_step"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{file} is no state of a run: {reason_of(error)}.") from error
    recipe_state = path / RECIPE_STATE_NAME
    checkpoint = Checkpoint(
        path,
        serial,
        state,
        state.epochs_run,
        recipe_state if recipe_state.exists() else None,
        is_of_step,
        {name: digest for name, (_, digest) in files.items()},
    )
    return checkpoint, {name: size for name, (size, _) in files.items()}


def _digest_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _clear(aside: Path, *, keeps_in: Path) -> None:
    """Remove the checkpoint in ``aside``. Files there that it does not list are the user's, and move to ``keeps_in``.

    One that cannot be removed or moved stays. Of a link, only the link is removed.
    """
    with contextlib.suppress(OSError):
        if aside.is_symlink():
            aside.unlink()
            return
        try:
            own = {*read_state(aside)[0].digests, STATE_NAME}
        except InputError:
            own = {STATE_NAME}
        files = [one.relative_to(aside) for one in aside.rglob("*") if not one.is_dir()]
        for name in sorted(files, key=lambda one: one.as_posix() == STATE_NAME):  # the list itself comes last
            if name.as_posix() in own or (keeps_in / name).exists():
                (aside / name).unlink()
            else:
                (keeps_in / name).parent.mkdir(parents=True, exist_ok=True)
                (aside / name).rename(keeps_in / name)
        shutil.rmtree(aside)
