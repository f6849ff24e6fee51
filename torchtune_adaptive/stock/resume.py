"""Which checkpoint a run resumes from, and the config with which a stock recipe then loads it."""

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf
from torchtune import training, utils

from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.errors import InputError, RunEnded, quote
from torchtune_adaptive.stock.checkpoints import RECIPE_STATE
from torchtune_adaptive.training.checkpoints.folder import (
    RECIPE_STATE_NAME,
    STATE_NAME,
    Checkpoint,
    CheckpointFolder,
    is_of_step,
    read_checkpoint,
    why_unreadable,
)

log = utils.get_logger("DEBUG")

_WEIGHTS = (".bin", ".pt", ".pth", ".safetensors")
_ADAPTER = "adapter_model"
_IN_BACKGROUND = "dist_epoch_"  # by recipes that support `enable_async_checkpointing`


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


def find_checkpoint(
    cfg: DictConfig, folder: CheckpointFolder, consensus: Consensus, *, is_last: Callable[[Checkpoint], bool]
) -> Checkpoint | None:
    """Lock ``folder`` for this run, and find the checkpoint for ``resume_from_checkpoint``. A collective.

    The key is False for a new run; True or "auto" for the latest checkpoint; or a checkpoint's path. "auto" starts a
    new run if there is no checkpoint.
    Args:
        is_last: whether a checkpoint is that of a complete run.
    Raises:
        InputError: another run uses the folder, there is no such checkpoint, some rank does not see it, or a new run
            would overwrite existing ones; on all ranks.
        RunEnded: training is already complete; on all ranks.
    """

    def find() -> Checkpoint | None:
        folder.lock()
        folder.discard_unfinished()
        return _find(cfg, folder, is_last)

    checkpoint = consensus.ask_rank_zero(find)
    if checkpoint is not None:
        path = checkpoint.path.absolute()
        unseen = "" if path.is_dir() else f"on rank {consensus.rank} there is no {str(path)!r}."
        if unseen := consensus.first_reason(unseen):
            raise InputError(f"`resume_from_checkpoint` must be a checkpoint that all nodes see, but {unseen}")
    return checkpoint


def check_epochs(checkpoint: Checkpoint | None, epochs: int) -> None:
    """Check that a run of ``epochs`` can reach the position of ``checkpoint``.

    Raises:
        InputError: it ends before.
    """
    if checkpoint is None:
        return
    needed = checkpoint.epochs_run + checkpoint.is_of_step  # a step is within the next epoch
    if epochs < needed:
        raise InputError(
            f"`epochs` must be at least {needed} to resume from {str(checkpoint.path)!r}, but is {epochs} instead."
        )


def _find(cfg: DictConfig, folder: CheckpointFolder, is_last: Callable[[Checkpoint], bool]) -> Checkpoint | None:
    wanted = cfg.get("resume_from_checkpoint", False)
    found = folder.checkpoints()  # always, because serial numbers continue from theirs
    if wanted not in (True, False, None, "auto"):
        return _checkpoint_at(wanted)
    if not wanted:
        if steps := [path for path in folder.paths() if is_of_step(path)]:
            raise InputError(
                f"`resume_from_checkpoint` must be True or auto if {str(steps[-1])!r} exists, which a new run would"
                f" overwrite, but is {quote(wanted)} instead."
            )
        return None
    if found and not found[-1].can_resume and is_last(found[-1]):
        raise RunEnded(f"The run is complete: {found[-1].path} is its last checkpoint.", status=0)
    latest = next((one for one in reversed(found) if one.can_resume), None)
    stock = stock_checkpoint(folder.path, in_background=cfg.get("enable_async_checkpointing", False))
    if stock is not None and (latest is None or stock.epochs_run > latest.epochs_run):
        latest = stock
    if latest is None and (paths := folder.paths()):  # damaged, or without optimizer state
        raise InputError(
            f"`output_dir` must be a new folder if no checkpoint in it can be resumed, but {str(paths[-1])!r} exists,"
            " which a new run would overwrite."
        )
    if latest is None and wanted != "auto":
        raise InputError(
            f"`resume_from_checkpoint` must be False or auto if there is no complete checkpoint, as in"
            f" {str(folder.path)!r}, but is {quote(wanted)} instead."
        )
    return latest


def _checkpoint_at(wanted: object) -> Checkpoint:
    if not isinstance(wanted, str) or not wanted or not Path(wanted).is_dir():
        raise InputError(
            f"`resume_from_checkpoint` must be True, False, auto or a checkpoint path, but is {quote(wanted)} instead."
        )
    checkpoint = read_checkpoint(Path(wanted))
    if not checkpoint.can_resume:
        raise InputError(
            "`resume_from_checkpoint` must be a checkpoint with optimizer state (not one after the last epoch, nor one"
            f" followed by a later epoch), but is {quote(wanted)} instead."
        )
    return checkpoint


def stock_checkpoint(folder: Path, *, in_background: bool) -> Checkpoint | None:
    """The checkpoint that torchtune has written in ``folder``; None if there is no complete one.

    Args:
        in_background: look for checkpoints of ``enable_async_checkpointing``.
    """
    if in_background:
        complete = [one.parent for one in folder.glob(f"{_IN_BACKGROUND}*/.metadata")]
        path = max(complete, key=lambda one: int(one.name.rpartition("_")[2]), default=None)
        if path is None:
            return None
        state = read_checkpoint(path).state if (path / STATE_NAME).exists() else None
        return Checkpoint(path, 0, state, int(path.name.rpartition("_")[2]) + 1, path / ".metadata")
    path = folder / RECIPE_STATE
    if not path.exists():
        return None
    try:
        epochs_run = torch.load(path, mmap=True, weights_only=True)[training.EPOCHS_KEY]
    except Exception as error:  # reading a damaged file can raise anything
        log.warning(f"Skipped {path}, because it cannot be read: {why_unreadable(error)}.")
        return None
    epoch = folder / f"epoch_{epochs_run - 1}"
    if not epoch.is_dir():
        log.warning(f"Skipped {path}, because {epoch} is missing.")
        return None
    with contextlib.suppress(InputError):
        read_checkpoint(epoch)
        return None  # written by this package, whose own files describe it
    return Checkpoint(epoch, 0, None, epochs_run, path)


def model_files(path: Path) -> list[str]:
    """The files of the whole model's weights in the folder ``path``."""
    files = sorted(one for one in path.iterdir() if one.suffix in _WEIGHTS and one.name != RECIPE_STATE_NAME)
    return [str(one) for one in files if not one.name.startswith(_ADAPTER)]


def resuming(cfg: DictConfig, checkpoint: Checkpoint | None) -> DictConfig:
    """A copy of ``cfg`` with which a stock recipe can be set up to resume from ``checkpoint``.

    For a checkpoint of a step, the recipe starts a new run, whose tensors are then replaced. For a checkpoint of an
    epoch, it loads that epoch's files.
    """
    changed = copy.deepcopy(cfg)
    OmegaConf.set_struct(changed, False)
    OmegaConf.resolve(changed)  # else a key that interpolates one of those below would follow it
    OmegaConf.update(changed, "resume_from_checkpoint", checkpoint is not None and not checkpoint.is_of_step)
    if checkpoint is None or checkpoint.is_of_step:
        return changed
    path = checkpoint.path.absolute()
    if path.name.startswith(_IN_BACKGROUND):
        return changed  # torchtune finds the latest checkpoint itself
    models = model_files(path)
    if checkpoint.recipe_state is not None:
        OmegaConf.update(changed, "checkpointer.recipe_checkpoint", str(checkpoint.recipe_state.absolute()))
    if any(path.glob(f"{_ADAPTER}*")):
        OmegaConf.update(changed, "checkpointer.adapter_checkpoint", str(path / f"{_ADAPTER}.pt"))
    elif models:
        OmegaConf.update(changed, "checkpointer.checkpoint_files", models, merge=False)
    return changed
