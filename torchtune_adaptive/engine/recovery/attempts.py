"""Run the micro-steps of an optimizer step, and tell all ranks if one of them ran out of memory.

A rank that runs out of memory cleans up. It then issues the remaining collectives of this micro-step and of the
following ones without computing, while the other ranks continue. After the last micro-step, all ranks agree on the CPU
whether the optimizer step may run.
"""

import logging
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.engine.distributed.fsdp_state import (
    KeptSettings,
    drop_forward_passes,
    fsdp_states,
    reset_after_failure,
)
from torchtune_adaptive.engine.distributed.functional_collectives import wait_for_unused_results
from torchtune_adaptive.engine.distributed.ledger import AnyCollective, CollectiveStateUnknownError, Ledger
from torchtune_adaptive.engine.distributed.snapshot import BufferPlace, KeptBuffers, RandomStates
from torchtune_adaptive.engine.memory.out_of_memory import (
    comes_from_out_of_memory,
    errors_behind,
    free_memory,
    is_out_of_memory,
    is_out_of_memory_in_collective,
)
from torchtune_adaptive.engine.recovery.micro_steps import collectives_of
from torchtune_adaptive.errors import InputError, quote, reason_of

log = logging.getLogger(__name__)

NO_SAMPLES = "An optimizer step must have samples, but has none."

Result = TypeVar("Result")


class MemoryPressure(IntEnum):
    """The memory pressure of a rank in the micro-steps of an optimizer step."""

    NONE = 0
    THRASHING = 1
    OUT_OF_MEMORY = 2


@dataclass
class Attempt(Generic[Result]):
    """The micro-steps of an optimizer step, as far as they have run, and their outcome.

    Attributes:
        result: the sum of this rank's results; None if any rank ran out of memory.
        pressure: the highest of all ranks.
        own_pressure: the pressure of this rank.
        error: this rank's out-of-memory error in one line, if it had one.
        in_backward: whether the error was raised in a backward pass.
        num_done: this rank's micro-steps that succeeded.
    """

    result: Result | None = None
    pressure: MemoryPressure = MemoryPressure.NONE
    own_pressure: MemoryPressure = MemoryPressure.NONE
    error: str | None = None
    in_backward: bool = False
    num_done: int = 0


class Recovery:
    """Runs the micro-steps of one model on one rank, and keeps collectives aligned after an out-of-memory error.

    Args:
        ledger: attached to ``model``, with its expected set.
        buffers: those that a micro-step may change. ``start_step`` saves them.
        release: releases memory that an aborted micro-step holds outside ``model``.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        consensus: Consensus,
        ledger: Ledger,
        buffers: Sequence[BufferPlace],
        release: Callable[[], object],
    ) -> None:
        self._model = model
        self._device = device
        self._consensus = consensus
        self._ledger = ledger
        self._buffers = buffers
        self._release = release
        self._states = fsdp_states(model)
        self._settings = KeptSettings(self._states)
        self._is_in_step = True

    def start_step(self) -> Callable[[], None]:
        """Save the random states and buffers, and return a function that restores them. A collective."""
        self._ledger.start_step()
        random_states, buffers = RandomStates(self._device), KeptBuffers(self._buffers)

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
                numbers: before the first micro-step if only the last one reduces gradients; else after it, with a
                second collective if a rank has several.
        Raises:
            CollectiveStateUnknownError: this rank cannot issue the same collectives as its peers. It must exit, and the
                launcher then ends the others.
            InputError: some rank has fewer micro-steps than another, or none has any. Raised on every rank.
        """
        attempt = Attempt[Result]()
        self._settings = KeptSettings(self._states)
        has_unused = 0
        if not is_even and self._ledger.reduces_once:
            _check_numbers(*self._consensus.min_and_max(len(micro_steps)))
        if is_even or self._ledger.reduces_once:
            self._run_all(micro_steps, attempt)
            worst, has_unused = self._consensus.begin_max(_measure(attempt, is_thrashing), self._ledger.has_unused)()
        else:
            worst = self._run_and_compare(micro_steps, attempt, is_thrashing)
        attempt.pressure = MemoryPressure(worst)
        if attempt.pressure is MemoryPressure.OUT_OF_MEMORY:
            attempt.result = None
            self._clean()
        elif has_unused:
            self._ledger.drop_unused(self._consensus)
        return attempt

    def _run_all(self, micro_steps: Sequence[Callable[[], Result]], attempt: Attempt[Result]) -> None:
        """Run ``micro_steps``. After an error, only issue the collectives of the rest."""
        for number, micro_step in enumerate(micro_steps, start=1):
            drop_forward_passes(self._states)
            self._ledger.begin(is_last=number == len(micro_steps))
            if attempt.error is None:
                self._run(micro_step, attempt)
            if attempt.error is not None:
                self._replay_rest(attempt.error, micro_step)
            elif self._is_in_step and not self._ledger.agrees:
                self._is_in_step = False
                log.warning(
                    "Micro-steps no longer issue the collectives of the dry run:"
                    " from now on an out-of-memory error ends the run. A likely cause is gradient accumulation by"
                    ' `set_requires_gradient_sync(False)`: leave it on, and pass `reduce="last"`.'
                )

    def _run_and_compare(
        self,
        micro_steps: Sequence[Callable[[], Result]],
        attempt: Attempt[Result],
        is_thrashing: Callable[[], bool],
    ) -> int:
        """Run ``micro_steps``, whose number may differ between ranks. Returns the highest pressure of all ranks."""
        number = len(micro_steps)
        if number:
            self._run_all(micro_steps[:1], attempt)
        else:
            self._replay_another()
        so_far = _measure(attempt, is_thrashing) if number == 1 else MemoryPressure.NONE
        compared = self._consensus.begin_max(so_far, -number, number)
        self._run_all(micro_steps[1:], attempt)
        worst, negated_fewest, most = compared()
        for _ in range(most - max(number, 1)):
            self._replay_another()
        if most > 1:
            worst = self._consensus.max_over_ranks(so_far if number == 1 else _measure(attempt, is_thrashing))
        if -negated_fewest != most or not most:
            self._clean()
        _check_numbers(-negated_fewest, most)
        return worst

    def _replay_another(self) -> None:
        """Issue the collectives of a micro-step that this rank does not have; its peers would wait for them."""
        reason = "fewer micro-steps than on another rank"
        self._ledger.begin(is_last=True)
        self._clean_up_after(reason)
        self._replay_rest(reason)

    def _run(self, micro_step: Callable[[], Result], attempt: Attempt[Result]) -> None:
        """Add the result of ``micro_step`` to ``attempt``, or clean up and keep the text of its error there.

        Only the text is kept, because the error's traceback keeps all tensors alive.
        """
        handled = sys.exc_info()[1]
        try:
            with self._ledger.running():
                result = micro_step()
            attempt.result = sum_of_results(attempt.result, result)
            attempt.num_done += 1
        except Exception as error:
            if is_out_of_memory_in_collective(error, handled=handled):
                raise CollectiveStateUnknownError(
                    f"out of memory inside a collective, so that it is unknown whether it was issued: {error}"
                ) from error
            if not comes_from_out_of_memory(error, handled=handled):
                raise
            wait_for_unused_results()
            attempt.error = reason_of(next(filter(is_out_of_memory, errors_behind(error)), error))
            attempt.in_backward = any(
                frame.f_code.co_name == "_engine_run_backward" for frame, _ in traceback.walk_tb(error.__traceback__)
            )
        if attempt.error is not None:
            self._clean_up_after(attempt.error)

    def _clean(self) -> None:
        """Undo everything that the failed step left. Must be called outside of any ``except`` block."""
        self._release()
        if self._device.type != "cpu":  # running collectives may use this memory; peers issue them too, so they end
            torch.get_device_module(self._device).synchronize(self._device)
        reset_after_failure(self._model)
        self._settings.restore()
        free_memory(self._device)

    def _clean_up_after(self, error: str) -> None:
        try:
            self._clean()
        except Exception as failure:
            raise CollectiveStateUnknownError(f"this rank could not clean up: {failure}; {error}") from failure

    def _replay_rest(self, error: str, micro_step: Callable[[], object] | None = None) -> None:
        """Issue the rest of the collectives of ``micro_step``; None: of one that this rank does not have."""
        if not self._is_in_step:
            raise CollectiveStateUnknownError(f"micro-steps no longer issue the collectives of the dry run; {error}")
        try:
            self._ledger.replay_rest(self._work_out(micro_step) if self._ledger.counts else None)
        except CollectiveStateUnknownError as doubt:
            raise CollectiveStateUnknownError(
                f"this rank cannot issue the collectives that the others wait for: {doubt}; {error}"
            ) from doubt

    def _work_out(self, micro_step: Callable[[], object] | None) -> list[AnyCollective]:
        """The collectives of ``micro_step``, among which are some that the model issues itself."""
        if micro_step is None:
            raise CollectiveStateUnknownError("the sizes of its collectives are not known")
        try:
            found = collectives_of(micro_step, self._ledger, self._states)
        except Exception as failure:
            raise CollectiveStateUnknownError(f"they could not be worked out: {reason_of(failure)}") from failure
        self._clean()
        return found

    def close(self) -> None:
        """Restore the model's own communication functions."""
        self._ledger.detach()


def _measure(attempt: Attempt[Any], is_thrashing: Callable[[], bool]) -> MemoryPressure:
    """Set and return the pressure of this rank. Call it once, after the last micro-step."""
    is_out = attempt.error is not None
    attempt.own_pressure = MemoryPressure.OUT_OF_MEMORY if is_out else MemoryPressure(is_thrashing())
    return attempt.own_pressure


def _check_numbers(fewest: int, most: int) -> None:
    """Check the numbers of micro-steps on the ranks that have the fewest and the most."""
    if not most:
        raise InputError(NO_SAMPLES)
    if fewest != most:
        raise InputError(
            f"Every rank must have the same number of micro-steps, but one has {fewest} and another has {most}."
        )


def sum_of_results(one: Any, other: Any) -> Any:
    """The sum of two results of micro-steps, elementwise for tuples and dicts.

    What is None, or a name that a dict lacks, adds nothing.
    Raises:
        InputError: they cannot be summed.
    """
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, dict):
        return one | {name: sum_of_results(one.get(name), value) for name, value in other.items()}
    if isinstance(one, tuple):
        if len(one) != len(other):
            raise InputError(
                f"`micro_step` must return tuples of one length, but has returned {len(one)} and {len(other)} values."
            )
        sums = map(sum_of_results, one, other)
        return getattr(type(one), "_make", tuple)(sums)  # of a named tuple
    try:
        if isinstance(one, str | bytes):
            raise TypeError
        return one + other
    except TypeError:
        raise InputError(
            "`micro_step` must return tensors or numbers that can be summed, in tuples or dicts, or nothing; but"
            f" has returned {quote(one)} and {quote(other)}."
        ) from None
