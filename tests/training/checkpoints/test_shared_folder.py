"""Ranks that do not share the checkpoint folder are refused where they must write to it, and warned otherwise."""

import logging
import os
from pathlib import Path
from unittest import mock

from omegaconf import DictConfig

from tests.support.ranks import run_on_ranks
from tests.support.toys import STATE
from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.stock.resume import find_checkpoint
from torchtune_adaptive.training.checkpoints import steps
from torchtune_adaptive.training.checkpoints.folder import CheckpointFolder, write_state
from torchtune_adaptive.training.checkpoints.steps import check_shared


def said(rank: int, path: Path) -> list[str]:
    """Each check's error, or warning: of a shared folder, of one per rank (needed, then not), and of checkpoints."""
    consensus, words = Consensus(), []
    own = path / str(rank)
    own.mkdir()
    write_state(path / "step_1", STATE, is_of_step=True)
    write_state(own / f"step_{rank}", STATE, is_of_step=True)
    os.chdir(own)  # the same relative path then leads to another folder on each rank

    def find(wanted: object) -> None:
        cfg = DictConfig({"resume_from_checkpoint": wanted})
        find_checkpoint(
            cfg, CheckpointFolder(path / "run"), consensus, method=STATE.run.method, is_last=lambda one: False
        )

    checks = [
        lambda: check_shared(CheckpointFolder(path), consensus, is_needed=True),
        lambda: check_shared(CheckpointFolder(own), consensus, is_needed=True),
        lambda: check_shared(CheckpointFolder(own), consensus, is_needed=False),
        lambda: find(False),
        lambda: find(str(path / "step_1")),
        lambda: find("step_0"),
    ]
    for check in checks:
        with mock.patch.object(steps.log, "log") as log:
            try:
                check()
            except InputError as error:
                words.append(str(error))
            else:
                words.append("".join(call.args[1] for call in log.call_args_list if call.args[0] == logging.WARNING))
    assert not list(path.rglob("unfinished_*"))
    return words


def test_nodes_without_a_shared_folder_are_refused_where_they_need_one_and_else_warned(tmp_path: Path) -> None:
    not_shared = (
        "`adaptive.save_every_n_steps` needs an `output_dir` that all nodes share:"
        f" '{tmp_path / '0'}' of rank 0 is not there on every rank."
    )
    unseen = (
        "All nodes must see the checkpoint of `resume_from_checkpoint`, but rank 1 does not see"
        f" '{tmp_path / '1' / 'step_0'}'."
    )
    warning = (
        f"{tmp_path / '0'} is not shared by all nodes: epochs are saved on the node of rank 0 alone, and a run that is"
        " asked to end cannot save."
    )
    expected = [["", not_shared, only_said, "", "", unseen] for only_said in (warning, "")]  # rank 0 logs for all
    assert run_on_ranks(said, 2, tmp_path) == expected
