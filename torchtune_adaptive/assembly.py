"""Build a trainer from a recipe's parts: find the sizes, prepare the recovery, resume from a saved state."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn
from torchtune import utils

from torchtune_adaptive.batch.growth import BatchGrowth
from torchtune_adaptive.batch.loader import GlobalStepLoader, StepLoader, check_fills_step
from torchtune_adaptive.batch.micro_batches import MicroBatcher
from torchtune_adaptive.batch.row_format import Row, RowFormat
from torchtune_adaptive.checkpoints.folder import Checkpoint, CheckpointFolder
from torchtune_adaptive.checkpoints.saver import RunSaver, SaveEpoch
from torchtune_adaptive.checkpoints.steps import step_checkpoints
from torchtune_adaptive.distributed.consensus import Consensus
from torchtune_adaptive.distributed.rank_states import RankStates
from torchtune_adaptive.distributed.snapshot import keep_random_states
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.memory.devices import allowed_bytes, meter_for
from torchtune_adaptive.memory.meter import MemoryMeter
from torchtune_adaptive.memory.phases import Phases
from torchtune_adaptive.search.find import first_that_fits
from torchtune_adaptive.search.found_config import end_search, found_values
from torchtune_adaptive.search.reuse import sizes_of_searches
from torchtune_adaptive.search.sizes import SizeFinder, Sizes
from torchtune_adaptive.search.workload import Workload
from torchtune_adaptive.settings import AdaptiveSettings
from torchtune_adaptive.stock.configs import flattened
from torchtune_adaptive.trainer import Trainer
from torchtune_adaptive.training.host_leak import leak_warning
from torchtune_adaptive.training.journal import RunJournal
from torchtune_adaptive.training.learning_rate import BuildScheduler, LearningRate, check_follows
from torchtune_adaptive.training.objectives import Objective
from torchtune_adaptive.training.oom_retry import OomRetry
from torchtune_adaptive.training.optimizers import Stepping
from torchtune_adaptive.training.profiling import StepProfiler
from torchtune_adaptive.training.record import RunRecord
from torchtune_adaptive.training.run_events import RunEvents
from torchtune_adaptive.training.run_state import AdaptiveState
from torchtune_adaptive.training.start import StartingPoint, changed_batch, starting_point
from torchtune_adaptive.training.step_log import StepLog
from torchtune_adaptive.training.summary import RunSummary
from torchtune_adaptive.training.train_step import TrainStep

log = utils.get_logger("DEBUG")


@dataclass(frozen=True, kw_only=True)
class RecipeParts:
    """A recipe's parts for training. The trainer uses nothing else of a recipe.

    Attributes:
        models: all models on the device, the trained one first.
        stepping: when and how the optimizers step.
        forget: frees memory that a failed step holds outside of the models.
        scheduler: the learning rate's scheduler, None for a constant rate; ``build_scheduler`` creates it again.
        sampler: this rank's sampler over the data set.
        collate: makes a batch from a list of samples.
        tokenizer_max_seq_len: length to which samples are truncated, None if they are not.
        batch_size, micro_steps: the config's samples per rank and micro-step, and micro-steps per optimizer step.
        epochs: the remaining epochs.
        ranks: number of ranks over which the model is sharded and tokens are counted.
        metric_logger: None on all ranks except rank 0.
        checkpoints: the folder of checkpoints.
        resumed: the checkpoint from which the run resumes; None for a new run.
        recipe: the name of its class.
        cfg: the run's config as the user gave it.
        why_unrecoverable: why training cannot recover from an out-of-memory error; "" if it can.
        before_step: called before each optimizer step with the number of steps done.
        save: called after each epoch with the epoch and the state for a resumed run.
        stop_requested: whether this rank was asked to end after its optimizer step.
    """

    models: Sequence[nn.Module]
    objective: Objective
    stepping: Stepping
    forget: Callable[[], object]
    scheduler: Any
    build_scheduler: BuildScheduler
    sampler: Any
    collate: Callable[[Sequence[Row]], Any]
    row_format: RowFormat
    tokenizer_max_seq_len: int | None
    batch_size: int
    micro_steps: int
    max_steps_per_epoch: int | None
    epochs: range
    device: torch.device
    ranks: int
    metric_logger: Any
    log_every_steps: int
    with_memory_stats: bool
    profiler: StepProfiler
    output_dir: Path
    checkpoints: CheckpointFolder
    resumed: Checkpoint | None
    recipe: str
    cfg: DictConfig
    why_unrecoverable: str
    before_step: Callable[[int], None]
    save: SaveEpoch
    stop_requested: Callable[[], bool]


def build_trainer(parts: RecipeParts, settings: AdaptiveSettings, consensus: Consensus) -> Trainer:
    """The trainer, with sizes by the settings, at the start of a run or where it resumes. A collective.

    Searches and dry runs restore all state.

    Raises:
        InputError: data, settings and saved state do not match.
        NothingFitsError: one row does not fit.
        RunEnded: the settings ask only for the search; its result is written.
    """
    trainer = _Assembly(parts, settings, consensus).trainer()
    if settings.search_only:
        found = found_values(settings, trainer.sizes, rows=trainer.loader.rows_per_micro_step)
        end_search(parts.cfg, found, seq_len=trainer.sizes.seq_len, consensus=consensus)
    return trainer


class _Assembly:
    """Creates the parts of a trainer one after the other."""

    def __init__(self, parts: RecipeParts, settings: AdaptiveSettings, consensus: Consensus) -> None:
        self._parts = parts
        self._settings = settings
        self._consensus = consensus
        self._config = flattened(parts.cfg)
        self._models = nn.ModuleList(parts.models)
        self._meter = _make_meter(parts, settings, self._models)
        self._phases = Phases(parts.models, self._meter)
        self._step = TrainStep(
            parts.objective,
            parts.stepping,
            collate=parts.collate,
            device=parts.device,
            phases=self._phases,
            meter=self._meter,
            stop_requested=parts.stop_requested,
        )
        self._checkpoints = step_checkpoints(
            parts.checkpoints, parts.stepping.model, parts.stepping.optimizers, settings, consensus
        )
        self._workload = Workload(
            train_step=self._step,
            model=self._models,
            optimizers=parts.stepping.optimizers,
            device=parts.device,
            meter=self._meter,
            consensus=consensus,
            forget=parts.forget,
            state_comes_first=True,
        )
        self._loader = _make_loader(parts, settings.global_batch_size)

    def trainer(self) -> Trainer:
        parts, settings = self._parts, self._settings
        saved = self._checkpoints.load(parts.resumed, config=self._config)
        growth = BatchGrowth(
            settings.batch_increase_function, total_epochs=parts.epochs.stop, consensus=self._consensus
        )
        if growth.grows or settings.lr_scaling != "none":
            check_follows(parts.scheduler)
        with keep_random_states():  # the data set's transforms and the user's function may use them
            parts.row_format.check_sample(self._loader.dataset)
            growth.sizes(self._loader.batch_size)  # so that an invalid answer is found before the search
            sizes = self._find_sizes()
            start = starting_point(settings, self._loader, growth, sizes, epochs_run=parts.epochs.start, saved=saved)
            self._loader.set_batch_size(start.batch_size)
            check_fills_step(self._loader, start.batch_size)
            self._check_fits_at_once(sizes)
            retry = self._make_retry(sizes)
            rate, record = self._make_rate(start, saved, grows=growth.grows), self._make_record(sizes)
            writes_steps = parts.metric_logger is not None and not settings.search_only
            journal = RunJournal(parts.output_dir, writes=writes_steps)
            events = RunEvents(journal, retry, checkpoints=lambda: parts.checkpoints.finished)
            step_log = _make_log(parts, self._step, retry, self._loader, growth, events)
            logs = self._config.get("metric_logger.log_dir")
            summary = RunSummary(step_log, retry, self._loader, record, events, sizes=sizes, logs=logs)
            trainer = Trainer(
                self._step,
                retry,
                self._loader,
                growth,
                rate,
                record,
                step_log,
                parts.profiler,
                self._make_saver(retry.micro_batches, (rate, growth, record)),
                summary,
                sizes=sizes,
                before_step=parts.before_step,
                epochs=parts.epochs,
                steps_done=start.steps_done,
            )
            if saved is not None:
                trainer.load_state(saved)
            _begin(journal, parts, start, record, searched=sizes.result is not None)
        if settings.decides:
            _note_batch_size(trainer, parts, settings, start)
        if self._consensus.rank == 0 and (leak := leak_warning(parts.stepping.optimizers)):
            log.warning(leak)
        return trainer

    def _find_sizes(self) -> Sizes:
        """Find the sizes. Afterwards the meter has the limit of training, whose peak begins here. A collective."""
        parts, settings = self._parts, self._settings
        finder = SizeFinder(
            self._workload,
            self._loader,
            parts.row_format,
            settings,
            models=parts.models,
            wanted_rows=parts.batch_size,
            tokenizer_max_seq_len=parts.tokenizer_max_seq_len,
            found_sizes=sizes_of_searches(
                self._config, settings, recipe=parts.recipe, device=parts.device, consensus=self._consensus
            ),
        )
        sizes = finder.find()
        if self._meter is not None:
            self._meter.set_limit(settings.memory_limit_bytes)
            self._meter.reset()
        return sizes

    def _check_fits_at_once(self, sizes: Sizes) -> None:
        """Check that the optimizers do not step in each backward pass if a step must be cut.

        Raises:
            InputError: the saved run's batch is larger than what fits now.
        """
        rows = self._loader.rows_per_micro_step
        limit = sizes.limit(rows)
        if not self._parts.stepping.accumulates and limit.size < rows:
            raise InputError(
                f"`optimizer_in_bwd` must be False to resume with a batch of {rows} rows, of which {limit.size} fit"
                " now, but is True instead."
            )

    def _make_retry(self, sizes: Sizes) -> OomRetry:
        parts, loader, row_format = self._parts, self._loader, self._parts.row_format
        micro_batches = MicroBatcher(
            sizes.limit(loader.rows_per_micro_step),
            row_format,
            self._consensus,
            make_silent_row=lambda: row_format.silent(loader.dataset[0]),
        )
        retry = OomRetry(
            self._step,
            micro_batches,
            self._workload,
            phases=self._phases,
            rehearsed_rows=loader.data_loader.batch_size or 1,
            first_that_fits=partial(first_that_fits, self._workload, settings=self._settings),
            # Without a search, training stays equal to torchtune's bit for bit. Only CUDA's allocator caches memory.
            starts_small=sizes.result is not None and parts.stepping.accumulates and parts.device.type == "cuda",
        )
        if self._settings.oom_recovery:
            retry.prepare(partial(row_format.small_batches, loader.dataset), why_not=parts.why_unrecoverable)
        else:
            retry.disable()
        return retry

    def _make_rate(self, start: StartingPoint, saved: AdaptiveState | None, *, grows: bool) -> LearningRate:
        parts, settings, loader = self._parts, self._settings, self._loader
        optimizers = parts.stepping.optimizers if parts.scheduler is None else [parts.scheduler.optimizer]
        rate = LearningRate(
            parts.scheduler,
            optimizers,
            parts.build_scheduler,
            total_epochs=parts.epochs.stop,
            schedule_steps=start.schedule_steps,
            rule=settings.lr_scaling,
            reference_samples=_samples_in_config(parts, loader),
        )
        if saved is not None:
            rate.load_state_dict(asdict(saved))
        # Also in a resumed run, in which some of torchtune's recipes restart their schedule.
        if settings.decides or settings.lr_scaling != "none" or parts.resumed is not None:
            steps = loader.steps_per_epoch
            rate.begin(
                epoch=parts.epochs.start,
                step=start.steps_done,
                epoch_steps=start.epoch_steps,
                steps_per_epoch=steps,
                grows=grows,
            )
            if scaled := rate.scale(loader.samples_per_step):
                utils.log_rank_zero(log, scaled)
        return rate

    def _make_record(self, sizes: Sizes) -> RunRecord:
        """The record, with the lowest memory limit of all ranks. A collective."""
        parts, settings = self._parts, self._settings
        own_bytes = allowed_bytes(parts.device, settings.memory_limit_bytes)
        limit_bytes = self._consensus.min_over_ranks(own_bytes or 0)
        return RunRecord(
            parts.output_dir,
            sizes,
            memory_limit_bytes=limit_bytes or None,
            writes=parts.metric_logger is not None,
            search_only=settings.search_only,
        )

    def _make_saver(self, micro_batches: MicroBatcher, others: Sequence[Any]) -> RunSaver:
        return RunSaver(
            self._loader,
            micro_batches,
            others,
            self._checkpoints,
            RankStates(self._consensus, self._parts.device),
            save_epoch=self._parts.save,
            config=self._config,
        )


def _note_batch_size(trainer: Trainer, parts: RecipeParts, settings: AdaptiveSettings, start: StartingPoint) -> None:
    """Log and record where the first batch size comes from, and how a search has changed the batch of a new run."""
    sizes, loader = trainer.sizes, trainer.loader
    how = "size found before" if sizes.result and sizes.result.reused else f"{settings.strategy} search"
    reason = how if settings.use_maximum_batch_size else "config"
    if parts.resumed is not None:
        reason += f", resumed at epoch {parts.epochs.start}"
    if start.epoch_steps:
        reason += f", step {start.epoch_steps}"
    samples, change = _samples_in_config(parts, loader), ""
    if settings.use_maximum_batch_size and not loader.is_global and parts.resumed is None:
        accumulates = parts.stepping.accumulates
        change = changed_batch(
            loader.samples_per_step, samples, lr_scaling=settings.lr_scaling, accumulates=accumulates
        )
    in_config = {"samples_per_step_in_config": samples} if change else {}
    trainer.note_batch_size(reason, epoch=parts.epochs.start, **in_config)
    if change:
        utils.log_rank_zero(log, change)


def _samples_in_config(parts: RecipeParts, loader: StepLoader) -> int:
    """Samples of an optimizer step by torchtune's own keys."""
    return parts.batch_size * parts.micro_steps * loader.ranks


def _make_meter(parts: RecipeParts, settings: AdaptiveSettings, models: nn.Module) -> MemoryMeter | None:
    """The meter. None on a CPU without a limit, where it would only cost time."""
    if parts.device.type != "cuda" and (parts.device.type != "cpu" or settings.memory_limit_bytes is None):
        return None
    return meter_for(parts.device, models, parts.stepping.optimizers, exact=False)


def _make_log(
    parts: RecipeParts, step: TrainStep, retry: OomRetry, loader: StepLoader, growth: BatchGrowth, events: RunEvents
) -> StepLog:
    return StepLog(
        parts.metric_logger,
        step,
        retry,
        loader,
        growth,
        events,
        every_steps=parts.log_every_steps,
        device=parts.device,
        ranks=parts.ranks,
        with_memory_stats=parts.with_memory_stats,
    )


def _begin(journal: RunJournal, parts: RecipeParts, start: StartingPoint, record: RunRecord, *, searched: bool) -> None:
    journal.begin(
        step=start.steps_done,
        time=time.time(),
        epoch=parts.epochs.start,
        epochs=parts.epochs.stop,
        ranks=parts.ranks,
        log_every_n_steps=parts.log_every_steps,
        memory_limit_bytes=record.memory_limit_bytes,
        searched=searched,
        checkpoint=None if parts.resumed is None else str(parts.resumed.path),
    )


def _make_loader(parts: RecipeParts, samples_per_step: int | None) -> StepLoader:
    options: dict[str, Any] = {"max_steps_per_epoch": parts.max_steps_per_epoch}
    if samples_per_step is not None:
        return GlobalStepLoader(parts.sampler, parts.row_format, batch_size=samples_per_step, **options)
    options |= {"batch_size": parts.batch_size, "micro_steps": parts.micro_steps}
    return StepLoader(parts.sampler, parts.row_format, **options)
