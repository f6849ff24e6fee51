"""The saved state of a PPO run. It is saved between turns; a turn generates answers to prompts and trains on them."""

from collections.abc import Mapping
from typing import Any

from torchtune import utils

from torchtune_adaptive.batch.prompt_batches import PromptBatches
from torchtune_adaptive.checkpoints.steps import StepCheckpoints
from torchtune_adaptive.distributed.rank_states import RankStates
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.training.run_state import AdaptiveState

log = utils.get_logger("DEBUG")

# Config keys that determine the steps of a turn. If they change, a run cannot resume at the same position.
_OF_A_TURN = ("batch_size", "ppo_batch_size", "ppo_epochs")


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
