"""When a run is saved, what is saved, and what a resumed run restores."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from typing import Any

from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.engine.distributed.rank_states import RankStates
from torchtune_adaptive.training.batch.loader import StepLoader
from torchtune_adaptive.training.batch.micro_batches import MicroBatcher
from torchtune_adaptive.training.checkpoints.steps import StepCheckpoints
from torchtune_adaptive.training.run_state import AdaptiveState, RunIdentity

SaveEpoch = Callable[[int, AdaptiveState], None]  # called with the finished epoch


@dataclass(eq=False)
class RunSaver:
    """Saves a run after optimizer steps and epochs.

    Attributes:
        others: parts with a ``state_dict`` and a ``load_state_dict``, beside those before.
        save_epoch: saves after an epoch, as torchtune does.
        run: which run it is.
        config: the run's config, by dotted keys; a resumed run logs changes.
        memory_limit_bytes: the lowest limit of all ranks, None without a limit.
    """

    loader: StepLoader
    micro_batches: MicroBatcher
    others: Sequence[Any]
    steps: StepCheckpoints
    rank_states: RankStates
    _: KW_ONLY
    consensus: Consensus
    save_epoch: SaveEpoch
    run: RunIdentity
    config: Mapping[str, Any]
    memory_limit_bytes: int | None

    def state(self, *, epochs_run: int, step: int) -> AdaptiveState:
        """The state of every part after ``epochs_run`` epochs and ``step`` optimizer steps. A collective."""
        parts = (self.loader, self.micro_batches, *self.others)
        return AdaptiveState(
            run=self.run,
            epochs_run=epochs_run,
            global_step=step,
            rank_states=self.rank_states.now(),
            optimizer=self.steps.options(),
            config=dict(self.config),
            memory_limit_bytes=self.memory_limit_bytes,
            **{name: value for part in parts for name, value in part.state_dict().items()},
        )

    def load(self, saved: AdaptiveState) -> list[str]:
        """Restore a saved state. Returns the changes since then, as parts of a sentence. A collective.

        Random generators are restored by ``restore_random``.
        """
        state = asdict(saved)
        for part in self.others:
            part.load_state_dict(state)
        self.loader.load_state_dict(state, epoch=saved.epochs_run - 1)
        self.rank_states.load(saved.rank_states)
        changes = saved.changes(self.state(epochs_run=saved.epochs_run, step=saved.global_step))
        changes = self.consensus.from_rank_zero(changes)  # a rank's own paths and memory limit may differ from others'
        # If nothing has changed, the saved micro-batch size is used, even if this search has found another one.
        self.micro_batches.load_state_dict(state | ({"micro_batch_limit": None} if changes else {}))
        return changes

    def restore_random(self) -> None:
        """Set the random generators to the saved states. Only the first call has an effect."""
        self.rank_states.restore()

    def after_step(self, *, epochs_run: int, step: int, stop: bool) -> None:
        """As ``StepCheckpoints.after_steps``. A collective."""
        self.steps.after_steps(step, stop=stop, state=lambda: self.state(epochs_run=epochs_run, step=step))

    def after_epoch(self, epoch: int, *, step: int) -> None:
        """Save after ``epoch``. A collective.

        Raises:
            CheckpointError: it was the last epoch, and its checkpoint cannot be saved.
        """
        self.steps.wait()
        self.save_epoch(epoch, self.state(epochs_run=epoch + 1, step=step))
