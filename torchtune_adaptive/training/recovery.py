"""Recovery in a recipe: prepared before training, and larger micro-batches tried again after an error."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torchtune import utils

from torchtune_adaptive.engine.memory.out_of_memory import free_memory
from torchtune_adaptive.engine.recovery.rehearsal import allocate_states, cannot_recover
from torchtune_adaptive.engine.recovery.step import RecoverableStep
from torchtune_adaptive.engine.recovery.watch import PressureWatch
from torchtune_adaptive.engine.search.find import first_that_fits
from torchtune_adaptive.engine.search.options import SearchOptions
from torchtune_adaptive.engine.search.workload import Workload
from torchtune_adaptive.errors import CannotRecoverError
from torchtune_adaptive.training.batch.limits import halvings
from torchtune_adaptive.training.batch.micro_batches import MicroBatcher
from torchtune_adaptive.training.batch.row_format import Row
from torchtune_adaptive.training.sizes import probe_batch

log = utils.get_logger("DEBUG")


def prepare_recovery(
    recoverable: RecoverableStep[Any],
    dataset: Sequence[Row],
    *,
    optimizers: Sequence[torch.optim.Optimizer],
    watch: PressureWatch,
    device: torch.device,
    is_wanted: bool,
    why_not: str,
) -> None:
    """Create the optimizers' state, and prepare recovery while memory is free. A collective.

    If recovery is not possible, this is logged, and an out-of-memory error will end the run.
    Args:
        is_wanted: whether to recover, if it is possible.
        why_not: why recovery is not possible, if that is known.

    Raises:
        NothingFitsError: the optimizers' state or the smallest micro-step does not fit.
    """
    if is_wanted:
        try:
            if why_not:
                raise cannot_recover(why_not)
            recoverable.rehearse(dataset)
            return
        except CannotRecoverError as error:
            utils.log_rank_zero(log, str(error))
    recoverable.disable()
    allocate_states(optimizers, watch)
    free_memory(device)


def larger_micro_batch(
    micro_batches: MicroBatcher,
    row: Row,
    rows_per_step: int,
    *,
    workload: Workload,
    watch: PressureWatch,
    options: SearchOptions,
) -> int | None:
    """If the micro-batch was reduced, the largest size of which a step with copies of ``row`` fits. A collective.

    None if it was not reduced, if no larger one fits, or if host memory lacks the room for the copies from which
    model and optimizers are restored.
    Args:
        rows_per_step: samples of an optimizer step on a rank.
    """
    before, largest = micro_batches.limit, micro_batches.largest
    if before == largest:
        return None
    if reason := workload.why_no_copies():
        utils.log_rank_zero(
            log,
            f"micro-batch stays at {before}: to try a larger one, with copies of weights and optimizer state,"
            f" {reason}.",
        )
        return None

    def make_batch(size: int) -> list[list[Row]]:
        rows = min(micro_batches.rows_of(row, size=size), rows_per_step)
        return probe_batch(row, rows, micro_steps=math.ceil(rows_per_step / rows))

    found = first_that_fits(workload, make_batch, halvings(largest.size, above=before.size), options=options)
    watch.reset()
    return found
