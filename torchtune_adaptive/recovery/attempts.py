"""Run the micro-steps of an optimizer step, and tell all ranks if one of them ran out of memory.

A rank that runs out of memory cleans up. It then issues the remaining collectives of this micro-step and of the
following ones without computing, while the other ranks continue. After the last micro-step, all ranks agree on the CPU
whether the optimizer step may run.
"""

import functools
import logging
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from torchtune_adaptive.distributed.consensus import Consensus
from torchtune_adaptive.distributed.fsdp_state import KeptSettings, fsdp_states, reset_after_failure
from torchtune_adaptive.distributed.ledger import CollectiveInDoubtError, Ledger
from torchtune_adaptive.distributed.snapshot import KeptTensors, RandomStates
from torchtune_adaptive.errors import InputError, reason_of
from torchtune_adaptive.memory.out_of_memory import (
    comes_from_out_of_memory,
    errors_behind,
    free_memory,
    is_out_of_memory,
    is_out_of_memory_in_collective,
)

log = logging.getLogger(__name__)

NO_SAMPLES = "An optimizer step must have samples, but has none."

Result = TypeVar("Result")


class MemoryPressure(IntEnum):
    """The memory pressure of a rank in the micro-steps of an optimizer step."""

    NONE = 0
    THRASHING = 1
    OUT_OF_MEMORY = 2


@dataclass(frozen=True)
class Attempt(Generic[Result]):
    """The outcome of the micro-steps of an optimizer step.

    Attributes:
        result: the sum of this rank's results; None if any rank ran out of memory.
        pressure: the highest of all ranks.
        own_pressure: the pressure of this rank.
        error: this rank's out-of-memory error in one line, if it had one.
        in_backward: whether the error was raised in a backward pass.
    """

    result: Result | None
    pressure: MemoryPressure
    own_pressure: MemoryPressure
    error: str | None
    in_backward: bool = False


class Recovery:
    """Runs the micro-steps of one model on one rank, and keeps collectives aligned after an out-of-memory error.

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
        self._states = fsdp_states(model)
        self._settings = KeptSettings(self._states)
        self._is_in_step = True

    def keep(self) -> Callable[[], None]:
        """Save the random states and the changing buffers, and return a function that restores them."""
        random_states, buffers = RandomStates(self._device), KeptTensors(self._changing_buffers)

        def restore() -> None:
            random_states.restore()
            buffers.restore()

        return restore

    def attempt(
        self,
        micro_steps: Sequence[Callable[[], Result]],
        *,
        is_thrashing: Callable[[], bool],
        is_even: bool = True,
    ) -> Attempt[Result]:
        """Run ``micro_steps`` on every rank, and agree on the outcome.

        A collective; it adds one all-reduce on the CPU. If any rank ran out of memory, the gradients on all ranks are
        None afterwards, FSDP2's settings are as before, and the model can run a new step.
        Args:
            is_thrashing: called on ranks that did not run out of memory.
            is_even: whether all ranks are known to have equally many micro-steps. Otherwise ranks exchange their
                numbers after the first micro-step, and need a second collective if a rank has several.
        Raises:
            CollectiveInDoubtError: this rank cannot issue the same collectives as its peers. It must exit, and the
                launcher then ends the others.
            InputError: some rank has fewer micro-steps than another, or none has any. Raised on every rank.
        """
        done = _Done[Result](is_thrashing)
        self._settings = KeptSettings(self._states)
        if is_even:
            self._run_all(micro_steps, done)
            worst = self._consensus.max_over_ranks(done.pressure)
        else:
            worst = self._run_and_compare(micro_steps, done)
        if worst < MemoryPressure.OUT_OF_MEMORY:
            return Attempt(done.result, MemoryPressure(worst), done.pressure, None)
        self._clean()
        return Attempt(None, MemoryPressure(worst), done.pressure, done.error, done.in_backward)

    def _run_all(self, micro_steps: Sequence[Callable[[], Any]], done: "_Done[Any]") -> None:
        """Run ``micro_steps``. After an error, only issue the collectives of the rest."""
        for micro_step in micro_steps:
            self._ledger.begin()
            if done.error is None:
                self._run(micro_step, done)
            if done.error is not None:
                self._replay_rest(done.error)
            elif not self._ledger.agrees:
                self._fall_out_of_step()

    def _run_and_compare(self, micro_steps: Sequence[Callable[[], Any]], done: "_Done[Any]") -> int:
        """Run ``micro_steps``, whose number may differ between ranks. Returns the highest pressure of all ranks.

        Ranks compare their numbers after the first micro-step. Most often it is the only one, and no second exchange
        is needed.
        """
        number = len(micro_steps)
        if number:
            self._run_all(micro_steps[:1], done)
        else:
            self._replay_another()
        compared = self._consensus.begin_max(done.pressure if number == 1 else MemoryPressure.NONE, -number, number)
        self._run_all(micro_steps[1:], done)
        worst, negated_fewest, most = compared()
        for _ in range(most - max(number, 1)):
            self._replay_another()
        if most > 1:
            worst = self._consensus.max_over_ranks(done.pressure)
        if -negated_fewest != most or not most:
            self._clean()
            raise InputError(_uneven(-negated_fewest, most))
        return worst

    def _replay_another(self) -> None:
        """Issue the collectives of a micro-step that this rank does not have; its peers would wait for them."""
        self._ledger.begin()
        self._clean_up_after("fewer micro-steps than on another rank")
        self._replay_rest("fewer micro-steps than on another rank")

    def _run(self, micro_step: Callable[[], Any], done: "_Done[Any]") -> None:
        """Add the result of ``micro_step`` to ``done``, or clean up and keep the text of its error there.

        Only the text is kept, because the error's traceback keeps all tensors alive.
        """
        try:
            done.add(micro_step())
        except Exception as error:
            if is_out_of_memory_in_collective(error):
                raise CollectiveInDoubtError(
                    f"out of memory inside a collective, so that it is unknown whether it was issued: {error}"
                ) from error
            if not comes_from_out_of_memory(error):
                raise
            done.fail(error)
        if done.error is not None:
            self._clean_up_after(done.error)

    def _clean(self) -> None:
        """Undo everything that the failed step left. Must be called outside of any ``except`` block."""
        self._forget()
        if self._device.type != "cpu":  # running collectives may use this memory; peers issue them too, so they end
            torch.get_device_module(self._device).synchronize(self._device)
        reset_after_failure(self._model)
        self._settings.restore()
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
            raise CollectiveInDoubtError(
                f"this rank cannot issue the collectives that the others wait for: {doubt}; {error}"
            ) from doubt

    def close(self) -> None:
        """Restore the model's own communication functions."""
        self._ledger.detach()

    def _fall_out_of_step(self) -> None:
        if self._is_in_step:
            log.warning(
                "Micro-steps no longer issue the collectives of the dry run:"
                " from now on an out-of-memory error ends the run. A likely cause is gradient accumulation by"
                " `set_requires_gradient_sync(False)`: leave it on, so that every micro-step reduces its gradients."
            )
        self._is_in_step = False


class _Done(Generic[Result]):
    """The progress of an optimizer step: the sum of results, up to the first error."""

    def __init__(self, is_thrashing: Callable[[], bool]) -> None:
        self.result: Result | None = None
        self.error: str | None = None
        self.in_backward = False
        self._is_thrashing = is_thrashing

    @functools.cached_property
    def pressure(self) -> MemoryPressure:
        """The memory pressure of this rank, after the last micro-step."""
        return MemoryPressure.OUT_OF_MEMORY if self.error is not None else MemoryPressure(self._is_thrashing())

    def add(self, result: Result) -> None:
        """Add the result of one more micro-step."""
        self.result = sum_of_results(self.result, result)

    def fail(self, error: Exception) -> None:
        """Keep the text and the origin of ``error``, but not the error itself."""
        self.error = reason_of(next(one for one in errors_behind(error) if is_out_of_memory(one)))
        frames = traceback.walk_tb(error.__traceback__)
        self.in_backward = any(frame.f_code.co_name == "_engine_run_backward" for frame, _ in frames)


def sum_of_results(one: Any, other: Any) -> Any:
    """The sum of two results of micro-steps, elementwise for tuples; ``other`` if ``one`` is None."""
    if isinstance(one, tuple):
        return tuple(map(sum_of_results, one, other))
    return other if one is None else one + other


def _uneven(fewest: int, most: int) -> str:
    if not most:
        return NO_SAMPLES
    return f"Every rank must have the same number of micro-steps, but one has {fewest} and another has {most}."
