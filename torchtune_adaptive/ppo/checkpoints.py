"""What checkpoints of a PPO run need: its position in the prompts, and both of its trained models."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from omegaconf import DictConfig, OmegaConf
from torch.utils.data import DataLoader

from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.stock.checkpoints import AtomicCheckpointer
from torchtune_adaptive.stock.resume import changed_file, model_files, resuming
from torchtune_adaptive.training.checkpoints.folder import STATE_NAME, Checkpoint, read_checkpoint


class PromptBatches:
    """Iterates as ``loader`` does, and counts batches.

    Attributes:
        dataset: the prompts, by index.
        done: batches of the current epoch so far, which are not read again; 0 between epochs.

    Args:
        restore_random: called after an epoch's iterator is made, which draws a random number.
    """

    def __init__(self, loader: Any, *, restore_random: Callable[[], None]) -> None:
        self.dataset = loader.dataset
        self.done = 0
        self._loader = loader
        self._restore_random = restore_random

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        loader = self._loader
        if self.done:
            places = list(loader.sampler)[self.done * loader.batch_size :]
            loader = DataLoader(
                loader.dataset,
                batch_size=loader.batch_size,
                sampler=places,
                collate_fn=loader.collate_fn,
                drop_last=loader.drop_last,
            )
        else:
            self._restore_random()
        batches = iter(loader)
        self._restore_random()
        try:
            for batch in batches:
                self.done += 1
                yield batch
        finally:  # also if the loop ends early
            self.done = 0


class LastCheckpointer(AtomicCheckpointer):
    """Delays each save until ``save_now``, so that another checkpointer can save first."""

    def save_checkpoint(self, *args: Any, **options: Any) -> None:
        """Keep the arguments for ``save_now``."""
        self._save = partial(super().save_checkpoint, *args, **options)

    def save_now(self) -> None:
        """Save what was kept."""
        self._save()


def resuming_with_value_model(cfg: DictConfig, checkpoint: Checkpoint | None, consensus: Consensus) -> DictConfig:
    """As ``resuming``, for a policy with a separate value model. A collective.

    Raises:
        InputError: the value model of that epoch does not exist, is damaged, or is of another run.
    """
    changed = resuming(cfg, checkpoint)
    if checkpoint is not None and not checkpoint.is_of_step:
        beside = os.path.relpath(cfg.value_checkpointer.output_dir, cfg.checkpointer.output_dir)
        path = (checkpoint.path.absolute().parent / beside / checkpoint.path.name).resolve()
        if not path.is_dir():
            raise InputError(
                f"`resume_from_checkpoint` {str(checkpoint.path)!r} lacks its value model: there is no {str(path)!r}."
            )
        values = Checkpoint(path, 0, None, checkpoint.epochs_run)
        if (path / STATE_NAME).exists():
            own = read_checkpoint(path)  # refuses an incomplete one
            change = changed_file(own, consensus)
            if change and checkpoint.state is not None:
                raise InputError(change)
            values = values if change else own  # torchtune copies the state file of a base model into its own epochs
        if values.run_id != checkpoint.run_id:
            raise InputError(
                f"`resume_from_checkpoint` {str(checkpoint.path)!r} lacks its value model: that in {str(path)!r} is of"
                " another run."
            )
        OmegaConf.update(changed, "value_checkpointer.checkpoint_files", model_files(values), merge=False)
    return changed
