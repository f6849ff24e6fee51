"""Learn the collectives of a micro-step from two small ones, or why out of memory cannot be recovered from."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import nn

from torchtune_adaptive.distributed.consensus import Consensus
from torchtune_adaptive.distributed.fsdp_state import CannotRecordError, reset_after_failure
from torchtune_adaptive.distributed.ledger import Collective, Ledger
from torchtune_adaptive.distributed.recovery import Recovery
from torchtune_adaptive.distributed.snapshot import KeptBuffers, keep_random_states
from torchtune_adaptive.distributed.vote import Outcome, run_together
from torchtune_adaptive.memory.operations import CountCollectives
from torchtune_adaptive.memory.out_of_memory import free_memory


def rehearse(
    micro_steps: Sequence[Callable[[], object]],
    *,
    model: nn.Module,
    device: torch.device,
    consensus: Consensus,
    forget: Callable[[], object] = lambda: None,
) -> Recovery | str | Literal[Outcome.OUT_OF_MEMORY]:
    """A ``Recovery`` for ``model`` whose ledger knows its micro-steps, or in a sentence's part why there is none.

    Runs ``micro_steps``, forward to backward on batches of different shapes, with a vote before each
    collective. Random generators and buffers are afterwards as before, and gradients are None. It also does
    FSDP2's and the communicators' lazy set-up while memory is free. A collective; the answer is every rank's,
    ``Outcome.OUT_OF_MEMORY`` if a micro-step ran out of memory on one of them. Without a ``Recovery`` the model's
    collectives are left as they were. ``forget`` drops what an aborted micro-step has left outside of the model.

    Raises:
        RuntimeError: a micro-step failed otherwise on another rank; its own error on the rank it hit.
    """
    ledger, reason = None, ""
    try:
        ledger = Ledger(model, device)
    except CannotRecordError as error:
        reason = str(error)
    if consensus.any_rank(ledger is None):
        if ledger is not None:
            ledger.detach()
        return _first(consensus.from_all_ranks(reason))
    assert ledger is not None
    recorded: list[list[Collective]] = []
    issued: list[int] = []
    buffers = KeptBuffers(model.buffers())

    def play() -> None:
        for micro_step in micro_steps:
            ledger.begin()
            with CountCollectives() as counter:
                micro_step()
            recorded.append(ledger.issued)
            issued.append(counter.issued)

    with keep_random_states():
        outcome = run_together(play, consensus)
    forget()
    changing = buffers.changed()
    buffers.restore()
    reset_after_failure(model)
    free_memory(device)
    if outcome is Outcome.OUT_OF_MEMORY:
        ledger.detach()
        return outcome
    reason = _first(consensus.from_all_ranks(_why_not_covered(recorded, issued))) or _difference(recorded[0], consensus)
    if reason:
        ledger.detach()
        return reason
    ledger.template = recorded[0]
    return Recovery(model, device, consensus=consensus, ledger=ledger, changing_buffers=changing, forget=forget)


def _why_not_covered(recorded: list[list[Collective]], issued: list[int]) -> str:
    for number, collectives in zip(issued, recorded, strict=True):
        if number != len(collectives):
            return (
                f"a micro-step issues {number} collectives, but FSDP2 only {len(collectives)} of them:"
                " the rest, such as those of tensor or context parallelism, may depend on the batch"
            )
    if any(collectives != recorded[0] for collectives in recorded):
        return "micro-steps on different batches issue different collectives"
    return ""


def _difference(collectives: list[Collective], consensus: Consensus) -> str:
    text = "\n".join(collective.description() for collective in collectives)
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    if consensus.min_over_ranks(digest) != consensus.max_over_ranks(digest):
        return "ranks issue different collectives in a micro-step"
    return ""


def _first(reasons: list[str]) -> str:
    return next((reason for reason in reasons if reason), "")
