"""The parts of a recipe for tests that build a trainer without one."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from tests.support.toys import STATE
from torchtune_adaptive.training.assembly import RecipeParts
from torchtune_adaptive.training.batch.row_format import Row, TokenRows
from torchtune_adaptive.training.checkpoints.folder import CheckpointFolder
from torchtune_adaptive.training.profiling import StepProfiler
from torchtune_adaptive.training.train_step import TrainStep

IGNORED = -100
_NO_PROFILER = SimpleNamespace(start=lambda: None, step=lambda: None, stop=lambda: None)


def recipe_parts(
    directory: Path, step: TrainStep, dataset: list[Row], *, shuffle: bool = False, **parts: Any
) -> RecipeParts:
    """A new run of two epochs on one rank, two rows at a time, at a constant rate; ``parts`` are in place of its own.

    Its log and its checkpoints are in ``directory``.
    """
    data: Any = dataset
    own: dict[str, Any] = {
        "scheduler": None,
        "build_scheduler": lambda steps, last: None,
        "sampler": StatefulDistributedSampler(data, num_replicas=1, rank=0, shuffle=shuffle, seed=0),
        "row_format": TokenRows(IGNORED),
        "tokenizer_max_seq_len": None,
        "batch_size": 2,
        "micro_steps": 1,
        "max_steps_per_epoch": None,
        "epochs": range(2),
        "ranks": 1,
        "metric_logger": None,
        "log_every_steps": 1,
        "with_memory_stats": False,
        "profiler": StepProfiler(_NO_PROFILER, memory_steps=None),
        "output_dir": directory,
        "checkpoints": CheckpointFolder(directory),
        "resumed": None,
        "run": STATE.run,
        "config": {},
        "objective_to_try": None,
        "why_unrecoverable": "",
        "before_step": lambda step: None,
        "save": lambda epoch, state: None,
    }
    return RecipeParts(step=step, **own | parts)
