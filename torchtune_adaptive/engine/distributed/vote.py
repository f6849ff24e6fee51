"""Let all ranks stop together when one of them fails in a probe.

If one rank runs out of memory, its peers would wait for it in their next collective. So every rank votes on the CPU
before each collective. A rank that fails votes once more, while its peers vote before their next collective. All
ranks then stop before the same collective. This costs a host round trip per collective, which is fine for a
probe but too slow for training.
"""

import re
import sys
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.engine.distributed.functional_collectives import wait_for_unused_results
from torchtune_adaptive.engine.memory.operations import OperationMode, is_collective, is_wait
from torchtune_adaptive.engine.memory.out_of_memory import errors_behind, is_out_of_memory
from torchtune_adaptive.errors import InputError

_SAME_SIZES = re.compile("_allgather_base|_reduce_scatter_base|allreduce")  # names of collectives of equal sizes
_IS_DONE, _IN_A_PART = 0, 1  # in place of the digest of a collective: no more of them; one of some of the ranks


class Outcome(IntEnum):
    """How ``work`` ended. All ranks get the worst outcome of any rank."""

    DONE = 0
    OUT_OF_MEMORY = 1
    FAILED = 2


class PeerFailedError(RuntimeError):
    """Another rank has failed, with an error of its own that is not out of memory."""


class RanksDifferError(InputError):
    """Ranks issue different collectives. Raised on all of them."""


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
                worst = _vote(self._consensus, Outcome.DONE, _digest(func, args, self._consensus.world_size))
            if worst != Outcome.DONE:
                raise _PeerStopped(worst)
        return func(*args, **kwargs)


def _vote(consensus: Consensus, outcome: Outcome, digest: int = _IS_DONE) -> Outcome:
    """The worst outcome of any rank. A collective.

    Raises:
        RanksDifferError: no rank has failed, but their next collectives differ: each would wait for the others.
    """
    worst, largest, negated_smallest = consensus.max_of_each(outcome, digest, -digest)
    if worst == Outcome.DONE and largest != -negated_smallest:
        raise RanksDifferError(
            "Ranks issue different collectives in one step, so that each would wait for the others: as where an expert"
            " or another part of the model gets no samples on one rank, or each rank runs a part of a pipeline."
        )
    return Outcome(worst)


def _digest(func: Any, args: tuple[Any, ...], world_size: int) -> int:
    """A number that is equal on all ranks if they issue the same collective."""
    group = next(
        (one for one in args if isinstance(one, torch.ScriptObject) and "ProcessGroup" in str(one._type())), None
    )
    if group is None or dist.ProcessGroup.unbox(group).size() != world_size:
        return _IN_A_PART  # or a functional collective, of tensor parallelism
    sizes = [one.numel() for one in tree_leaves(args) if isinstance(one, torch.Tensor)]
    return 2 + zlib.crc32(f"{func.__name__} {sizes if _SAME_SIZES.search(func.__name__) else ''}".encode())


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
        with _VoteBeforeCollectives(consensus) if consensus.world_size > 1 else nullcontext():
            work()
    except Exception as error:
        if any(isinstance(one, RanksDifferError) for one in errors_behind(error, handled=handled)):
            raise  # on each rank
        stopped = _why_stopped(error, handled)
        if stopped is None:
            _vote(consensus, Outcome.FAILED)
            raise
        outcome, failed_here = stopped  # do not keep the error: its traceback keeps all tensors alive
        wait_for_unused_results()
    if failed_here:  # or if the work is done: the peers then wait for this rank's vote
        outcome = _vote(consensus, outcome)
    if outcome is Outcome.FAILED:
        raise PeerFailedError("another rank failed during a probe; see its own error message")
    return outcome
