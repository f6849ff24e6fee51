"""The parts of a trainer from a stock recipe. Only this module and the recipes use torchtune's attribute names."""

import contextlib
import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import nn
from torchtune import training
from torchtune.modules.model_fusion import DeepFusionModel

from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.engine.distributed.snapshot import KeptTensors, keep_own_generators, keep_random_states
from torchtune_adaptive.engine.memory.devices import check_limit, meter_of_run
from torchtune_adaptive.engine.memory.phases import Phases
from torchtune_adaptive.errors import InputError, reason_of
from torchtune_adaptive.stock.checkpoints import AtomicCheckpointer
from torchtune_adaptive.stock.checks import (
    check_components,
    check_config,
    check_model,
    check_models,
    why_unrecoverable,
)
from torchtune_adaptive.stock.configs import flattened
from torchtune_adaptive.stock.identity import identity, method_of_recipe
from torchtune_adaptive.stock.load import connecting, is_of_stock, keeping_magnitudes, setting_up, with_samples
from torchtune_adaptive.stock.resume import (
    check_epochs,
    checkpoint_folder,
    find_checkpoint,
    latest_epoch,
    lock_output,
    resuming,
)
from torchtune_adaptive.training.assembly import RecipeParts, build_trainer
from torchtune_adaptive.training.batch.image_rows import text_or_images
from torchtune_adaptive.training.batch.row_format import Row, RowFormat, TokenRows
from torchtune_adaptive.training.found_config import end_search, found_values
from torchtune_adaptive.training.metrics import TolerantLogger
from torchtune_adaptive.training.objectives import NextToken, Objective
from torchtune_adaptive.training.optimizers import OptimizerInBackward, OptimizerPolicy, OptimizerStep
from torchtune_adaptive.training.profiling import StepProfiler
from torchtune_adaptive.training.run_state import AdaptiveState, RunIdentity
from torchtune_adaptive.training.same_config import check_same_config
from torchtune_adaptive.training.signals import StopRequest
from torchtune_adaptive.training.train_step import TrainStep
from torchtune_adaptive.training.trainer import Trainer


class AdaptiveRecipe:
    """Trains with the parts that a stock recipe has set up. The stock recipe is the next of a recipe's bases.

    A recipe can override ``objective``, ``models``, ``row_format``, ``before_step`` and ``save_checkpoint`` for its
    method. A ``_loss_step`` of its own is refused. Attributes that some stock recipes lack have a default here.

    Attributes:
        trainer: the trainer, set by ``setup``.
        on_several_ranks: whether the recipe uses a process group.
    """

    if TYPE_CHECKING:
        _dataloader: Any

        def __getattr__(self, name: str) -> Any: ...  # what a stock recipe's set-up creates, by torchtune's names

    # Attributes that some stock recipes lack.
    on_several_ranks = True
    world_size = 1
    _is_rank_zero = True
    _profiler: Any = training.DummyProfiler()
    activations_handling_ctx: Any = contextlib.nullcontext()
    profiler_profile_memory = False
    _lr_scheduler: Any = None
    _optimizer_in_bwd = False
    _normalizes_in_backward = True
    tensor_parallel_dim = 1
    tensor_parallel_plan: Any = None

    def __init__(self, cfg: DictConfig) -> None:
        self._settings = check_config(cfg, ranks=dist.get_world_size() if dist.is_initialized() else 1)
        check_components(cfg)
        _check_loss_step(type(self))
        self._stop_request = StopRequest()
        with connecting():
            self._consensus = Consensus()
        check_same_config(flattened(cfg), self._consensus)
        self._folder = checkpoint_folder(cfg)
        self._resumed = find_checkpoint(
            cfg,
            self._folder,
            self._consensus,
            method=method_of_recipe(type(self)),
            is_last=lambda one: one.epochs_run >= cfg.epochs,
        )
        self._output_lock = lock_output(cfg, self._consensus)
        check_epochs(self._resumed, cfg.epochs)
        self._cfg = resuming(cfg, self._resumed)
        with setting_up():
            super().__init__(cfg=self._cfg)  # pyright: ignore[reportCallIssue]
        self._clip_grad_norm = cfg.get("clip_grad_norm", None)  # which some stock recipes do not read
        if cfg.get("optimizer_in_bwd", False) and not self._optimizer_in_bwd:
            raise InputError("`optimizer_in_bwd` must be False for this recipe, which lacks it, but is True instead.")
        if self._settings.searches_on(self._device.type):
            check_limit(self._settings.memory_limit_bytes, self._device)

    def objective(self, *, as_stock: bool) -> Objective:
        """The objective: forward pass and loss of a micro-batch.

        Args:
            as_stock: compute as the stock recipe does, even if the result depends on the cut into micro-batches.
        """
        return NextToken(self._model, self._loss_fn, self._activations, weight_depends_on_cut=as_stock)

    def losses(self) -> list[Any]:
        """The loss functions of the objective."""
        return [self._loss_fn]

    def models(self) -> list[nn.Module]:
        """Every model on the device, the trained one first."""
        return [self._model]

    def row_format(self) -> RowFormat:
        """The format of samples."""
        if not isinstance(self._model, DeepFusionModel):
            return TokenRows(self._loss_fn.ignore_index)
        with keep_random_states():  # the data set's transforms may use them
            return text_or_images(
                self._dataloader.dataset,
                self._loss_fn.ignore_index,
                collate=self._dataloader.collate_fn,
                max_images=self._settings.max_images,
                max_tiles=getattr(self._tokenizer, "max_num_tiles", None),
            )

    def keep_whole(self) -> AtomicCheckpointer:
        """Make checkpoints of epochs atomic, and return the checkpointer for that."""
        self._checkpointer = AtomicCheckpointer(self._checkpointer, self._folder)
        return self._checkpointer

    def before_step(self, step: int) -> None:
        """Called before each optimizer step with the number of steps done."""

    def setup(self, cfg: DictConfig) -> None:
        """Set up as the stock recipe does, then build the trainer, which may run a batch size search. A collective.

        Raises:
            RunEnded: the settings ask only for the search; its result is written.
        """
        given, cfg = cfg, self._cfg
        with setting_up(), latest_epoch(cfg, self._resumed):
            super().setup(cfg)  # pyright: ignore[reportAttributeAccessIssue]
        self._whole = self.keep_whole()
        data = self._dataloader
        with keep_own_generators(data.dataset.__getitem__, data.collate_fn):  # so that training draws as torchtune does
            self.trainer = self._build_trainer(cfg, config=flattened(given))
        if cfg.get("compile", False):
            torch.compiler.reset()  # code compiled for probes would make the sizes of training dynamic
        if self._settings.search_only:
            sizes, rows = self.trainer.sizes, self.trainer.loader.rows_per_micro_step
            found = found_values(self._settings, sizes, rows=rows)
            end_search(given, found, seq_len=sizes.seq_len, consensus=self._consensus)

    def _build_trainer(self, cfg: DictConfig, *, config: Mapping[str, Any]) -> Trainer:
        """The trainer with the parts that are set up. A collective; samples are read.

        Args:
            config: as the user gave it, by dotted keys.
        """
        resumed = self._resumed
        epochs_run = self.epochs_run if resumed is None else resumed.epochs_run
        check_model(self._model, self._settings, self.tensor_parallel_plan if self.tensor_parallel_dim > 1 else {})
        check_models(self.models(), self._dataloader.dataset)
        row_format = self.row_format()
        self._activations = self.activations_handling_ctx = Activations(self.activations_handling_ctx)
        parts = RecipeParts(
            step=self.train_step(collate=row_format.collating(self._dataloader.collate_fn)),
            scheduler=self._lr_scheduler,
            build_scheduler=lambda steps, last: self._setup_lr_scheduler(
                cfg_lr_scheduler=cfg.lr_scheduler, num_training_steps=steps, last_epoch=last
            ),
            sampler=self._dataloader.sampler,
            row_format=row_format,
            tokenizer_max_seq_len=getattr(self._tokenizer, "max_seq_len", None),
            batch_size=cfg.batch_size,
            micro_steps=self._gradient_accumulation_steps,
            max_steps_per_epoch=self.max_steps_per_epoch,
            epochs=range(epochs_run, self.total_epochs),
            ranks=self.world_size,
            metric_logger=TolerantLogger(self._metric_logger) if self._is_rank_zero else None,
            log_every_steps=self._log_every_n_steps,
            with_memory_stats=self._log_peak_memory_stats,
            profiler=StepProfiler(self._profiler, memory_steps=self._memory_steps()),
            output_dir=Path(self._output_dir),
            checkpoints=self._folder,
            resumed=resumed,
            run=self._identity(cfg),
            config=config,
            objective_to_try=None if all(map(_is_known, self.losses())) else self.objective(as_stock=False),
            why_unrecoverable=why_unrecoverable(cfg),
            before_step=self.before_step,
            save=self._save,
        )
        return build_trainer(parts, self._settings, self._consensus)

    def _identity(self, cfg: DictConfig) -> RunIdentity:
        method = method_of_recipe(type(self))
        if self._settings.search_only:  # nothing is trained: the frozen weights, many gigabytes, need not be read again
            return RunIdentity(uuid4().hex, method)
        has_frozen = not all(one.requires_grad for one in self._model.parameters())
        return identity(cfg, method, self._resumed, self._folder, self._consensus, has_frozen=has_frozen)

    def train_step(self, *, collate: Callable[[Sequence[Row]], Any]) -> TrainStep:
        """The train step: what a search, training and a plan run.

        Args:
            collate: makes a batch from a list of rows.
        """
        models, policy = self.models(), self.optimizer_policy()
        meter = meter_of_run(models, policy.optimizers, self._device, self._settings.memory_limit_bytes)
        return TrainStep(
            models,
            self.objective(as_stock=not self._settings.cuts_samples),
            policy,
            collate=collate,
            device=self._device,
            phases=Phases(models, meter),
            meter=meter,
            release=self._activations.renew,
            stop_requested=self._stop_request.is_made,
        )

    def listening(self) -> AbstractContextManager[None]:
        """Context: after SIGTERM, SIGUSR1 or SIGHUP, ``train`` finishes its optimizer step, saves and ends."""
        return self._stop_request.listening()

    def train(self) -> None:
        """Train for the remaining epochs, and save after each. A collective."""
        if self._device.type != "cpu":
            training.cleanup_before_training()
        self.trainer.train()

    def cleanup(self) -> None:
        """Close the logger, release everything that uses the process group, and destroy the group. A collective."""
        if self._is_rank_zero:
            TolerantLogger(self._metric_logger).close()
        has_group = dist.is_initialized()
        if has_group:
            dist.barrier()
        vars(self).clear()  # the model's device mesh would keep the group's threads alive
        gc.collect()
        if has_group:
            dist.destroy_process_group()

    def _setup_model(self, *args: Any, **kwargs: Any) -> Any:
        has_adapters = bool(kwargs.get("lora_weights_state_dict"))
        with keeping_magnitudes() if has_adapters else contextlib.nullcontext():
            return super()._setup_model(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def _setup_data(self, *args: Any, **kwargs: Any) -> Any:
        return with_samples(super()._setup_data(*args, **kwargs))  # pyright: ignore[reportAttributeAccessIssue]

    def _update_recipe_state(self, ckpt_dict: dict[str, Any]) -> None:
        """As torchtune, but keep the config's ``max_steps_per_epoch``.

        torchtune would replace it by the checkpoint's, although the log says that the config's new value is used.
        """
        if self._resumed is not None and self._resumed.state is not None:
            ckpt_dict = {**ckpt_dict, training.MAX_STEPS_KEY: self.max_steps_per_epoch}
        super()._update_recipe_state(ckpt_dict)  # pyright: ignore[reportAttributeAccessIssue]

    def optimizer_policy(self) -> OptimizerPolicy:
        """When and how the optimizers step."""
        if self._optimizer_in_bwd:
            normalizes = self._normalizes_in_backward
            wrapper = self._optim_ckpt_wrapper
            return OptimizerInBackward(self._model, wrapper, ranks=self.world_size, normalizes=normalizes)
        max_norm = None if self._clip_grad_norm is None else float(self._clip_grad_norm)
        return OptimizerStep(self._model, [self._optimizer], ranks=self.world_size, max_grad_norm=max_norm)

    def _memory_steps(self) -> range | None:
        """Steps with CUDA memory history in the profile: the active ones and one more, as in the stock recipe."""
        if not self._is_rank_zero or self._device.type != "cuda" or not self.profiler_profile_memory:
            return None
        first = self.profiler_wait_steps + self.profiler_warmup_steps + 1
        return range(first, first + self.profiler_active_steps + 1)

    def _save(self, epoch: int, state: AdaptiveState) -> None:
        """Save as the stock recipe does, with the trainer's progress in the stock attributes. A collective.

        Raises:
            CheckpointError: the last epoch's checkpoint cannot be written. After other epochs training continues.
        """
        self._whole.set_state(state)
        self.epochs_run, self.global_step = self.trainer.epochs_run, self.trainer.global_step
        self._dataloader = self.trainer.loader.data_loader
        # On one CPU the stock LoRA recipes merge the adapters into the base weights, which training still uses.
        is_merged = self._device.type == "cpu" and not self.on_several_ranks
        base = KeptTensors(weight for weight in self._model.parameters() if is_merged and not weight.requires_grad)
        try:
            self.save_checkpoint(epoch=epoch)
        except NotImplementedError as error:  # on all ranks: torch cannot gather the state of some optimizers
            self._whole.give_up(reason_of(error))
        base.restore()
        self._whole.check_saved(self._consensus, is_last=epoch + 1 == self.total_epochs)


class Activations:
    """torchtune's context for the forward pass, which may offload activations; a failed step makes it unusable.

    Args:
        context: torchtune's context; it keeps a step's tensors while it offloads activations.
    """

    def __init__(self, context: AbstractContextManager[Any]) -> None:
        self._context = context

    def renew(self) -> None:
        """Create the context again, and drop the tensors that it kept."""
        self._context = type(self._context)()

    def __enter__(self) -> Any:
        return self._context.__enter__()

    def __exit__(self, *error: Any) -> Any:
        return self._context.__exit__(*error)


def _check_loss_step(recipe: type) -> None:
    """Refuse a recipe with a ``_loss_step`` of its own, which only torchtune's training loop calls."""
    owner = next((one for one in recipe.__mro__ if "_loss_step" in vars(one)), None)
    if owner is not None and not is_of_stock(owner):
        raise InputError(
            f"`_loss_step` of {owner.__name__} would have no effect: the loss of a micro-batch is that of"
            " `objective()`, which a recipe can override."
        )


def _is_known(loss: Any) -> bool:
    """Whether a loss function is torch's or torchtune's; the config's check requires that it is a mean."""
    return type(loss).__module__.partition(".")[0] in ("torch", "torchtune")
