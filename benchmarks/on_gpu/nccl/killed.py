"""One of the ranks of a recipe, launched by ``torchrun``, of which one is killed in training."""

import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from benchmarks.on_gpu import ranks
from benchmarks.on_gpu.nccl import group
from benchmarks.on_gpu.nccl.torchrun import KILLED_AT, KILLED_RANK, KILLED_STEP
from benchmarks.on_gpu.observed import Observed
from benchmarks.on_gpu.stage import Section, Stage
from torchtune_adaptive.testing import kill_process


class Killed(Observed):
    """Kills its rank in a backward pass."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        self._number = 0

    def before_step(self, number: int) -> None:
        super().before_step(number)
        self._number = number

    def before_backward(self) -> None:
        if self._number == KILLED_STEP and dist.get_rank() == KILLED_RANK:
            (self._directory / KILLED_AT).write_text(str(time.time()))
            kill_process()


def measure(stage: Stage) -> Iterator[list[Section]]:
    """Train until a rank is killed, with the signals and the end after an error of a recipe's program."""
    group.start(stage)
    try:
        recipe = ranks.random_recipe(stage, Killed(stage.directory), shard=None)
        with recipe.listening():
            recipe.train()
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # the interpreter's shutdown could wait for collectives
    yield []
