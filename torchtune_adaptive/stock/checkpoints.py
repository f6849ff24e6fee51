"""torchtune's checkpoints after epochs, written atomically."""

import copy
import logging
import os
import shutil
from pathlib import Path
from typing import Any
from uuid import uuid4

from omegaconf import DictConfig
from safetensors import SafetensorError
from torchtune import utils
from torchtune.training.checkpointing._checkpoint_client import CheckpointClient

from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.errors import CheckpointError, reason_of
from torchtune_adaptive.training.checkpoints.folder import (
    RECIPE_STATE_NAME,
    STATE_NAME,
    CheckpointFolder,
    write_state,
)
from torchtune_adaptive.training.folder_lock import FolderReplacedError
from torchtune_adaptive.training.run_state import AdaptiveState

log = utils.get_logger("DEBUG")

# torchtune's place for the state that it resumes from.
RECIPE_STATE = Path("recipe_state") / RECIPE_STATE_NAME


class AtomicCheckpointer:
    """A torchtune checkpointer whose checkpoints are complete, or do not exist.

    Files are in torchtune's places. In addition, the folder of the latest epoch has the recipe's state, so that weights
    and state are always of one epoch, and the state of the run.

    Args:
        checkpointer: torchtune's checkpointer.
    """

    def __init__(self, checkpointer: Any, folder: CheckpointFolder) -> None:
        self._checkpointer = checkpointer
        if hasattr(checkpointer, "_output_dir"):
            vars(checkpointer)["_output_dir"] = folder.path
        self._folder = folder
        self._state: AdaptiveState | None = None
        self._failure: str | FolderReplacedError = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._checkpointer, name)

    def check_saved(self, consensus: Consensus, *, is_last: bool) -> bool:
        """Whether the last requested checkpoint is saved. A failure is logged. A collective.

        Raises:
            CheckpointError: saving failed, and it is the last checkpoint of the run. Otherwise training continues.
            FolderReplacedError: another run may write to the folder.
        """
        failure = consensus.from_rank_zero(self._failure)
        if isinstance(failure, FolderReplacedError):
            raise failure
        if failure:
            sentence = f"the checkpoint of an epoch could not be saved: {failure}. Earlier checkpoints are kept."
            if is_last:
                raise CheckpointError(sentence)
            utils.log_rank_zero(
                log, f"{sentence} Training continues and saves again after the next epoch.", logging.WARNING
            )
        return not failure

    def give_up(self, reason: str) -> None:
        """Record for ``check_saved`` that the checkpoint could not be saved."""
        self._failure = reason

    def set_state(self, state: AdaptiveState) -> None:
        """Set the state for the next checkpoint."""
        self._state = state

    def save_state(self, name: str) -> None:
        """Save only the state, into the folder ``name`` in which torchtune writes its files in the background.

        A checkpoint of an earlier run there is no longer complete: its files have not this state. If this fails, the
        run's position is in torchtune's own state.
        """
        assert self._state is not None, "`set_state` comes first"
        try:
            self._folder.check()
            for file in (".metadata", STATE_NAME):
                (self._folder.path / name / file).unlink(missing_ok=True)
            write_state(self._folder.path / name, self._state)
        except OSError as error:
            log.warning(
                f"{self._folder.path / name} has no {STATE_NAME}, which could not be saved: {reason_of(error)}."
            )

    def save_checkpoint(self, state_dict: dict[str, Any], epoch: int, *args: Any, **options: Any) -> None:
        """As torchtune. A write error is reported by ``check_saved``, because other ranks wait for this one."""
        name = f"epoch_{epoch}"
        self._failure = ""
        if not hasattr(self._checkpointer, "_output_dir"):  # not a torchtune checkpointer
            self._checkpointer.save_checkpoint(state_dict, epoch, *args, **options)
            return
        writer = copy.copy(self._checkpointer)
        try:
            directory = self._folder.start(name)
            vars(writer)["_output_dir"] = directory
            writer.save_checkpoint(state_dict, epoch, *args, **options)
            self._finish(name, directory)
        except FolderReplacedError as error:
            self._failure = error
        except (OSError, RuntimeError, SafetensorError) as error:  # RuntimeError: torch.save, on a full disk
            self._failure = f"{reason_of(error)}{self._folder.describe_space(error)}"
            self._folder.discard(name)

    def _finish(self, name: str, written: Path) -> None:
        assert self._state is not None, "`set_state` comes first"
        if (written / RECIPE_STATE).exists():
            (written / RECIPE_STATE).rename(written / RECIPE_STATE_NAME)
            (written / RECIPE_STATE).parent.rmdir()
        epoch = (written / name).rename(written / uuid4().hex)  # the base model's folder may have `name`
        for path in list(epoch.iterdir()):
            path.rename(written / path.name)
        epoch.rmdir()
        path = self._folder.finish(name, self._state)
        if (path / RECIPE_STATE_NAME).exists():
            _link(path / RECIPE_STATE_NAME, self._folder.path / RECIPE_STATE)
            self._folder.drop_recipe_states(path)
        log.info(f"Checkpoint saved to {path}")


class WholeCheckpointClient(CheckpointClient):
    """torchtune's checkpoint client, which saves by ``checkpointer``."""

    def __init__(self, cfg: DictConfig, checkpointer: AtomicCheckpointer) -> None:
        super().__init__(cfg)
        self._whole = checkpointer

    def _get_checkpointer(self) -> AtomicCheckpointer:
        return self._whole

    def _save_checkpoint_async(self, model: Any, optimizer: Any, training_progress: Any, epoch: int) -> None:
        if utils.get_world_size_and_rank()[1] == 0:
            self._whole.save_state(f"dist_epoch_{epoch}")
        super()._save_checkpoint_async(model, optimizer, training_progress, epoch)


def _link(source: Path, target: Path) -> None:
    """Replace ``target`` by a hard link to ``source``, which saves the disk space of a copy."""
    target.parent.mkdir(exist_ok=True)
    unfinished = target.with_name(f"{target.name}.tmp")
    unfinished.unlink(missing_ok=True)
    try:
        try:
            os.link(source, unfinished)
        except OSError:  # a file system without hard links
            shutil.copyfile(source, unfinished)
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)
