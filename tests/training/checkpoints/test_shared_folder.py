"""Ranks that do not share the checkpoint folder are refused where they must write to it."""

import os
from pathlib import Path

from benchmarks.support.ranks import run_on_ranks
from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.training.checkpoints.folder import Checkpoint, CheckpointFolder
from torchtune_adaptive.training.checkpoints.resume import find_for_all_ranks
from torchtune_adaptive.training.checkpoints.steps import check_shared


def said(rank: int, path: Path) -> list[str]:
    """Each check's error, or empty text: of a shared folder, of one per rank (needed, then not), and of checkpoints."""
    consensus, words = Consensus(), []
    own = path / str(rank)
    own.mkdir()
    (path / "step_1").mkdir(exist_ok=True)
    (own / f"step_{rank}").mkdir()
    os.chdir(own)  # the same relative path then leads to another folder on each rank
    checks = [
        lambda: check_shared(CheckpointFolder(path), consensus, is_needed=True),
        lambda: check_shared(CheckpointFolder(own), consensus, is_needed=True),
        lambda: check_shared(CheckpointFolder(own), consensus, is_needed=False),
        lambda: find_for_all_ranks(lambda: None, consensus),
        lambda: find_for_all_ranks(lambda: Checkpoint(path / "step_1", 1, None, 0), consensus),
        lambda: find_for_all_ranks(lambda: Checkpoint(Path("step_0"), 1, None, 0), consensus),
    ]
    for check in checks:
        try:
            check()
        except InputError as error:
            words.append(str(error))
        else:
            words.append("")
    assert not list(path.rglob("unfinished_*"))
    return words


def test_nodes_without_a_shared_folder_are_refused_where_they_need_one(tmp_path: Path) -> None:
    not_shared = (
        "`adaptive.save_every_n_steps` must be null where nodes do not share `output_dir`, but"
        f" '{tmp_path / '0'}' of rank 0 is not there on every rank."
    )
    unseen = (
        "`resume_from_checkpoint` must be a checkpoint that all nodes see, but on rank 1 there is no"
        f" '{tmp_path / '1' / 'step_0'}'."
    )
    assert run_on_ranks(said, 2, tmp_path) == [["", not_shared, "", "", "", unseen]] * 2
