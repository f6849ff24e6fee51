"""Which checkpoint a run resumes from, and the config with which a stock recipe then loads it."""

import copy
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf
from torchtune import training, utils

from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.errors import InputError, RunEnded, quote
from torchtune_adaptive.stock.checkpoints import RECIPE_STATE
from torchtune_adaptive.text import format_bytes
from torchtune_adaptive.training.checkpoints.digests import digests_of, first_change
from torchtune_adaptive.training.checkpoints.folder import (
    RECIPE_STATE_NAME,
    STATE_NAME,
    Checkpoint,
    CheckpointFolder,
    read_checkpoint,
    read_state,
    why_unreadable,
)
from torchtune_adaptive.training.folder_lock import FolderLock

log = utils.get_logger("DEBUG")

_WEIGHTS = (".bin", ".pt", ".pth", ".safetensors")
_ADAPTER = "adapter_model"
_IN_BACKGROUND = "dist_epoch_"  # by recipes that support `enable_async_checkpointing`
_METADATA = ".metadata"  # the last file of such a checkpoint
_LONG_BYTES = 2**30  # to read for seconds


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


def lock_output(cfg: DictConfig, consensus: Consensus) -> FolderLock | None:
    """Lock `output_dir`, where the run's log is, which may be another folder than that of checkpoints. A collective.

    Returns the lock on rank 0, to be kept while the run lasts.

    Raises:
        InputError: another run uses the folder; on all ranks.
    """
    held: list[FolderLock] = []
    consensus.ask_rank_zero(lambda: held.append(FolderLock(Path(cfg.output_dir))))
    return held[0] if held else None


def find_checkpoint(
    cfg: DictConfig,
    folder: CheckpointFolder,
    consensus: Consensus,
    *,
    method: str,
    is_last: Callable[[Checkpoint], bool],
) -> Checkpoint | None:
    """Lock ``folder`` for this run, and find the checkpoint for ``resume_from_checkpoint``. A collective.

    The key is False for a new run; True or "auto" for the latest checkpoint of the run that was the last to write here;
    or a checkpoint's path. "auto" starts a new run if there is no such checkpoint. A checkpoint whose files differ from
    their digests is skipped, or refused if it is named by its path.

    Args:
        method: the recipe's method.
        is_last: whether a checkpoint is that of a complete run.

    Raises:
        InputError: another run uses the folder, there is no such checkpoint, some rank does not see it, it is of
            another method, the run would overwrite steps of another one, or a search is asked for whose run is
            complete; on all ranks.
        RunEnded: training is already complete; on all ranks.
    """
    wanted, in_background = cfg.get("resume_from_checkpoint", False), cfg.get("enable_async_checkpointing", False)
    by_path = wanted not in (True, False, None, "auto")
    changed: list[Path] = []

    def find() -> Checkpoint | None:
        last_run = folder.lock().last_run
        folder.discard_unfinished()
        found = folder.checkpoints()  # always, because serial numbers continue from theirs
        if by_path:
            checkpoint = _checkpoint_at(wanted, in_background=in_background)
            _check_no_steps_of_others(folder, found, checkpoint)
            return checkpoint
        if not wanted:
            return _check_no_steps(folder, wanted)
        stock = stock_checkpoint(folder.path, in_background=in_background, run_id=last_run, changed=changed)
        try:
            return _Found(folder, found, stock, last_run, changed).latest(wanted, is_last)
        except RunEnded as end:
            if not OmegaConf.select(cfg, "adaptive.search_only"):
                raise
            raise InputError(
                f"A search with `resume_from_checkpoint: {wanted}` needs a run to continue. {end}"
            ) from end

    while (checkpoint := consensus.ask_rank_zero(find)) is not None:
        path = checkpoint.path.absolute()
        unseen = "" if path.is_dir() else f"rank {consensus.rank} does not see {str(path)!r}."
        if unseen := consensus.first_reason(unseen):
            raise InputError(f"All nodes must see the checkpoint of `resume_from_checkpoint`, but {unseen}")
        if not (change := changed_file(checkpoint, consensus)):
            _check_method(checkpoint, method)
            break
        if by_path:
            raise InputError(change)
        _log_skipped(checkpoint, change)
        changed.append(checkpoint.path)
    return checkpoint


def _log_skipped(checkpoint: Checkpoint, change: str) -> None:
    utils.log_rank_zero(log, f"Skipped checkpoint {checkpoint.path}. {change}", logging.WARNING)


def changed_file(checkpoint: Checkpoint, consensus: Consensus | None = None) -> str:
    """Which file of ``checkpoint`` has changed since it was written, as a sentence; "" if none has.

    A collective with a ``consensus``, whose ranks share the reading.
    """
    files = [checkpoint.path / name for name in checkpoint.digests]
    num_bytes = sum(file.stat().st_size for file in files if file.is_file())
    if num_bytes >= _LONG_BYTES:
        utils.log_rank_zero(log, f"Comparing {format_bytes(num_bytes)} of {checkpoint.path} with their digests")
    if consensus is None:
        return first_change(checkpoint.path, checkpoint.digests)
    own = first_change(checkpoint.path, checkpoint.digests, share=consensus.rank, shares=consensus.world_size)
    return consensus.first_reason(own)


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


def _check_no_steps(folder: CheckpointFolder, wanted: object) -> None:
    """Refuse a new run where it would mix its checkpoints of steps with others."""
    if steps := [path for path in folder.paths() if path.name.startswith("step_")]:
        raise InputError(
            f"With `resume_from_checkpoint: {wanted}` a new run would overwrite {str(steps[-1])!r}: set it to True or"
            " auto, or `output_dir` to a new folder."
        )


def _check_no_steps_of_others(folder: CheckpointFolder, found: Sequence[Checkpoint], checkpoint: Checkpoint) -> None:
    """Refuse a run that comes from another folder where it would replace checkpoints of steps of another run."""
    others = [one.path for one in found if one.is_of_step and one.run_id != checkpoint.run_id]
    if others and checkpoint.path.absolute().parent.resolve() != folder.path.resolve():
        raise InputError(
            f"The run of `resume_from_checkpoint` {str(checkpoint.path)!r} would overwrite {str(others[-1])!r}, which"
            " is of another run: set `output_dir` to a new folder, or `resume_from_checkpoint: True` to continue that"
            " run."
        )


@dataclass(frozen=True)
class _Found:
    """What there is in a folder.

    Attributes:
        complete: this package's complete checkpoints, in the order of writing.
        stock: torchtune's own.
        last_run: the id of the run that was the last to write here; "" if that is not known.
        changed: those of ``complete`` whose files differ from their digests.
    """

    folder: CheckpointFolder
    complete: Sequence[Checkpoint]
    stock: Checkpoint | None
    last_run: str
    changed: Sequence[Path]

    def latest(self, wanted: object, is_last: Callable[[Checkpoint], bool]) -> Checkpoint | None:
        """The latest checkpoint of the latest run that can be resumed, for ``wanted``: True or "auto"."""
        paths = self.folder.paths()
        run_id = self.last_run or (self.complete[-1].run_id if self.complete else "")
        # torchtune copies the state file of a base model that this package has trained into each epoch of its own.
        path_of_torchtune = self.stock and self.stock.path
        every = [
            one for one in self.complete if one.run_id == run_id and (one.can_resume or one.path != path_of_torchtune)
        ]
        own = [one for one in every if one.path not in self.changed]
        while own and not own[-1].can_resume and (change := changed_file(own[-1])):
            _log_skipped(own[-1], change)
            every.remove(own.pop())
        if own and not own[-1].can_resume and is_last(own[-1]):
            raise RunEnded(f"The run is complete: {own[-1].path} is its last checkpoint.", status=0)
        latest = next((one for one in reversed(own) if one.can_resume), None)
        if self._has_stock_of(run_id, every):
            latest = self.stock
        elif latest is not None and latest is not own[-1]:
            log.warning(f"Skipped {own[-1].path}, without optimizer state: the run continues from {latest.path}.")
        if others := [str(one.path) for one in self.complete if one.run_id != run_id]:
            log.warning(f"Skipped checkpoints of another run than the latest: {', '.join(others)}")
        if latest is None and paths:  # damaged, without optimizer state, or of another run
            raise InputError(
                f"No checkpoint of the latest run can be resumed, and a new run would overwrite {str(paths[-1])!r}: set"
                " `output_dir` to a new folder."
            )
        if latest is None and wanted != "auto":
            raise InputError(
                f"`resume_from_checkpoint: {wanted}` finds no complete checkpoint in {str(self.folder.path)!r}; auto"
                " would start a new run."
            )
        return latest

    def _has_stock_of(self, run_id: str, every: Sequence[Checkpoint]) -> bool:
        """Whether torchtune's own checkpoint is of the run ``run_id``, and later than ``every`` one of ours."""
        stock = self.stock
        if stock is None or (every and stock.epochs_run <= every[-1].epochs_run):
            return False
        if stock.run_id or not every:
            return stock.run_id == run_id or not self.last_run
        return content_digest(stock) != (every[-1].state.run.stock_before if every[-1].state else "")


def content_digest(stock: Checkpoint) -> str:
    """The digest of the optimizer state of torchtune's own checkpoint; "" if it cannot be read."""
    assert stock.recipe_state is not None, "`stock_checkpoint` has found it"
    try:
        return digests_of([stock.recipe_state])[0]
    except OSError:
        return ""


def _check_method(checkpoint: Checkpoint, method: str) -> None:
    """Refuse a checkpoint of another method. torchtune's own says only whether it has adapters."""
    if checkpoint.state is not None:
        was = checkpoint.state.run.method
    else:
        has_adapter = any(checkpoint.path.glob(f"{_ADAPTER}*"))
        trains_adapter = "lora" in method or method == "knowledge_distillation"
        was = method if has_adapter == trains_adapter else "a LoRA recipe" if has_adapter else "a recipe without LoRA"
    if was != method:
        raise InputError(
            f"`resume_from_checkpoint` needs a checkpoint of {method}, but {str(checkpoint.path)!r} is of {was}."
        )


def _checkpoint_at(wanted: object, *, in_background: bool) -> Checkpoint:
    """The checkpoint at the path ``wanted``, whatever its name is, unless torchtune wrote it in the background."""
    if not isinstance(wanted, str) or not wanted or not Path(wanted).is_dir():
        raise InputError(
            f"`resume_from_checkpoint` must be True, False, auto or a checkpoint path, but is {quote(wanted)} instead."
        )
    path = Path(wanted)
    if _is_in_background(path) and (path / _METADATA).is_file():
        if not in_background:
            raise InputError(
                f"`resume_from_checkpoint` {quote(wanted)} needs `enable_async_checkpointing: True`, which wrote it."
            )
        return _of_background(path)
    if not (path / RECIPE_STATE_NAME).exists():
        stock = stock_checkpoint(path.absolute().parent, in_background=False)
        if stock is not None and stock.path.samefile(path):
            return stock
    checkpoint = read_checkpoint(path)
    if not checkpoint.can_resume:
        raise InputError(
            f"`resume_from_checkpoint` needs optimizer state, which {quote(wanted)} lacks, as do the last epoch and any"
            " that a later one follows."
        )
    return checkpoint


def stock_checkpoint(
    folder: Path, *, in_background: bool, run_id: str = "", changed: Sequence[Path] = ()
) -> Checkpoint | None:
    """The checkpoint that torchtune has written in ``folder``; None if there is no complete one.

    Args:
        in_background: look for checkpoints of ``enable_async_checkpointing``.
        run_id: of these, the latest of this run, if it has one: those of an earlier run may be of later epochs.
        changed: leave these of them out.
    """
    if in_background:
        complete = [_of_background(one.parent) for one in folder.glob(f"{_IN_BACKGROUND}*/{_METADATA}")]
        complete = [one for one in complete if one.path not in changed]
        own = [one for one in complete if one.run_id == run_id]
        return max(own or complete, key=lambda one: one.epochs_run, default=None)
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
    stock = Checkpoint(epoch, 0, None, epochs_run, path)
    return None if _is_own(stock) else stock


def _of_background(path: Path) -> Checkpoint:
    """The complete checkpoint in ``path`` that torchtune has written in the background."""
    stock = Checkpoint(path, 0, None, int(path.name.rpartition("_")[2]) + 1, path / _METADATA)
    if not (path / STATE_NAME).exists():
        return stock
    own = read_checkpoint(path)
    return replace(stock, state=own.state, digests=own.digests)


def _is_own(stock: Checkpoint) -> bool:
    """Whether this package wrote the files, also if they are damaged now, and torchtune has not written them again.

    Only this package saves the optimizer state in the epoch. torchtune copies the state file of a base model there.
    """
    if not (stock.path / RECIPE_STATE_NAME).exists():
        return False
    try:
        listed = read_state(stock.path)[0].digests.get(RECIPE_STATE_NAME)
    except InputError:
        return True
    return listed == content_digest(stock)


def model_files(checkpoint: Checkpoint) -> list[str]:
    """The files of the whole model's weights in an epoch."""
    path = checkpoint.path.absolute()
    names = checkpoint.digests or [one.name for one in path.iterdir()]
    files = sorted(path / name for name in names if Path(name).suffix in _WEIGHTS and name != RECIPE_STATE_NAME)
    return [str(one) for one in files if one.parent == path and not one.name.startswith(_ADAPTER)]


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
    if _is_in_background(path):
        return changed  # torchtune finds it itself: see `latest_epoch`
    models = model_files(checkpoint)
    if checkpoint.recipe_state is not None:
        OmegaConf.update(changed, "checkpointer.recipe_checkpoint", str(checkpoint.recipe_state.absolute()))
    if any(path.glob(f"{_ADAPTER}*")):
        OmegaConf.update(changed, "checkpointer.adapter_checkpoint", str(path / f"{_ADAPTER}.pt"))
    elif models:
        OmegaConf.update(changed, "checkpointer.checkpoint_files", models, merge=False)
    return changed


@contextmanager
def latest_epoch(cfg: DictConfig, checkpoint: Checkpoint | None) -> Iterator[None]:
    """Context for a set-up with ``cfg`` of ``resuming``: a checkpoint of an epoch is the only one that torchtune sees.

    torchtune reads the latest epoch of the checkpointer's `output_dir`, which may have none, or another run's. Within
    the context, `output_dir` is a temporary folder with a link; ``AtomicCheckpointer`` sets the checkpointer's back.
    """
    is_torchtunes = str(OmegaConf.select(cfg, "checkpointer._component_")).startswith("torchtune.")
    if checkpoint is None or checkpoint.is_of_step or not is_torchtunes:
        yield
        return
    name = checkpoint.path.name if _is_in_background(checkpoint.path) else "epoch_0"
    output_dir = cfg.checkpointer.output_dir
    with tempfile.TemporaryDirectory(prefix="torchtune_adaptive_") as folder:
        Path(folder, name).symlink_to(checkpoint.path.absolute())
        OmegaConf.update(cfg, "checkpointer.output_dir", folder)
        yield
    OmegaConf.update(cfg, "checkpointer.output_dir", output_dir)


def _is_in_background(path: Path) -> bool:
    return path.name.startswith(_IN_BACKGROUND)
