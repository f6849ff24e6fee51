"""``RecoverableStep``: a train step for any PyTorch loop that recovers from out-of-memory errors."""

import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Generic, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from torchtune_adaptive.engine.distributed.fsdp_state import drop_forward_passes, fsdp_states
from torchtune_adaptive.engine.loop import Loop, check_no_search, compile_each_size, sum_of_results
from torchtune_adaptive.engine.memory.devices import computing_device, optimizers_of
from torchtune_adaptive.engine.optimizers import optimizers_within
from torchtune_adaptive.engine.recovery.attempts import Attempt, Recovery
from torchtune_adaptive.engine.recovery.backoff import Backoff
from torchtune_adaptive.engine.recovery.columns import copied, gradients_of, tensors_in, versions, was_changed
from torchtune_adaptive.engine.recovery.dry_run import DryRun, allocate_states, dry_run
from torchtune_adaptive.engine.recovery.micro_batches import Cutter, Slices
from torchtune_adaptive.engine.recovery.micro_steps import MicroStep
from torchtune_adaptive.engine.recovery.optimizer_state import check_optimizers, drop_unused_states
from torchtune_adaptive.engine.recovery.pace import STEPS_TO_TIME
from torchtune_adaptive.engine.recovery.trial import ResultsError, cannot_cut
from torchtune_adaptive.engine.recovery.watch import MemoryEvent, MemoryPressure, PressureWatch
from torchtune_adaptive.errors import (
    NOTHING_FITS_ADVICE,
    CannotCutError,
    InputError,
    NothingFitsError,
    cannot_recover,
    reason_of,
    require_callable,
    require_one_of,
)
from torchtune_adaptive.text import parse_memory

log = logging.getLogger(__name__)

Sums = TypeVar("Sums")
_NO_SAMPLES = "This optimizer step has no samples."
_MOST_TRIALS = 8  # until it is known whether samples may be cut
_MOST_SAMPLES = 8  # that a trial takes, until two of them have gradients


class RecoverableStep(Generic[Sums]):
    """Runs the forward and backward passes of an optimizer step in micro-batches, and recovers from out of memory.

    If any rank runs out of memory, all ranks drop their gradients, and run the same samples again in micro-batches of
    half the size with the same random numbers. No rank is left waiting in a collective. Works on one device, in
    ``DistributedDataParallel`` and under FSDP2.

    If micro-batches of the larger size have fitted before, the next step tries them again. Each time that memory soon
    runs out again, the next trial waits for twice as many steps.

    Args:
        model: everything on the device; several models in an ``nn.ModuleList``. Under FSDP2 it must be sharded. A
            ``DistributedDataParallel`` itself, not the model in it.
        micro_step: forward pass, loss and backward pass of one micro-batch. It must not change anything else, because
            it may run again. It must leave the synchronisation of gradients to this class: no ``no_sync``, no
            ``set_requires_gradient_sync``. Its results are summed: a tensor or number, a tuple or dict of them,
            anything with ``+``, or None. Detach tensors, or they keep the graph alive.
        micro_batch_size: samples per micro-batch, the same on every rank; or an object that cuts micro-batches.
        optimizer: the optimizer, or several. ``dry_run`` creates the state of Adam and AdamW, so that its memory is in
            use before training.
        reduce: "each": FSDP2 reduces gradients in each micro-step; "last": only in the last one of an optimizer step,
            which communicates less, but every rank then keeps the whole gradients until then.
            ``DistributedDataParallel`` always does so.
        release: frees what an interrupted ``micro_step`` keeps outside of the model, such as a list of activations.
        padded_rows: for a model that issues collectives itself, as with tensor parallelism, whose micro-batches have
            rows padded to one length. ``padded_rows(micro_batch)`` returns the number of its rows, and a function
            from a number to a micro-batch of so many rows of the same length. None: such models are refused.
        on_event: called on every rank after a shortage of memory, and when a reduced micro-batch has grown again. The
            default logs a line on the first rank.
        process_group: the ranks that train the model. None: those of the mesh on which FSDP2 has sharded it, or all
            ranks of the default group if it is not sharded. These ranks must create the object together, and no others.
        memory_limit: memory that this rank may use in its micro-steps, in bytes or as text such as "80GiB". None: what
            the device has. On a CPU, a limit makes micro-steps slow: each operation is watched.
        watch: the memory watch of a larger program, which limits memory itself; None: create one.
        steps_done: optimizer steps before the first one, for the numbers of steps in messages.

    Attributes:
        on_event: as the argument; another function may be set.
        backoff: decides when a reduced micro-batch grows again.

    Raises:
        InputError: an argument is invalid, or the model has no parameters.

    >>> model = torch.nn.Linear(2, 1)
    >>> def micro_step(rows):
    ...     loss_sum = model(torch.stack(rows)).square().sum()
    ...     loss_sum.backward()
    ...     return loss_sum.detach(), len(rows)
    >>> step = RecoverableStep(model, micro_step, micro_batch_size=2)
    >>> loss_sum, num_rows = step([torch.ones(2) for _ in range(5)])
    >>> num_rows
    5
    >>> model.weight.grad is None
    False
    """

    def __init__(
        self,
        model: nn.Module,
        micro_step: Callable[[Any], Sums],
        *,
        micro_batch_size: int | Cutter,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
        reduce: Literal["each", "last"] = "each",
        release: Callable[[], object] = lambda: None,
        padded_rows: Callable[[Any], tuple[int, Callable[[int], Any]]] | None = None,
        on_event: Callable[[MemoryEvent], object] | None = None,
        process_group: dist.ProcessGroup | None = None,
        memory_limit: int | str | None = None,
        watch: PressureWatch | None = None,
        steps_done: int = 0,
    ) -> None:
        compile_each_size()
        functions = {"micro_step": micro_step, "release": release, "padded_rows": padded_rows, "on_event": on_event}
        require_callable(**{name: one for name, one in functions.items() if one is not None})
        self._cutter = micro_batch_size if isinstance(micro_batch_size, Cutter) else Slices(micro_batch_size)
        optimizers, device = optimizers_of(optimizer), computing_device(model)
        require_one_of("reduce", reduce, ("each", "last"))
        self._reduces_once = reduce == "last"
        self._padded_rows = padded_rows
        self._owns_watch = watch is None
        limit_bytes = None if memory_limit is None else parse_memory(memory_limit)
        self._watch = watch or PressureWatch.of(
            model, optimizers, device, process_group=process_group, limit_bytes=limit_bytes
        )
        self._loop = Loop(
            model=model,
            optimizers=optimizers,
            device=device,
            micro_step=micro_step,
            release=release,
            consensus=self._watch.consensus,
            meter=self._watch.meter,
        )
        if isinstance(self._cutter, Slices):
            self._cutter.consensus = self._watch.consensus
        self.on_event = on_event or self._watch.log
        self._limited = self._watch.meter if limit_bytes is not None else None
        self._recovery: Recovery | None = None
        self._is_enabled = True
        self._is_closed = False
        self._is_trained: dict[nn.Parameter, bool] = {}  # as in the dry run
        self._modules: list[nn.Module] = []  # those with tensors
        self._children: list[dict[str, nn.Module | None]] = []  # of each module
        self._all_children: list[nn.Module | None] = []
        self._batch_norms: list[tuple[nn.Module, bool]] = []  # and whether each was in training mode
        self._trials_left = 0 if self._cutter.adds_up else _MOST_TRIALS
        self._has_warned = False  # that it is not known whether samples may be cut
        self._gives_copies = False  # whether micro-steps change their batches in place
        self._must_stay_whole = ""  # why samples must not be cut
        self._events: list[MemoryEvent] = []
        self._number = steps_done
        self.backoff = Backoff()

    @property
    def micro_batch_size(self) -> int:
        """The current size of a micro-batch."""
        return self._cutter.size

    @property
    def events(self) -> tuple[MemoryEvent, ...]:
        """All events so far, except those that ended the training."""
        return tuple(self._events)

    @property
    def retries(self) -> int:
        """How often a step ran out of memory and was run again."""
        return sum(event.pressure is MemoryPressure.OUT_OF_MEMORY for event in self._events)

    @property
    def recovers(self) -> bool:
        """Whether the step recovers from out-of-memory errors. False before ``dry_run`` and after ``disable``."""
        return self._recovery is not None

    def any_rank(self, fact: bool) -> bool:
        """Whether ``fact`` is true on any rank. Every rank must call it; the exchange does not wait for the device."""
        return self._loop.consensus.any_rank(fact)

    def try_larger(self) -> None:
        """Try larger micro-batches in the next step, if there was an error. For example at the beginning of an epoch.

        Every rank must call it.
        """
        self.backoff.try_now()

    def disable(self) -> None:
        """Turn recovery off: there is no dry run, and an out-of-memory error is raised as it is."""
        self._is_enabled = False
        self._end_recovery()

    def close(self) -> None:
        """Restore the model's own communication functions. Every rank must call it."""
        self._is_closed = True
        self._end_recovery()
        if self._owns_watch:
            self._watch.close()

    def _end_recovery(self) -> None:
        if self._recovery is not None:
            self._recovery.close()
            self._recovery = None

    def _check_open(self) -> None:
        if self._is_closed:
            raise InputError("This `RecoverableStep` has been closed: create another one.")

    # ---- one optimizer step

    def __call__(self, samples: Any) -> Sums:
        """Run forward and backward passes over ``samples``, in smaller micro-batches if memory runs out.

        Returns the sum of the results of ``micro_step``. Gradients are the sums over all micro-steps. A collective:
        every rank must call it with the same number of samples.

        Args:
            samples: this rank's samples of the optimizer step: a sequence, a tensor [samples, ...], or a dict of these.

        Raises:
            NothingFitsError: a single sample does not fit. Raised on every rank, with the same message.
            InputError: gradients are not None, ranks have different numbers of samples, or a search runs this step.
            CannotRecoverError: see ``dry_run``.
            CollectiveStateUnknownError: the error does not allow recovery; this process must end.
        """
        self._check_open()
        check_no_search()
        if needs_dry_run := self._is_enabled and self._recovery is None:
            self.prepare(samples)
        self._number += 1
        return self._run_step(samples, self._cutter.size, is_fresh=needs_dry_run)

    def _run_step(self, samples: Any, size_before: int, *, is_fresh: bool) -> Sums:
        """Run the step; unless the dry run ``is_fresh``, after another one if a rank needs it."""
        if self._limited is not None:
            self._limited.count([one.state for one in optimizers_within(self._loop.optimizers)])
        if self._recovery is None:
            return self._run_without_recovery(samples)
        self._check_no_gradients()
        self._recovery.start_step()
        changed = "" if is_fresh else self._what_has_changed()
        is_outdated = bool(changed) or (not is_fresh and self._may_compare(samples))
        self._grow_if_due()
        self._watch.start_step(self._cutter.size)
        tensors = [] if self._cutter.adds_up else tensors_in(samples)
        unchanged, gradients = versions(tensors), gradients_of(tensors)
        while True:
            micro_batches = self._cutter.cut(samples)
            if self._any_outdated(is_outdated, len(micro_batches)):
                self._tell_of(changed)
                self.prepare(samples)
                return self._run_step(samples, size_before, is_fresh=True)
            attempt = self._recovery.attempt(self._micro_steps(micro_batches), numbers=self._watch.last_step)
            is_changed = not self._gives_copies and versions(tensors) != unchanged
            self._gives_copies |= is_changed
            if not attempt.ran_out:
                break
            self._check_unchanged(is_changed)
            for tensor, gradient in gradients:
                tensor.grad = None if gradient is None else gradient.clone()
            self._watch.reset()
            self._reduce(attempt, samples)
        self._watch.end_step(micro_batches, attempt.largest)
        is_thrashing = self._watch.is_thrashing()
        if is_thrashing:
            self._reduce(attempt, samples)
        else:
            self._note_fit(size_before)
        if is_thrashing is False:
            self._note_once(attempt)
        return cast(Sums, attempt.result)

    def _any_outdated(self, is_outdated: bool, num_micro_steps: int) -> bool:
        """Whether what the dry run has found may have changed on any rank. A collective.

        If nothing has, it checks that all ranks have equally many micro-steps.

        Raises:
            InputError: some rank has fewer micro-steps than another, or none has any. Raised on every rank.
        """
        if self._cutter.is_even:  # that of recipes, whose ranks change alike
            return is_outdated
        own = -num_micro_steps, num_micro_steps, int(is_outdated)
        negated_fewest, most, any_outdated = self._loop.consensus.begin_max(*own)()
        if any_outdated:
            return True
        if not most:
            raise InputError(_NO_SAMPLES)
        if -negated_fewest != most:
            raise InputError(
                f"Ranks must have equally many micro-steps, but one has {-negated_fewest} and another {most}."
            )
        return False

    def _run_without_recovery(self, samples: Any) -> Sums:
        if not (micro_batches := self._cutter.cut(samples)):
            raise InputError(_NO_SAMPLES)
        self._check_whole(samples)
        *first, last = self._micro_steps(micro_batches)
        result = None
        if first:
            with self._keeping_gradients():
                result = functools.reduce(sum_of_results, (run() for run in first))
        return sum_of_results(result, last())

    @contextmanager
    def _keeping_gradients(self) -> Iterator[None]:
        """Context of micro-steps without recovery whose gradients a later one reduces."""
        with ExitStack() as stack:
            for module in self._loop.model.modules():
                if isinstance(module, DistributedDataParallel) and not module.static_graph:
                    stack.enter_context(module.no_sync())
                elif isinstance(module, FSDPModule) and self._reduces_once:
                    module.set_requires_gradient_sync(False, recurse=False)
                    stack.callback(module.set_requires_gradient_sync, True, recurse=False)
            yield

    def _grow_if_due(self) -> None:
        """Double a reduced micro-batch if ``backoff`` says so."""
        if self.backoff.next_trial is None or self._number < self.backoff.next_trial:
            return
        self.backoff.grew(self._number, is_whole=self._cutter.grow())

    def _micro_steps(self, micro_batches: Iterable[Any]) -> list[MicroStep[Sums]]:
        context = self._limited or nullcontext()
        return [self._as_micro_step(context, one) for one in micro_batches]

    def _as_micro_step(
        self, context: AbstractContextManager[Any], micro_batch: Any, *, is_trial: bool = False
    ) -> MicroStep[Sums]:
        run = partial(self._run, context, micro_batch, sees_changes=is_trial and not self._cutter.adds_up)
        if self._padded_rows is None:
            return MicroStep(run)
        num_rows, with_rows = self._padded_rows(micro_batch)
        return MicroStep(run, num_rows, lambda number: self._run(context, with_rows(number)))

    def _run(self, context: AbstractContextManager[Any], micro_batch: Any, *, sees_changes: bool = False) -> Sums:
        """Run a micro-step; if it ``sees_changes``, on a copy, to see whether the copy is changed in place."""
        with context, self._watch.noting_failures():
            self._watch.phases.enter("batch")
            given = micro_batch
            if not self._cutter.adds_up:  # changes of arrays, lists and mappings would not be seen in later steps
                given = copied(micro_batch, with_tensors=sees_changes or self._gives_copies)
            result = self._loop.micro_step(given)
        if sees_changes:
            self._gives_copies |= was_changed(given, micro_batch)
        return result

    def _reduce(self, attempt: Attempt[Sums], samples: Any) -> None:
        """Halve the micro-batch: at once after an error, from the next step on if it is thrashing. A collective.

        Raises:
            NothingFitsError: the attempt failed, and micro-batches are already single rows.
        """
        before = self._cutter.size
        is_reduced = self._cutter.reduce(samples)
        after, unit = self._cutter.size, self._cutter.unit
        event = self._watch.event(attempt, step=self._number, before=before, after=after, unit=unit)
        if is_reduced:
            if attempt.has_fitted:
                self.backoff.fitted(before)
            self.backoff.failed(before, step=self._number, first_wait=1 if attempt.ran_out else STEPS_TO_TIME)
        elif attempt.ran_out:
            raise NothingFitsError(
                f"not even one row fits: in step {self._number} {event.cause}; {NOTHING_FITS_ADVICE}."
            )
        else:
            self._watch.stop()
        self._note(event)

    def _note_fit(self, size_before: int) -> None:
        """Note that a step has succeeded, before which the size was ``size_before``."""
        size = self._cutter.size
        self.backoff.fitted(size)
        if size > size_before:
            self._note(MemoryEvent.growth(self._number, size_before, size, self._cutter.unit))

    def _note_once(self, attempt: Attempt[Sums]) -> None:
        """Note, once for each size, that it stays although the allocator frees its cache. A collective."""
        size = self._cutter.size
        if (MemoryPressure.THRASHING, size, size) not in {one.kind for one in self._events}:
            self._note(self._watch.event(attempt, step=self._number, before=size, after=size, unit=self._cutter.unit))

    def _note(self, event: MemoryEvent) -> None:
        self._events.append(replace(event, times=1 + sum(one.kind == event.kind for one in self._events)))
        self.on_event(self._events[-1])

    def _check_no_gradients(self) -> None:
        if any(is_trained and parameter.grad is not None for parameter, is_trained in self._is_trained.items()):
            raise InputError(
                "Gradients must be None before a step, which may run again: call `optimizer.zero_grad()` after each"
                " step, also a skipped one, without `set_to_none=False`, and pass all samples of a step in one call."
            )

    def _check_whole(self, samples: Any) -> None:
        """Check that samples that must not be cut are not cut on any rank. A collective."""
        if self._must_stay_whole and self._loop.consensus.any_rank(not self._cutter.is_whole(samples)):
            raise CannotCutError(self._must_stay_whole)

    def _check_unchanged(self, is_changed: bool) -> None:
        """Check that no rank's samples were changed by an attempt that must run again. A collective."""
        if self._loop.consensus.any_rank(is_changed):
            raise InputError(
                "`micro_step` has changed its micro-batch in place, but had not before, and this step cannot run again"
                " with the same samples: change a copy."
            )

    # ---- the dry run

    def dry_run(self, samples: Any) -> None:
        """Create the optimizers' state, and try small micro-steps: on one sample, on another one, and on both.

        They show which collectives they issue, and whether samples may be cut into micro-batches: gradients and results
        of both samples must be the sum of those of each alone. It restores model, optimizers and random generators,
        and sets gradients to None. A collective: every rank must call it. If it has not been called, the first step
        calls it with its own samples. So does each step after modules were added, parameters frozen or unfrozen or
        FSDP2's settings changed on any rank, and the next one that has two samples with gradients, if there were none.

        Raises:
            CannotCutError: samples must not be cut into micro-batches: the loss or a layer mixes them, or the loss is a
                mean.
            CannotRecoverError: recovery is not possible for this model.
            NothingFitsError: the optimizers' state or the smallest micro-step does not fit.
            InputError: the micro-batch size is not the same on every rank, some rank has no samples, or an optimizer
                has a parameter that the model lacks.
        """
        self._check_open()
        self._end_recovery()
        drop_forward_passes(fsdp_states(self._loop.model))  # after one, some parameters are whole instead of sharded
        self._is_trained = {parameter: parameter.requires_grad for parameter in self._loop.model.parameters()}
        self._batch_norms = [(one, one.training) for one in self._loop.model.modules() if isinstance(one, _BatchNorm)]
        check_optimizers(self._loop.optimizers, self._loop.model)
        self._check_no_gradients()
        allocate_states(self._loop)
        used: list[nn.Parameter] = []
        try:
            found = self._dry_run_with_samples_that_count(samples)
            self._recovery, used = found.recovery, found.used
            self._modules = _with_tensors(self._loop.model)
            self._children = [one._modules for one in self._loop.model.modules()]
            self._all_children = _values(self._children)
        finally:
            drop_unused_states(self._loop.optimizers, used)

    def prepare(self, samples: Any) -> None:
        """Call ``dry_run``; but if samples must not be cut and need not be, train without recovery. A collective.

        Raises: as ``dry_run``.
        """
        try:
            self.dry_run(samples)
            return
        except CannotCutError as error:
            self._must_stay_whole = str(error)  # only the text: the traceback keeps tensors alive
        self._check_whole(samples)
        if self._loop.consensus.rank == 0:
            log.warning("An out-of-memory error will end the run. %s", self._must_stay_whole)
        self.disable()

    def _what_has_changed(self) -> str:
        """Why what the dry run has found may no longer hold on this rank, or ""."""
        if _values(self._children) != self._all_children and _with_tensors(self._loop.model) != self._modules:
            return "modules were added or removed"  # the dry run has not seen their buffers
        if any(parameter.requires_grad is not was for parameter, was in self._is_trained.items()):
            return "parameters were frozen or unfrozen"  # other collectives reduce gradients
        if self._recovery is not None and self._recovery.has_other_settings:
            return "settings of FSDP2 have changed"  # other collectives gather parameters
        if any(module.training is not was for module, was in self._batch_norms):
            return "a batch norm has changed its mode"  # samples may be mixed
        return ""

    def _may_compare(self, samples: Any) -> bool:
        """Whether only now two samples can be compared."""
        return self._trials_left > 0 and self._cutter.num_to_try(samples) > 1

    def _tell_of(self, changed: str) -> None:
        """Say on the first rank what has changed on any, because another dry run takes time. A collective."""
        if (reason := self._loop.consensus.first_reason(changed)) and self._loop.consensus.rank == 0:
            log.warning("Step %d makes another dry run: since the last one, %s.", self._number, reason)

    def _dry_run_with_samples_that_count(self, samples: Any) -> DryRun:
        """A dry run with two samples that have gradients, if a few tries find them. A collective.

        Raises:
            CannotRecoverError: no micro-step leaves a gradient.
        """
        if self._cutter.adds_up:
            return self._dry_run(samples, None)
        self._trials_left -= 1
        candidates = min(self._loop.consensus.max_over_ranks(self._cutter.num_to_try(samples)), _MOST_SAMPLES)
        pair, following = [0, 1], 2
        while True:
            found = self._dry_run(samples, (pair[0], pair[1]) if candidates > 1 else None)
            counts = found.verdict.counts
            if all(counts) or following + counts.count(False) > candidates:
                break
            found.recovery.close()
            for place in (place for place in (0, 1) if not counts[place]):
                pair[place], following = following, following + 1
        if candidates > 3 and not any(found.verdict.counts):  # a loss may need several samples, as one over pairs does
            found.recovery.close()
            found = self._dry_run(samples, (0, 1), group=candidates // 2)
        if found.verdict.factor is not None or found.verdict.is_random or not candidates:
            self._trials_left = 0
        if candidates and found.verdict.factor is None:
            self._warn_of_unknown(samples, is_random=found.verdict.is_random)
        if candidates and not found.used:
            found.recovery.close()
            raise cannot_recover("a micro-step leaves no gradient in `.grad` of any parameter")
        return found

    def _warn_of_unknown(self, samples: Any, *, is_random: bool) -> None:
        """Warn once that no trial has shown whether samples may be cut: if they are cut now, or no trial follows.

        A collective.
        """
        has_effect = self._loop.consensus.any_rank(not self._cutter.is_whole(samples)) or not self._trials_left
        if not has_effect or self._has_warned:
            return
        self._has_warned = True
        if self._loop.consensus.rank == 0:
            log.warning(
                "It is not known whether samples may be cut into micro-batches, because %s: the loss must be a sum.",
                "a micro-step draws random numbers that cannot be fixed, or depends on what earlier ones have left"
                " outside of the model"
                if is_random
                else "two could not be compared",
            )

    def _dry_run(self, samples: Any, pair: tuple[int, int] | None, *, group: int = 1) -> DryRun:
        """A dry run with these two samples, if there are two, or groups of samples. A collective.

        Raises:
            CannotCutError: samples must not be cut into micro-batches.
            ResultsError: results do not add up.
        """
        trial_batches = list(self._cutter.trial_batches(samples, pair, group=group))
        self._check_ranks(has_samples=bool(trial_batches))
        context = self._loop.meter or nullcontext()
        try:
            found = dry_run(
                self._loop,
                [[self._as_micro_step(context, one, is_trial=True) for one in parts] for parts in trial_batches],
                reduces_once=self._reduces_once,
                is_trial=not self._cutter.adds_up,
                compares_results=self._cutter.results != "sums",
            )
        except ResultsError as error:
            if self._cutter.results == "losses":
                raise cannot_cut(reason_of(error)) from None
            raise
        reason, factor = found.verdict.reason, found.verdict.factor
        if factor is not None and not self._cutter.scale_by(factor):
            is_what = "a mean over the samples of a micro-batch" if factor == 0.5 else f"{factor:g} times a sum"
            reason = f"the loss is {is_what}, but must be a sum, and its gradients be divided once per step"
        if found.verdict.why_no_sum and self._cutter.results == "losses":  # by which a trainer would scale them
            reason = f"a micro-step draws random numbers that cannot be fixed. {found.verdict.why_no_sum}"
        if reason:
            found.recovery.close()
            raise cannot_cut(reason)
        return found

    def _check_ranks(self, *, has_samples: bool) -> None:
        """Check the micro-batch size and the samples of all ranks. A collective."""
        smallest, largest = self._loop.consensus.min_and_max(self._cutter.size)
        if smallest != largest:
            raise InputError(
                f"`micro_batch_size` must be the same on every rank, but is {smallest} on one and {largest} on another."
            )
        if self._loop.consensus.any_rank(not has_samples):
            raise InputError("A rank has no samples for this optimizer step.")
        are_trained = tuple(parameter.requires_grad for parameter in self._loop.model.parameters())
        smallest, largest = self._loop.consensus.min_and_max(hash(are_trained))
        if smallest != largest:
            raise InputError("Ranks must train the same parameters, but their `requires_grad` differs between ranks.")


def _values(children: Iterable[dict[str, nn.Module | None]]) -> list[nn.Module | None]:
    return list(itertools.chain.from_iterable(map(dict.values, children)))


def _with_tensors(model: nn.Module) -> list[nn.Module]:
    """The modules of ``model`` that have parameters or buffers of their own."""
    own = ((one, (*one._parameters.values(), *one._buffers.values())) for one in model.modules())
    return [one for one, tensors in own if any(tensor is not None for tensor in tensors)]
