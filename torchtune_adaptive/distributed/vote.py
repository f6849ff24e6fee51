"""Before every collective of a probe, all ranks agree that none of them has failed.

A rank that runs out of memory alone would leave its peers waiting in the next collective for ever. Here
each rank votes on the CPU before it issues a collective; the rank that failed votes once, where its
peers vote before their next one. They all stop at the same place, and no collective was issued in vain.
The price is a host round trip per collective: right for a probe, too much for training.
"""

from collections.abc import Callable
from enum import IntEnum
from typing import Any

from torch.utils._python_dispatch import _disable_current_modes

from torchtune_adaptive.distributed.consensus import Consensus
from torchtune_adaptive.memory.operations import OperationMode, is_collective, is_wait
from torchtune_adaptive.memory.out_of_memory import errors_behind, is_out_of_memory


class Outcome(IntEnum):
    """How a guarded piece of work ended on the ranks; the worst one counts for all."""

    DONE = 0
    OUT_OF_MEMORY = 1
    FAILED = 2


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


def _why_stopped(error: BaseException) -> tuple[Outcome, bool] | None:
    """The outcome that ``error`` means and whether it arose here; None if it is neither out of memory nor a peer's."""
    for one in errors_behind(error):
        if isinstance(one, _PeerStopped):
            return one.outcome, False
        if is_out_of_memory(one):
            return Outcome.OUT_OF_MEMORY, True
    return None


def run_together(work: Callable[[], object], consensus: Consensus) -> Outcome:
    """Run ``work`` on every rank; all ranks return the same outcome, whichever of them ran out of memory and where.

    A collective: every rank calls it with work that issues the same collectives in the same order. The
    tensors of a failed run are still referenced by nothing but what ``work`` itself left behind.

    Raises:
        RuntimeError: a peer failed with another error than out of memory; that error itself on the rank it hit.
    """
    outcome, failed_here = Outcome.DONE, True
    try:
        if consensus.world_size == 1:
            work()
        else:
            with _VoteBeforeCollectives(consensus):
                work()
    except Exception as error:
        stopped = _why_stopped(error)
        if stopped is None:
            consensus.max_over_ranks(Outcome.FAILED)
            raise
        outcome, failed_here = stopped  # only the fact leaves this block: the traceback pins every tensor
    if failed_here:  # or done: either way the peers wait for this rank's vote
        outcome = Outcome(consensus.max_over_ranks(outcome))
    if outcome is Outcome.FAILED:
        raise RuntimeError("another rank failed during a probe; its own message says why")
    return outcome
