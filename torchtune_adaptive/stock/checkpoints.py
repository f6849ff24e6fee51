"""torchtune's checkpoints after epochs: written atomically, and resumed without file names in the config."""

import contextlib
import copy
import logging
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from safetensors import SafetensorError
from torchtune import training, utils
from torchtune.training.checkpointing._checkpoint_client import CheckpointClient

from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.errors import CheckpointError, InputError, quote, reason_of
from torchtune_adaptive.training.checkpoints.folder import (
    RECIPE_STATE_NAME,
    STATE_NAME,
    Checkpoint,
    CheckpointFolder,
    read_checkpoint,
    write_state,
)
from torchtune_adaptive.training.checkpoints.resume import IsLast, find_checkpoint
from torchtune_adaptive.training.run_state import AdaptiveState

log = utils.get_logger("DEBUG")

_RECIPE_STATE = Path("recipe_state") / RECIPE_STATE_NAME
_WEIGHTS = (".bin", ".pt", ".pth", ".safetensors")
_ADAPTER = "adapter_model"


class WholeCheckpointer:
    """A torchtune checkpointer whose checkpoints are complete, or do not exist.

    Files are in torchtune's places. In addition, the folder of the latest epoch has the recipe's state, so that weights
    and state are always of one epoch, and the state of the run.
    Args:
        checkpointer: torchtune's checkpointer.
    """

    def __init__(self, checkpointer: Any, folder: CheckpointFolder) -> None:
        self._checkpointer = checkpointer
        self._folder = folder
        self._state: AdaptiveState | None = None
        self._failure = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._checkpointer, name)

    def check_saved(self, consensus: Consensus, *, is_last: bool) -> bool:
        """Whether the last requested checkpoint is saved. A failure is logged. A collective.

        Raises:
            CheckpointError: saving failed, and it is the last checkpoint of the run. Otherwise training continues.
        """
        if failure := consensus.from_rank_zero(self._failure):
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

        If this fails, the run's position is in torchtune's own state.
        """
        assert self._state is not None, "`set_state` comes first"
        try:
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
        except (OSError, RuntimeError, SafetensorError) as error:  # RuntimeError: torch.save, on a full disk
            self._failure = f"{reason_of(error)} ({self._folder.describe_space()})"
            self._folder.discard(name)

    def _finish(self, name: str, written: Path) -> None:
        assert self._state is not None, "`set_state` comes first"
        for path in list((written / name).iterdir()):
            path.rename(written / path.name)
        (written / name).rmdir()
        if (written / _RECIPE_STATE).exists():
            (written / _RECIPE_STATE).rename(written / RECIPE_STATE_NAME)
            (written / _RECIPE_STATE).parent.rmdir()
        path = self._folder.finish(name, self._state)
        if (path / RECIPE_STATE_NAME).exists():
            _link(path / RECIPE_STATE_NAME, self._folder.path / _RECIPE_STATE)
            for other in self._folder.path.glob(f"epoch_*/{RECIPE_STATE_NAME}"):
                if other.parent != path:
                    other.unlink()
        log.info(f"Checkpoint saved to {path}")


class WholeCheckpointClient(CheckpointClient):
    """torchtune's checkpoint client, which saves by ``checkpointer``."""

    def __init__(self, cfg: DictConfig, checkpointer: WholeCheckpointer) -> None:
        super().__init__(cfg)
        self._whole = checkpointer

    def _get_checkpointer(self) -> WholeCheckpointer:
        return self._whole

    def _save_checkpoint_async(self, model: Any, optimizer: Any, training_progress: Any, epoch: int) -> None:
        if utils.get_world_size_and_rank()[1] == 0:
            self._whole.save_state(f"dist_epoch_{epoch}")
        super()._save_checkpoint_async(model, optimizer, training_progress, epoch)


def checkpoint_folder(cfg: DictConfig, checkpointer: str = "checkpointer") -> CheckpointFolder:
    """The output folder of the ``checkpointer`` in ``cfg``.

    Raises:
        InputError: it is not a path.
    """
    block = cfg.get(checkpointer)
    path = (block if isinstance(block, DictConfig) else {}).get("output_dir", cfg.get("output_dir"))
    if not isinstance(path, str | Path) or not str(path):
        raise InputError(f"`{checkpointer}.output_dir` must be a folder, but is {quote(path)} instead.")
    return CheckpointFolder(path)


def resuming(cfg: DictConfig, checkpoint: Checkpoint | None) -> DictConfig:
    """A copy of ``cfg`` with which a stock recipe can be set up to resume from ``checkpoint``.

    For a checkpoint of a step, the recipe starts a new run, whose tensors are then replaced. For a checkpoint of an
    epoch, it loads that epoch's files.
    """
    changed = copy.deepcopy(cfg)
    OmegaConf.set_struct(changed, False)
    OmegaConf.update(changed, "resume_from_checkpoint", checkpoint is not None and not checkpoint.is_of_step)
    if checkpoint is None or checkpoint.is_of_step:
        return changed
    if cfg.get("enable_async_checkpointing", False):
        return changed  # torchtune finds the latest checkpoint itself
    path = checkpoint.path.absolute()
    models = model_files(path)
    if checkpoint.recipe_state is not None:
        OmegaConf.update(changed, "checkpointer.recipe_checkpoint", str(checkpoint.recipe_state.absolute()))
    if any(path.glob(f"{_ADAPTER}*")):
        OmegaConf.update(changed, "checkpointer.adapter_checkpoint", str(path / f"{_ADAPTER}.pt"))
    elif models:
        OmegaConf.update(changed, "checkpointer.checkpoint_files", models, merge=False)
    return changed


def find_checkpoint_of(cfg: DictConfig, folder: CheckpointFolder, *, is_last: IsLast) -> Checkpoint | None:
    """Lock ``folder`` for this run, and find the checkpoint for ``resume_from_checkpoint``. On rank 0 only.

    Args:
        is_last: whether a checkpoint is that of a complete run.
    Raises:
        InputError: another run uses the folder, or there is no such checkpoint.
        RunEnded: training is already complete.
    """
    folder.lock()
    folder.discard_unfinished()
    find_stock = partial(stock_checkpoint, in_background=cfg.get("enable_async_checkpointing", False))
    wanted = cfg.get("resume_from_checkpoint", False)
    return find_checkpoint(wanted, folder, is_last=is_last, find_other=find_stock)


def stock_checkpoint(folder: Path, *, in_background: bool) -> Checkpoint | None:
    """The checkpoint that torchtune has written in ``folder``; None if there is no complete one.

    Args:
        in_background: look for checkpoints of ``enable_async_checkpointing``.
    """
    if in_background:
        complete = [one.parent for one in folder.glob("dist_epoch_*/.metadata")]
        path = max(complete, key=lambda one: int(one.name.rpartition("_")[2]), default=None)
        return path and _background_checkpoint(path)
    path = folder / _RECIPE_STATE
    if not path.exists():
        return None
    try:
        epochs_run = torch.load(path, mmap=True, weights_only=True)[training.EPOCHS_KEY]
    except Exception as error:  # reading a damaged file can raise anything
        log.warning(f"Skipped {path}, because it cannot be read: {reason_of(error)}.")
        return None
    epoch = folder / f"epoch_{epochs_run - 1}"
    if not epoch.is_dir():
        log.warning(f"Skipped {path}, because {epoch} is missing.")
        return None
    with contextlib.suppress(InputError):
        read_checkpoint(epoch)
        return None  # written by this package, whose own files describe it
    return Checkpoint(epoch, 0, None, epochs_run, path)


def _background_checkpoint(path: Path) -> Checkpoint:
    epochs_run = int(path.name.rpartition("_")[2]) + 1
    state = read_checkpoint(path).state if (path / STATE_NAME).exists() else None
    return Checkpoint(path, 0, state, epochs_run, path / ".metadata")


def model_files(path: Path) -> list[str]:
    """The files of the whole model's weights in the folder ``path``."""
    files = sorted(one for one in path.iterdir() if one.suffix in _WEIGHTS and one.name != RECIPE_STATE_NAME)
    return [str(one) for one in files if not one.name.startswith(_ADAPTER)]


def _link(source: Path, target: Path) -> None:
    """Replace ``target`` by a hard link to ``source``, which saves the disk space of a copy."""
    target.parent.mkdir(exist_ok=True)
    unfinished = target.with_name(f"{target.name}.tmp")
    unfinished.unlink(missing_ok=True)
    try:
        os.link(source, unfinished)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, unfinished)
    os.replace(unfinished, target)
