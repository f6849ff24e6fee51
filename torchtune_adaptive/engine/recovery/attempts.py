"""Run the micro-steps of an optimizer step, and tell all ranks if one of them ran out of memory.

A rank that runs out of memory cleans up. It then issues the remaining collectives of this micro-step and of the
following ones without computing, while the other ranks continue. After the last micro-step, all ranks agree on the CPU
whether the optimizer step may run.
"""

import logging
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from torch import nn

from torchtune_adaptive.engine.distributed.attributes import KeptAttributes, TensorPlace
from torchtune_adaptive.engine.distributed.fsdp_state import (
    KeptSettings,
    drop_forward_passes,
    fsdp_states,
    reset_after_failure,
)
from torchtune_adaptive.engine.distributed.functional_collectives import wait_for_unused_results
from torchtune_adaptive.engine.distributed.ledger import AnyCollective, CollectiveStateUnknownError, Ledger
from torchtune_adaptive.engine.distributed.snapshot import KeptBuffers, RandomStates
from torchtune_adaptive.engine.loop import Loop, sum_of_results
from torchtune_adaptive.engine.memory.devices import wait_for
from torchtune_adaptive.engine.memory.out_of_memory import (
    comes_from_out_of_memory,
    errors_behind,
    is_out_of_memory,
    is_out_of_memory_in_collective,
)
from torchtune_adaptive.engine.recovery.micro_steps import collectives_of
from torchtune_adaptive.engine.references import Generators
from torchtune_adaptive.errors import reason_of

log = logging.getLogger(__name__)


@dataclass
class Attempt:
    """The micro-steps of an optimizer step, as far as they have run, and their outcome.

    Attributes:
        result: the sum of this rank's results; None if any rank ran out of memory.
        ran_out: whether any rank ran out of memory.
        error: this rank's out-of-memory error in one line, if it had one.
        in_backward: whether the error was raised in a backward pass.
        has_fitted: whether a micro-step has succeeded, on any rank.
        largest: the largest of all ranks' numbers, in each position.
    """

    result: Any = None
    ran_out: bool = False
    error: str | None = None
    in_backward: bool = False
    has_fitted: bool = False
    largest: Sequence[int] = ()


@dataclass(eq=False)
class Recovery:
    """Runs the micro-steps of one model on one rank, and keeps collectives aligned after an out-of-memory error.

    Attributes:
        ledger: attached to the loop's model, with the expected collectives.
        buffers: those that a micro-step may change. ``start_step`` saves them.
        modules: those whose attributes a micro-step may change.
        generators: random generators of one's own, from which it may draw.
    """

    loop: Loop
    _: KW_ONLY
    ledger: Ledger
    buffers: Sequence[TensorPlace]
    modules: Sequence[nn.Module]
    generators: Generators

    def __post_init__(self) -> None:
        self._random_states = RandomStates(self.loop.device, self.generators.now())
        self._kept: KeptBuffers | None = None
        self._attributes = KeptAttributes(self.modules, self.buffers)
        self._states = fsdp_states(self.loop.model)
        self._settings = self._first_settings = KeptSettings(self._states)
        self._is_in_step = True
        self._is_interrupted = False  # whether an error of the caller's has ended the last attempt

    @property
    def has_other_settings(self) -> bool:
        """Whether FSDP2's settings were others when the step started than after the dry run."""
        return not self._settings.is_like(self._first_settings)

    def start_step(self) -> None:
        """Save all that failed attempts restore: random states, buffers, attributes of modules, FSDP2's settings.

        A collective.
        """
        self._reset_if_interrupted()
        self.ledger.start_step()
        self._random_states = RandomStates(self.loop.device, self.generators.now())
        self._kept = KeptBuffers(self.buffers) if self._kept is None else self._kept.renewed()
        self._attributes.save()
        self._settings = KeptSettings(self._states)

    def attempt(self, micro_steps: Sequence[Callable[[], Any]], *, numbers: Sequence[int] = ()) -> Attempt:
        """Run ``micro_steps``, equally many on every rank, and agree on the outcome.

        A collective; it adds one all-reduce on the CPU. If any rank ran out of memory, the gradients on all ranks are
        None afterwards, all that ``start_step`` has saved is as it was then, and the model can run a new step.

        Args:
            numbers: this rank's, equally many on every rank; they are compared in the same all-reduce.

        Raises:
            CollectiveStateUnknownError: this rank cannot issue the same collectives as its peers. It must exit, and the
                launcher then ends the others.
        """
        attempt = Attempt()
        self._is_interrupted = True
        for number, micro_step in enumerate(micro_steps, start=1):
            drop_forward_passes(self._states)
            self.ledger.begin(is_last=number == len(micro_steps))
            if attempt.error is None:
                self._run(micro_step, attempt)
            if attempt.error is not None:
                self._replay_rest(micro_step, attempt.error)
            elif self._is_in_step and not self.ledger.agrees:
                self._is_in_step = False
                log.warning(
                    "Micro-steps no longer issue the collectives of the dry run: an out-of-memory error will now end"
                    ' the run. Pass `reduce="last"` instead of calling `set_requires_gradient_sync(False)`, and issue'
                    " your own collectives between the steps."
                )
        own = attempt.error is not None, attempt.has_fitted, bool(self.ledger.unused)
        ran_out, has_fitted, has_unused, *attempt.largest = self.loop.consensus.max_of_each(*map(int, own), *numbers)
        attempt.ran_out, attempt.has_fitted = bool(ran_out), bool(has_fitted)
        if ran_out:
            attempt.result = None
            self._clean(has_garbage=attempt.error is None)  # else this rank has cleaned up at once
        elif has_unused:
            self.ledger.drop_unused(self.loop.consensus)
        self._is_interrupted = False
        drop_forward_passes(self._states)  # else the model shows parameters that stay whole, without their gradients
        return attempt

    def _run(self, micro_step: Callable[[], Any], attempt: Attempt) -> None:
        """Add the result of ``micro_step`` to ``attempt``, or clean up and keep the text of its error there.

        Only the text is kept, because the error's traceback keeps all tensors alive.
        """
        handled = sys.exc_info()[1]
        try:
            with self.ledger.running():
                result = micro_step()
            attempt.result = sum_of_results(attempt.result, result)
            attempt.has_fitted = True
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
            try:
                self._clean()
            except Exception as failure:
                raise CollectiveStateUnknownError(
                    f"this rank could not clean up: {failure}; {attempt.error}"
                ) from failure

    def _clean(self, *, has_garbage: bool = True) -> None:
        """Undo everything that the failed step left. Must be called outside of any ``except`` block."""
        wait_for(self.loop.device)  # running collectives may use its memory; peers issue them too, so they end
        self.loop.clean_up(has_garbage=has_garbage)
        self._settings.restore()
        self._attributes.restore()
        if self._kept is not None:
            self._kept.restore()
        self._random_states.restore()

    def _replay_rest(self, micro_step: Callable[[], object], error: str) -> None:
        """Issue the collectives of ``micro_step`` that this rank has not issued, for which its peers wait."""
        if not self._is_in_step:
            raise CollectiveStateUnknownError(f"micro-steps no longer issue the collectives of the dry run; {error}")
        try:
            self.ledger.replay_rest(self._work_out(micro_step) if self.ledger.counts else None)
        except CollectiveStateUnknownError as doubt:
            raise CollectiveStateUnknownError(
                f"this rank cannot issue the collectives that the others wait for: {doubt}; {error}"
            ) from doubt

    def _work_out(self, micro_step: Callable[[], object]) -> list[AnyCollective]:
        """The collectives of ``micro_step``, among which are some that the model issues itself."""
        try:
            found = collectives_of(micro_step, self.ledger, self._states)
        except Exception as failure:
            raise CollectiveStateUnknownError(f"they could not be worked out: {reason_of(failure)}") from failure
        self._clean()
        return found

    def close(self) -> None:
        """Restore the model's own communication functions, and drop what an interrupted attempt has left."""
        self.ledger.detach()
        self._reset_if_interrupted()

    def _reset_if_interrupted(self) -> None:
        """Drop what an error of the caller's has left: FSDP2 holds gradients that no parameter shows.

        Unlike ``Loop.clean_up`` it does not wait for the device, which may be broken.
        """
        if self._is_interrupted:
            self.loop.release()
            reset_after_failure(self.loop.model)
            self._is_interrupted = False
