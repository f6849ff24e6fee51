"""Recovery in a recipe, prepared before training."""

from collections.abc import Sequence
from typing import Any

import torch
from torchtune import utils

from torchtune_adaptive.engine.memory.out_of_memory import free_memory
from torchtune_adaptive.engine.recovery.dry_run import allocate_states
from torchtune_adaptive.engine.recovery.step import RecoverableStep
from torchtune_adaptive.engine.recovery.watch import PressureWatch
from torchtune_adaptive.errors import CannotCutError, CannotRecoverError, cannot_recover
from torchtune_adaptive.training.batch.row_format import Row

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
        CannotCutError: the loss of a micro-batch is not the sum of those of its rows.
        NothingFitsError: the optimizers' state or the smallest micro-step does not fit.
    """
    if is_wanted:
        try:
            if why_not:
                raise cannot_recover(why_not)
            recoverable.dry_run(dataset)
            return
        except CannotCutError:
            raise
        except CannotRecoverError as error:
            utils.log_rank_zero(log, str(error))
    recoverable.disable()
    allocate_states(optimizers, watch)
    free_memory(device)
