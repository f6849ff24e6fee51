"""A recipe's train step without memory, data or weights: models and optimizer of a config as fake tensors.

It needs a process of its own, because it starts a process group of which only one rank exists. What CUDA does
differently is set up here.
"""

import functools
import importlib
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torchtune.training._activation_offloading as torchtune_offloading
import torchtune.training.activations as torchtune_activations
from omegaconf import DictConfig, ListConfig
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtune import config
from torchtune.modules import TransformerDecoder
from torchtune.modules.model_fusion import DeepFusionModel, FusionLayer
from torchtune.modules.peft import DoRALinear

from torchtune_adaptive.engine.memory.phases import Phases
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.plan.trace.as_cuda import attention_as_on_cuda, composed_as_on_cuda
from torchtune_adaptive.plan.trace.fake_images import FakesWithIntegers, images_of
from torchtune_adaptive.plan.trace.fake_tensors import (
    NumbersOfFakes,
    make_fake,
    optimizers_choose_as_on_cuda,
    shardings_worked_out_unseen,
    start_fake_process_group,
)
from torchtune_adaptive.plan.trace.few_layers import layers_limited_to
from torchtune_adaptive.plan.trace.host_figures import host_figures
from torchtune_adaptive.plan.trace.offloaded_activations import OffloadedActivations
from torchtune_adaptive.plan.trace.optimizer_stand_ins import stand_in_for_optimizer
from torchtune_adaptive.plan.trace.recorder import CUDA_GRANULARITY_BYTES, ON_HOST, Mark, StepTrace
from torchtune_adaptive.plan.trace.running_modules import RunningModules
from torchtune_adaptive.stock.configs import method_of, resolved
from torchtune_adaptive.stock.installed import adaptive_name
from torchtune_adaptive.stock.recipe import AdaptiveRecipe
from torchtune_adaptive.training.batch.row_format import PreferenceRows, Row, RowFormat, TokenRows
from torchtune_adaptive.training.train_step import TrainStep

# The stock recipes of these methods shard the trained model without `custom_sharded_layers`.
_WITHOUT_CUSTOM_SHARDS = ("knowledge_distillation", "qat_lora_finetune")


class FakeRecipe:
    """Rank 0 of a recipe that trains ``cfg`` with ``world_size`` ranks.

    Args:
        num_layers: build only this many layers of each model; None: all.

    Attributes:
        models: all on the device, the trained one first.
        num_layers: layers of the trained model that were built.
        true_num_layers: layers that the config's trained model has.
        fusion_interval: every such layer of the trained model is fused with images; 0 in text models.

    Raises:
        InputError: the config cannot be planned, or ``num_layers`` is given for models of different depths.
    """

    def __init__(self, cfg: DictConfig, *, world_size: int, num_layers: int | None = None) -> None:
        self.cfg = _on_fake_device(cfg)
        self._like_cuda = str(cfg.device).startswith("cuda")
        self._keeps_on_host = bool(cfg.get("fsdp_cpu_offload", False))
        start_fake_process_group(world_size)
        recipe = _recipe_of(self.cfg)
        true_nums = _set_up_models(recipe, self.cfg, num_layers)
        if num_layers is not None and len(set(true_nums)) > 1:
            # To extrapolate them, one model must get more layers while the others stay the same.
            raise InputError(f"Models must be equally deep to be built with fewer layers, but have {true_nums} layers.")
        self.models: list[Any] = recipe.models()
        self.num_layers = len(_layers_of(self.models[0]))
        self.true_num_layers = true_nums[0]
        fused = (number for number, layer in enumerate(_layers_of(self.models[0]), 1) if isinstance(layer, FusionLayer))
        self.fusion_interval = next(fused, 0)
        self._images = images_of(self.models[0], cfg)
        self._micro_steps = min(2, recipe._gradient_accumulation_steps)
        self._fake_mode = FakesWithIntegers()
        with self._as_on_device():
            make_fake(nn.ModuleList(self.models))
            _set_up_optimizer_and_loss(recipe, self.cfg)
        self._optimizer_policy = recipe.optimizer_policy()
        for optimizer in self._optimizer_policy.optimizers:
            _require_no_closure(optimizer)
            optimizer.step = _reading_numbers(optimizer.step)
        self._objective = recipe.objective(as_stock=True)
        self._row_format = recipe.row_format()
        self._activations = recipe.activations_handling_ctx
        self._tokens = 1  # of the micro-batch traced last
        self._is_warm = False

    def running_modules(self) -> RunningModules:
        """Tracks which module of the models runs, which a trace with events needs."""
        return RunningModules(self.models, self._optimizer_policy.optimizers)

    def trace(
        self,
        batch_size: int,
        seq_len: int,
        *,
        modules: RunningModules | None = None,
        after_operation: Callable[[], object] = lambda: None,
    ) -> StepTrace:
        """One steady-state step over micro-batches of ``batch_size`` rows of ``seq_len`` tokens."""
        micro_batches = [[{"num_tokens": seq_len}] * batch_size] * self._micro_steps
        self._tokens = batch_size * seq_len * self._row_format.sequences
        on_host = self._keeps_on_host
        trace = StepTrace(
            granularity_bytes=CUDA_GRANULARITY_BYTES if self._like_cuda else 1,
            steps_on_host=on_host,
            by_gloo=not self._like_cuda,
            modules=modules,
            after_operation=after_operation,
        )
        with self._as_on_device():
            if not self._is_warm:
                self._warm_up()
                self._is_warm = True
            for index, model in enumerate(self.models):
                kind: Mark = "frozen models" if index else "parameters"
                trace.mark(list(model.buffers()), kind)
                trace.mark(list(model.parameters()), ON_HOST if on_host else kind)
            states = [list(optimizer.state.values()) for optimizer in self._optimizer_policy.optimizers]
            trace.mark(states, ON_HOST if on_host else "optimizer state")
            phases = _TracedPhases(self.models, trace, gradients_are=ON_HOST if on_host else "gradients")
            with trace:
                self._train_step(phases, micro_batches)
            phases.remove()
        return trace

    def figures(self) -> dict[str, int]:
        """Figures that are linear in the number of layers, see ``TracedStep``. Those of models are over all ranks."""
        trained, *frozen = (sum(one.numel() for one in model.parameters()) for model in self.models)
        return {
            "num_parameters": trained + sum(frozen),
            "num_frozen_parameters": sum(frozen),
            "paged_bytes": sum(getattr(optimizer, "paged_bytes", 0) for optimizer in self._optimizer_policy.optimizers),
            "attention_width": max(text.num_heads * text.head_dim for text in map(_text_part, self.models)),
            "sequences": self._row_format.sequences,
            "images": 0 if self._images is None else self._images.images,
            "tiles": 0 if self._images is None else self._images.tiles,
        }

    def host_figures(self) -> dict[str, int]:
        """Figures for ``HostFigures.from_flat``, which are linear in the number of layers too."""
        activations = self._activations
        offloaded = activations.host_bytes if isinstance(activations, OffloadedActivations) else []
        return host_figures(
            self.cfg,
            self.models,
            self._optimizer_policy.optimizers,
            activation_bytes_per_token=[math.ceil(num_bytes / self._tokens) for num_bytes in offloaded],
        )

    def _warm_up(self) -> None:
        """Run two optimizer steps. The first creates the state; some optimizers then run other operations.

        FSDP2 sets itself up at its first all-gather, and DTensor derives shardings on global shapes only once.
        """
        sharded = [module for model in self.models for module in model.modules() if isinstance(module, FSDPModule)]
        for module in sharded:
            module.unshard()
            module.reshard()
        for _ in range(2):
            self._step_optimizers(normalizes=bool(sharded))

    def _step_optimizers(self, *, normalizes: bool) -> None:
        """Run the optimizers alone, on the parameters with optimizer state, or on all if there is no state."""
        for optimizer in self._optimizer_policy.optimizers:
            trained = (one for group in optimizer.param_groups for one in group["params"] if one.requires_grad)
            for parameter in list(optimizer.state) or trained:
                parameter.grad = torch.zeros_like(parameter)
        if normalizes:
            self._optimizer_policy.normalize(torch.ones((), dtype=torch.long))
        for optimizer in self._optimizer_policy.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def _train_step(self, phases: Phases, micro_batches: list[list[Row]]) -> None:
        device = torch.device("cpu")
        TrainStep(
            self._objective, self._optimizer_policy, collate=self._collate, device=device, phases=phases, meter=None
        )(micro_batches)

    def _collate(self, rows: Sequence[Row]) -> Any:
        """A batch with the shape of ``rows``, without content."""
        shape = self._row_format.sequences * len(rows), rows[0]["num_tokens"]
        if isinstance(self._row_format, PreferenceRows):
            return tuple(torch.zeros(shape, dtype=torch.long) for _ in ("tokens", "labels"))
        names = ("tokens", "labels", "input_pos") if _is_packed(self.cfg.dataset) else ("tokens", "labels")
        batch: dict[str, Any] = {name: torch.zeros(shape, dtype=torch.long) for name in names}
        if self._images is not None:
            batch |= self._images.batch(*shape, mode=self._fake_mode)
        if "input_pos" in batch and not self._like_cuda:
            # CUDA uses flex attention with a block mask instead; its memory is counted as that of causal attention.
            batch["mask"] = torch.zeros(*shape, shape[1], dtype=torch.bool)
        return batch

    @contextmanager
    def _as_on_device(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self._like_cuda:
                stack.enter_context(optimizers_choose_as_on_cuda())
                stack.enter_context(composed_as_on_cuda(compiles=self.cfg.get("compile", False)))
                stack.enter_context(attention_as_on_cuda())
            stack.enter_context(self._fake_mode)
            stack.enter_context(shardings_worked_out_unseen())
            yield


class _TracedPhases(Phases):
    """Sets the phase of a trace, and marks gradients before they are clipped."""

    def __init__(self, models: Sequence[nn.Module], trace: StepTrace, *, gradients_are: Mark) -> None:
        super().__init__(models, None)
        self._models = models
        self._trace = trace
        self._gradients_are: Mark = gradients_are

    def enter(self, name: str) -> None:
        super().enter(name)
        if name == "clip":
            gradients = [parameter.grad for model in self._models for parameter in model.parameters()]
            self._trace.mark(gradients, self._gradients_are)
        self._trace.enter_phase(name)


def _is_packed(dataset: Any) -> bool:
    """Whether the config's `dataset` is packed. Of several data sets, all are or none is."""
    one = dataset[0] if isinstance(dataset, ListConfig) else dataset
    return bool(one.get("packed", False))


def _on_fake_device(cfg: DictConfig) -> DictConfig:
    content = resolved(cfg)
    wants_offloading = bool(content.get("enable_activation_offloading", False))
    changes = {"device": "cpu", "enable_activation_offloading": False}
    optimizer = stand_in_for_optimizer(cfg.optimizer)
    return DictConfig(content | changes | {"wants_offloading": wants_offloading, "optimizer": optimizer})


def _recipe_of(cfg: DictConfig) -> Any:
    """The method's recipe, set up as usual, but with fake weights instead of a checkpoint."""
    module: Any = importlib.import_module(adaptive_name(f"{method_of(cfg)}_distributed"))
    names = module.StockRecipe._setup_model.__globals__
    if not isinstance(names["training"], _TrainingOnFakes):
        names["training"] = _TrainingOnFakes(names["training"])
    names["validate_missing_and_unexpected_for_lora"] = lambda **_: None
    recipe_class = getattr(module, f"Adaptive{module.StockRecipe.__name__}")
    recipe: Any = type(recipe_class.__name__, (recipe_class, _WithoutRanks), {})(cfg)
    recipe._compile = bool(cfg.get("compile", False))
    return recipe


class _WithoutRanks(AdaptiveRecipe):
    """A base class between an adaptive and its stock recipe: it skips the agreement with ranks that do not exist."""

    def __init__(self, cfg: DictConfig) -> None:
        super(AdaptiveRecipe, self).__init__(cfg=cfg)  # pyright: ignore[reportCallIssue]
        self._clip_grad_norm = cfg.get("clip_grad_norm", None)

    def row_format(self) -> RowFormat:
        return TokenRows(self._loss_fn.ignore_index)  # also of texts with images: there is no sample to see


def _set_up_models(recipe: Any, cfg: DictConfig, num_layers: int | None) -> list[int]:
    """Build the recipe's models, the trained one first, and return how many layers the config's models have.

    Raises:
        InputError: one of them is neither a text model nor one of texts and images.
    """
    method, true_nums = method_of(cfg), []

    def built(set_up: Callable[..., nn.Module], key: str) -> nn.Module:
        # Selective checkpointing counts layers over all models of a process: delete when torchtune resets the count.
        vars(torchtune_activations.checkpoint_wrapper).pop("_count", None)
        shards = cfg.get("custom_sharded_layers", None)
        values = {
            **dict.fromkeys(("cfg_model", "model_cfg"), cfg[key]),
            "enable_activation_checkpointing": cfg.get("enable_activation_checkpointing", False),
            "enable_activation_offloading": cfg.wants_offloading,
            "fsdp_cpu_offload": False,  # tensors in host memory are marked by their kind
            "reshard_after_forward": cfg.get("fsdp_reshard_after_forward", True),
            "custom_sharded_layers": None if key == "model" and method in _WITHOUT_CUSTOM_SHARDS else shards,
            "ac_mode": cfg.get("ac_mode", None),
            "ac_option": cfg.get("ac_option", None),
            "quantizer_cfg": cfg.get("quantizer", None),
            "model_state_dict": {},
            "base_model_state_dict": {},
            "lora_weights_state_dict": {"any": None},
        }
        taken = inspect.signature(set_up).parameters
        with layers_limited_to(num_layers, str(cfg[key]._component_)) as counts:
            model = set_up(**{name: value for name, value in values.items() if name in taken})
        if not isinstance(_text_part(model), TransformerDecoder):
            kind = type(model).__name__
            raise InputError(
                f"`{key}` must be a TransformerDecoder, alone or in a DeepFusionModel, but is a {kind} instead."
            )
        true_nums.append(counts[0] if counts else len(_layers_of(model)))
        return model

    recipe._model = built(recipe._setup_model, "model")
    recipe._activations = recipe.activations_handling_ctx
    if method == "lora_dpo" and recipe.world_size == 1 and recipe._compile:
        from torchtune_adaptive.plan.trace.compiled_code import compile_layers  # as in ``_compile_loss``

        compile_layers(recipe._model)  # as the stock recipe for one device; that for several never compiles
    if method == "full_dpo":
        recipe._ref_model = built(recipe._setup_reference_model, "model")
    if method == "knowledge_distillation":
        recipe._teacher_model = built(recipe._setup_teacher_model, "teacher_model")
        if recipe.world_size == 1:
            # As the stock recipe for one device: its teacher's parameters require gradients.
            recipe._teacher_model.requires_grad_(True)
    return true_nums


def _text_part(model: Any) -> Any:
    """The model, or its decoder if it has an encoder of images."""
    return model.decoder if isinstance(model, DeepFusionModel) else model


def _layers_of(model: Any) -> Any:
    return _text_part(model).layers


def _set_up_optimizer_and_loss(recipe: Any, cfg: DictConfig) -> None:
    how = {"cfg_optimizer": cfg.optimizer, "optimizer_in_bwd": recipe._optimizer_in_bwd}
    taken = inspect.signature(recipe._setup_optimizer).parameters
    recipe._optimizer = recipe._setup_optimizer(**{name: value for name, value in how.items() if name in taken})
    recipe._loss_fn = config.instantiate(cfg.loss)
    is_distillation = method_of(cfg) == "knowledge_distillation"
    # Only these recipes use the new loss that torchtune returns for a loss without chunks.
    compiles_whole = is_distillation or (method_of(cfg) == "lora_finetune" and recipe.world_size == 1)
    if recipe._compile:
        _compile_loss(recipe._loss_fn, also_whole=compiles_whole)
    chunks = getattr(recipe._loss_fn, "num_output_chunks", None)
    if chunks is not None:
        for model in recipe.models():
            model.set_num_output_chunks(chunks)
    if is_distillation:
        kd_loss = config.instantiate(cfg.kd_loss)
        if recipe._compile:
            _compile_loss(kd_loss, also_whole=True)
        kd_chunks = getattr(kd_loss, "num_output_chunks", None)
        if kd_chunks != chunks:
            raise InputError(f"`kd_loss` must have as many chunks as `loss` ({chunks}), but has {kd_chunks} instead.")
        recipe._kd_loss_fn = _reading_numbers(kd_loss)


def _require_no_closure(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose step evaluates the loss itself: no recipe passes it a closure.

    Raises:
        InputError: the optimizer needs a closure.
    """
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        name = type(optimizer).__name__
        raise InputError(f"`optimizer` must be one whose step needs no closure, but {name} needs one.")


def _compile_loss(loss: nn.Module, *, also_whole: bool) -> None:
    from torchtune_adaptive.plan.trace.compiled_code import compile_loss  # AOTAutograd takes time to import

    compile_loss(loss, also_whole=also_whole)


def _reading_numbers(call: Callable[..., Any]) -> Callable[..., Any]:
    """``call`` with values of fake tensors readable: distillation's loss counts tokens, Adafactor computes norms."""

    @functools.wraps(call)
    def reading(*args: Any, **kwargs: Any) -> Any:
        with NumbersOfFakes():
            return call(*args, **kwargs)

    return reading


class _TrainingOnFakes:
    """``torchtune.training`` for the stock recipe, except that models keep the meta tensors they were built with."""

    def __init__(self, training: Any) -> None:
        self._training = training

    def __getattr__(self, name: str) -> Any:
        return getattr(self._training, name)

    def load_from_full_model_state_dict(self, model: nn.Module, *_: Any, **__: Any) -> tuple[list[str], list[str]]:
        for module in model.modules():
            if isinstance(module, DoRALinear):  # would compute its magnitude from the weights
                module.initialize_dora_magnitude = lambda: None
        return [], []

    def validate_no_params_on_meta_device(self, _: nn.Module) -> None:
        return None

    def compile_model(self, model: nn.Module, *_: Any, **__: Any) -> None:
        from torchtune_adaptive.plan.trace.compiled_code import compile_layers  # as in ``_compile_loss``

        compile_layers(model)

    def get_act_offloading_ctx_manager(self, model: nn.Module, enabled: bool) -> Any:
        torchtune_offloading.OffloadActivations = OffloadedActivations  # pyright: ignore[reportAttributeAccessIssue]
        return self._training.get_act_offloading_ctx_manager(model, enabled)
