"""Let all ranks stop together when one of them fails in a probe.

If one rank runs out of memory, its peers would wait for it in their next collective. So every rank votes on the CPU
before each collective. A rank that fails votes once more, while its peers vote before their next collective. All
ranks then stop before the same collective. This costs a host round trip per collective, which is fine for a
probe but too slow for training.
"""

import sys
from collections.abc import Callable
from enum import IntEnum
from typing import Any

from torch.utils._python_dispatch import _disable_current_modes

from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.engine.distributed.functional_collectives import wait_for_unused_results
from torchtune_adaptive.engine.memory.operations import OperationMode, is_collective, is_wait
from torchtune_adaptive.engine.memory.out_of_memory import errors_behind, is_out_of_memory


class Outcome(IntEnum):
    """How ``work`` ended. All ranks get the worst outcome of any rank."""

    DONE = 0
    OUT_OF_MEMORY = 1
    FAILED = 2


class PeerFailedError(RuntimeError):
    """Another rank has failed, with an error of its own that is not out of memory."""


class _PeerStopped(Exception):
    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome


class _VoteBeforeCollectives(OperationMode):
    def __init__(self, consensus: Consensus) -> None:
        super().__init__()
        self._consensus = consensus

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_collective(func) and not is_wait(func):
            with _disable_current_modes():
                worst = self._consensus.max_over_ranks(Outcome.DONE)
            if worst != Outcome.DONE:
                raise _PeerStopped(Outcome(worst))
        return func(*args, **kwargs)


def _why_stopped(error: BaseException, handled: BaseException | None) -> tuple[Outcome, bool] | None:
    """Return the outcome for ``error`` and whether this rank failed; None if the error is of another kind."""
    for one in errors_behind(error, handled=handled):
        if isinstance(one, _PeerStopped):
            return one.outcome, False
        if is_out_of_memory(one):
            return Outcome.OUT_OF_MEMORY, True
    return None


def run_or_abort_together(work: Callable[[], object], consensus: Consensus) -> Outcome:
    """Run ``work`` with a vote before each collective, and return the same outcome on all ranks.

    A collective: all ranks must call it, and their work must issue the same collectives in the same order. This
    function keeps no references to the tensors of a failed run.

    Raises:
        PeerFailedError: another rank failed with an error other than out of memory. That rank raises its own error.
    """
    outcome, failed_here, handled = Outcome.DONE, True, sys.exc_info()[1]
    try:
        if consensus.world_size == 1:
            work()
        else:
            with _VoteBeforeCollectives(consensus):
                work()
    except Exception as error:
        stopped = _why_stopped(error, handled)
        if stopped is None:
            consensus.max_over_ranks(Outcome.FAILED)
            raise
        outcome, failed_here = stopped  # do not keep the error: its traceback keeps all tensors alive
        wait_for_unused_results()
    if failed_here:  # or if the work is done: the peers then wait for this rank's vote
        outcome = Outcome(consensus.max_over_ranks(outcome))
    if outcome is Outcome.FAILED:
        raise PeerFailedError("another rank failed during a probe; see its own error message")
    return outcome
