"""The dry run before training, while memory is free, from which recovery learns the collectives."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from torchtune_adaptive.distributed.vote import Outcome, run_with_votes
from torchtune_adaptive.errors import NOTHING_FITS_ADVICE, CannotRecoverError, InputError, NothingFitsError
from torchtune_adaptive.memory.devices import describe_peak
from torchtune_adaptive.recovery.attempts import Recovery
from torchtune_adaptive.recovery.dry_run import DryRun, dry_run
from torchtune_adaptive.recovery.micro_batches import MicroBatches
from torchtune_adaptive.recovery.optimizer_state import allocate_state
from torchtune_adaptive.recovery.watch import PressureWatch

_LONGEST_LIST = 3  # different figures of ranks in a message


class Rehearsal:
    """Creates the optimizers' state, and a recovery from a dry run of small micro-steps.

    Args:
        forget: frees memory that a failed micro-step holds outside of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        device: torch.device,
        watch: PressureWatch,
        forget: Callable[[], object],
    ) -> None:
        self._model = model
        self._optimizers = optimizers
        self._device = device
        self._consensus = watch.consensus
        self._meter = watch.meter
        self._forget = forget

    def allocate_states(self) -> None:
        """Create the optimizers' state. A collective.

        Raises:
            NothingFitsError: the state does not fit.
        """
        if run_with_votes(self._allocate_states, self._consensus) is Outcome.OUT_OF_MEMORY:
            raise NothingFitsError(
                "the optimizer's state must fit beside model and gradients, but does not"
                f" ({self._figures()}); an 8-bit optimizer, LoRA or more ranks would need less."
            )

    def recovery(self, micro_step: Callable[[Any], object], micro_batches: MicroBatches, samples: Any) -> Recovery:
        """A recovery for ``micro_step``, which is run on the first small micro-batches of ``samples`` that fit.

        A collective. It restores the model, and sets gradients to None.
        Raises:
            NothingFitsError: none of the micro-batches fits.
            CannotRecoverError: recovery is not possible for this model and step.
            InputError: the micro-batch size differs between ranks, or some rank has no samples.
        """
        rehearsals = list(micro_batches.rehearsals(samples))
        self._check(micro_batches.size, has_samples=bool(rehearsals))
        found = DryRun(None, out_of_memory=True)
        for rehearsed in rehearsals:
            found = dry_run(
                [partial(self._metered, micro_step, one) for one in rehearsed],
                model=self._model,
                device=self._device,
                consensus=self._consensus,
                forget=self._forget,
            )
            if not found.out_of_memory:
                break
        if found.out_of_memory:
            raise NothingFitsError(
                "the first rows of the data set must fit, but their forward or backward pass ran out of memory"
                f" ({self._figures()}); {NOTHING_FITS_ADVICE}."
            )
        if found.recovery is None:
            raise CannotRecoverError(f"An out-of-memory error in training will end the run: {found.reason}.")
        return found.recovery

    def _check(self, size: int, *, has_samples: bool) -> None:
        """Check the arguments of all ranks. A collective."""
        smallest, largest = self._consensus.min_and_max(size)
        if smallest != largest:
            raise InputError(
                f"`micro_batch_size` must be the same on every rank, but is {smallest} on one and {largest} on another."
            )
        if self._consensus.any_rank(not has_samples):
            raise InputError("An optimizer step must have samples on every rank, but has none on some.")

    def _metered(self, micro_step: Callable[[Any], object], micro_batch: Any) -> None:
        with self._meter or nullcontext():
            micro_step(micro_batch)

    def _allocate_states(self) -> None:
        for optimizer in self._optimizers:
            if allocate_state(optimizer) and self._meter is not None:
                self._meter.count([list(values.values()) for values in optimizer.state.values()])

    def _figures(self) -> str:
        """Peaks and limits of the ranks, without duplicates. A collective."""
        figures = self._consensus.from_all_ranks(describe_peak(self._meter))
        return "; ".join(list(dict.fromkeys(figures))[:_LONGEST_LIST])
