"""Prepare the recovery from out-of-memory errors, while memory is free."""

from collections.abc import Callable
from functools import partial

from torchtune import utils

from torchtune_adaptive.batch.row_format import Row
from torchtune_adaptive.distributed.dry_run import DryRun, dry_run
from torchtune_adaptive.distributed.recovery import Recovery
from torchtune_adaptive.distributed.vote import Outcome, run_with_votes
from torchtune_adaptive.errors import NothingFitsError
from torchtune_adaptive.memory.devices import describe_peak
from torchtune_adaptive.search.find import NOTHING_FITS_ADVICE
from torchtune_adaptive.search.workload import Workload
from torchtune_adaptive.training.optimizer_state import allocate_state
from torchtune_adaptive.training.train_step import TrainStep

log = utils.get_logger("DEBUG")

_LONGEST_LIST = 3  # of different figures of ranks, in a message


class RecoveryPreparation:
    """Makes the optimizers' state, and a dry run of two small micro-steps.

    Args:
        workload: the models and optimizers on the device.
        step: of which micro-steps are run.
    """

    def __init__(self, workload: Workload, step: TrainStep) -> None:
        self._workload = workload
        self._step = step

    def prepare(self, small_batches: Callable[[int], list[list[Row]]], *, batch_size: int) -> Recovery | None:
        """The recovery, or None where there can be none, which is logged with the reason. A collective.

        Args:
            small_batches: ``small_batches(n)`` gives two batches of different shape, of at most n rows.
            batch_size: rows of a micro-step, if they fit.

        Raises:
            NothingFitsError: the optimizers' state or the smallest micro-step does not fit.
        """
        if run_with_votes(self._allocate_states, self._workload.consensus) is Outcome.OUT_OF_MEMORY:
            raise NothingFitsError(
                "the optimizer's state must fit beside model and gradients, but does not"
                f" ({self._figures()}); an 8-bit optimizer, LoRA or more ranks would need less."
            )
        found = self._dry_run(small_batches(batch_size))
        if found.out_of_memory and batch_size > 1:
            found = self._dry_run(small_batches(1))
        if found.out_of_memory:
            raise NothingFitsError(
                "the first rows of the data set must fit, but their forward and backward ran out of memory"
                f" ({self._figures()}); {NOTHING_FITS_ADVICE}."
            )
        if found.recovery is None:
            log_no_recovery(found.reason)
        return found.recovery

    def _dry_run(self, batches: list[list[Row]]) -> DryRun:
        workload = self._workload
        return dry_run(
            [partial(self._micro_step, rows) for rows in batches],
            model=workload.model,
            device=workload.device,
            consensus=workload.consensus,
            forget=workload.forget,
        )

    def _micro_step(self, rows: list[Row]) -> None:
        with self._step.metered:
            self._step.micro_step(rows)

    def _allocate_states(self) -> None:
        for optimizer in self._workload.optimizers:
            if allocate_state(optimizer) and self._workload.meter is not None:
                self._workload.meter.count([list(values.values()) for values in optimizer.state.values()])

    def _figures(self) -> str:
        """Peak and limit of the ranks, equal ones once. A collective."""
        figures = self._workload.consensus.from_all_ranks(describe_peak(self._workload.meter))
        return "; ".join(list(dict.fromkeys(figures))[:_LONGEST_LIST])


def log_no_recovery(reason: str) -> None:
    """Log, on rank 0, that an out-of-memory error will end the run."""
    utils.log_rank_zero(log, f"An out-of-memory error in training will end the run: {reason}.")
