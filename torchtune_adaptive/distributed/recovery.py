"""Run the micro-steps of an optimizer step so that out of memory on one rank becomes a fact that all ranks know.

A rank that runs out of memory drops what its micro-step left, and issues the rest of its collectives, and
those of the micro-steps to come, without computing. The others notice nothing until all ranks agree, at the
end and on the CPU, whether the step may be taken.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import nn
from torchtune import utils

from torchtune_adaptive.distributed.consensus import Consensus
from torchtune_adaptive.distributed.fsdp_state import reset_after_failure
from torchtune_adaptive.distributed.ledger import CollectiveInDoubtError, Ledger
from torchtune_adaptive.distributed.snapshot import KeptBuffers, RandomStates
from torchtune_adaptive.errors import reason_of
from torchtune_adaptive.memory.out_of_memory import (
    comes_from_out_of_memory,
    errors_behind,
    free_memory,
    is_out_of_memory,
    is_out_of_memory_in_collective,
)

log = utils.get_logger("DEBUG")

Result = TypeVar("Result", bound="Summable")


class Summable(Protocol):
    """What can be added to its like."""

    def __add__(self, other: Any, /) -> Any: ...


class Strain(IntEnum):
    """How an optimizer step's micro-steps went; the worst of all ranks counts."""

    NONE = 0
    THRASHING = 1
    OUT_OF_MEMORY = 2


@dataclass(frozen=True)
class Attempt(Generic[Result]):
    """How micro-steps went, by the worst strain of all ranks.

    ``result`` is the sum of theirs, None if any rank ran out of memory; ``own_strain`` and ``error``, what ran
    out of memory in one line, are this rank's.
    """

    result: Result | None
    strain: Strain
    own_strain: Strain
    error: str | None


class Recovery:
    """Of one model on one rank.

    Args:
        ledger: attached to ``model``; its template is that of every micro-step.
        changing_buffers: those that a micro-step changes, to be put back when it is run again.
        forget: drops what an aborted micro-step has left outside of ``model``.
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
        """A function that brings random generators and changing buffers back to where they are now."""
        random_states, buffers = RandomStates(self._device), KeptBuffers(self._changing_buffers)

        def restore() -> None:
            random_states.restore()
            buffers.restore()

        return restore

    def attempt(
        self, micro_steps: Iterable[Callable[[], Result]], *, is_thrashing: Callable[[], bool]
    ) -> Attempt[Result]:
        """Run ``micro_steps``, as many on every rank, and agree on how it went; one exchange on the CPU. A collective.

        If a rank ran out of memory, all of them stand between steps afterwards, without gradients, and the
        results are to be thrown away. ``is_thrashing`` is asked on a rank that did not.

        Raises:
            CollectiveInDoubtError: this rank cannot keep in step with its peers and must end. They end by the launcher.
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
        own = Strain.OUT_OF_MEMORY if error is not None else Strain(is_thrashing())
        worst = Strain(self._consensus.max_over_ranks(own))
        if worst is Strain.OUT_OF_MEMORY:
            result = None
            self._clean()
        return Attempt(result, worst, own, error)

    def _run(self, micro_step: Callable[[], Result], before: Result | None) -> tuple[Result | None, str | None]:
        """The sum so far, or what ran out of memory. Only the text leaves: the traceback pins every tensor."""
        try:
            result = micro_step()
            return (result if before is None else before + result), None
        except Exception as error:
            if is_out_of_memory_in_collective(error):
                raise CollectiveInDoubtError(
                    f"out of memory inside a collective, after which nobody knows whether it was issued: {error}"
                ) from error
            if not comes_from_out_of_memory(error):
                raise
            return None, reason_of(next(one for one in errors_behind(error) if is_out_of_memory(one)))

    def _clean(self) -> None:
        """Stand between steps again, with nothing left of this one. Outside of any ``except`` block."""
        self._forget()
        if self._device.type != "cpu":  # collectives under way may still read what is dropped; peers issue them too
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
            raise CollectiveInDoubtError(f"micro-steps no longer issue the collectives of the rehearsal; {error}")
        try:
            self._ledger.replay_rest()
        except CollectiveInDoubtError as doubt:
            raise CollectiveInDoubtError(f"this rank cannot keep in step with the others: {doubt}; {error}") from doubt

    def _fall_out_of_step(self) -> None:
        if self._is_in_step:
            log.warning(
                "Micro-steps no longer issue the collectives of the rehearsal:"
                " from now on an out-of-memory error ends the run."
            )
        self._is_in_step = False
