"""Runs of small micro-steps, which record the collectives that they issue."""

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchtune_adaptive.engine.distributed.attributes import KeptAttributes, TensorPlace, tensor_places
from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.engine.distributed.ddp_ledger import DdpLedger
from torchtune_adaptive.engine.distributed.fsdp_ledger import FsdpLedger
from torchtune_adaptive.engine.distributed.fsdp_state import (
    KeptSettings,
    awaits_another_backward,
    drop_forward_passes,
    fsdp_states,
    reset_after_failure,
)
from torchtune_adaptive.engine.distributed.functional_collectives import (
    CannotRecordError,
    IssuedCounts,
    RecordFunctional,
    groups_of,
)
from torchtune_adaptive.engine.distributed.ledger import AnyCollective, Collective, Ledger
from torchtune_adaptive.engine.distributed.snapshot import KeptBuffers, keep_random_states
from torchtune_adaptive.engine.distributed.vote import Outcome, run_or_abort_together
from torchtune_adaptive.engine.loop import Loop
from torchtune_adaptive.engine.memory.copies import Copies
from torchtune_adaptive.engine.memory.out_of_memory import free_memory
from torchtune_adaptive.engine.recovery.attempts import Recovery
from torchtune_adaptive.engine.recovery.micro_steps import collectives_of
from torchtune_adaptive.engine.recovery.trial import Trial, cannot_cut
from torchtune_adaptive.errors import cannot_recover

MicroSteps = Sequence[Callable[[], object]]


class _Recorded(NamedTuple):
    """The collectives of one micro-step.

    Attributes:
        is_last: whether it ran as the last one of an optimizer step.
        num_issued: how many collectives torch has counted.
        is_known: whether this rank can find those that the model issues itself.
        awaits_another: whether the next one would continue its backward pass.
        numbers: what the ledger has counted.
        is_used: of each parameter, whether it was seen to have a gradient.
    """

    is_last: bool
    num_issued: int
    collectives: list[AnyCollective]
    is_known: bool
    awaits_another: bool
    numbers: Counter[Any]
    is_used: list[bool]


class Found(NamedTuple):
    """What micro-steps have shown.

    Attributes:
        reason: why recovery is not possible, "" if it is.
        expected: the collectives of a micro-step that is not the last one of an optimizer step, and of the last one.
        numbers: what the ledger has counted in each of the two.
        counts: of the groups in which the model issues collectives itself.
        buffers: those that may change.
        used: the parameters that have got gradients, on any rank.
    """

    reason: str
    expected: tuple[list[AnyCollective], list[AnyCollective]]
    numbers: tuple[Counter[Any], Counter[Any]]
    counts: IssuedCounts
    buffers: list[TensorPlace]
    used: list[nn.Parameter]


class RecordedRuns:
    """Runs small micro-steps with a vote before each collective, and records what they issue. All ranks together.

    After each run, random generators, buffers and attributes of modules are as before, and gradients None.

    Args:
        reduces_once: whether FSDP2 reduces gradients in the last micro-step of an optimizer step only.

    Attributes:
        modules: those whose buffers and attributes a micro-step may change.
        generators: random generators of one's own that it may draw from.
        repeats: whether micro-steps run twice: as others than the last one of an optimizer step, and as the last one.

    Raises:
        CannotRecoverError: the model's collectives cannot be recorded. Raised on every rank.
    """

    def __init__(self, loop: Loop, *, reduces_once: bool = False) -> None:
        self._loop = loop
        self._ledger = _attached_ledger(loop, reduces_once=reduces_once)
        self.modules = loop.modules()
        self.generators = loop.generators(self.modules)
        self.repeats = self._ledger.reduces_once

    def detach(self) -> None:
        """Restore the model's own communication functions."""
        self._ledger.detach()

    def recovery(self, found: Found) -> Recovery:
        """The recovery of micro-steps such as those that have ``found`` this."""
        self._ledger.expected, self._ledger.expected_numbers = found.expected, found.numbers
        self._ledger.counts = found.counts
        return Recovery(
            self._loop, ledger=self._ledger, buffers=found.buffers, modules=self.modules, generators=self.generators
        )

    def run(
        self,
        micro_steps: MicroSteps,
        *,
        keeps_gradients: bool = False,
        trial: Trial | None = None,
        only_last: bool = False,
        leaves_garbage: bool = False,
    ) -> Found | None:
        """Run ``micro_steps`` once, or twice if it ``repeats``. None if some rank ran out of memory. A collective.

        A micro-step that reduces must issue the same collectives with and without gradients of others before it, which
        is seen only if it ``keeps_gradients``. Otherwise training sees it: see ``Recovery``.

        Args:
            trial: compares the micro-steps.
            only_last: whether each runs as the last one of an optimizer step alone.
            leaves_garbage: whether what a failed run leaves is freed by the next run.
        """
        model, consensus = self._loop.model, self._loop.consensus
        recorded: list[_Recorded] = []

        def run_and_record() -> None:
            for is_last, micro_step in itertools.product(as_last, micro_steps):
                if not keeps_gradients or (trial is not None and not trial.is_finite):
                    reset_after_failure(model)
                drop_forward_passes(states)
                if trial is not None:  # micro-steps that are compared begin with equal models
                    attributes.restore()
                    buffers.restore_on_device()
                self._ledger.counts = IssuedCounts(groups_of(one for before in recorded for one in before.collectives))
                recorded.append(self._record(micro_step, states, is_last=is_last, trial=trial))

        as_last = (False, True) if self.repeats and not only_last else (True,)
        states = fsdp_states(model)
        settings, places = KeptSettings(states), tensor_places(self.modules)
        attributes = KeptAttributes(self.modules, places)
        with Copies(one.tensor for one in places if one.tensor is not None) as copies:
            buffers = KeptBuffers(places, copies)
            try:
                with keep_random_states(self.generators.now()):
                    outcome = run_or_abort_together(run_and_record, consensus)
            except Exception:
                settings.restore()
                # One sample may be too few for such a layer. All ranks are here, with an error of their own or not.
                if trial is not None and (layer := consensus.first_reason(trial.mixing_layer)):
                    raise cannot_cut(layer) from None
                raise
            finally:
                self._loop.release()
                may_change = buffers.that_may_change()
                attributes.restore()
                buffers.restore()
                reset_after_failure(model)
        if not leaves_garbage:
            free_memory(self._loop.device)
        if outcome is Outcome.OUT_OF_MEMORY:
            settings.restore()
            return None
        expected = _by_fsdp(recorded[0].collectives), _by_fsdp(recorded[-1].collectives)
        reason = consensus.first_reason(_why_not_covered(recorded, expected))
        if not reason and _differs_between_ranks([one for each in recorded for one in each.collectives], consensus):
            reason = "ranks issue different collectives in a micro-step"
        parameters = list(model.parameters())
        is_used = (int(any(one.is_used[number] for one in recorded)) for number in range(len(parameters)))
        used = list(itertools.compress(parameters, consensus.max_of_each(*is_used)))
        numbers = recorded[0].numbers, recorded[-1].numbers
        return Found(reason, expected, numbers, self._ledger.counts, may_change, used)

    def _record(
        self, micro_step: Callable[[], object], states: list[Any], *, is_last: bool, trial: Trial | None
    ) -> _Recorded:
        """Run ``micro_step``, and record what it issues. ``states``: FSDP2's of the model."""
        model, ledger = self._loop.model, self._ledger
        ledger.begin(is_last=is_last)
        watched = trial.micro_step() if trial is not None else nullcontext()
        with watched, RecordFunctional(ledger.record) as counter, ledger.running():
            result = micro_step()
        issued, numbers = ledger.issued, ledger.of_any_code.since_start()
        awaits_another = awaits_another_backward(model)
        drop_forward_passes(states)  # parameters that stay whole after a backward pass hide those with gradients
        if trial is not None and is_last:
            trial.note(result)
        shows_use = is_last is not isinstance(ledger, DdpLedger)  # which puts zeros into missing gradients at the end
        is_used = [shows_use and one.grad is not None for one in model.parameters()]
        is_known = True
        if groups_of(issued):
            is_known = _can_be_worked_out(issued, micro_step, ledger, states)
            if trial is not None and not trial.starts_finite():  # zeros in place of what others send give nan
                reset_after_failure(model)
                trial.forget_earlier()
        return _Recorded(is_last, counter.issued, issued, is_known, awaits_another, numbers, is_used)


def _by_fsdp(collectives: list[AnyCollective]) -> list[AnyCollective]:
    """Those that the model does not issue itself: FSDP2's or those of ``DistributedDataParallel``."""
    return [one for one in collectives if isinstance(one, Collective)]


def _can_be_worked_out(
    issued: list[AnyCollective], micro_step: Callable[[], object], ledger: Ledger, states: list[Any]
) -> bool:
    """Whether this rank, alone, finds the collectives that ``micro_step`` has ``issued``, and torch has counted them.

    In the first micro-step the groups to count for are not known yet.
    """
    if ledger.counts and ledger.counts.since_start() != Counter(groups_of(issued)):
        return False
    try:
        return collectives_of(micro_step, ledger, states) == issued
    except CannotRecordError:
        return False


def _attached_ledger(loop: Loop, *, reduces_once: bool) -> Ledger:
    """A ledger on every rank. If one rank cannot attach it, none does, and all have its reason. A collective."""
    ledger: Ledger | None = None
    reason = ""
    try:
        if isinstance(loop.model, DistributedDataParallel):
            ledger = DdpLedger(loop.model, loop.device)
        else:
            ledger = FsdpLedger(loop.model, loop.device, reduces_once=reduces_once)
    except CannotRecordError as error:
        reason = str(error)
    reason = loop.consensus.first_reason(reason)
    if ledger is not None and not reason:
        return ledger
    if ledger is not None:
        ledger.detach()
    raise cannot_recover(reason)


def _why_not_covered(recorded: list[_Recorded], expected: tuple[list[AnyCollective], list[AnyCollective]]) -> str:
    """Why the ``expected`` do not describe the collectives of every micro-step on this rank, or "".

    Those of the model itself need not be there, if it is known how to find them.
    """
    if any(one.awaits_another for one in recorded):
        return "a micro-step ends after `set_is_last_backward(False)`"
    is_known = all(one.is_known for one in recorded)
    for one in recorded:
        num_known = len(one.collectives if is_known else _by_fsdp(one.collectives))
        if one.num_issued != num_known:
            why = (
                f"a micro-step issues {one.num_issued} collectives, but only {num_known} of them gather parameters or"
                " reduce gradients: the others, for example of tensor or context parallelism or of a model that is not"
                " in `model`, may depend on the batch"
            )
            of_ddp = "If there is a DistributedDataParallel, pass that itself as `model`, and set none of its flags"
            return why if num_known else f"{why}. {of_ddp}"
    if any(_by_fsdp(one.collectives) != expected[one.is_last] for one in recorded):
        return "micro-steps on different batches issue different collectives"
    return ""


def _differs_between_ranks(collectives: list[AnyCollective], consensus: Consensus) -> bool:
    text = "\n".join(collective.description() for collective in collectives)
    return len({*consensus.from_all_ranks(hashlib.sha256(text.encode()).digest())}) > 1
