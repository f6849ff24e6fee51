"""``RecoverableStep``: a train step for any PyTorch loop that recovers from out-of-memory errors."""

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Generic, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from torchtune_adaptive.engine.compiled import compile_each_size
from torchtune_adaptive.engine.distributed.fsdp_state import drop_forward_passes, fsdp_states
from torchtune_adaptive.engine.memory.devices import computing_device, optimizers_of
from torchtune_adaptive.engine.optimizers import optimizers_within
from torchtune_adaptive.engine.recovery.attempts import NO_SAMPLES, Attempt, MemoryPressure, Recovery, sum_of_results
from torchtune_adaptive.engine.recovery.backoff import Backoff
from torchtune_adaptive.engine.recovery.columns import copied, versions, was_changed
from torchtune_adaptive.engine.recovery.dry_run import DryRun, allocate_states, dry_run
from torchtune_adaptive.engine.recovery.micro_batches import Cutter, Slices
from torchtune_adaptive.engine.recovery.micro_steps import MicroStep
from torchtune_adaptive.engine.recovery.optimizer_state import check_optimizers, drop_unused_states
from torchtune_adaptive.engine.recovery.size_range import SizeRange, check_size_of
from torchtune_adaptive.engine.recovery.trial import ResultsError, cannot_cut
from torchtune_adaptive.engine.recovery.watch import MemoryEvent, PressureWatch
from torchtune_adaptive.errors import (
    NOTHING_FITS_ADVICE,
    CannotCutError,
    InputError,
    NothingFitsError,
    cannot_recover,
    reason_of,
    require_one_of,
)
from torchtune_adaptive.text import parse_memory

log = logging.getLogger(__name__)

Sums = TypeVar("Sums")
_MOST_TRIALS = 8  # until it is known whether samples may be cut
_MOST_SAMPLES = 8  # that a trial takes, until two of them have gradients


class RecoverableStep(Generic[Sums]):
    """Runs the forward and backward passes of an optimizer step in micro-batches, and recovers from out of memory.

    If any rank runs out of memory, all ranks drop their gradients, and run the same samples again in smaller
    micro-batches with the same random numbers. No rank is left waiting in a collective. Works on one device, in
    ``DistributedDataParallel`` and under FSDP2.

    A micro-batch that failed because it was larger than any before, by ``size_of``, sets a limit: from then on such
    micro-batches are cut, and no others. Otherwise ``micro_batch_size`` is halved. If it had fitted before, the next
    step tries it again. Each time that it soon fails again, the next trial waits for twice as many steps.

    Args:
        model: everything on the device; several models in an ``nn.ModuleList``. Under FSDP2 it must be sharded. A
            ``DistributedDataParallel`` itself, not the model in it.
        micro_step: forward pass, loss and backward pass of one micro-batch. It must not change anything else, because
            it may run again. It must leave the synchronisation of gradients to this class: no ``no_sync``, no
            ``set_requires_gradient_sync``. Its results are summed: a tensor or number, a tuple or dict of them,
            anything with ``+``, or None. Detach tensors, or they keep the graph alive.
        micro_batch_size: samples per micro-batch, the same on every rank; or an object that cuts micro-batches.
        size_of: a number of at least 1 that the memory of a micro-batch follows, the same on every rank for the same
            micro-batch. None: the elements of its first tensor of integers, or else its samples.
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
        backoff: decides when a reduced micro-batch grows again.
        sizes: the sizes of micro-batches that have and have not fitted.

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
        size_of: Callable[[Any], int] | None = None,
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
        self._model = model
        self._micro_step = micro_step
        is_cutter = isinstance(micro_batch_size, Cutter)
        self._cutter = micro_batch_size if is_cutter else Slices(micro_batch_size, size_of)
        self._has_own_sizes = size_of is not None and not is_cutter
        self._size_unit = ""
        self._optimizers = optimizers_of(optimizer)
        require_one_of("reduce", reduce, ("each", "last"))
        self._reduces_once = reduce == "last"
        self._release = release
        self._padded_rows = padded_rows
        self._device = computing_device(model)
        self._owns_watch = watch is None
        limit_bytes = None if memory_limit is None else parse_memory(memory_limit)
        self._watch = watch or PressureWatch.of(
            model, self._optimizers, self._device, process_group=process_group, limit_bytes=limit_bytes
        )
        if isinstance(self._cutter, Slices):
            self._cutter.consensus = self._watch.consensus
        self._on_event = on_event or self._watch.log
        self._limited = self._watch.meter if limit_bytes is not None else None
        self._recovery: Recovery | None = None
        self._is_enabled = True
        self._is_closed = False
        self._is_trained: dict[nn.Parameter, bool] = {}  # as in the dry run
        self._batch_norms: list[tuple[nn.Module, bool]] = []  # and whether each was in training mode
        self._trials_left = 0 if self._cutter.adds_up else _MOST_TRIALS
        self._gives_copies = False  # whether micro-steps change their batches in place
        self._must_stay_whole = ""  # why samples must not be cut
        self._events: list[MemoryEvent] = []
        self._number = steps_done
        self.backoff = Backoff()
        self.sizes = SizeRange(self._watch.consensus)

    @property
    def micro_batch_size(self) -> int:
        """The current size of a micro-batch."""
        return self._cutter.size

    def try_larger(self) -> None:
        """Try larger micro-batches in the next step, if there was an error. For example at the beginning of an epoch.

        Every rank must call it.
        """
        self.backoff.try_now()
        self.sizes.try_again()

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

    def dry_run(self, samples: Any) -> None:
        """Create the optimizers' state, and try small micro-steps: on one sample, on another one, and on both.

        They show which collectives they issue, and whether samples may be cut into micro-batches: gradients and results
        of both samples must be the sum of those of each alone. It restores model, optimizers and random generators,
        and sets gradients to None. A collective: every rank must call it. If it has not been called, the first step
        calls it with its own samples. So does each step after parameters were frozen or unfrozen, and the next one that
        has two samples with gradients, if there were none.
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
        drop_forward_passes(fsdp_states(self._model))  # after one, some parameters are whole instead of sharded
        self._is_trained = {parameter: parameter.requires_grad for parameter in self._model.parameters()}
        self._batch_norms = [(one, one.training) for one in self._model.modules() if isinstance(one, _BatchNorm)]
        check_optimizers(self._optimizers, self._model)
        self._check_no_gradients()
        allocate_states(self._optimizers, self._watch)
        used: list[nn.Parameter] = []
        try:
            found = self._dry_run_with_samples_that_count(samples)
            self._recovery, used = found.recovery, found.used
        finally:
            drop_unused_states(self._optimizers, used)

    def prepare(self, samples: Any) -> None:
        """Rehearse; but if samples must not be cut and need not be, train without recovery. A collective.

        Raises: as ``dry_run``.
        """
        try:
            self.dry_run(samples)
            return
        except CannotCutError as error:
            self._must_stay_whole = str(error)  # only the text: the traceback keeps tensors alive
        self._check_whole(samples)
        if self._watch.consensus.rank == 0:
            log.warning("An out-of-memory error will end the run. %s", self._must_stay_whole)
        self.disable()

    def _dry_run_with_samples_that_count(self, samples: Any) -> DryRun:
        """Rehearse, and look for two samples with gradients if the first ones have none. A collective.

        Raises:
            CannotRecoverError: no micro-step leaves a gradient.
        """
        if self._cutter.adds_up:
            return self._dry_run(samples, None)
        self._trials_left -= 1
        candidates = min(self._watch.consensus.max_over_ranks(self._cutter.num_to_try(samples)), _MOST_SAMPLES)
        pair, following = [0, 1], 2
        while True:
            found = self._dry_run(samples, (pair[0], pair[1]) if candidates > 1 else None)
            counts = found.verdict.counts
            if all(counts) or following + counts.count(False) > candidates:
                break
            found.recovery.close()
            for place in (place for place in (0, 1) if not counts[place]):
                pair[place], following = following, following + 1
        if found.verdict.factor is not None or found.verdict.is_random or not candidates:
            self._trials_left = 0
        is_unknown = candidates and not self._trials_left and found.verdict.factor is None
        if is_unknown and self._watch.consensus.rank == 0:
            is_random = found.verdict.is_random
            log.warning(
                "It is not known whether samples may be cut into micro-batches, because %s: the loss must be a sum.",
                "a micro-step draws random numbers that cannot be fixed" if is_random else "two could not be compared",
            )
        if candidates and not found.used:
            found.recovery.close()
            raise cannot_recover("a micro-step leaves no gradient in `.grad` of any parameter")
        return found

    def _dry_run(self, samples: Any, pair: tuple[int, int] | None) -> DryRun:
        """Rehearse with these two samples, if there are two. A collective.

        Raises:
            CannotCutError: samples must not be cut into micro-batches.
            ResultsError: results do not add up.
        """
        trial_batches = list(self._cutter.trial_batches(samples, pair))
        self._check(has_samples=bool(trial_batches))
        one = trial_batches[0][0]
        if self._has_own_sizes:
            check_size_of(self._cutter.size_of, one, self._watch.consensus)
        else:
            self._size_unit = "tokens" if self._cutter.size_of(one) > self._cutter.num_rows(one) else "samples"
        context = self._watch.meter or nullcontext()
        try:
            found = dry_run(
                [[self._as_micro_step(context, one, is_trial=True) for one in parts] for parts in trial_batches],
                model=self._model,
                device=self._device,
                watch=self._watch,
                release=self._release,
                reduces_once=self._reduces_once,
                optimizers=self._optimizers,
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
        if reason:
            found.recovery.close()
            raise cannot_cut(reason)
        return found

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

    def __call__(self, samples: Any) -> Sums:
        """Run forward and backward passes over ``samples``, in smaller micro-batches if memory runs out.

        Returns the sum of the results of ``micro_step``. Gradients are the sums over all micro-steps. A collective:
        every rank must call it with the same number of samples.
        Args:
            samples: this rank's samples of the optimizer step: a sequence, a tensor [samples, ...], or a dict of these.
        Raises:
            NothingFitsError: a single sample does not fit. Raised on every rank, with the same message.
            InputError: gradients are not None, or ranks have different numbers of samples.
            CannotRecoverError: see ``dry_run``.
            CollectiveStateUnknownError: the error does not allow recovery; this process must end.
        """
        self._check_open()
        if self._is_enabled and (self._recovery is None or self._trains_others() or self._can_be_tried(samples)):
            self.prepare(samples)
        self._number += 1
        if self._limited is not None:
            self._limited.count([one.state for one in optimizers_within(self._optimizers)])
        if self._recovery is None:
            if not (micro_batches := self._cutter.cut(samples, self.sizes)):
                raise InputError(NO_SAMPLES)
            self._check_whole(samples)
            return functools.reduce(sum_of_results, (run() for run in self._micro_steps(micro_batches)))
        self._check_no_gradients()
        restore = self._recovery.start_step()
        grown_from = self._try_larger()
        unchanged = None if self._cutter.adds_up or self._gives_copies else versions(samples)
        while True:
            micro_batches = self._cutter.cut(samples, self.sizes)
            attempt = self._recovery.attempt(
                self._micro_steps(micro_batches),
                is_thrashing=self._watch.is_thrashing,
                is_even=self._cutter.is_even or self.sizes.made_even,
            )
            is_changed = unchanged is not None and versions(samples) != unchanged
            self._gives_copies |= is_changed
            if attempt.pressure is MemoryPressure.OUT_OF_MEMORY:
                restore()
                self._check_unchanged(is_changed)
            if attempt.pressure is MemoryPressure.NONE:
                self._note_fit(micro_batches, grown_from)
            elif self._learns(attempt, micro_batches):
                self._note_limit(attempt)
            else:
                self._reduce(attempt, samples)
            if attempt.pressure is not MemoryPressure.OUT_OF_MEMORY:
                return cast(Sums, attempt.result)
            grown_from = 0

    def _trains_others(self) -> bool:
        """Whether a parameter was frozen or unfrozen since the dry run, or the mode of a batch norm was changed.

        Other collectives then reduce gradients, or samples are mixed.
        """
        was_frozen = any(parameter.requires_grad is not was for parameter, was in self._is_trained.items())
        return was_frozen or any(module.training is not was for module, was in self._batch_norms)

    def _can_be_tried(self, samples: Any) -> bool:
        """Whether no trial has had two samples with gradients yet, but this step may have. A collective."""
        return self._trials_left > 0 and self._watch.consensus.any_rank(self._cutter.num_to_try(samples) > 1)

    def _check_whole(self, samples: Any) -> None:
        """Check that samples that must not be cut are not cut on any rank. A collective."""
        if self._must_stay_whole and self._watch.consensus.any_rank(not self._cutter.is_whole(samples)):
            raise CannotCutError(self._must_stay_whole)

    def _check_unchanged(self, is_changed: bool) -> None:
        """Check that no rank's samples were changed by an attempt that must run again. A collective."""
        if self._watch.consensus.any_rank(is_changed):
            raise InputError(
                "`micro_step` must not change its micro-batch in place only in some steps, because this one has to run"
                " again with the same samples, but it did: change a copy."
            )

    def _try_larger(self) -> int:
        """Grow a reduced micro-batch if it is time. Returns the size before; 0 if it has not changed."""
        if self.backoff.next_trial is None or self._number < self.backoff.next_trial:
            return 0
        before = self._cutter.size
        self.backoff.grew(self._number, is_whole=self._cutter.grow())
        if self._cutter.size == before:
            return 0
        self._watch.reset()
        return before

    def _micro_steps(self, micro_batches: Iterable[Any]) -> list[MicroStep[Sums]]:
        context = self._limited or nullcontext()
        return [self._as_micro_step(context, one) for one in micro_batches]

    def _as_micro_step(
        self, context: AbstractContextManager[Any], micro_batch: Any, *, is_trial: bool = False
    ) -> MicroStep[Sums]:
        run = partial(self._try if is_trial and not self._cutter.adds_up else self._run, context, micro_batch)
        if self._padded_rows is None:
            return MicroStep(run)
        num_rows, with_rows = self._padded_rows(micro_batch)
        return MicroStep(run, num_rows, lambda number: self._run(context, with_rows(number)))

    def _run(self, context: AbstractContextManager[Any], micro_batch: Any) -> Sums:
        with context:
            self._watch.phases.enter("batch")
            return self._micro_step(copied(micro_batch) if self._gives_copies else micro_batch)

    def _try(self, context: AbstractContextManager[Any], micro_batch: Any) -> Sums:
        """Run a micro-step of a trial on a copy, and see whether it changes the copy in place."""
        given = copied(micro_batch)
        with context:
            self._watch.phases.enter("batch")
            result = self._micro_step(given)
        self._gives_copies |= was_changed(given, micro_batch)
        return result

    def _learns(self, attempt: Attempt[Sums], micro_batches: Sequence[Any]) -> bool:
        """Learn what did not fit, if sizes explain the shortage on every rank that had one. A collective.

        They do if other micro-batches fit, also of other ranks, but none as large as this one, which has several rows.
        """
        is_out, size_of = attempt.pressure is MemoryPressure.OUT_OF_MEMORY, self._cutter.size_of
        done = micro_batches[: attempt.num_done] if is_out else ()
        self._note_sizes(done)
        size, is_explained, largest_fitted = 0, True, self.sizes.largest_fitted
        if attempt.own_pressure is attempt.pressure:
            failed = micro_batches[attempt.num_done] if is_out else max(micro_batches, key=size_of)
            size = size_of(failed)
            is_explained = self._cutter.num_rows(failed) > 1 and size > largest_fitted
        reports = self._watch.consensus.from_all_ranks((size, is_explained, largest_fitted, bool(done)))
        sizes, are_explained, fitted, has_done = zip(*reports, strict=True)
        fits = self._cutter.size <= self.backoff.largest_fitted or any(has_done)
        if not (fits and all(are_explained)):
            return False
        self.sizes.failed(min(filter(None, sizes)), most_fitted=max(fitted))
        return True

    def _note_limit(self, attempt: Attempt[Sums]) -> None:
        """Note that larger micro-batches are cut from now on. A collective."""
        size, unit = self._cutter.size, self._cutter.unit
        event = self._watch.event(attempt, step=self._number, before=size, after=size, unit=unit)
        self._watch.reset()
        self._note(replace(event, too_large=self.sizes.smallest_failed, size_unit=self._size_unit))

    def _reduce(self, attempt: Attempt[Sums], samples: Any) -> None:
        """Halve the micro-batch, at once after an error, or from the next step on after thrashing. A collective.

        Raises:
            NothingFitsError: the attempt failed, and micro-batches are already single rows.
        """
        can_reduce = self._cutter.can_reduce(samples)
        before = self._cutter.size
        if can_reduce:
            self._cutter.reduce(samples)
        after, unit = self._cutter.size, self._cutter.unit
        event = self._watch.event(attempt, step=self._number, before=before, after=after, unit=unit)
        self._watch.reset()
        if not can_reduce and attempt.pressure is MemoryPressure.OUT_OF_MEMORY:
            raise NothingFitsError(
                f"a single row per micro-step must fit, but in step {self._number} {event.cause};"
                f" {NOTHING_FITS_ADVICE}."
            )
        if not can_reduce:
            self._watch.stop()
        else:
            self.backoff.failed(before, step=self._number)
        self._note(event)

    def _note_fit(self, micro_batches: Sequence[Any], grown_from: int) -> None:
        size = self._cutter.size
        self.backoff.fitted(size)
        self._note_sizes(micro_batches)
        if grown_from:
            self._note(MemoryEvent.growth(self._number, grown_from, size, self._cutter.unit))

    def _note_sizes(self, fitted: Sequence[Any]) -> None:
        self.sizes.fitted(max(map(self._cutter.size_of, fitted), default=0))

    def _note(self, event: MemoryEvent) -> None:
        self._events.append(replace(event, times=1 + sum(one.kind == event.kind for one in self._events)))
        self._on_event(self._events[-1])

    def _check(self, *, has_samples: bool) -> None:
        """Check the micro-batch size and the samples of all ranks. A collective."""
        smallest, largest = self._watch.consensus.min_and_max(self._cutter.size)
        if smallest != largest:
            raise InputError(
                f"`micro_batch_size` must be the same on every rank, but is {smallest} on one and {largest} on another."
            )
        if self._watch.consensus.any_rank(not has_samples):
            raise InputError("An optimizer step must have samples on every rank, but has none on some.")

    def _check_no_gradients(self) -> None:
        if any(is_trained and parameter.grad is not None for parameter, is_trained in self._is_trained.items()):
            raise InputError(
                "Gradients must be None before a step, which may have to run again, but some are not: call"
                " `optimizer.zero_grad()` after each optimizer step, also after one that is skipped, without"
                " `set_to_none=False`; and pass all samples of a step in one call."
            )

    def _check_open(self) -> None:
        if self._is_closed:
            raise InputError("This `RecoverableStep` has been closed: create another one.")

    def _end_recovery(self) -> None:
        if self._recovery is not None:
            self._recovery.close()
            self._recovery = None
