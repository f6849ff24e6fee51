"""Run small micro-steps before training, to learn the collectives that recovery must replay after a failure."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from torchtune_adaptive.distributed.consensus import Consensus
from torchtune_adaptive.distributed.fsdp_state import (
    CannotRecordError,
    KeptSettings,
    fsdp_states,
    reset_after_failure,
)
from torchtune_adaptive.distributed.ledger import Collective, Ledger
from torchtune_adaptive.distributed.snapshot import KeptTensors, keep_random_states
from torchtune_adaptive.distributed.vote import Outcome, run_with_votes
from torchtune_adaptive.memory.operations import CountCollectives
from torchtune_adaptive.memory.out_of_memory import free_memory
from torchtune_adaptive.recovery.attempts import Recovery


@dataclass(frozen=True)
class DryRun:
    """The outcome of a dry run. Exactly one of the attributes is set, the same one on every rank.

    Attributes:
        recovery: recovers from out-of-memory errors in micro-steps like those of the dry run.
        reason: why recovery is not possible, as part of a sentence.
        out_of_memory: whether a micro-step of the dry run ran out of memory on some rank.
    """

    recovery: Recovery | None
    reason: str = ""
    out_of_memory: bool = False

    def __post_init__(self) -> None:
        assert (self.recovery is not None) + bool(self.reason) + self.out_of_memory == 1


def dry_run(
    micro_steps: Sequence[Callable[[], object]],
    *,
    model: nn.Module,
    device: torch.device,
    consensus: Consensus,
    forget: Callable[[], object] = lambda: None,
) -> DryRun:
    """Run ``micro_steps`` with a vote before each collective, and make a ``Recovery`` from what they issue.

    A collective: all ranks must call it, and get the same kind of outcome. It restores random generators and buffers,
    and sets gradients to None. Settings of FSDP2 that a micro-step has changed for good stay changed; the micro-steps
    are therefore run once more before recovery is refused. The lazy set-up of FSDP2 and of the communicators then
    happens while memory is free. If there is no recovery, the model's original communication functions are restored.
    Args:
        micro_steps: forward and backward passes on batches of different shapes.
        forget: releases memory that an aborted micro-step holds outside ``model``.

    Raises:
        RuntimeError: on another rank a micro-step failed with an error other than out of memory. That rank raises
            its own error.
    """
    ledger, reason = _attach_ledger(model, device, consensus)
    if ledger is None:
        return DryRun(None, reason)
    options = {"model": model, "device": device, "consensus": consensus, "forget": forget}
    found = _try(micro_steps, ledger, **options)
    if found.reason:  # the first micro-step may have changed FSDP2's settings for good
        found = _try(micro_steps, ledger, **options)
    if found.recovery is None:
        ledger.detach()
    return found


def _try(
    micro_steps: Sequence[Callable[[], object]],
    ledger: Ledger,
    *,
    model: nn.Module,
    device: torch.device,
    consensus: Consensus,
    forget: Callable[[], object],
) -> DryRun:
    """Run ``micro_steps`` once, as ``dry_run`` describes, with ``ledger`` attached."""
    record = _Record(ledger)
    settings, buffers = KeptSettings(fsdp_states(model)), KeptTensors(model.buffers())
    with keep_random_states():
        outcome = run_with_votes(lambda: record.run(micro_steps), consensus)
    forget()
    changing_buffers = buffers.changed()
    buffers.restore()
    reset_after_failure(model)
    free_memory(device)
    if outcome is Outcome.OUT_OF_MEMORY:
        settings.restore()
        return DryRun(None, out_of_memory=True)
    reason = record.why_not_recoverable(consensus)
    if reason:
        return DryRun(None, reason)
    ledger.set_template(record.template)
    return DryRun(
        Recovery(model, device, consensus=consensus, ledger=ledger, changing_buffers=changing_buffers, forget=forget)
    )


def _attach_ledger(model: nn.Module, device: torch.device, consensus: Consensus) -> tuple[Ledger | None, str]:
    """Attach a ledger on all ranks. If one rank cannot, attach none, and return that rank's reason. A collective."""
    ledger, reason = None, ""
    try:
        ledger = Ledger(model, device)
    except CannotRecordError as error:
        reason = str(error)
    if not consensus.any_rank(ledger is None):
        return ledger, ""
    if ledger is not None:
        ledger.detach()
    return None, consensus.first_reason(reason)


class _Record:
    """The collectives that each micro-step of a dry run issues on this rank."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._recorded: list[list[Collective]] = []  # FSDP2's collectives of each micro-step
        self._num_issued: list[int] = []  # number of all collectives of each micro-step

    @property
    def template(self) -> list[Collective]:
        """The collectives of one micro-step."""
        return self._recorded[0]

    def run(self, micro_steps: Sequence[Callable[[], object]]) -> None:
        """Run ``micro_steps`` and record their collectives."""
        for micro_step in micro_steps:
            self._ledger.begin()
            with CountCollectives() as counter:
                micro_step()
            self._recorded.append(self._ledger.issued)
            self._num_issued.append(counter.issued)

    def why_not_recoverable(self, consensus: Consensus) -> str:
        """Return why the template does not describe every micro-step on every rank, or "". A collective."""
        reason = consensus.first_reason(self._why_not_covered())
        if not reason and self._differs_between_ranks(consensus):
            reason = "ranks issue different collectives in a micro-step"
        return reason

    def _why_not_covered(self) -> str:
        for num_issued, recorded in zip(self._num_issued, self._recorded, strict=True):
            if num_issued != len(recorded):
                return (
                    f"a micro-step issues {num_issued} collectives, but FSDP2 only {len(recorded)} of them:"
                    " the others, for example of tensor or context parallelism, may depend on the batch"
                )
        if any(recorded != self.template for recorded in self._recorded):
            return "micro-steps on different batches issue different collectives"
        return ""

    def _differs_between_ranks(self, consensus: Consensus) -> bool:
        text = "\n".join(collective.description() for collective in self.template)
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        smallest, largest = consensus.min_and_max(digest)
        return smallest != largest
