"""Build a trainer from a recipe's parts: find the sizes, prepare the recovery, resume from a saved state."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torchtune import utils

from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.engine.distributed.rank_states import RankStates
from torchtune_adaptive.engine.distributed.snapshot import keep_random_states
from torchtune_adaptive.engine.loop import Loop
from torchtune_adaptive.engine.memory.devices import allowed_bytes
from torchtune_adaptive.engine.memory.out_of_memory import free_memory
from torchtune_adaptive.engine.recovery.dry_run import allocate_states
from torchtune_adaptive.engine.recovery.optimizer_state import check_optimizers
from torchtune_adaptive.engine.recovery.step import RecoverableStep
from torchtune_adaptive.engine.recovery.watch import PressureWatch
from torchtune_adaptive.errors import CannotCutError, CannotRecoverError, InputError, cannot_recover
from torchtune_adaptive.settings import AdaptiveSettings
from torchtune_adaptive.training.batch.growth import BatchGrowth
from torchtune_adaptive.training.batch.loader import GlobalStepLoader, StepLoader, check_fills_step, check_sampler
from torchtune_adaptive.training.batch.micro_batches import MicroBatcher
from torchtune_adaptive.training.batch.row_format import Row, RowFormat, longest_row
from torchtune_adaptive.training.checkpoints.folder import Checkpoint, CheckpointFolder
from torchtune_adaptive.training.checkpoints.saver import RunSaver, SaveEpoch
from torchtune_adaptive.training.checkpoints.steps import StepCheckpoints
from torchtune_adaptive.training.learning_rate import BuildScheduler, LearningRate, check_follows
from torchtune_adaptive.training.objectives import Loss, Objective
from torchtune_adaptive.training.optimizers import leak_warning
from torchtune_adaptive.training.profiling import StepProfiler
from torchtune_adaptive.training.run_log import RunLog
from torchtune_adaptive.training.run_state import AdaptiveState, RunIdentity
from torchtune_adaptive.training.sizes import SizeFinder, Sizes
from torchtune_adaptive.training.start import StartingPoint, starting_point
from torchtune_adaptive.training.step_log import StepLog
from torchtune_adaptive.training.train_step import TrainStep
from torchtune_adaptive.training.trainer import Trainer
from torchtune_adaptive.training.utilisation import Utilisation

log = utils.get_logger("DEBUG")


@dataclass(frozen=True, kw_only=True)
class RecipeParts:
    """A recipe's parts for training. The trainer uses nothing else of a recipe.

    Attributes:
        step: the train step, with the models and the optimizers.
        scheduler: the learning rate's scheduler, None for a constant rate; ``build_scheduler`` creates it again.
        sampler: this rank's sampler over the data set.
        tokenizer_max_seq_len: length to which samples are truncated, None if they are not.
        batch_size, micro_steps: the config's samples per rank and micro-step, and micro-steps per optimizer step.
        epochs: the remaining epochs.
        ranks: number of ranks over which the model is sharded and tokens are counted.
        metric_logger: None on all ranks except rank 0.
        checkpoints: the folder of checkpoints.
        resumed: the checkpoint from which the run resumes; None for a new run.
        run: which run it is.
        config: the run's config as the user gave it, by dotted keys.
        objective_to_try: None if the loss of a micro-batch is known to be the sum of those of its rows. Otherwise that
            is tried before training, with this objective: that of ``step``, with weights that do not depend on the cut.
        why_unrecoverable: why training cannot recover from an out-of-memory error; "" if it can.
        before_step: called before each optimizer step with the number of steps done.
        save: called after each epoch with the epoch and the state for a resumed run.
    """

    step: TrainStep
    scheduler: Any
    build_scheduler: BuildScheduler
    sampler: Any
    row_format: RowFormat
    tokenizer_max_seq_len: int | None
    batch_size: int
    micro_steps: int
    max_steps_per_epoch: int | None
    epochs: range
    ranks: int
    metric_logger: Any
    log_every_steps: int
    with_memory_stats: bool
    profiler: StepProfiler
    output_dir: Path
    checkpoints: CheckpointFolder
    resumed: Checkpoint | None
    run: RunIdentity
    config: Mapping[str, Any]
    objective_to_try: Objective | None
    why_unrecoverable: str
    before_step: Callable[[int], None]
    save: SaveEpoch


def build_trainer(parts: RecipeParts, settings: AdaptiveSettings, consensus: Consensus) -> Trainer:
    """The trainer, with sizes by the settings, at the start of a run or where it resumes. A collective.

    Searches and dry runs restore all state.

    Raises:
        InputError: data, settings and saved state do not match.
        NothingFitsError: one row does not fit.
    """
    step, loop = parts.step, parts.step.loop(consensus)
    loader = _make_loader(parts, settings.global_batch_size)
    checkpoints = StepCheckpoints(parts.checkpoints, step.policy.model, loop.optimizers, settings, consensus)
    saved = checkpoints.load(parts.resumed, config=parts.config)
    growth = _make_growth(parts, settings, loader, consensus)
    with keep_random_states():  # the data set's transforms and the user's function may use them
        sizes = _find_sizes(parts, settings, loop, loader, growth)
        start = starting_point(loader, growth, sizes, settings=settings, epochs_run=parts.epochs.start, saved=saved)
        loader.set_batch_size(start.batch_size)
        check_fills_step(loader, start.batch_size)
        micro_batches = _make_micro_batches(parts, settings, sizes, loader, consensus)
        utilisation = Utilisation.of(step, micro_batches)
        loop = replace(loop, micro_step=utilisation.counting(loop.micro_step))
        recoverable = _make_recoverable(parts, settings, loop, micro_batches, loader, sizes, start)
        utilisation.flops_per_token = None  # of the dry run, whose rows are short
        rate = _make_rate(parts, settings, loader, start, saved, grows=growth.grows)
        limit_bytes = consensus.min_over_ranks(allowed_bytes(step.device, settings.memory_limit_bytes) or 0) or None
        run_log = _begin_log(parts, settings, start, sizes, limit_bytes)
        step_log = StepLog(
            parts.metric_logger,
            run_log,
            step,
            recoverable,
            micro_batches,
            utilisation,
            loader,
            growth,
            checkpoints=parts.checkpoints.finished,
            resumed=None if parts.resumed is None else (parts.resumed.path, start.steps_done),
            every_steps=parts.log_every_steps,
            device=step.device if parts.with_memory_stats else None,
            ranks=parts.ranks,
            memory_limit_bytes=limit_bytes,
            found=sizes.result,
            logs=parts.config.get("metric_logger.log_dir"),
        )
        saver = RunSaver(
            loader,
            micro_batches,
            (rate, growth, recoverable.backoff),
            checkpoints,
            RankStates(consensus, step.device),
            consensus=consensus,
            save_epoch=parts.save,
            run=parts.run,
            config=parts.config,
            memory_limit_bytes=limit_bytes,
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
    if consensus.rank == 0 and (leak := leak_warning(loop.optimizers)):
        log.warning(leak)
    return trainer


def _make_loader(parts: RecipeParts, samples_per_step: int | None) -> StepLoader:
    check_sampler(parts.sampler, is_global=samples_per_step is not None)
    longest = [length for model in parts.step.models if (length := longest_row(model)) is not None]
    options: dict[str, Any] = {
        "max_steps_per_epoch": parts.max_steps_per_epoch,
        "longest": min(longest, default=None),
    }
    if samples_per_step is not None:
        return GlobalStepLoader(parts.sampler, parts.row_format, batch_size=samples_per_step, **options)
    options |= {"batch_size": parts.batch_size, "micro_steps": parts.micro_steps}
    return StepLoader(parts.sampler, parts.row_format, **options)


def _make_growth(
    parts: RecipeParts, settings: AdaptiveSettings, loader: StepLoader, consensus: Consensus
) -> BatchGrowth:
    """The growth of the batch, which needs a learning rate that can follow it."""
    growth = BatchGrowth(
        settings.batch_increase_function,
        total_epochs=parts.epochs.stop,
        samples_per_unit=loader.samples_per_step_at(1),
        consensus=consensus,
    )
    if growth.grows or settings.lr_scaling != "none":
        check_follows(parts.scheduler)
    return growth


def _find_sizes(
    parts: RecipeParts, settings: AdaptiveSettings, loop: Loop, loader: StepLoader, growth: BatchGrowth
) -> Sizes:
    """The sizes of micro-batches, searched if the settings ask for it. A collective."""
    parts.row_format.sample(loader.dataset, 0)
    growth.sizes(loader.batch_size)  # so that an invalid answer is found before the search
    sizes = SizeFinder(
        loop,
        loader,
        parts.row_format,
        settings,
        models=parts.step.models,
        wanted_rows=parts.batch_size,
        tokenizer_max_seq_len=parts.tokenizer_max_seq_len,
    ).find()
    if loop.meter is not None:
        loop.meter.limit_bytes = settings.memory_limit_bytes  # that of training
    return sizes


def _make_micro_batches(
    parts: RecipeParts, settings: AdaptiveSettings, sizes: Sizes, loader: StepLoader, consensus: Consensus
) -> MicroBatcher:
    """What cuts the samples of a step into micro-batches that fit."""
    limit = sizes.limit(loader.rows_per_micro_step)
    if not parts.step.policy.accumulates and limit.size < loader.rows_per_micro_step:  # the step would have to be cut
        raise InputError(
            f"With `optimizer_in_bwd: True` a batch is not cut, and of its {loader.rows_per_micro_step} rows only"
            f" {limit.size} fit now."
        )
    return MicroBatcher(
        limit,
        parts.row_format,
        consensus,
        loader.dataset,
        adds_up=parts.objective_to_try is None,
        may_cut=settings.may_cut,
    )


def _make_recoverable(
    parts: RecipeParts,
    settings: AdaptiveSettings,
    loop: Loop,
    micro_batches: MicroBatcher,
    loader: StepLoader,
    sizes: Sizes,
    start: StartingPoint,
) -> RecoverableStep[Loss]:
    """What runs micro-steps, prepared for out-of-memory errors while memory is free. A collective."""
    recoverable = RecoverableStep(
        loop.model,
        loop.micro_step,
        micro_batch_size=micro_batches,
        optimizer=loop.optimizers,
        release=loop.release,
        padded_rows=micro_batches.padded_rows if parts.row_format.memory_follows_tokens else None,
        watch=PressureWatch(loop.consensus, loop.meter, parts.step.phases),
        steps_done=start.steps_done,
    )
    if sizes.result is not None and not isinstance(settings.max_tokens_per_micro_batch, int):
        recoverable.backoff.fitted(micro_batches.limit.size)
    used = parts.step.objective
    parts.step.objective = parts.objective_to_try or used
    prepare_recovery(
        recoverable,
        loop,
        loader.dataset,
        is_wanted=settings.oom_recovery,
        why_not=parts.why_unrecoverable,
    )
    parts.step.objective = used
    if not settings.cuts_samples:
        micro_batches.adds_up = True  # for all that is known: a later trial would see the weights of torchtune's keys
    if loop.meter is not None:
        loop.meter.reset()  # its peak is that of training
    creates_state = parts.step.policy.accumulates and not any(one.state for one in loop.optimizers)
    # Without a search, training stays equal to torchtune's bit for bit. Only CUDA's allocator caches memory.
    if creates_state and sizes.result is not None and loop.device.type == "cuda":
        micro_batches.start_small()
    return recoverable


def prepare_recovery(
    recoverable: RecoverableStep[Any],
    loop: Loop,
    dataset: Sequence[Row],
    *,
    is_wanted: bool,
    why_not: str,
) -> None:
    """Create the optimizers' state, and prepare recovery while memory is free. A collective.

    If recovery is not possible, this is logged, and an out-of-memory error will end the run.

    Args:
        is_wanted: whether to recover, if it is possible.
        why_not: why recovery is not possible, if that is known.

    Raises:
        CannotCutError: training must cut samples, but the loss of a micro-batch is not the sum of those of its rows.
        InputError: see ``check_optimizers``.
        NothingFitsError: the optimizers' state or the smallest micro-step does not fit.
    """
    check_optimizers(loop.optimizers, loop.model)
    if is_wanted:
        try:
            if why_not:
                raise cannot_recover(why_not)
            recoverable.prepare(dataset)
        except CannotCutError:
            raise
        except CannotRecoverError as error:
            utils.log_rank_zero(log, str(error))
    if recoverable.recovers:
        return
    recoverable.disable()
    allocate_states(loop)
    free_memory(loop.device)


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
        parts.step.policy.optimizers,
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


def _begin_log(
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
            timings={str(limit): one for limit, one in (sizes.timings or {}).items()},
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
        trainer.note_batch_size(reason)
        return
    trainer.note_batch_size(reason, samples_per_step_in_config=in_config)
    text = f"An optimizer step has {samples} samples, but had {in_config} in the config"
    if not parts.step.policy.accumulates:  # with `optimizer_in_bwd`, which allows neither of the keys
        text += ", for which its learning rate was chosen"
    else:
        text += f": adaptive.global_batch_size={in_config} keeps {in_config}"
        if settings.lr_scaling == "none":
            text += ", adaptive.lr_scaling adjusts the learning rate"
    utils.log_rank_zero(log, f"{text}.")


def _samples_in_config(parts: RecipeParts, loader: StepLoader) -> int:
    """Samples of an optimizer step by torchtune's own keys."""
    return parts.batch_size * parts.micro_steps * loader.ranks
