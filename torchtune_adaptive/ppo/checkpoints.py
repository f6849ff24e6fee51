"""Checkpoints of a PPO run, whose turns generate answers and train on them, and of its two trained models."""

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from omegaconf import DictConfig, OmegaConf
from torch.utils.data import DataLoader
from torchtune import utils

from torchtune_adaptive.engine.distributed.rank_states import RankStates
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.stock.checkpoints import WholeCheckpointer
from torchtune_adaptive.stock.resume import model_files, resuming
from torchtune_adaptive.training.checkpoints.folder import STATE_NAME, Checkpoint, read_checkpoint
from torchtune_adaptive.training.checkpoints.steps import StepCheckpoints
from torchtune_adaptive.training.run_state import AdaptiveState

log = utils.get_logger("DEBUG")

# Config keys that determine the steps of a turn. If they change, a run cannot resume at the same position.
_OF_A_TURN = ("batch_size", "ppo_batch_size", "ppo_epochs")


class PromptBatches:
    """Iterates as ``loader`` does, and counts batches.

    Args:
        restore_random: called after an epoch's iterator is made, which draws a random number.
    """

    def __init__(self, loader: Any, *, restore_random: Callable[[], None]) -> None:
        self._loader = loader
        self._restore_random = restore_random
        self._done = 0

    @property
    def dataset(self) -> Any:
        """The prompts, by index."""
        return self._loader.dataset

    @property
    def done(self) -> int:
        """Batches of the current epoch so far; 0 between epochs."""
        return self._done

    def __len__(self) -> int:
        return len(self._loader)

    def go_to(self, done: int) -> None:
        """Start the epoch after its first ``done`` batches, which are not read."""
        self._done = done

    def __iter__(self) -> Iterator[Any]:
        loader = self._loader
        if self._done:
            places = list(loader.sampler)[self._done * loader.batch_size :]
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
                self._done += 1
                yield batch
        finally:  # also if the loop ends early
            self._done = 0


class TurnSaver:
    """Creates the state of a run on one device between its turns, and restores it.

    Args:
        config: the run's config, by dotted keys.
        memory_limit_bytes: memory that the run may use; None without a limit.
    """

    def __init__(
        self,
        batches: PromptBatches,
        steps: StepCheckpoints,
        rank_states: RankStates,
        *,
        config: Mapping[str, Any],
        memory_limit_bytes: int | None,
    ) -> None:
        self._batches = batches
        self._steps = steps
        self._rank_states = rank_states
        self._config = dict(config)
        self._memory_limit_bytes = memory_limit_bytes

    def state(self, *, epochs_run: int, step: int, generated: int, trained: int) -> AdaptiveState:
        """The state after ``epochs_run`` epochs and ``step`` optimizer steps.

        Args:
            generated, trained: number of answers generated, and trained on, at once.
        """
        answers, prompts = self._config["batch_size"], len(self._batches.dataset)
        return AdaptiveState(
            epochs_run=epochs_run,
            epoch_samples=self._batches.done * answers,
            schedule_steps=0,
            batch_size=answers,
            is_global=False,
            reference_samples=answers,
            samples_per_step=self._config["ppo_batch_size"],
            global_step=step,
            micro_batch=None,
            micro_batch_limit=trained,
            micro_batch_unit="rows",
            left_over=(0, 0),
            padding=(0, 0),
            dataset_samples=prompts,
            ranks=1,
            memory_limit_bytes=self._memory_limit_bytes,
            rank_states=self._rank_states.now(generated=generated),
            optimizer=self._steps.options(),
            config=self._config,
        )

    def load(self, saved: AdaptiveState) -> tuple[int, int] | None:
        """Restore ``saved``. Returns its numbers of answers generated, and trained on, at once; None after a change.

        Random generators are restored by the ``RankStates``.
        Raises:
            InputError: the saved run had different turns.
        """
        for key in _OF_A_TURN:
            if (before := saved.config.get(key)) != (now := self._config[key]):
                raise InputError(f"`{key}` must be {before} as in the checkpoint, but is {now} instead.")
        self._batches.go_to(saved.epoch_samples // saved.batch_size)
        own = self._rank_states.load(saved.rank_states)
        assert own is not None, "a run on one device has saved one rank"
        generated, trained = own["generated"], saved.micro_batch_limit
        now = self.state(epochs_run=saved.epochs_run, step=saved.global_step, generated=generated, trained=trained)
        if changes := saved.changes(now):
            log.info(f"resumed with changes: {'; '.join(changes)}")
            return None
        return generated, trained


class LastCheckpointer:
    """Delays the save of ``checkpointer`` until ``save_now``, so that another checkpointer can save first."""

    def __init__(self, checkpointer: WholeCheckpointer) -> None:
        self._checkpointer = checkpointer
        self._save: Callable[[], None] | None = None

    def save_checkpoint(self, *args: Any, **options: Any) -> None:
        """Keep the arguments for ``save_now``."""
        self._save = partial(self._checkpointer.save_checkpoint, *args, **options)

    def save_now(self) -> None:
        """Save, and drop the kept arguments."""
        assert self._save is not None, "`save_checkpoint` comes first"
        self._save()
        self._save = None


def resuming_with_value_model(cfg: DictConfig, checkpoint: Checkpoint | None) -> DictConfig:
    """As ``resuming``, for a policy with a separate value model.

    Raises:
        InputError: the value model of that epoch does not exist.
    """
    changed = resuming(cfg, checkpoint)
    if checkpoint is not None and not checkpoint.is_of_step:
        beside = os.path.relpath(cfg.value_checkpointer.output_dir, cfg.checkpointer.output_dir)
        path = (checkpoint.path.absolute().parent / beside / checkpoint.path.name).resolve()
        if not path.is_dir():
            raise InputError(
                "`resume_from_checkpoint` must be a checkpoint whose value model exists, but for"
                f" {str(checkpoint.path)!r} there is no {str(path)!r}."
            )
        if (path / STATE_NAME).exists():
            read_checkpoint(path)  # refuses an incomplete one
        OmegaConf.update(changed, "value_checkpointer.checkpoint_files", model_files(path), merge=False)
    return changed
