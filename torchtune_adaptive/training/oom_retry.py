"""Run the micro-steps of an optimizer step within memory: in smaller micro-batches where memory runs out."""

import functools
import math
import operator
import textwrap
from collections.abc import Callable, Iterable
from functools import partial

from torchtune import utils

from torchtune_adaptive.batch.limits import halvings
from torchtune_adaptive.batch.loader import StepSamples
from torchtune_adaptive.batch.micro_batches import Cut, MicroBatcher
from torchtune_adaptive.batch.row_format import Row
from torchtune_adaptive.distributed.consensus import Consensus
from torchtune_adaptive.distributed.recovery import Attempt, MemoryPressure, Recovery
from torchtune_adaptive.errors import NothingFitsError
from torchtune_adaptive.memory.allocator_retries import RetryWatch
from torchtune_adaptive.memory.devices import describe_peak
from torchtune_adaptive.memory.meter import MemoryMeter
from torchtune_adaptive.memory.out_of_memory import comes_from_out_of_memory, is_out_of_memory_in_collective
from torchtune_adaptive.memory.phases import Phases
from torchtune_adaptive.search.find import NOTHING_FITS_ADVICE
from torchtune_adaptive.search.sizes import MicroBatches, probe_batch
from torchtune_adaptive.text import ranks_text
from torchtune_adaptive.training.step_figures import StepFigures, StepSums
from torchtune_adaptive.training.train_step import TrainStep

log = utils.get_logger("DEBUG")

Run = Callable[[], StepSums]
FirstThatFits = Callable[[Callable[[int], MicroBatches], Iterable[int]], int | None]
Note = Callable[[str], None]  # takes the reason why the micro-batch changed, on every rank


class OomRetry:
    """Runs the micro-steps of one optimizer step after the other, and halves the micro-batch if memory runs out.

    Args:
        recovery: None if an out-of-memory error is to end the run.
        meter: whose figures are logged when memory runs out; None if nothing is metered.
        first_that_fits: tries micro-batches by whole train steps that leave no trace, in the middle of training.
    """

    def __init__(
        self,
        step: TrainStep,
        micro_batches: MicroBatcher,
        *,
        recovery: Recovery | None,
        phases: Phases,
        meter: MemoryMeter | None,
        consensus: Consensus,
        first_that_fits: FirstThatFits,
    ) -> None:
        self._step = step
        self._micro_batches = micro_batches
        self._recovery = recovery
        self._phases = phases
        self._meter = meter
        self._consensus = consensus
        self._first_that_fits = first_that_fits
        self._watch = RetryWatch(lambda: 0 if meter is None else meter.total_retries)
        self._around: Callable[[int, Run], StepSums] | None = None
        self._retries = 0

    @property
    def retries(self) -> int:
        """Attempts so far that ran out of memory."""
        return self._retries

    @property
    def micro_batches(self) -> MicroBatcher:
        """How large micro-batches are."""
        return self._micro_batches

    @property
    def recovers(self) -> bool:
        """Whether training survives out-of-memory errors."""
        return self._recovery is not None

    def wrap_micro_steps(self, around: Callable[[int, Run], StepSums] | None) -> None:
        """Have ``around(number, run)`` run every micro-step, to inject faults; None: nothing.

        Numbers count from 0 in each optimizer step, and go on counting when it is run again.
        """
        self._around = around

    def run(self, samples: StepSamples, *, number: int, measured: bool, note: Note) -> StepSums:
        """The sums of the micro-steps over ``samples``, whatever memory there is for them. A collective.

        Args:
            number: of the optimizer step, from 1, for messages.
            measured: whether gradient norms of a small batch are to be taken.

        Raises:
            NothingFitsError: not even single rows fit; on every rank, with the same sentence.
        """
        measured = measured and samples.most_rows > 1
        first = 0
        if self._recovery is None:
            micro_steps, cuts = self._micro_steps(samples, measured=measured, first=first)
            sums = functools.reduce(operator.add, (run() for run in micro_steps))
            self._micro_batches.count_padding(*cuts)
            return sums
        restore = self._recovery.keep()
        while True:
            micro_steps, cuts = self._micro_steps(samples, measured=measured, first=first)
            attempt = self._recovery.attempt(micro_steps, is_thrashing=self._watch.is_thrashing)
            if attempt.pressure is not MemoryPressure.NONE:
                self._reduce(attempt, samples, number=number, note=note)
            if attempt.result is not None:
                self._micro_batches.count_padding(*cuts)
                return attempt.result
            first += len(micro_steps)
            restore()

    def finish(self, sums: StepSums, *, number: int) -> StepFigures:
        """Take optimizer step ``number`` by the sums of its micro-steps. A collective.

        Raises:
            RuntimeError: out of memory after all ranks had agreed that the micro-steps went well.
        """
        try:
            return self._step.finish(sums)
        except Exception as error:
            if not comes_from_out_of_memory(error) and not is_out_of_memory_in_collective(error):
                raise
            raise RuntimeError(
                f"out of memory in phase {self._phases.now!r} of step {number}, when parameters and optimizer state"
                " may be half updated: the run must end, and may resume from its last checkpoint;"
                " an 8-bit optimizer, LoRA or more ranks would need less"
            ) from error

    def try_larger(self, row: Row, rows_per_step: int) -> tuple[int, int] | None:
        """Try again larger micro-batches of ``row``, if memory has made them small; the sizes before and after.

        None if there is nothing to try or nothing larger fits. A collective.
        """
        before, largest = self._micro_batches.limit, self._micro_batches.largest
        if before == largest:
            return None

        def make_batch(size: int) -> MicroBatches:
            rows = min(self._micro_batches.rows_of(row, size=size), rows_per_step)
            return probe_batch(row, rows, micro_steps=math.ceil(rows_per_step / rows))

        found = self._first_that_fits(make_batch, halvings(largest.size, above=before.size))
        self._reset_watch()
        if found is None:
            return None
        self._micro_batches.resize(found)
        return before.size, found

    def _micro_steps(self, samples: StepSamples, *, measured: bool, first: int) -> tuple[list[Run], tuple[Cut, ...]]:
        """The micro-steps of ``samples``, as many on every rank, and how they are cut. With a token limit a collective.

        ``first`` is the number of the first one.
        """
        if not measured:
            cut = self._micro_batches.cut(samples)
            runs: list[Run] = [partial(self._step.micro_step, rows) for rows in cut.micro_batches]
            return self._wrapped(runs, first), (cut,)
        small, rest = map(self._micro_batches.cut, samples.halves())
        last = len(small.micro_batches) - 1
        runs = [
            partial(self._step.micro_step_of_small_batch, rows, is_last=place == last)
            for place, rows in enumerate(small.micro_batches)
        ]
        runs += [partial(self._step.micro_step, rows) for rows in rest.micro_batches]
        return self._wrapped(runs, first), (small, rest)

    def _wrapped(self, runs: list[Run], first: int) -> list[Run]:
        around = self._around
        return runs if around is None else [partial(around, number, run) for number, run in enumerate(runs, first)]

    def _reduce(self, attempt: Attempt[StepSums], samples: StepSamples, *, number: int, note: Note) -> None:
        """Halve the micro-batch: from now on if the attempt failed, from the next step on if it was slow. A collective.

        Raises:
            NothingFitsError: the attempt failed, and micro-batches are single rows already.
        """
        can_reduce = self._micro_batches.can_reduce(samples)
        cause = self._cause(attempt)
        self._reset_watch()
        if attempt.pressure is MemoryPressure.OUT_OF_MEMORY:
            self._retries += 1
            if not can_reduce:
                raise NothingFitsError(
                    f"a single row per micro-step must fit, but in step {number} {cause}; {NOTHING_FITS_ADVICE}."
                )
        if not can_reduce:
            utils.log_rank_zero(log, f"micro-batch stays at a single row, although {cause}")
            self._watch.stop()
            return
        before = self._micro_batches.limit.size
        self._micro_batches.reduce()
        note(f"micro-batch {before} -> {self._micro_batches.limit}: in step {number} {cause}")

    def _cause(self, attempt: Attempt[StepSums]) -> str:
        """Which ranks were short of memory, and the figures of the first of them. A collective."""
        mine = attempt.own_pressure, self._phases.now, describe_peak(self._meter), attempt.error
        reports = enumerate(self._consensus.from_all_ranks(mine))
        ranks = {rank: figures for rank, (pressure, *figures) in reports if pressure is attempt.pressure}
        phase, figures, error = next(iter(ranks.values()))
        if attempt.pressure is MemoryPressure.THRASHING:
            return f"{ranks_text(ranks)} gave back the allocator's cache in two steps in a row ({figures})"
        return f"{ranks_text(ranks)} ran out of memory in {phase} ({figures}: {textwrap.shorten(error, 200)})"

    def _reset_watch(self) -> None:
        """Forget peaks and allocator retries: they belong to micro-batches of another size."""
        self._watch.reset()
        if self._meter is not None:
            self._meter.reset()
