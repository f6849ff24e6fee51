"""Checkpoints after optimizer steps, by PyTorch's distributed checkpoints: each rank writes its own shards."""

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torchtune import utils

from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.errors import CheckpointError, InputError, RunEnded, reason_of
from torchtune_adaptive.settings import AdaptiveSettings
from torchtune_adaptive.training.checkpoints.digests import settle
from torchtune_adaptive.training.checkpoints.folder import (
    Checkpoint,
    CheckpointFolder,
    read_rank_states,
    why_unreadable,
)
from torchtune_adaptive.training.checkpoints.reading import TensorReader, TensorsOnly
from torchtune_adaptive.training.checkpoints.tensors import TrainedTensors
from torchtune_adaptive.training.folder_lock import FolderReplacedError
from torchtune_adaptive.training.run_state import AdaptiveState
from torchtune_adaptive.training.signals import STATUS_STOPPED

log = utils.get_logger("DEBUG")

Read = TypeVar("Read")

_NOT_SHARED = "not every rank sees the folder of rank 0, which they must share"
_LONGEST_WRITE = timedelta(hours=6)  # timeout of the process group that waits for files


class StepCheckpoints:
    """Writes and reads ``step_N`` folders with all tensors that training changes. Creating it is a collective.

    Raises:
        InputError: ranks save after steps, but do not share the folder.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        settings: AdaptiveSettings,
        consensus: Consensus,
    ) -> None:
        self._folder = folder
        self._tensors = TrainedTensors(model, optimizers, rank=consensus.rank, ranks=consensus.world_size)
        self._consensus = consensus
        self._every_steps = settings.save_every_n_steps
        self._keep_last = settings.keep_last_n_checkpoints
        self._in_background = settings.save_in_background
        self._group: Any = None
        if consensus.world_size > 1:
            self._group = dist.new_group(backend="gloo", timeout=_LONGEST_WRITE)
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # DCP warns in a single process
        self._pending: tuple[str, Future[Any]] | None = None
        check_shared(folder, consensus, is_needed=self._every_steps is not None)

    def after_steps(self, step: int, *, steps: int = 1, stop: bool, state: Callable[[], AdaptiveState]) -> None:
        """Save if a checkpoint is due in the last ``steps`` steps. If ``stop``, save and end the run. A collective.

        Args:
            step: optimizer steps done.
            state: returns the current state of the run; a collective.

        Raises:
            RunEnded: ``stop``, and the run is saved.
            CheckpointError: ``stop``, but the run cannot be saved. Without ``stop`` training continues.
            FolderReplacedError: another run may write to the folder.
        """
        every = self._every_steps
        is_due = every is not None and step // every > (step - steps) // every
        if not stop and not is_due:
            return
        is_saved = self.save(state(), at_once=stop)
        if not stop:
            return
        if not is_saved:
            raise CheckpointError(f"a signal ended the run after step {step}, but saving a checkpoint failed.")
        raise RunEnded(
            f"a signal ended the run after step {step}, and a checkpoint is saved:"
            " run the same command with `resume_from_checkpoint=True` to resume.",
            STATUS_STOPPED,
        )

    def save(self, state: AdaptiveState, *, at_once: bool = False) -> bool:
        """Save the current tensors with ``state``. Returns whether that succeeded. A collective.

        In the background, without ``at_once``, it returns True, and logs the outcome later. If a checkpoint cannot be
        written, earlier ones are kept. After ``at_once`` the run ends.

        Raises:
            FolderReplacedError: another run may write to the folder.
        """
        self.wait()
        name = f"step_{state.global_step}"
        try:
            failure = self._consensus.first_reason(self._tensors.unsavable())
            if failure := failure or make_for_all_ranks(name, self._folder, self._consensus):
                raise CheckpointError(failure)
            writer = _Writer(self._folder.unfinished(name), publish=lambda digests: self._publish(name, state, digests))
            options: dict[str, Any] = {"storage_writer": writer, "process_group": self._group}
            options["no_dist"] = self._group is None
            if self._in_background and not at_once:
                future: Any = async_save(self._tensors.tensors(), **options)
                self._pending = name, future
                return True
            save(self._tensors.tensors(), **options)
        except (CheckpointException, CheckpointError) as error:
            self._give_up(name, error, ends=at_once)
            return False
        self._say_saved(name)
        return True

    def wait(self) -> None:
        """Wait for a checkpoint that is written in the background. A collective if there is one."""
        if self._pending is None:
            return
        name, future = self._pending
        self._pending = None
        try:
            future.result()
        except CheckpointException as error:
            self._give_up(name, error)
        else:
            self._say_saved(name)

    def load(self, checkpoint: Checkpoint | None, *, config: Mapping[str, Any]) -> AdaptiveState | None:
        """Load the tensors of ``checkpoint``, if it is of a step, and return its state. A collective.

        The number of ranks may differ from that of the checkpoint. Nothing is copied on the device. Optimizer options
        that ``config`` changes are not loaded; those that torchtune has loaded of an epoch are set back.

        Raises:
            InputError: the checkpoint is of another model, or not readable.
        """
        if checkpoint is None:
            return None
        path, state = checkpoint.path, checkpoint.state
        utils.log_rank_zero(log, f"Resuming from {path}")
        if state is None:  # torchtune's own, which it has already loaded
            return None
        key = "optimizer._component_"
        if (was := state.config.get(key)) != (wanted := config.get(key)):
            raise InputError(f"`{key}` must be {was} as in the checkpoint, but is {wanted} instead.")
        state = replace(state, rank_states=self._read(path, read_rank_states))
        keys = {*config, *state.config}
        changed = [key for key in keys if key.startswith("optimizer.") and config.get(key) != state.config.get(key)]
        chosen = [key.split(".")[1] for key in changed]
        if not checkpoint.is_of_step:
            prefix = "optimizer."
            before = {key.removeprefix(prefix): was for key, was in state.config.items() if key.startswith(prefix)}
            self._tensors.reset_options(chosen, before=before)
            return state
        if (were := len(state.optimizer["groups"])) != (number := len(self._tensors.options()["groups"])):
            raise InputError(
                f"`optimizer_in_bwd` must be as in the checkpoint with {were} optimizers, but there are {number}."
            )
        saved = self._read(path, self._metadata)
        try:
            load(
                self._tensors.allocate(saved),
                storage_reader=TensorReader(path),
                planner=TensorsOnly(),
                process_group=self._group,
                no_dist=self._group is None,
            )
        except (CheckpointException, Exception) as error:  # the first is no Exception; a damaged file can raise any
            raise InputError(_unreadable(path, error)) from error
        self._tensors.load_options(state.optimizer, chosen=chosen)
        return state

    def options(self) -> dict[str, Any]:
        """The part of the optimizers' state that is not tensors, for the saved state."""
        return self._tensors.options()

    def _read(self, path: Path, read: Callable[[Path], Read]) -> Read:
        """What ``read`` reads of the checkpoint in ``path``; an error is raised on all ranks. A collective."""
        found: Any = None
        failure = ""
        try:
            found = read(path)
        except InputError as error:
            failure = str(error)
        except Exception as error:  # reading a damaged file can raise any error
            failure = _unreadable(path, error)
        if failure := self._consensus.first_reason(failure):
            raise InputError(failure)
        return found

    def _metadata(self, path: Path) -> Mapping[str, Any]:
        """The metadata of the tensors in ``path``, by name; those of another model are refused."""
        saved = TensorReader(path).read_metadata().state_dict_metadata
        if missing := self._tensors.missing(saved):
            raise InputError(f"`resume_from_checkpoint` is no checkpoint of this model: in {str(path)!r} {missing}.")
        return saved

    def _publish(self, name: str, state: AdaptiveState, digests: Mapping[str, str]) -> None:
        """Called on rank 0 once all ranks have written."""
        self._folder.finish(name, state, digests=digests)
        if self._keep_last is not None:
            try:
                self._folder.prune(self._keep_last)
            except OSError as error:
                log.warning(f"Some older checkpoints could not be removed: {reason_of(error)}.")

    def _give_up(self, name: str, error: BaseException, *, ends: bool = False) -> None:
        """Log ``error``, and remove what is written. Called on all ranks; only FolderReplacedError is raised again.

        Args:
            ends: whether the run ends now.
        """
        first = _first(error)
        if isinstance(first, FolderReplacedError):
            raise FolderReplacedError(str(first)) from error
        if self._consensus.rank == 0:
            space = self._folder.describe_space(first)
            self._folder.discard(name)
            again = " and saves again at the next checkpoint" if self._every_steps else ""
            goes_on = "" if ends else f"; training continues{again}"
            log.warning(
                f"Checkpoint {name} could not be saved: {reason_of(first)}{space}."
                f" Earlier checkpoints are kept{goes_on}."
            )

    def _say_saved(self, name: str) -> None:
        utils.log_rank_zero(log, f"Checkpoint saved to {self._folder.path / name}")


def make_for_all_ranks(name: str, folder: CheckpointFolder, consensus: Consensus) -> str:
    """Make the folder for the files of checkpoint ``name``; why not all ranks can write there, or "". A collective."""

    def start() -> str:
        try:
            folder.start(name)
        except OSError as error:
            return reason_of(error)
        return ""

    failure = consensus.ask_rank_zero(start)
    if not failure and consensus.any_rank(not folder.unfinished(name).is_dir()):
        return _NOT_SHARED
    return failure


def check_shared(folder: CheckpointFolder, consensus: Consensus, *, is_needed: bool) -> None:
    """Check that all ranks see ``folder``. A collective.

    If they do not and it is not needed, a warning is logged.

    Raises:
        InputError: they do not, and ``is_needed``.
    """
    if consensus.world_size == 1:
        return
    name = consensus.from_rank_zero(f"shared_{uuid4().hex}")  # a new one: NFS remembers what was not there
    failure = make_for_all_ranks(name, folder, consensus)
    if consensus.rank == 0:
        folder.discard(name)
    if failure != _NOT_SHARED:  # any other is said where a checkpoint is saved
        return
    place = consensus.from_rank_zero(str(folder.path))
    if is_needed:
        raise InputError(
            f"`adaptive.save_every_n_steps` needs an `output_dir` that all nodes share: {place!r} of rank 0 is not"
            " there on every rank."
        )
    utils.log_rank_zero(
        log,
        f"{place} is not shared by all nodes: epochs are saved on the node of rank 0 alone, and a run that is asked to"
        " end cannot save.",
        logging.WARNING,
    )


class _Written(list[Any]):
    """What a rank has written, with the digests of its files by name. torch gathers it on rank 0."""

    digests: Mapping[str, str] = {}


class _Writer(FileSystemWriter):
    """Calls ``publish`` on rank 0 once every rank has written, with the digests. Its error is raised on all ranks."""

    def __init__(self, path: Path, *, publish: Callable[[Mapping[str, str]], None]) -> None:
        super().__init__(path, sync_files=False)  # `settle` does
        self._publish = publish

    def write_data(self, plan: Any, planner: Any) -> torch.futures.Future[Any]:
        with _without_checksums():
            written = _Written(super().write_data(plan, planner).value())
        written.digests = settle(Path(self.path), {one.storage_data.relative_path for one in written})
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(written)
        return done

    def finish(self, metadata: Any, results: Any) -> None:
        super().finish(metadata, results)
        self._publish({name: digest for one in results for name, digest in one.digests.items()})


@contextmanager
def _without_checksums() -> Iterator[None]:
    """Context: torch writes no checksums, which take as long as the digests that replace them."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _unreadable(path: Path, error: BaseException) -> str:
    return f"{path} cannot be read: {why_unreadable(_first(error))}."


def _first(error: BaseException) -> BaseException:
    """The error of the first rank that failed."""
    return next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
