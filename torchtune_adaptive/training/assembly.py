"""Build a trainer from a recipe's parts: find the sizes, prepare the recovery, resume from a saved state."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn
from torchtune import utils

from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.engine.distributed.rank_states import RankStates
from torchtune_adaptive.engine.distributed.snapshot import keep_random_states
from torchtune_adaptive.engine.memory.devices import allowed_bytes, meter_for
from torchtune_adaptive.engine.memory.meter import MemoryMeter
from torchtune_adaptive.engine.memory.phases import Phases
from torchtune_adaptive.engine.recovery.step import RecoverableStep
from torchtune_adaptive.engine.recovery.watch import PressureWatch
from torchtune_adaptive.engine.search.workload import Workload
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.settings import AdaptiveSettings
from torchtune_adaptive.training.batch.growth import BatchGrowth
from torchtune_adaptive.training.batch.loader import GlobalStepLoader, StepLoader, check_fills_step
from torchtune_adaptive.training.batch.micro_batches import MicroBatcher
from torchtune_adaptive.training.batch.row_format import Row, RowFormat
from torchtune_adaptive.training.checkpoints.folder import Checkpoint, CheckpointFolder
from torchtune_adaptive.training.checkpoints.saver import RunSaver, SaveEpoch
from torchtune_adaptive.training.checkpoints.steps import StepCheckpoints
from torchtune_adaptive.training.found_config import end_search, found_values
from torchtune_adaptive.training.learning_rate import BuildScheduler, LearningRate, check_follows
from torchtune_adaptive.training.objectives import Objective
from torchtune_adaptive.training.optimizers import OptimizerPolicy, leak_warning
from torchtune_adaptive.training.profiling import StepProfiler
from torchtune_adaptive.training.recovery import prepare_recovery
from torchtune_adaptive.training.run_log import RunLog
from torchtune_adaptive.training.run_state import AdaptiveState, RunIdentity
from torchtune_adaptive.training.sizes import SizeFinder, Sizes
from torchtune_adaptive.training.start import StartingPoint, starting_point
from torchtune_adaptive.training.step_log import StepLog
from torchtune_adaptive.training.train_step import TrainStep
from torchtune_adaptive.training.trainer import Trainer

log = utils.get_logger("DEBUG")


@dataclass(frozen=True, kw_only=True)
class RecipeParts:
    """A recipe's parts for training. The trainer uses nothing else of a recipe.

    Attributes:
        models: all models on the device, the trained one first.
        optimizer_policy: when and how the optimizers step.
        release: frees memory that a failed step holds outside of the models.
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
        run: which run it is.
        cfg: the run's config as the user gave it.
        config: its values by their dotted keys.
        loss_adds_up: whether the loss of a micro-batch is known to be the sum of those of its parts. Otherwise that is
            tried before training.
        why_unrecoverable: why training cannot recover from an out-of-memory error; "" if it can.
        before_step: called before each optimizer step with the number of steps done.
        save: called after each epoch with the epoch and the state for a resumed run.
        stop_requested: whether this rank was asked to end after its optimizer step.
    """

    models: Sequence[nn.Module]
    objective: Objective
    optimizer_policy: OptimizerPolicy
    release: Callable[[], object]
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
    run: RunIdentity
    cfg: DictConfig
    config: Mapping[str, Any]
    loss_adds_up: bool
    why_unrecoverable: str
    before_step: Callable[[int], None]
    save: SaveEpoch
    stop_requested: Callable[[], bool]


def build_trainer(parts: RecipeParts, settings: AdaptiveSettings, consensus: Consensus) -> Trainer:
    """The trainer, with sizes by the settings, at the start of a run or where it resumes. A collective.

    In order: what a step needs (meter, train step, loader), the saved state, the search for sizes, the batch size and
    the position to start from, the preparation for out-of-memory errors, the learning rate, the run's files, and the
    trainer of all these. Searches and trial_batches restore all state.

    Raises:
        InputError: data, settings and saved state do not match.
        NothingFitsError: one row does not fit.
        RunEnded: the settings ask only for the search; its result is written.
    """
    optimizer_policy = parts.optimizer_policy
    model = nn.ModuleList(parts.models)
    meter = _make_meter(parts, settings, model)
    phases = Phases(parts.models, meter)
    step = TrainStep(
        parts.objective,
        optimizer_policy,
        collate=parts.collate,
        device=parts.device,
        phases=phases,
        meter=meter,
        stop_requested=parts.stop_requested,
    )
    workload = Workload(
        train_step=step,
        model=model,
        optimizers=optimizer_policy.optimizers,
        device=parts.device,
        meter=meter,
        consensus=consensus,
        release=parts.release,
        state_comes_first=True,
    )
    loader = _make_loader(parts, settings.global_batch_size)
    checkpoints = StepCheckpoints(
        parts.checkpoints, optimizer_policy.model, optimizer_policy.optimizers, settings, consensus
    )
    saved = checkpoints.load(parts.resumed, config=parts.config)
    growth = BatchGrowth(
        settings.batch_increase_function,
        total_epochs=parts.epochs.stop,
        samples_per_unit=loader.samples_per_step_at(1),
        consensus=consensus,
    )
    if growth.grows or settings.lr_scaling != "none":
        check_follows(parts.scheduler)
    with keep_random_states():  # the data set's transforms and the user's function may use them
        parts.row_format.check_sample(loader.dataset)
        growth.sizes(loader.batch_size)  # so that an invalid answer is found before the search
        sizes = SizeFinder(
            workload,
            loader,
            parts.row_format,
            settings,
            models=parts.models,
            wanted_rows=parts.batch_size,
            tokenizer_max_seq_len=parts.tokenizer_max_seq_len,
        ).find()
        if meter is not None:
            meter.limit_bytes = settings.memory_limit_bytes  # that of training
        start = starting_point(
            loader,
            growth,
            sizes,
            settings=settings,
            epochs_run=parts.epochs.start,
            saved=saved,
        )
        loader.set_batch_size(start.batch_size)
        check_fills_step(loader, start.batch_size)
        limit = sizes.limit(loader.rows_per_micro_step)
        if (
            not optimizer_policy.accumulates and limit.size < loader.rows_per_micro_step
        ):  # the step would have to be cut
            raise InputError(
                f"`optimizer_in_bwd` must be False to resume with a batch of {loader.rows_per_micro_step} rows, of"
                f" which {limit.size} fit now, but is True instead."
            )
        micro_batches = MicroBatcher(limit, parts.row_format, consensus, loader.dataset, adds_up=parts.loss_adds_up)
        watch = PressureWatch(consensus, meter, phases)
        recoverable = RecoverableStep(
            model,
            step.micro_step,
            micro_batch_size=micro_batches,
            optimizer=optimizer_policy.optimizers,
            release=parts.release,
            padded_rows=micro_batches.padded_rows if parts.row_format.memory_follows_tokens else None,
            on_event=lambda event: trainer.note_event(event),
            watch=watch,
            steps_done=start.steps_done,
        )
        if sizes.result is not None and not isinstance(settings.max_tokens_per_micro_batch, int):
            recoverable.backoff.fitted(limit.size)
            recoverable.sizes.fitted(sizes.fitted_size)
        prepare_recovery(
            recoverable,
            loader.dataset,
            optimizers=optimizer_policy.optimizers,
            watch=watch,
            device=parts.device,
            is_wanted=settings.oom_recovery,
            why_not=parts.why_unrecoverable,
        )
        if meter is not None:
            meter.reset()  # its peak is that of training
        creates_state = optimizer_policy.accumulates and not any(
            optimizer.state for optimizer in optimizer_policy.optimizers
        )
        # Without a search, training stays equal to torchtune's bit for bit. Only CUDA's allocator caches memory.
        if creates_state and sizes.result is not None and parts.device.type == "cuda":
            micro_batches.start_small()
        rate = _make_rate(parts, settings, loader, start, saved, grows=growth.grows)
        own_limit_bytes = allowed_bytes(parts.device, settings.memory_limit_bytes) or 0
        memory_limit_bytes = consensus.min_over_ranks(own_limit_bytes) or None
        run_log = _begun_log(parts, settings, start, sizes, memory_limit_bytes)
        step_log = StepLog(
            parts.metric_logger,
            run_log,
            step,
            recoverable,
            micro_batches,
            loader,
            growth,
            checkpoints=parts.checkpoints.finished,
            resumed=None if parts.resumed is None else (parts.resumed.path, start.steps_done),
            every_steps=parts.log_every_steps,
            device=parts.device if parts.with_memory_stats else None,
            ranks=parts.ranks,
            memory_limit_bytes=memory_limit_bytes,
            found=sizes.result,
            logs=parts.config.get("metric_logger.log_dir"),
        )
        saver = RunSaver(
            loader,
            micro_batches,
            recoverable.sizes,
            (rate, growth, recoverable.backoff),
            checkpoints,
            RankStates(consensus, parts.device),
            consensus=consensus,
            save_epoch=parts.save,
            run=parts.run,
            config=parts.config,
            memory_limit_bytes=memory_limit_bytes,
        )
        trainer = Trainer(
            step,
            recoverable,
            micro_batches,
            loader,
            growth,
            rate,
            run_log,
            step_log,
            parts.profiler,
            saver,
            sizes=sizes,
            before_step=parts.before_step,
            epochs=parts.epochs,
            global_step=start.steps_done,
        )
        if saved is not None:
            trainer.load_state(saved)
    if settings.overrides_batching:
        _note_batch_size(trainer, parts, settings, start)
    if consensus.rank == 0 and (leak := leak_warning(optimizer_policy.optimizers)):
        log.warning(leak)
    if settings.search_only:
        found = found_values(settings, sizes, rows=loader.rows_per_micro_step)
        end_search(parts.cfg, found, seq_len=sizes.seq_len, consensus=consensus)
    return trainer


def _make_meter(parts: RecipeParts, settings: AdaptiveSettings, models: nn.Module) -> MemoryMeter | None:
    """The meter. None on a CPU without a limit, where it would only cost time."""
    if parts.device.type != "cuda" and (parts.device.type != "cpu" or settings.memory_limit_bytes is None):
        return None
    return meter_for(parts.device, models, parts.optimizer_policy.optimizers, exact=False)


def _make_loader(parts: RecipeParts, samples_per_step: int | None) -> StepLoader:
    options: dict[str, Any] = {"max_steps_per_epoch": parts.max_steps_per_epoch}
    if samples_per_step is not None:
        return GlobalStepLoader(parts.sampler, parts.row_format, batch_size=samples_per_step, **options)
    options |= {"batch_size": parts.batch_size, "micro_steps": parts.micro_steps}
    return StepLoader(parts.sampler, parts.row_format, **options)


def _make_rate(
    parts: RecipeParts,
    settings: AdaptiveSettings,
    loader: StepLoader,
    start: StartingPoint,
    saved: AdaptiveState | None,
    *,
    grows: bool,
) -> LearningRate:
    """The learning rate, at the step from which the run starts."""
    rate = LearningRate(
        parts.scheduler,
        parts.optimizer_policy.optimizers,
        parts.build_scheduler,
        total_epochs=parts.epochs.stop,
        schedule_steps=start.schedule_steps,
        rule=settings.lr_scaling,
        reference_samples=_samples_in_config(parts, loader) if saved is None else saved.reference_samples,
    )
    # Also in a resumed run, in which some of torchtune's recipes restart their schedule.
    if settings.overrides_batching or settings.lr_scaling != "none" or parts.resumed is not None:
        rate.begin(
            epoch=parts.epochs.start,
            step=start.steps_done,
            epoch_steps=start.epoch_steps,
            steps_per_epoch=loader.steps_per_epoch,
            grows=grows,
        )
        if scaled := rate.scale(loader.samples_per_step):
            utils.log_rank_zero(log, scaled)
    return rate


def _begun_log(
    parts: RecipeParts, settings: AdaptiveSettings, start: StartingPoint, sizes: Sizes, memory_limit_bytes: int | None
) -> RunLog:
    """The run's log, begun, with the result of the search."""
    run_log = RunLog(parts.output_dir, writes=parts.metric_logger is not None)
    if parts.metric_logger is not None and not settings.search_only:
        parts.checkpoints.claim(parts.run.id, resumed=parts.resumed)
    run_log.begin(
        step=start.steps_done,
        run=parts.run.id,
        search_only=settings.search_only,
        time=time.time(),
        epoch=parts.epochs.start,
        epochs=parts.epochs.stop,
        ranks=parts.ranks,
        log_every_n_steps=parts.log_every_steps,
        memory_limit_bytes=memory_limit_bytes,
        checkpoint=None if parts.resumed is None else str(parts.resumed.path),
    )
    if sizes.result is not None:
        run_log.search(
            sizes.result,
            step=start.steps_done,
            seq_len=sizes.seq_len,
            chosen={} if sizes.token_budget is None else {"token_budget": sizes.token_budget},
            tokens_per_second=sizes.tokens_per_second,
        )
    return run_log


def _note_batch_size(trainer: Trainer, parts: RecipeParts, settings: AdaptiveSettings, start: StartingPoint) -> None:
    """Log and record where the first batch size comes from, and how a search has changed the batch of a new run."""
    loader = trainer.loader
    reason = f"{settings.strategy} search" if settings.use_maximum_batch_size else "config"
    if parts.resumed is not None:
        grows = settings.batch_increase_function is not None
        reason = f"{'growth' if grows else reason}, resumed at epoch {parts.epochs.start}"
    if start.epoch_steps:
        reason += f", step {start.epoch_steps}"
    samples, in_config = loader.samples_per_step, _samples_in_config(parts, loader)
    chooses = settings.use_maximum_batch_size and not loader.is_global and parts.resumed is None
    if not chooses or samples == in_config:
        trainer.note_batch_size(reason, epoch=parts.epochs.start)
        return
    trainer.note_batch_size(reason, epoch=parts.epochs.start, samples_per_step_in_config=in_config)
    text = f"An optimizer step has {samples} samples, but had {in_config} in the config"
    if not parts.optimizer_policy.accumulates:  # with `optimizer_in_bwd`, which allows neither of the keys
        text += ", for which its learning rate was chosen"
    else:
        text += f": adaptive.global_batch_size={in_config} keeps {in_config}"
        if settings.lr_scaling == "none":
            text += ", adaptive.lr_scaling adjusts the learning rate"
    utils.log_rank_zero(log, f"{text}.")


def _samples_in_config(parts: RecipeParts, loader: StepLoader) -> int:
    """Samples of an optimizer step by torchtune's own keys."""
    return parts.batch_size * parts.micro_steps * loader.ranks
