"""``RecoverableStep``: a train step for any PyTorch loop that recovers from out-of-memory errors."""

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Generic, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from torchtune_adaptive.engine.loop import Loop, check_no_search, compile_each_size, sum_of_results
from torchtune_adaptive.engine.memory.devices import computing_device, limit_bytes_of, optimizers_of
from torchtune_adaptive.engine.optimizers import optimizers_within
from torchtune_adaptive.engine.recovery.attempts import Attempt
from torchtune_adaptive.engine.recovery.backoff import Backoff
from torchtune_adaptive.engine.recovery.columns import TensorsBefore
from torchtune_adaptive.engine.recovery.micro_batches import Cutter, Slices
from torchtune_adaptive.engine.recovery.micro_step_maker import MicroStepMaker, PaddedRows
from torchtune_adaptive.engine.recovery.pace import STEPS_TO_TIME
from torchtune_adaptive.engine.recovery.preparation import Preparation
from torchtune_adaptive.engine.recovery.watch import MemoryEvent, MemoryPressure, PressureWatch
from torchtune_adaptive.errors import (
    NOTHING_FITS_ADVICE,
    CannotCutError,
    InputError,
    NothingFitsError,
    require_callable,
    require_one_of,
)

log = logging.getLogger(__name__)

Sums = TypeVar("Sums")
_NO_SAMPLES = "This optimizer step has no samples."


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
        padded_rows: PaddedRows | None = None,
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
        self._owns_watch = watch is None
        limit_bytes = limit_bytes_of(memory_limit)
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
        self._micro_steps = MicroStepMaker(
            self._loop,
            self._watch,
            limited=self._limited,
            keeps_batches=not self._cutter.adds_up,
            padded_rows=padded_rows,
        )
        self._preparation = Preparation(self._loop, self._cutter, self._micro_steps, reduces_once=self._reduces_once)
        self._is_enabled = True
        self._is_closed = False
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
        return self._preparation.recovery is not None

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
        self._preparation.end()

    def close(self) -> None:
        """Restore the model's own communication functions. Every rank must call it."""
        self._is_closed = True
        self._preparation.end()
        if self._owns_watch:
            self._watch.close()

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
        if needs_dry_run := self._is_enabled and not self.recovers:
            self.prepare(samples)
        self._number += 1
        return self._run_step(samples, self._cutter.size, is_fresh=needs_dry_run)

    def _run_step(self, samples: Any, size_before: int, *, is_fresh: bool) -> Sums:
        """Run the step; unless the dry run ``is_fresh``, after another one if a rank needs it."""
        if self._limited is not None:
            self._limited.count([one.state for one in optimizers_within(self._loop.optimizers)])
        if (recovery := self._preparation.recovery) is None:
            return self._run_without_recovery(samples)
        self._preparation.check_no_gradients()
        recovery.start_step()
        changed = "" if is_fresh else self._preparation.what_has_changed()
        is_outdated = bool(changed) or (not is_fresh and self._preparation.may_compare(samples))
        self._grow_if_due()
        self._watch.start_step(self._cutter.size)
        before = TensorsBefore(() if self._cutter.adds_up else samples)
        while True:
            micro_batches = self._cutter.cut(samples)
            if self._any_outdated(is_outdated, len(micro_batches)):
                self._tell_of(changed)
                self.prepare(samples)
                return self._run_step(samples, size_before, is_fresh=True)
            attempt = recovery.attempt(self._micro_steps.of(micro_batches), numbers=self._watch.last_step)
            is_changed = not self._micro_steps.gives_copies and before.were_changed()
            self._micro_steps.gives_copies |= is_changed
            if not attempt.ran_out:
                break
            self._check_unchanged(is_changed)
            before.restore_gradients()
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
        return attempt.result

    def _any_outdated(self, is_outdated: bool, num_micro_steps: int) -> bool:
        """Whether what the dry run has found may have changed on any rank. A collective.

        If nothing has, it checks that all ranks have equally many micro-steps.

        Raises:
            InputError: some rank has fewer micro-steps than another, or none has any. Raised on every rank.
        """
        if self._cutter.is_even:  # that of recipes, whose ranks change alike
            return is_outdated
        own = -num_micro_steps, num_micro_steps, int(is_outdated)
        negated_fewest, most, any_outdated = self._loop.consensus.max_of_each(*own)
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
        *first, last = self._micro_steps.of(micro_batches)
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

    def _reduce(self, attempt: Attempt, samples: Any) -> None:
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

    def _note_once(self, attempt: Attempt) -> None:
        """Note, once for each size, that it stays although the allocator frees its cache. A collective."""
        size = self._cutter.size
        if (MemoryPressure.THRASHING, size, size) not in {one.kind for one in self._events}:
            self._note(self._watch.event(attempt, step=self._number, before=size, after=size, unit=self._cutter.unit))

    def _note(self, event: MemoryEvent) -> None:
        self._events.append(replace(event, times=1 + sum(one.kind == event.kind for one in self._events)))
        self.on_event(self._events[-1])

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
        self._preparation.dry_run(samples)

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

    def _tell_of(self, changed: str) -> None:
        """Say on the first rank what has changed on any, because another dry run takes time. A collective."""
        if (reason := self._loop.consensus.first_reason(changed)) and self._loop.consensus.rank == 0:
            log.warning("Step %d makes another dry run: since the last one, %s.", self._number, reason)
