"""Checkpoints after optimizer steps, by PyTorch's distributed checkpoints: each rank writes what it holds."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torchtune import utils

from torchtune_adaptive.checkpoints.folder import Checkpoint, CheckpointFolder
from torchtune_adaptive.checkpoints.shared import check_shared, make_for_all_ranks
from torchtune_adaptive.checkpoints.tensors import TrainedTensors
from torchtune_adaptive.distributed.consensus import Consensus
from torchtune_adaptive.errors import CheckpointError, InputError, RunEnded, reason_of
from torchtune_adaptive.settings import AdaptiveSettings
from torchtune_adaptive.signals import STATUS_STOPPED
from torchtune_adaptive.training.run_state import AdaptiveState

log = utils.get_logger("DEBUG")

_LONGEST_WRITE = timedelta(hours=6)  # of a group of processes that only waits for files


class StepCheckpoints:
    """Writes and reads ``step_N`` folders. Creating it is a collective.

    Args:
        every_steps: None: only when a run is asked to end.
        keep_last: how many are kept; None: all.
        in_background: copy tensors to the host within the step, and write them beside training.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        tensors: TrainedTensors,
        consensus: Consensus,
        *,
        every_steps: int | None,
        keep_last: int | None,
        in_background: bool,
    ) -> None:
        self._folder = folder
        self._tensors = tensors
        self._consensus = consensus
        self._every_steps = every_steps
        self._keep_last = keep_last
        self._in_background = in_background
        self._group = _file_group() if consensus.world_size > 1 else None
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # DCP, of a single process
        self._pending: tuple[str, Future[Any]] | None = None

    def after_steps(self, step: int, *, steps: int = 1, stop: bool, state: Callable[[], AdaptiveState]) -> None:
        """Save if one of the last ``steps`` is to be saved, and end the run if it is to ``stop``. A collective.

        Args:
            step: optimizer steps done.
            state: makes the state of the run now; a collective.

        Raises:
            RunEnded: the run is to stop, and is saved.
            CheckpointError: it is to stop, and cannot be saved. Otherwise training goes on then.
        """
        every = self._every_steps
        is_due = every is not None and step // every > (step - steps) // every
        if not stop and not is_due:
            return
        is_saved = self.save(state(), at_once=stop)
        if not stop:
            return
        if not is_saved:
            raise CheckpointError(f"a signal ended the run after step {step}, which could not be saved.")
        raise RunEnded(
            f"a signal ended the run after step {step}, which is saved:"
            " the same command with `resume_from_checkpoint=True` goes on from there.",
            STATUS_STOPPED,
        )

    def save(self, state: AdaptiveState, *, at_once: bool = False) -> bool:
        """Save the tensors as they are now, with ``state``, and say whether that succeeded. A collective.

        In the background, but with ``at_once``, the answer is always yes; what becomes of it is logged later.
        A checkpoint that cannot be written leaves the ones before it as they are.
        """
        self.wait()
        name = f"step_{state.global_step}"
        try:
            self._start(name)
            writer = _Writer(self._folder.unfinished(name), publish=lambda: self._publish(name, state))
            options: dict[str, Any] = {"storage_writer": writer, "process_group": self._group}
            options["no_dist"] = self._group is None
            if self._in_background and not at_once:
                future: Any = async_save(self._tensors.tensors(), **options)
                self._pending = name, future
                return True
            save(self._tensors.tensors(), **options)
        except (CheckpointException, CheckpointError) as error:
            self._give_up(name, error)
            return False
        self._say_saved(name)
        return True

    def wait(self) -> None:
        """Wait for what is written in the background. A collective if there is something."""
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
        """Set the tensors to those of ``checkpoint``, if it is of a step, and return its state. A collective.

        Whatever the number of ranks it is of; no copy is made on the device. Options of the optimizer that ``config``
        has otherwise than the checkpoint's run stay as they are.

        Raises:
            InputError: another model's, or not readable.
        """
        if checkpoint is None:
            return None
        path, state = checkpoint.path, checkpoint.state
        utils.log_rank_zero(log, f"Resuming from {path}")
        if state is not None:
            _check_optimizer(state, config)
        if state is None or not checkpoint.is_of_step:  # torchtune has loaded it
            return state
        _check_groups(state, len(self._tensors.options()["groups"]))
        saved = self._read_metadata(path)
        try:
            load(
                self._tensors.allocate(saved),
                storage_reader=FileSystemReader(path),
                process_group=self._group,
                no_dist=self._group is None,
            )
        except (CheckpointException, Exception) as error:  # whatever reading a damaged file raises
            raise InputError(_unreadable(path, error)) from error
        keys = {*config, *state.config}
        changed = [key for key in keys if key.startswith("optimizer.") and config.get(key) != state.config.get(key)]
        self._tensors.load_options(state.optimizer, chosen=[key.split(".")[1] for key in changed])
        return state

    def options(self) -> dict[str, Any]:
        """What belongs into a state beside the tensors."""
        return self._tensors.options()

    def _read_metadata(self, path: Path) -> Mapping[str, Any]:
        """What is saved in ``path``, by its name. A collective, so that no rank goes on when another cannot.

        Raises:
            InputError: some rank cannot read it, or it is another model's.
        """
        saved: Mapping[str, Any] = {}
        failure = ""
        try:
            saved = FileSystemReader(path).read_metadata().state_dict_metadata
        except Exception as error:  # whatever reading a damaged file raises
            failure = _unreadable(path, error)
        else:
            if missing := self._tensors.missing(saved):
                failure = (
                    f"`resume_from_checkpoint` must be a checkpoint of this model, but in {str(path)!r} {missing}."
                )
        if failure := self._consensus.first_reason(failure):
            raise InputError(failure)
        return saved

    def _start(self, name: str) -> None:
        """Make the folder on rank 0, and check that every rank sees it.

        Raises:
            CheckpointError: it cannot be made, or some rank does not see it; on every rank.
        """

        failure = self._consensus.first_reason(self._tensors.unsavable())
        if failure := failure or make_for_all_ranks(name, self._folder, self._consensus):
            raise CheckpointError(failure)

    def _publish(self, name: str, state: AdaptiveState) -> None:
        """Called on rank 0 when all ranks have written."""
        self._folder.finish(name, state)
        if self._keep_last is not None:
            try:
                self._folder.prune(self._keep_last)
            except OSError as error:
                log.warning(f"Earlier checkpoints are not all removed: {reason_of(error)}.")

    def _give_up(self, name: str, error: BaseException) -> None:
        if self._consensus.rank == 0:
            space = self._folder.describe_space()
            self._folder.discard(name)
            again = ", and tries again at the next one" if self._every_steps else ""
            log.warning(
                f"Checkpoint {name} is not saved: {_first_reason(error)} ({space})."
                f" Those before it are as they were; training goes on{again}."
            )

    def _say_saved(self, name: str) -> None:
        utils.log_rank_zero(log, f"Checkpoint saved to {self._folder.path / name}")


def step_checkpoints(
    folder: CheckpointFolder,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    settings: AdaptiveSettings,
    consensus: Consensus,
) -> StepCheckpoints:
    """The checkpoints that ``settings`` ask for, of all that training changes. A collective.

    Raises:
        InputError: ranks do not share the folder, but are to save after steps.
    """
    checkpoints = StepCheckpoints(
        folder,
        TrainedTensors(model, optimizers, rank=consensus.rank, ranks=consensus.world_size),
        consensus,
        every_steps=settings.save_every_n_steps,
        keep_last=settings.keep_last_n_checkpoints,
        in_background=settings.save_in_background,
    )
    check_shared(folder, consensus, is_needed=settings.save_every_n_steps is not None)
    return checkpoints


class _Writer(FileSystemWriter):
    """Calls ``publish`` on rank 0 when every rank has written; what it raises is raised on all of them."""

    def __init__(self, path: Path, *, publish: Callable[[], None]) -> None:
        super().__init__(path)
        self._publish = publish

    def finish(self, metadata: Any, results: Any) -> None:
        super().finish(metadata, results)
        self._publish()


def _check_optimizer(state: AdaptiveState, config: Mapping[str, Any]) -> None:
    key = "optimizer._component_"
    if (saved := state.config.get(key)) != (wanted := config.get(key)):
        raise InputError(f"`{key}` must be {saved}, of which the checkpoint has the state, but is {wanted} instead.")


def _check_groups(state: AdaptiveState, number: int) -> None:
    if (saved_number := len(state.optimizer["groups"])) != number:
        raise InputError(
            f"`optimizer_in_bwd` must be as for the checkpoint, of {saved_number} optimizers, but there are {number}."
        )


def _unreadable(path: Path, error: BaseException) -> str:
    return f"{path} must be a readable checkpoint, but failed: {_first_reason(error)}."


def _file_group() -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo", timeout=_LONGEST_WRITE)
    assert isinstance(group, dist.ProcessGroup)
    return group


def _first_reason(error: BaseException) -> str:
    """The error of the first rank that failed."""
    if isinstance(error, CheckpointException):
        error, _ = next(iter(error.failures.values()))
        return reason_of(error)
    return reason_of(error)
