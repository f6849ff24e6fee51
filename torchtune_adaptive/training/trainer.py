"""The training loop, independent of recipes."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass, replace

from torchtune import utils

from torchtune_adaptive.engine.progress import Bar
from torchtune_adaptive.engine.recovery.step import RecoverableStep
from torchtune_adaptive.engine.recovery.watch import MemoryEvent
from torchtune_adaptive.errors import RunEnded
from torchtune_adaptive.training.batch.growth import BatchGrowth, gradient_norms
from torchtune_adaptive.training.batch.limits import RowLimit
from torchtune_adaptive.training.batch.loader import StepLoader, StepSamples
from torchtune_adaptive.training.batch.micro_batches import MicroBatcher
from torchtune_adaptive.training.checkpoints.saver import RunSaver
from torchtune_adaptive.training.learning_rate import LearningRate
from torchtune_adaptive.training.objectives import Loss
from torchtune_adaptive.training.profiling import StepProfiler
from torchtune_adaptive.training.run_log import RunLog
from torchtune_adaptive.training.run_state import AdaptiveState
from torchtune_adaptive.training.sizes import Sizes
from torchtune_adaptive.training.step_log import StepLog
from torchtune_adaptive.training.train_step import StepResult, TrainStep

log = utils.get_logger("DEBUG")


@dataclass(eq=False)
class Trainer:
    """Trains epochs, with a batch that may grow and micro-batches that fit.

    Attributes:
        recoverable: runs ``step.micro_step`` on what ``micro_batches`` cuts.
        sizes: the sizes that the search found.
        before_step: called before each step with the number of optimizer steps done.
        epochs: the remaining epochs.
        epochs_run, global_step: epochs and optimizer steps done, including those before a resume.
    """

    step: TrainStep
    recoverable: RecoverableStep[Loss]
    micro_batches: MicroBatcher
    loader: StepLoader
    growth: BatchGrowth
    rate: LearningRate
    run_log: RunLog
    step_log: StepLog
    profiler: StepProfiler
    saver: RunSaver
    _: KW_ONLY
    sizes: Sizes
    before_step: Callable[[int], None]
    epochs: range
    global_step: int

    def __post_init__(self) -> None:
        self.epochs_run = self.epochs.start
        self.recoverable.on_event = self._note_event
        self._resumes_within = False  # the first epoch, in which the batch has grown before

    def train(self) -> None:
        """Train for the remaining epochs, save after each, and log a summary at the end. A collective.

        Raises:
            RunEnded: a signal has asked some rank to end, and the run is saved.
            CheckpointError: a signal has asked some rank to end, but the run cannot be saved.
        """
        try:
            self._train_epochs()
        except RunEnded:
            self.step_log.finish("ended by a signal", step=self.global_step, epochs_run=self.epochs_run)
            raise
        self.step_log.finish("complete", step=self.global_step, epochs_run=self.epochs_run)

    def _train_epochs(self) -> None:
        self.step.policy.zero_grad()
        with self.profiler.running():
            for epoch in self.epochs:
                if not self._resumes_within:
                    self.saver.restore_random()
                    self._grow(epoch)
                    self.recoverable.try_larger()
                self._resumes_within = False
                self._train_epoch(epoch)
                self.epochs_run = epoch + 1
                self.saver.after_epoch(epoch, step=self.global_step)

    def load_state(self, saved: AdaptiveState) -> None:
        """Resume from a saved state, and log what has changed since. A collective."""
        self._resumes_within = saved.epoch_samples > 0
        if changes := self.saver.load(saved):
            self.note(f"resumed with changes: {'; '.join(changes)}")

    def note_batch_size(self, reason: str, **figures: int) -> None:
        """Log the batch size with its arithmetic and the reason; with ``figures`` also in the run's log."""
        size, loader = self.loader.batch_size, self.loader
        utils.log_rank_zero(log, f"{loader.key} {size} ({reason}): {loader.describe(size)}{self._describe_cut()}")
        self.note(reason, is_logged=False, samples_per_step=loader.samples_per_step, **figures)

    def note(self, reason: str, *, is_logged: bool = True, **figures: int) -> None:
        """Log ``reason``, and add it to the run's log with ``figures``."""
        if is_logged:
            utils.log_rank_zero(log, reason)
        step, size = self.global_step + 1, self.loader.batch_size
        self.run_log.note(reason, step=step, epoch=self.epochs_run, batch_size=size, **figures)

    def _grow(self, epoch: int) -> None:
        """Apply this epoch's increase; adapt data, steps per epoch, micro-batches and learning rate. A collective."""
        growth = self.growth.next(epoch, self.loader.batch_size)
        if growth is None:
            return
        if growth.increment:
            utils.log_rank_zero(log, growth.reason)
        if growth.batch_size != self.loader.batch_size:
            self.loader.set_batch_size(growth.batch_size)
            self.micro_batches.largest = self.sizes.limit(self.loader.rows_per_micro_step)
            self.rate.change(epoch=epoch, step=self.global_step, steps_per_epoch=self.loader.steps_per_epoch)
            if scaled := self.rate.scale(self.loader.samples_per_step):
                utils.log_rank_zero(log, scaled)
            self.note_batch_size(growth.reason)

    def _train_epoch(self, epoch: int) -> None:
        done = self.loader.steps_done
        steps = self.loader.steps(epoch)
        self.saver.restore_random()  # after the data loader's iterator is made, which draws a random number
        with Bar(total=self.loader.steps_per_epoch, initial=done, disable=not self.step_log.writes) as progress:
            asked = time.perf_counter()
            for step, samples in enumerate(steps, start=done + 1):
                waited_seconds = time.perf_counter() - asked
                self.profiler.begin_step(epoch, step)
                began = time.perf_counter()
                self.before_step(self.global_step)
                result = self.train_step(samples)
                self.global_step += 1
                self.rate.step()
                seconds = waited_seconds + time.perf_counter() - began
                progress.update(1)
                progress.set_description(f"{epoch + 1}|{self.global_step}|Loss: {result.loss}")
                self.step_log.write(self.global_step, result, samples=samples.num_samples, epoch=epoch, seconds=seconds)
                self.profiler.end_step(epoch, step)
                self.saver.after_step(epochs_run=epoch, step=self.global_step, stop=result.stop)
                asked = time.perf_counter()  # a step includes the wait for its samples

    def train_step(self, samples: StepSamples) -> StepResult:
        """One optimizer step over ``samples``. It also measures the gradient's noise if growth needs it. A collective.

        Raises:
            NothingFitsError: a single row does not fit.
            RuntimeError: out of memory after the last backward pass.
        """
        samples = replace(samples, measured=self.growth.measures(self.global_step))
        with self.step.meter or nullcontext():
            sums = self.recoverable(samples)  # forward and backward in micro-batches; smaller ones if memory runs out
            with self.step.finishing():
                values = self.step.finish(sums)  # one all-reduce, normalize, clip, optimizer
            result = StepResult.read(values, sums)
        self.micro_batches.end_step()
        if result.measured:
            norms = gradient_norms(
                result.measured, weight=result.weight, samples=samples.num_samples, ranks=self.loader.ranks
            )
            self.growth.observe(norms)
        return result

    def _note_event(self, event: MemoryEvent) -> None:
        """Log a shortage of memory or its end, and add it to the run's log if micro-batches have changed."""
        self.step_log.write_events()  # at once, because the step may end the run
        limit = self.micro_batches.limit
        if event.after != event.before:
            self.note(str(event), is_logged=event.is_logged, **{limit.key: limit.size})
        elif event.is_logged:
            utils.log_rank_zero(log, str(event))

    def _describe_cut(self) -> str:
        """How an optimizer step is cut into micro-steps, if this does not follow from the batch size."""
        largest = self.micro_batches.largest
        if isinstance(largest, RowLimit) and not self.loader.is_global and largest.size >= self.loader.batch_size:
            return ""
        return f", in micro-steps of at most {largest} per rank"
