"""What a recipe notes of its batch: a report for people, and the state that a resumed run goes on from."""

from collections.abc import Callable
from typing import Any

from torch.distributed.checkpoint.stateful import Stateful
from torchtune import utils

from torchtune_adaptive.data import num_tokens
from torchtune_adaptive.errors import InputError, quote, reason_of
from torchtune_adaptive.memory.meter import device_memory_bytes
from torchtune_adaptive.sizing import AdaptiveSizing
from torchtune_adaptive.training.report import AdaptiveReport
from torchtune_adaptive.training.run_state import AdaptiveState, read_state, refuse_unsavable, state_path, write_state
from torchtune_adaptive.worst_case import is_packed, stretched_row

log = utils.get_logger("DEBUG")


class AdaptiveRecord(AdaptiveSizing):
    """Keeps report and state of a run. The annotated attributes are the stock recipe's own."""

    epochs_run: int
    global_step: int
    _is_rank_zero: bool
    _output_dir: str
    _checkpoint_dir: str

    _saved: AdaptiveState | None  # what a resumed run found
    _schedule_steps: int  # per epoch, that the learning rate schedule was built for
    _reference_samples: int
    _largest_micro_batch: int | None = None  # since memory ran out, in rows or tokens

    @property
    def _micro_batch_unit(self) -> str:
        return "rows" if self._token_budget is None else "tokens"

    def _begin_record(self) -> None:
        """Find what an earlier part of the run has left. A collective.

        Raises:
            InputError: what it left cannot be read, or what this run is to leave could not be written.
        """
        refuse_unsavable(self._adaptive.batch_increase_function)
        path, epochs_run = state_path(self._checkpoint_dir), self.epochs_run
        self._saved = (
            self._consensus.ask_rank_zero(lambda: read_state(path, epochs_run=epochs_run)) if epochs_run else None
        )
        self._report = AdaptiveReport(history=list(self._saved.history) if self._saved else [])
        own_bytes = device_memory_bytes(self._device) if self._device.type == "cuda" else 0
        self._least_limit_bytes = self._consensus.min_over_ranks(self._adaptive.memory_limit_bytes or own_bytes)

    def _go_on_from(self, saved: AdaptiveState) -> None:
        """Take up what an earlier part of the run has left, and say what is not as it was."""
        if saved.micro_batch_unit == self._micro_batch_unit:
            self._largest_micro_batch = saved.micro_batch
        dataset = self._dataloader.dataset
        if saved.longest_row_tokens:
            row = dict(dataset[0])
            self._longest_row = row if is_packed(dataset) else stretched_row(row, saved.longest_row_tokens)
        schedule = self._adaptive.batch_increase_function
        if saved.schedule is not None and isinstance(schedule, Stateful):
            _load(schedule, saved.schedule)
        if (saved.dataset_samples, saved.ranks) == (len(dataset), self._ranks):
            self._take_up_left_over(saved.left_over, epoch=saved.epochs_run - 1)
        if changes := saved.changes(self._state()):
            reason = f"resumed with changes: {'; '.join(changes)}"
            utils.log_rank_zero(log, reason)
            self._note(reason)

    def _save_state(self) -> None:
        """Save what a run that resumes after the epoch just done needs. Only rank 0 writes."""
        path, state = state_path(self._checkpoint_dir), self._state()
        self._write("State", lambda: write_state(path, state))

    def _state(self) -> AdaptiveState:
        schedule = self._adaptive.batch_increase_function
        return AdaptiveState(
            epochs_run=self.epochs_run,
            schedule_steps=self._schedule_steps,
            batch_size=self._batch_size,
            is_global=self._is_global,
            reference_samples=self._reference_samples,
            samples_per_step=self._samples_per_step_at(self._batch_size),
            global_step=self.global_step,
            micro_batch=self._largest_micro_batch,
            micro_batch_unit=self._micro_batch_unit,
            longest_row_tokens=0 if self._longest_row is None else num_tokens(self._longest_row),
            left_over=self._left_over(),
            dataset_samples=len(self._dataloader.dataset),
            ranks=self._ranks,
            memory_limit_bytes=self._least_limit_bytes or None,
            schedule=schedule.state_dict() if isinstance(schedule, Stateful) else None,
            history=self._report.history,
        )

    def _decide(self, reason: str, epoch: int | None = None) -> None:
        """Note the batch size in the report, aloud and on disk, and why it is."""
        name = "global_batch_size" if self._is_global else "batch_size"
        made_of = self._arithmetic(self._batch_size) + self._cut_aloud()
        utils.log_rank_zero(log, f"{name} {self._batch_size} ({reason}): {made_of}")
        self._note(reason, epoch=epoch, samples_per_step=self._samples_per_step_at(self._batch_size))

    def _cut_aloud(self) -> str:
        """How an optimizer step is cut into micro-steps, if that is not told by the batch size."""
        raise NotImplementedError

    def _note(self, reason: str, *, epoch: int | None = None, **figures: int) -> None:
        """Add an entry to the report's history, and write it."""
        epoch = self.epochs_run if epoch is None else epoch
        self._report.decided(epoch=epoch, batch_size=self._batch_size, reason=reason, **figures)
        self._write("Report", lambda: self._report.write(self._output_dir))

    def _write(self, what: str, write: Callable[[], Any]) -> None:
        """Write a file on rank 0. A run, perhaps in mid-training, need not end because it cannot."""
        if self._is_rank_zero:
            try:
                log.info(f"{what} written to {write()}")
            except OSError as error:
                log.warning(f"{what} not written: {reason_of(error)}")


def _load(schedule: Stateful, state: dict[str, Any]) -> None:
    """Give a schedule the state that it had.

    Raises:
        InputError: it does not take it, as another schedule's.
    """
    try:
        schedule.load_state_dict(state)
    except Exception as error:  # the user's own code: whatever it raises is reported
        raise InputError(
            f"`batch_increase_function` must take the state of the run that is resumed, but does not take"
            f" {quote(state)}: {reason_of(error)}."
        ) from error
