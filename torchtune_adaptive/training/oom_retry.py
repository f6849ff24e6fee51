"""Run the micro-steps of an optimizer step, in smaller micro-batches if memory runs out."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torchtune import utils

from torchtune_adaptive.batch.limits import halvings
from torchtune_adaptive.batch.loader import StepSamples
from torchtune_adaptive.batch.micro_batches import Cut, MicroBatcher
from torchtune_adaptive.batch.row_format import Row
from torchtune_adaptive.errors import CannotRecoverError
from torchtune_adaptive.memory.out_of_memory import (
    comes_from_out_of_memory,
    free_memory,
    is_out_of_memory_in_collective,
)
from torchtune_adaptive.memory.phases import Phases
from torchtune_adaptive.recovery.attempts import MemoryPressure
from torchtune_adaptive.recovery.events import MemoryEvent
from torchtune_adaptive.recovery.rehearsal import Rehearsal
from torchtune_adaptive.recovery.step import RecoverableStep
from torchtune_adaptive.recovery.watch import PressureWatch
from torchtune_adaptive.search.sizes import MicroBatches, probe_batch
from torchtune_adaptive.search.workload import Workload
from torchtune_adaptive.training.step_figures import StepFigures, StepSums
from torchtune_adaptive.training.train_step import TrainStep

log = utils.get_logger("DEBUG")

_FEWEST = {"rows": 2, "tokens": 1}  # with a limit of one token, every row is a micro-batch of its own

Run = Callable[[], StepSums]
FirstThatFits = Callable[[Callable[[int], MicroBatches], Iterable[int]], int | None]
Note = Callable[[str], None]  # called on every rank with the reason why the micro-batch changed
SmallBatches = Callable[[int], list[list[Row]]]  # returns two batches of different shapes, with at most this many rows


@dataclass(frozen=True)
class _Window:
    """The samples of one optimizer step. ``measured``: whether to measure the gradient norm of a small batch."""

    samples: StepSamples
    measured: bool


@dataclass(frozen=True)
class _MicroBatch:
    """Rows of one micro-step. After the last one of a small batch, its gradient norm is measured."""

    rows: Sequence[Row]
    of_small_batch: bool = False
    is_last: bool = False


class _Cutter:
    """Cuts the samples of optimizer steps for ``RecoverableStep``.

    Args:
        rehearsed_rows: rows of a micro-batch in the dry run, if they fit.
    """

    is_even = True

    def __init__(self, micro_batches: MicroBatcher, rehearsed_rows: int) -> None:
        self._micro_batches = micro_batches
        self._rehearsed_rows = rehearsed_rows
        self._cuts: tuple[Cut, ...] = ()

    @property
    def size(self) -> int:
        return self._micro_batches.limit.size

    @property
    def unit(self) -> str:
        return self._micro_batches.limit.unit

    def cut(self, samples: _Window) -> list[_MicroBatch]:
        if not samples.measured:
            cut = self._micro_batches.cut(samples.samples)
            self._cuts = (cut,)
            return list(map(_MicroBatch, cut.micro_batches))
        small, rest = map(self._micro_batches.cut, samples.samples.halves())
        self._cuts = (small, rest)
        last = len(small.micro_batches) - 1
        measured = [_MicroBatch(rows, True, place == last) for place, rows in enumerate(small.micro_batches)]
        return measured + list(map(_MicroBatch, rest.micro_batches))

    def can_reduce(self, samples: _Window) -> bool:
        return self._micro_batches.can_reduce(samples.samples)

    def reduce(self, samples: _Window) -> None:
        self._micro_batches.reduce()

    def rehearsals(self, samples: SmallBatches) -> Iterable[list[_MicroBatch]]:
        for rows in sorted({self._rehearsed_rows, 1}, reverse=True):
            yield list(map(_MicroBatch, samples(rows)))

    def count_padding(self) -> None:
        """Count the padding of the last cut, which was used in training."""
        self._micro_batches.count_padding(*self._cuts)


class OomRetry:
    """Runs the micro-steps of optimizer steps, and halves the micro-batch if memory runs out.

    Args:
        workload: the models and optimizers on the device.
        rehearsed_rows: rows of a micro-batch in the dry run, if they fit.
        first_that_fits: tries micro-batches by whole train steps during training, and restores all state.
        starts_small: take the first step in small micro-batches, if it creates the optimizers' state. Otherwise the
            state lies within memory that an allocator has cached for the activations of a large one. It then cannot be
            freed as a whole, so that later steps find less memory than a search did.
    """

    def __init__(
        self,
        step: TrainStep,
        micro_batches: MicroBatcher,
        workload: Workload,
        *,
        phases: Phases,
        rehearsed_rows: int,
        first_that_fits: FirstThatFits,
        starts_small: bool = False,
    ) -> None:
        self._step = step
        self._workload = workload
        self._starts_small = starts_small
        self._micro_batches = micro_batches
        self._cutter = _Cutter(micro_batches, rehearsed_rows)
        self._phases = phases
        self._first_that_fits = first_that_fits
        self._note: Note = lambda reason: None
        self._watch = PressureWatch(workload.consensus, workload.meter, phases)
        self._recoverable: RecoverableStep[StepSums] = RecoverableStep(
            workload.model,
            self._micro_step,
            micro_batch_size=self._cutter,
            optimizer=workload.optimizers,
            forget=workload.forget,
            on_event=self._take_note,
            watch=self._watch,
        )

    @property
    def retries(self) -> int:
        """Number of attempts so far that ran out of memory and were repeated."""
        return sum(event.pressure is MemoryPressure.OUT_OF_MEMORY for event in self._recoverable.events)

    @property
    def events(self) -> tuple[MemoryEvent, ...]:
        """What has happened where memory ran short, in order."""
        return tuple(self._recoverable.events)

    @property
    def micro_batches(self) -> MicroBatcher:
        """The cut of steps into micro-batches, with its limit."""
        return self._micro_batches

    @property
    def recovers(self) -> bool:
        """Whether training recovers from out-of-memory errors."""
        return self._recoverable.recovers

    def prepare(self, small_batches: SmallBatches, *, why_not: str = "") -> None:
        """Prepare the recovery while memory is free. If it is not possible, log the reason. A collective.

        Args:
            why_not: why recovery is not possible, if that is known.

        Raises:
            NothingFitsError: the optimizers' state or the smallest micro-step does not fit.
        """
        if why_not:
            self.disable()
            log_no_recovery(why_not)
            return
        try:
            self._recoverable.rehearse(small_batches)
        except CannotRecoverError as error:
            self.disable()
            utils.log_rank_zero(log, str(error))

    def disable(self) -> None:
        """Let an out-of-memory error end the run. A collective.

        Raises:
            NothingFitsError: the optimizers' state does not fit.
        """
        workload = self._workload
        self._recoverable.disable()
        rehearsal = Rehearsal(workload.model, workload.optimizers, workload.device, self._watch, workload.forget)
        rehearsal.allocate_states()
        free_memory(workload.device)

    def wrap_micro_steps(self, around: Callable[[int, Run], StepSums] | None) -> None:
        """Run every micro-step through ``around(number, run)``, to inject faults. None: run it directly.

        Numbers count from 0 in each optimizer step, and continue when the step runs again.
        """
        self._recoverable.wrap_micro_steps(around)

    def run(self, samples: StepSamples, *, number: int, measured: bool, note: Note) -> StepSums:
        """The sums of the micro-steps over ``samples``, in smaller micro-batches if memory runs out. A collective.

        Args:
            number: the optimizer step's number from 1, for messages.
            measured: whether to measure the gradient norm of a small batch.
        Raises:
            NothingFitsError: a single row does not fit. Raised on every rank, with the same message.
        """
        self._note = note
        window = _Window(samples, measured and samples.most_rows > 1)
        if self._starts_small and not any(optimizer.state for optimizer in self._workload.optimizers):
            sums = self._run_small(window, number=number)
        else:
            sums = self._recoverable(window, number=number)
        self._cutter.count_padding()
        return sums

    def _run_small(self, window: _Window, *, number: int) -> StepSums:
        """As ``run``, in the smallest micro-batches that a search tries. The cache is then free for optimizer state."""
        before = self._micro_batches.limit.size
        self._micro_batches.resize(min(before, _FEWEST[self._micro_batches.limit.unit]))
        try:
            return self._recoverable(window, number=number)
        finally:
            self._micro_batches.resize(before)
            free_memory(self._workload.device)

    def finish(self, sums: StepSums, *, number: int) -> StepFigures:
        """Finish optimizer step ``number`` with the sums of its micro-steps. A collective.

        Raises:
            RuntimeError: out of memory after all ranks had agreed that the micro-steps succeeded.
        """
        try:
            figures = self._step.finish(sums)
        except Exception as error:
            if not comes_from_out_of_memory(error) and not is_out_of_memory_in_collective(error):
                raise
            raise RuntimeError(
                f"out of memory in phase {self._phases.now!r} of step {number}, when parameters and optimizer state"
                " may be half updated: the run must end, and may resume from its last checkpoint;"
                " an 8-bit optimizer, LoRA or more ranks would need less"
            ) from error
        if self._starts_small:
            self._starts_small = False
            free_memory(self._workload.device)
        return figures

    def try_larger(self, row: Row, rows_per_step: int) -> tuple[int, int] | None:
        """If the micro-batch was reduced, try larger ones of ``row``. Returns the sizes before and after. A collective.

        None if it was not reduced, if no larger one fits, or if host memory lacks the room for the copies from which
        model and optimizers are restored.
        """
        before, largest = self._micro_batches.limit, self._micro_batches.largest
        if before == largest:
            return None
        if reason := self._workload.why_no_copies():
            utils.log_rank_zero(
                log,
                f"micro-batch stays at {before}: to try a larger one, with copies of weights and optimizer state,"
                f" {reason}.",
            )
            return None

        def make_batch(size: int) -> MicroBatches:
            rows = min(self._micro_batches.rows_of(row, size=size), rows_per_step)
            return probe_batch(row, rows, micro_steps=math.ceil(rows_per_step / rows))

        found = self._first_that_fits(make_batch, halvings(largest.size, above=before.size))
        self._watch.reset()
        if found is None:
            return None
        self._micro_batches.resize(found)
        return before.size, found

    def _micro_step(self, micro_batch: _MicroBatch) -> StepSums:
        if not micro_batch.of_small_batch:
            return self._step.micro_step(micro_batch.rows)
        return self._step.micro_step_of_small_batch(micro_batch.rows, is_last=micro_batch.is_last)

    def _take_note(self, event: MemoryEvent) -> None:
        if event.after == event.before:
            utils.log_rank_zero(log, str(event))
        else:
            self._note(str(event))


def log_no_recovery(reason: str) -> None:
    """Log, on rank 0, that an out-of-memory error will end the run."""
    utils.log_rank_zero(log, f"An out-of-memory error in training will end the run: {reason}.")
