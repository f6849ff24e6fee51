"""Which checkpoint a run resumes from: the meaning of ``resume_from_checkpoint``."""

from collections.abc import Callable
from pathlib import Path

from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.errors import InputError, RunEnded, quote
from torchtune_adaptive.training.checkpoints.folder import Checkpoint, CheckpointFolder, read_checkpoint

FindOther = Callable[[Path], Checkpoint | None]
IsLast = Callable[[Checkpoint], bool]


def find_checkpoint(
    wanted: object, folder: CheckpointFolder, *, is_last: IsLast, find_other: FindOther
) -> Checkpoint | None:
    """The checkpoint from which the run resumes; None for a new run.

    Args:
        wanted: False; True or "auto" for the latest checkpoint; or a checkpoint's path. "auto" starts a new run if
            there is no checkpoint.
        is_last: whether a checkpoint is that of a complete run.
        find_other: finds a checkpoint in the folder that another program has written.
    Raises:
        InputError: there is no such checkpoint, or a new run would overwrite existing ones.
        RunEnded: training is already complete.
    """
    found = folder.checkpoints()  # always, because serial numbers continue from theirs
    if wanted not in (True, False, None, "auto"):
        return _checkpoint_at(wanted)
    if not wanted:
        if steps := [one.path for one in found if one.is_of_step]:
            raise InputError(
                f"`resume_from_checkpoint` must be True or auto if {str(steps[-1])!r} exists, which a new run would"
                f" overwrite, but is {quote(wanted)} instead."
            )
        return None
    if found and not found[-1].can_resume and is_last(found[-1]):
        raise RunEnded(f"The run is complete: {found[-1].path} is its last checkpoint.", status=0)
    latest = next((one for one in reversed(found) if one.can_resume), None)
    other = find_other(folder.path)
    if other is not None and (latest is None or other.epochs_run > latest.epochs_run):
        latest = other
    if latest is None and wanted != "auto":
        raise InputError(
            f"`resume_from_checkpoint` must be False or auto if there is no complete checkpoint, as in"
            f" {str(folder.path)!r}, but is {quote(wanted)} instead."
        )
    return latest


def find_for_all_ranks(find: Callable[[], Checkpoint | None], consensus: Consensus) -> Checkpoint | None:
    """What ``find`` finds on rank 0, if every rank sees it. A collective.

    Raises:
        InputError, RunEnded: ``find`` raised it, or some rank does not see the checkpoint; on all ranks.
    """
    checkpoint = consensus.ask_rank_zero(find)
    if checkpoint is not None:
        path = checkpoint.path.absolute()
        unseen = "" if path.is_dir() else f"on rank {consensus.rank} there is no {str(path)!r}."
        if unseen := consensus.first_reason(unseen):
            raise InputError(f"`resume_from_checkpoint` must be a checkpoint that all nodes see, but {unseen}")
    return checkpoint


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
