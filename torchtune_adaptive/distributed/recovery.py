"""Run the micro-steps of an optimizer step, and let all ranks know if any of them ran out of memory.

A rank that runs out of memory cleans up. It then issues the remaining collectives of this micro-step and of those
that follow, without computing. The other ranks compute on. After the last micro-step, all ranks agree on the CPU
whether the optimizer step may be taken.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torchtune import utils

from torchtune_adaptive.distributed.consensus import Consensus
from torchtune_adaptive.distributed.fsdp_state import reset_after_failure
from torchtune_adaptive.distributed.ledger import CollectiveInDoubtError, Ledger
from torchtune_adaptive.distributed.snapshot import KeptTensors, RandomStates
from torchtune_adaptive.errors import reason_of
from torchtune_adaptive.memory.out_of_memory import (
    comes_from_out_of_memory,
    errors_behind,
    free_memory,
    is_out_of_memory,
    is_out_of_memory_in_collective,
)

log = utils.get_logger("DEBUG")

Result = TypeVar("Result")


class MemoryPressure(IntEnum):
    """How short of memory a rank was in the micro-steps of an optimizer step."""

    NONE = 0
    THRASHING = 1
    OUT_OF_MEMORY = 2


@dataclass(frozen=True)
class Attempt(Generic[Result]):
    """The outcome of the micro-steps of an optimizer step.

    Attributes:
        result: the sum of this rank's results; None if any rank ran out of memory.
        pressure: the worst of all ranks.
        own_pressure: that of this rank.
        error: this rank's out-of-memory error in one line, if it had one.
    """

    result: Result | None
    pressure: MemoryPressure
    own_pressure: MemoryPressure
    error: str | None


class Recovery:
    """Runs the micro-steps of one model on one rank, and keeps the ranks in step after an out-of-memory error.

    Args:
        ledger: attached to ``model``, with its template set.
        changing_buffers: the buffers that a micro-step changes. ``keep`` saves them.
        forget: releases memory that an aborted micro-step holds outside ``model``.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        consensus: Consensus,
        ledger: Ledger,
        changing_buffers: list[torch.Tensor],
        forget: Callable[[], object],
    ) -> None:
        self._model = model
        self._device = device
        self._consensus = consensus
        self._ledger = ledger
        self._changing_buffers = changing_buffers
        self._forget = forget
        self._is_in_step = True

    def keep(self) -> Callable[[], None]:
        """Save the random states and the changing buffers, and return a function that restores them."""
        random_states, buffers = RandomStates(self._device), KeptTensors(self._changing_buffers)

        def restore() -> None:
            random_states.restore()
            buffers.restore()

        return restore

    def attempt(
        self, micro_steps: Iterable[Callable[[], Result]], *, is_thrashing: Callable[[], bool]
    ) -> Attempt[Result]:
        """Run ``micro_steps`` on every rank, and agree on the outcome.

        A collective: every rank must call it with the same number of micro-steps. It adds one collective, on the CPU.
        If any rank ran out of memory, the gradients on all ranks are None afterwards, and the model can run a new
        step. ``is_thrashing`` is called only on ranks that did not run out of memory.

        Raises:
            CollectiveInDoubtError: this rank cannot issue the same collectives as its peers. It must end, and the
                launcher then ends the others.
        """
        result: Result | None = None
        error: str | None = None
        for micro_step in micro_steps:
            self._ledger.begin()
            if error is None:
                result, error = self._run(micro_step, result)
                if error is not None:
                    self._clean_up_after(error)
            if error is not None:
                self._replay_rest(error)
            elif not self._ledger.agrees:
                self._fall_out_of_step()
        own = MemoryPressure.OUT_OF_MEMORY if error is not None else MemoryPressure(is_thrashing())
        worst = MemoryPressure(self._consensus.max_over_ranks(own))
        if worst is MemoryPressure.OUT_OF_MEMORY:
            result = None
            self._clean()
        return Attempt(result, worst, own, error)

    def _run(self, micro_step: Callable[[], Result], total: Any) -> tuple[Result | None, str | None]:
        """Add the result of ``micro_step`` to ``total``, or return the text of its out-of-memory error.

        Only the text, because the traceback of the error keeps all tensors alive.
        """
        try:
            result = micro_step()
            return (result if total is None else total + result), None
        except Exception as error:
            if is_out_of_memory_in_collective(error):
                raise CollectiveInDoubtError(
                    f"out of memory inside a collective, after which nobody knows whether it was issued: {error}"
                ) from error
            if not comes_from_out_of_memory(error):
                raise
            return None, reason_of(next(one for one in errors_behind(error) if is_out_of_memory(one)))

    def _clean(self) -> None:
        """Drop everything that this step has left. Must be called outside any ``except`` block."""
        self._forget()
        if self._device.type != "cpu":  # running collectives may use this memory; they end, as peers issue them too
            torch.get_device_module(self._device).synchronize(self._device)
        reset_after_failure(self._model)
        free_memory(self._device)

    def _clean_up_after(self, error: str) -> None:
        try:
            self._clean()
        except Exception as failure:
            raise CollectiveInDoubtError(f"this rank could not clean up: {failure}; {error}") from failure

    def _replay_rest(self, error: str) -> None:
        if not self._is_in_step:
            raise CollectiveInDoubtError(f"micro-steps no longer issue the collectives of the dry run; {error}")
        try:
            self._ledger.replay_rest()
        except CollectiveInDoubtError as doubt:
            raise CollectiveInDoubtError(f"this rank cannot keep in step with the others: {doubt}; {error}") from doubt

    def _fall_out_of_step(self) -> None:
        if self._is_in_step:
            log.warning(
                "Micro-steps no longer issue the collectives of the dry run:"
                " from now on an out-of-memory error ends the run."
            )
        self._is_in_step = False
