"""Run small micro-steps while memory is free, to learn the collectives that recovery must replay after a failure."""

import itertools
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.jit import ScriptModule as _Scripted

from torchtune_adaptive.engine.distributed.snapshot import UnchangedParameters
from torchtune_adaptive.engine.distributed.vote import PeerFailedError
from torchtune_adaptive.engine.loop import Loop, is_compiled
from torchtune_adaptive.engine.memory.devices import describe_peak
from torchtune_adaptive.engine.recovery.attempts import Recovery
from torchtune_adaptive.engine.recovery.interruption import Interruption
from torchtune_adaptive.engine.recovery.recorded_runs import Found, MicroSteps, RecordedRuns
from torchtune_adaptive.engine.recovery.trial import Trial, Verdict, cannot_cut
from torchtune_adaptive.errors import NOTHING_FITS_ADVICE, InputError, NothingFitsError, cannot_recover, reason_of

_LONGEST_LIST = 3  # different figures of ranks in a message
_OTHER_SEEDS = (20_001, 20_002, 20_003)  # that no program is likely to have


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
    runs = RecordedRuns(loop, reduces_once=reduces_once)
    trials = _Trials(loop, runs, compares_results=compares_results) if is_trial else None
    run = runs.run if trials is None else trials.run
    with ExitStack() as without_recovery:
        without_recovery.callback(runs.detach)
        # A step of one micro-step needs less memory than two: the second one runs beside the first one's gradients.
        for keeps_gradients, micro_steps in itertools.product((True, False), tries):
            found, verdict = None, Verdict()
            for _ in range(2):  # the first time, a micro-step may change FSDP2's settings for good
                found = run(micro_steps, keeps_gradients=keeps_gradients)
                if found is None or not found.reason:
                    break
            if found is None:
                continue
            if found.reason:
                raise cannot_recover(found.reason)
            if trials is not None:
                verdict = trials.verdict()
            without_recovery.pop_all()
            return DryRun(runs.recovery(found), verdict, found.used)
    raise NothingFitsError(
        f"not even one row fits: its forward or backward pass ran out of memory ({_figures(loop)});"
        f" {NOTHING_FITS_ADVICE}."
    )


class _Trials:
    """The trial of micro-steps, and others with which it is compared if it leaves a doubt. All ranks together."""

    def __init__(self, loop: Loop, runs: RecordedRuns, *, compares_results: bool) -> None:
        self._loop = loop
        self._runs = runs
        self._new = partial(
            Trial, loop, generators=runs.generators.now(), has_earlier=runs.repeats, compares_results=compares_results
        )
        # A micro-step may change parameters in a way that no operation of torch shows.
        self._unchanged = UnchangedParameters(loop.named_parameters(runs.modules))
        self._names = _names_of_tensors(loop.model)
        self._generators = {*runs.generators.now()}
        self._first: Trial | None = None
        # Code that is compiled in its first runs may then draw random numbers in another way, and catch errors.
        self._is_compiled = is_compiled(loop.model) or any(isinstance(one, _Scripted) for one in loop.model.modules())

    def run(self, micro_steps: MicroSteps, *, keeps_gradients: bool) -> Found | None:
        """Run ``micro_steps``: on one sample, on another one, and on both; or fewer, of which nothing is known.

        Raises:
            CannotCutError: a micro-step fails on one sample alone. Raised on every rank.
        """
        self._micro_steps, self._keeps_gradients = micro_steps, keeps_gradients
        self._trial = self._new(keeps_gradients=keeps_gradients)
        self._first = self._first or self._trial
        try:
            return self._runs.run(micro_steps, keeps_gradients=keeps_gradients, trial=self._trial)
        except Exception as error:
            is_final = isinstance(error, InputError | dist.DistBackendError)
            if self._loop.consensus.any_rank(is_final) or len(micro_steps) < 3:
                raise
            self._runs.run(micro_steps[2:], trial=self._new())  # which fails if two samples do
            own = "" if isinstance(error, PeerFailedError) else reason_of(error)
            reason = f"a micro-step fails on one sample alone ({self._loop.consensus.first_reason(own)})"
            raise cannot_cut(reason) from error

    def verdict(self) -> Verdict:
        """What the micro-steps of ``run`` have shown. A collective.

        Raises:
            CannotRecoverError: a micro-step that ends halfway leaves something that is not undone; or micro-steps have
                built a layer, with random numbers that were fixed, or keep such numbers or a generator.
            InputError: a micro-step has changed a parameter.
        """
        consensus = self._loop.consensus
        added = (name for name in _names_of_tensors(self._loop.model) if name not in self._names)
        if built := consensus.first_reason(next(added, "")):
            raise cannot_recover(f"a micro-step adds `{built}` to the model: build it before, by one forward pass")
        once_more = None if self._is_compiled else self._try_what_is_made_at_first()
        verdict = Verdict() if len(self._micro_steps) < 3 else self._trial.verdict()
        if verdict.may_be_random and self._is_random():
            verdict = self._trial.random_verdict()
        if verdict.may_be_random:
            again = self._new(keeps_gradients=self._keeps_gradients, has_constant_noise=True)
            if self._runs.run(self._micro_steps, keeps_gradients=self._keeps_gradients, trial=again) is not None:
                of_constant = again.verdict()
                verdict = verdict if of_constant.factor is None else of_constant
        if verdict.factor is not None and not self._is_compiled:
            self._check_undone(once_more)
        if changed := consensus.first_reason(self._unchanged.first_changed()):
            raise InputError(f"A micro-step has changed the parameter `{changed}`: load the model again.")
        return verdict

    def _is_random(self) -> bool:
        """Whether random numbers that are not fixed change the gradients of both samples together.

        Those of a sample alone may be the same by chance, as where each row is flipped with a probability.
        """
        others = (self._try_again(self._micro_steps[2:], seed=seed) for seed in _OTHER_SEEDS)
        return any(one is not None and not self._trial.is_like(one) for one in others)

    def _try_again(self, micro_steps: MicroSteps, *, seed: int | None = None) -> Trial | None:
        """The trial of one of the micro-steps alone, as the last one of a step. None if it does not fit."""
        trial = self._new(seed=seed)
        return None if self._runs.run(micro_steps, trial=trial, only_last=True) is None else trial

    def _try_what_is_made_at_first(self) -> Trial | None:
        """The trial of the first micro-step once more, if it fits, which shows what only the first time has made.

        Raises:
            CannotRecoverError: random numbers, which were fixed, or a generator, which was not restored. Raised on
                every rank.
        """
        made = self._generators_within_reach() - self._generators
        again = self._try_again(self._micro_steps[:1])
        what = "makes a random generator" if made and made & self._generators_within_reach() else ""
        if again is not None and self._first is not None and self._first.draws_more_than(again):
            what = "draws random numbers"
        if what := self._loop.consensus.first_reason(what):
            raise cannot_recover(
                f"the first micro-step {what}, which it keeps outside of the model: do that before the first step"
            )
        return again

    def _generators_within_reach(self) -> set[Any]:
        return {*self._loop.generators(self._runs.modules).now()}

    def _check_undone(self, before: Trial | None) -> None:
        """Check that a micro-step has the same gradients as ``before`` after it has ended halfway.

        What it leaves in an object outside of the model is not undone.

        Raises:
            CannotRecoverError: it has other gradients, or fails. Raised on every rank.
        """
        consensus = self._loop.consensus
        again, failure = None, ""
        try:
            self._end_halfway(before)
            again = self._try_again(self._micro_steps[:1])
            is_changed = _differ(before, again)
        except Exception as error:
            if consensus.any_rank(isinstance(error, InputError | dist.DistBackendError)):
                raise
            failure = "" if isinstance(error, PeerFailedError) else f", which fails ({reason_of(error)})"
            is_changed = True
        failure = consensus.first_reason(failure)
        if is_changed and (failure or not self._changes_in_any_case(before, again)):
            raise cannot_recover(
                f"a micro-step that ends halfway changes the next one{failure}: it leaves something outside of the"
                " model's modules, such as an auxiliary loss in a list, which `micro_step` must clear before it begins"
            )

    def _end_halfway(self, before: Trial | None) -> None:
        """Run the first micro-step up to its backward pass, to the middle of its forward pass and to the end of it.

        Raises:
            CannotRecoverError: it goes on, and then has other gradients than ``before``, or fails, as where a gradient
                grows that has been averaged. Raised on every rank.
        """
        in_backward = Interruption(self._loop.model)
        self._interrupt(in_backward, before)
        for calls in (in_backward.calls // 2, in_backward.calls):
            self._interrupt(Interruption(self._loop.model, after=calls), before, leaves_garbage=True)

    def _interrupt(self, interruption: Interruption, before: Trial | None, *, leaves_garbage: bool = False) -> None:
        consensus, trial = self._loop.consensus, self._new()
        micro_steps = [partial(interruption.run, self._micro_steps[0])]
        found = self._runs.run(micro_steps, trial=trial, only_last=True, leaves_garbage=leaves_garbage)
        if before is None or not consensus.any_rank(interruption.has_struck):
            return
        if found is None:
            has_others = consensus.any_rank(interruption.goes_on)
        else:
            has_others = not before.is_like(trial, exactly=True)
        if has_others:
            raise cannot_recover(
                "`micro_step` catches out-of-memory errors itself, and goes on with other gradients: let them pass"
            )

    def _changes_in_any_case(self, before: Trial | None, again: Trial | None) -> bool:
        """Whether the first micro-step has other gradients each time. What it has left may also stay, as hooks do."""
        last = self._try_again(self._micro_steps[:1])
        return _differ(before, last) and _differ(again, last)


def _differ(one: Trial | None, other: Trial | None) -> bool:
    """Whether both have other gradients; not if one of them did not fit. A collective."""
    return one is not None and other is not None and not one.is_like(other, exactly=True)


def _names_of_tensors(model: nn.Module) -> list[str]:
    return [name for name, _ in itertools.chain(model.named_parameters(), model.named_buffers())]
