"""Run small micro-steps while memory is free, to learn the collectives that recovery must replay after a failure."""

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
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
from torchtune_adaptive.engine.distributed.snapshot import KeptBuffers, UnchangedParameters, keep_random_states
from torchtune_adaptive.engine.distributed.vote import Outcome, PeerFailedError, run_or_abort_together
from torchtune_adaptive.engine.loop import Loop, is_compiled
from torchtune_adaptive.engine.memory.copies import Copies
from torchtune_adaptive.engine.memory.devices import describe_peak
from torchtune_adaptive.engine.memory.out_of_memory import free_memory
from torchtune_adaptive.engine.recovery.attempts import Recovery
from torchtune_adaptive.engine.recovery.interruption import Interruption
from torchtune_adaptive.engine.recovery.micro_steps import collectives_of
from torchtune_adaptive.engine.recovery.trial import Trial, Verdict, cannot_cut
from torchtune_adaptive.errors import NOTHING_FITS_ADVICE, InputError, NothingFitsError, cannot_recover, reason_of

MicroSteps = Sequence[Callable[[], object]]

_LONGEST_LIST = 3  # different figures of ranks in a message


def allocate_states(loop: Loop) -> None:
    """Create the state of Adam and AdamW, so that its memory is in use before training. A collective.

    Raises:
        NothingFitsError: the state does not fit.
    """
    if not loop.create_states(nullcontext()):
        raise NothingFitsError(
            f"the optimizer's state does not fit beside model and gradients ({_figures(loop)});"
            " an 8-bit optimizer, LoRA or more ranks would need less."
        )
    if loop.meter is not None:
        loop.meter.count([one.state for one in loop.optimizers])


def _figures(loop: Loop) -> str:
    """Peaks and limits of the ranks as text, without duplicates. A collective."""
    figures = loop.consensus.from_all_ranks(describe_peak(loop.meter))
    return "; ".join(list(dict.fromkeys(figures))[:_LONGEST_LIST])


class DryRun(NamedTuple):
    """What a dry run gives.

    Attributes:
        verdict: that of the trial; nothing is known without one, or if two samples do not fit.
        used: the parameters that have got gradients, on any rank.
    """

    recovery: Recovery
    verdict: Verdict
    used: list[nn.Parameter]


def dry_run(
    loop: Loop,
    tries: Sequence[MicroSteps],
    *,
    reduces_once: bool = False,
    is_trial: bool = False,
    compares_results: bool = True,
) -> DryRun:
    """Run the first micro-steps that fit, with a vote before each collective, and return a recovery for such steps.

    A collective: all ranks must call it, and get the same kind of outcome. It restores random generators, buffers and
    attributes of modules, and sets gradients to None. Settings of FSDP2 that a micro-step has changed for good stay
    changed; the micro-steps are therefore run once more before recovery is refused. The lazy set-up of FSDP2 and of
    the communicators then happens while memory is free. If there is no recovery, the model's original communication
    functions are restored.

    Args:
        tries: forward and backward passes on batches of different shapes; then others to try if memory runs out.
        reduces_once: whether FSDP2 reduces gradients in the last micro-step of an optimizer step only.
        is_trial: whether the first micro-steps are those of a trial: see ``Trial``.
        compares_results: whether a trial compares results too.

    Raises:
        CannotCutError: a micro-step cannot run on one sample.
        CannotRecoverError: recovery is not possible for this model and these micro-steps.
        NothingFitsError: none of the micro-steps fits.
    """
    consensus = loop.consensus
    ledger = _attached_ledger(loop, reduces_once=reduces_once)
    modules = loop.modules()
    run = partial(_run, loop, ledger, modules)
    new_trial = partial(Trial, loop, has_earlier=ledger.reduces_once, compares_results=compares_results)
    # A micro-step may change parameters in a way that no operation of torch shows.
    unchanged = UnchangedParameters(loop.named_parameters(modules)) if is_trial else None
    with ExitStack() as without_recovery:
        without_recovery.callback(ledger.detach)
        # A step of one micro-step needs less memory than two: the second one runs beside the first one's gradients.
        for keeps_gradients, micro_steps in itertools.product((True, False), tries):
            found, trial = None, None
            for _ in range(2):  # the first time, a micro-step may change FSDP2's settings for good
                trial = new_trial(keeps_gradients=keeps_gradients) if is_trial else None
                try:
                    found = run(micro_steps, keeps_gradients=keeps_gradients, trial=trial)
                except Exception as error:
                    is_final = isinstance(error, InputError | dist.DistBackendError)
                    if consensus.any_rank(is_final) or not is_trial or len(micro_steps) < 3:
                        raise
                    run(micro_steps[2:], keeps_gradients=False, trial=new_trial())  # which fails if two samples do
                    own = "" if isinstance(error, PeerFailedError) else reason_of(error)
                    reason = f"a micro-step fails on one sample alone ({consensus.first_reason(own)})"
                    raise cannot_cut(reason) from error
                if found is None or not found.reason:
                    break
            if found is None:
                continue
            if found.reason:
                raise cannot_recover(found.reason)
            verdict = Verdict() if trial is None or len(micro_steps) < 3 else trial.verdict(consensus)
            if trial is not None and verdict.may_be_random:
                again = new_trial(seed=1)
                fits = run(micro_steps[:1], keeps_gradients=False, trial=again) is not None
                if fits and not trial.is_like(again, consensus):
                    verdict = trial.random_verdict(consensus)
            if trial is not None and verdict.may_be_random:
                again = new_trial(keeps_gradients=keeps_gradients, has_constant_noise=True)
                fits = run(micro_steps, keeps_gradients=keeps_gradients, trial=again) is not None
                of_constant = again.verdict(consensus) if fits else verdict
                verdict = verdict if of_constant.factor is None else of_constant
            if trial is not None and verdict.factor is not None:
                _check_undone(loop, run, new_trial, micro_steps[0])
            if changed := consensus.first_reason("" if unchanged is None else unchanged.first_changed()):
                raise InputError(f"A micro-step has changed the parameter `{changed}`: load the model again.")
            without_recovery.pop_all()
            ledger.expected, ledger.expected_numbers, ledger.counts = found.expected, found.numbers, found.counts
            recovery = Recovery(loop, ledger=ledger, buffers=found.buffers, modules=modules)
            return DryRun(recovery, verdict, found.used)
    raise NothingFitsError(
        f"not even one row fits: its forward or backward pass ran out of memory ({_figures(loop)});"
        f" {NOTHING_FITS_ADVICE}."
    )


def _check_undone(
    loop: Loop,
    run: Callable[..., "_Found | None"],
    new_trial: Callable[[], Trial],
    micro_step: Callable[[], object],
) -> None:
    """Check that ``micro_step`` has the same gradients again after it has ended halfway. A collective.

    What it leaves in an object outside of the model is not undone. Compiled code is not checked.

    Raises:
        CannotRecoverError: it has other gradients, or fails. Raised on every rank.
    """
    if is_compiled(loop.model):
        return

    def differs_from(before: Trial | None) -> bool:
        again = tried()
        if before is None or again is None:  # it does not fit
            return False
        return not before.is_like(again, loop.consensus, exactly=True)

    def tried() -> Trial | None:
        trial = new_trial()
        return None if run([micro_step], trial=trial, only_last=True) is None else trial

    before = tried()
    failure = ""
    try:
        in_backward = Interruption(loop.model)
        run([partial(in_backward.run, micro_step)], only_last=True)
        for calls in (in_backward.calls // 2, in_backward.calls):
            in_forward = Interruption(loop.model, after=calls)
            run([partial(in_forward.run, micro_step)], only_last=True, leaves_garbage=True)
        is_changed = differs_from(before)
    except Exception as error:
        if loop.consensus.any_rank(isinstance(error, InputError | dist.DistBackendError)):
            raise
        failure = "" if isinstance(error, PeerFailedError) else f", which fails ({reason_of(error)})"
        is_changed = True
    failure = loop.consensus.first_reason(failure)
    if is_changed and (failure or not differs_from(before)):  # else its gradients change in any case
        raise cannot_recover(
            f"a micro-step that ends halfway changes the next one{failure}: it leaves something outside of the model's"
            " modules, such as an auxiliary loss in a list, which `micro_step` must clear before it begins"
        )


class _Recorded(NamedTuple):
    """The collectives of one micro-step.

    Attributes:
        is_last: whether it ran as the last one of an optimizer step.
        num_issued: how many collectives torch has counted.
        is_known: whether this rank can find those that the model issues itself.
        awaits_another: whether the next one would continue its backward pass.
    """

    is_last: bool
    num_issued: int
    collectives: list[AnyCollective]
    is_known: bool
    awaits_another: bool
    numbers: Counter[Any]


class _Found(NamedTuple):
    """What micro-steps have shown. ``reason``: why recovery is not possible, "" if it is. ``buffers`` may change."""

    reason: str
    expected: tuple[list[AnyCollective], list[AnyCollective]]
    numbers: tuple[Counter[Any], Counter[Any]]
    counts: IssuedCounts
    buffers: list[TensorPlace]
    used: list[nn.Parameter]


def _run(
    loop: Loop,
    ledger: Ledger,
    modules: Sequence[nn.Module],
    micro_steps: MicroSteps,
    *,
    keeps_gradients: bool = False,
    trial: Trial | None = None,
    only_last: bool = False,
    leaves_garbage: bool = False,
) -> _Found | None:
    """Run ``micro_steps`` once, or twice if only a last one reduces; None if some rank ran out of memory. A collective.

    A micro-step that reduces must issue the same collectives with and without gradients of others before it, which is
    seen only if it ``keeps_gradients``. Otherwise training sees it: see ``Recovery``.

    Args:
        only_last: whether each runs as the last one of an optimizer step alone.
        leaves_garbage: whether what a failed run leaves is freed by the next run.
    """
    model, consensus = loop.model, loop.consensus
    recorded: list[_Recorded] = []
    parameters, used = list(model.parameters()), set[int]()

    def run_and_record() -> None:
        for is_last, micro_step in itertools.product(as_last, micro_steps):
            if not keeps_gradients or (trial is not None and not trial.is_finite):
                reset_after_failure(model)
            drop_forward_passes(states)
            ledger.counts = IssuedCounts(groups_of(one for before in recorded for one in before.collectives))
            ledger.begin(is_last=is_last)
            if trial is not None:  # micro-steps that are compared begin with equal models
                attributes.restore()
                buffers.restore_on_device()
            watched = trial.micro_step() if trial is not None else nullcontext()
            with watched, RecordFunctional(ledger.record) as counter, ledger.running():
                result = micro_step()
            issued, is_known, awaits_another = ledger.issued, True, awaits_another_backward(model)
            numbers = ledger.numbers
            drop_forward_passes(states)  # parameters that stay whole after a backward pass hide those with gradients
            if trial is not None and is_last:
                trial.note(result)
            if is_last is not isinstance(ledger, DdpLedger):  # which puts zeros into missing gradients at the end
                used.update(number for number, one in enumerate(parameters) if one.grad is not None)
            if groups_of(issued):
                is_known = _can_be_worked_out(issued, micro_step, ledger, states)
                if trial is not None and not trial.starts_finite():  # zeros in place of what others send give nan
                    reset_after_failure(model)
                    trial.forget_earlier()
            recorded.append(_Recorded(is_last, counter.issued, issued, is_known, awaits_another, numbers))

    as_last = (False, True) if ledger.reduces_once and not only_last else (True,)
    states = fsdp_states(model)
    settings, attributes, places = KeptSettings(states), KeptAttributes(modules), tensor_places(modules)
    with Copies(one.tensor for one in places if one.tensor is not None) as copies:
        buffers = KeptBuffers(places, copies)
        try:
            with keep_random_states():
                outcome = run_or_abort_together(run_and_record, consensus)
        except Exception:
            settings.restore()
            # One sample may be too few for such a layer. All ranks are here: those without an error of their own, too.
            if trial is not None and (layer := consensus.first_reason(trial.mixing_layer)):
                raise cannot_cut(layer) from None
            raise
        finally:
            loop.release()
            may_change = buffers.that_may_change()
            attributes.restore()
            buffers.restore()
            reset_after_failure(model)
    if not leaves_garbage:
        free_memory(loop.device)
    if outcome is Outcome.OUT_OF_MEMORY:
        settings.restore()
        return None
    expected = _by_fsdp(recorded[0].collectives), _by_fsdp(recorded[-1].collectives)
    reason = consensus.first_reason(_why_not_covered(recorded, expected))
    if not reason and _differs_between_ranks([one for each in recorded for one in each.collectives], consensus):
        reason = "ranks issue different collectives in a micro-step"
    is_used = consensus.begin_max(*(int(number in used) for number in range(len(parameters))))()
    numbers = recorded[0].numbers, recorded[-1].numbers
    return _Found(reason, expected, numbers, ledger.counts, may_change, list(itertools.compress(parameters, is_used)))


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
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    smallest, largest = consensus.min_and_max(digest)
    return smallest != largest
