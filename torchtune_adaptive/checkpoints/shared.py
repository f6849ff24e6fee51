"""The folder of checkpoints, which ranks on several nodes must share."""

import logging
from uuid import uuid4

from torchtune import utils

from torchtune_adaptive.checkpoints.folder import CheckpointFolder
from torchtune_adaptive.distributed.consensus import Consensus
from torchtune_adaptive.errors import InputError, reason_of

log = utils.get_logger("DEBUG")

_NOT_SHARED = "not every rank sees the folder of rank 0, which they must share"


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
            f"`adaptive.save_every_n_steps` must be null where nodes do not share `output_dir`, but {place!r} of rank 0"
            " is not there on every rank."
        )
    utils.log_rank_zero(
        log,
        f"{place} is not shared by all nodes: epochs are saved on the node of rank 0 alone, and a run that is asked to"
        " end cannot save.",
        logging.WARNING,
    )
