"""A recipe's train step without memory, data or weights: the stock recipe's own set-up makes fake models."""

import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torchtune.training._activation_offloading as torchtune_offloading
import torchtune.training.activations as torchtune_activations
from omegaconf import DictConfig
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import _disable_current_modes
from torchao.dtypes.nf4tensor import NF4Tensor, to_nf4
from torchtune import training
from torchtune.modules import TransformerDecoder
from torchtune.modules.model_fusion import DeepFusionModel, FusionLayer
from torchtune.modules.peft import DoRALinear

from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.engine.memory.operations import plain_parts
from torchtune_adaptive.engine.memory.phases import Phases
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.plan.trace.events import BEFORE, Events
from torchtune_adaptive.plan.trace.fake_images import images_of
from torchtune_adaptive.plan.trace.fake_step import FakeStep
from torchtune_adaptive.plan.trace.fake_tensors import make_fake
from torchtune_adaptive.plan.trace.few_layers import layers_limited_to
from torchtune_adaptive.plan.trace.host_figures import host_figures
from torchtune_adaptive.plan.trace.keys import is_packed
from torchtune_adaptive.plan.trace.loading import load, without_loops
from torchtune_adaptive.plan.trace.loop_tracer import LoopTracer
from torchtune_adaptive.plan.trace.offloaded_activations import OffloadedActivations
from torchtune_adaptive.plan.trace.optimizer_stand_ins import stand_in_for_optimizer
from torchtune_adaptive.plan.trace.recorder import StepTrace
from torchtune_adaptive.settings import AdaptiveSettings
from torchtune_adaptive.stock.configs import method_of, resolved
from torchtune_adaptive.stock.installed import adaptive_name
from torchtune_adaptive.stock.load import setting_up
from torchtune_adaptive.stock.recipe import Activations, AdaptiveRecipe
from torchtune_adaptive.training.batch.micro_batches import MicroBatch
from torchtune_adaptive.training.batch.row_format import PreferenceRows, Row, RowFormat, TokenRows
from torchtune_adaptive.training.signals import StopRequest


class FakeRecipe:
    """Rank 0 of a recipe that trains ``cfg``, on fake tensors.

    Args:
        num_layers: build only this many layers of each model; None: all.

    Attributes:
        models: all on the device, the trained one first.
        num_layers: layers of the trained model that were built.
        true_num_layers: layers that the config's trained model has.
        loads: of their weights, in order.
        fusion_interval: every such layer of the trained model is fused with images; 0 in text models.

    Raises:
        InputError: the config cannot be planned, or ``num_layers`` is given for models of different depths.
    """

    def __init__(self, cfg: DictConfig, *, num_layers: int | None = None) -> None:
        self._cfg = cfg
        self._mode = FakeStep(like_cuda=str(cfg.device).startswith("cuda"), values_are_fixed=True)
        recipe = _set_up_recipe(cfg, self._mode, num_layers)
        true_nums = recipe.true_nums
        if num_layers is not None and len(set(true_nums)) > 1:
            # To extrapolate them, one model must get more layers while the others stay the same.
            raise InputError(f"Models of {true_nums} layers cannot be built with fewer layers.")
        self.models: list[Any] = recipe.models()
        self.num_layers = len(_layers_of(self.models[0]))
        self.true_num_layers = true_nums[0]
        fused = (number for number, layer in enumerate(_layers_of(self.models[0]), 1) if isinstance(layer, FusionLayer))
        self.fusion_interval = next(fused, 0)
        self._images = images_of(self.models[0], cfg)
        self._micro_steps = min(2, recipe._gradient_accumulation_steps)
        self._row_format = recipe.row_format()
        self._activations = recipe.activations_handling_ctx
        self._tokens = 1  # of the micro-batch traced last
        step = recipe.train_step(collate=self._collate)
        step.phases.remove()
        self._policy = step.policy
        self._tracer = LoopTracer(
            step.loop(Consensus([0])),
            self._mode,
            frozen=self.models[1:],
            keeps_on_host=bool(cfg.get("fsdp_cpu_offload", False)),
        )
        meter: Any = self._tracer  # it takes the phases as a meter does
        step.phases = Phases(self.models, meter)
        with self._mode.faking():
            self.loads = [one for model in self.models for one in _loads_of(model)] if self._mode.like_cuda else []
            self._warm_up()

    def trace(self, batch_size: int, seq_len: int) -> StepTrace:
        """One steady-state step over micro-batches of ``batch_size`` rows of ``seq_len`` tokens."""
        self._tokens = batch_size * seq_len * self._row_format.sequences
        return self._tracer.trace([MicroBatch([{"num_tokens": seq_len}] * batch_size)] * self._micro_steps)

    def figures(self) -> dict[str, int]:
        """Figures that are linear in the number of layers, see ``TracedStep``. Those of models are over all ranks."""
        trained, *frozen = (sum(one.numel() for one in model.parameters()) for model in self.models)
        return {
            "num_parameters": trained + sum(frozen),
            "num_frozen_parameters": sum(frozen),
            "paged_bytes": sum(getattr(optimizer, "paged_bytes", 0) for optimizer in self._policy.optimizers),
            "sequences": self._row_format.sequences,
            "images": 0 if self._images is None else self._images.images,
            "tiles": 0 if self._images is None else self._images.tiles,
        }

    def host_figures(self) -> dict[str, int]:
        """Figures for ``HostFigures.from_flat``, which are linear in the number of layers too."""
        offloaded = getattr(self._activations, "host_bytes", [])  # only of `OffloadedActivations`
        return host_figures(
            self._cfg,
            self.models,
            self._policy.optimizers,
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
            for optimizer in self._policy.optimizers:
                trained = (one for group in optimizer.param_groups for one in group["params"] if one.requires_grad)
                for parameter in list(optimizer.state) or trained:  # of the second step those with state
                    parameter.grad = torch.zeros_like(parameter)
            if sharded:
                self._policy.normalize(torch.ones((), dtype=torch.long))
            for optimizer in self._policy.optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

    def _collate(self, rows: Sequence[Row]) -> Any:
        """A batch with the shape of ``rows``, without content."""
        shape = self._row_format.sequences * len(rows), rows[0]["num_tokens"]
        if isinstance(self._row_format, PreferenceRows):
            return tuple(torch.zeros(shape, dtype=torch.long) for _ in ("tokens", "labels"))
        names = ("tokens", "labels", "input_pos") if is_packed(self._cfg) else ("tokens", "labels")
        batch: dict[str, Any] = {name: torch.zeros(shape, dtype=torch.long) for name in names}
        if self._images is not None:
            batch |= self._images.batch(*shape, mode=self._mode)
        if "input_pos" in batch and not self._mode.like_cuda:
            # CUDA uses flex attention with a block mask instead; its memory is counted as that of causal attention.
            batch["mask"] = torch.zeros(*shape, shape[1], dtype=torch.bool)
        return batch


def _set_up_recipe(cfg: DictConfig, mode: FakeStep, num_layers: int | None) -> Any:
    """The method's recipe, set up as usual, but with fake models and without what is read from files."""
    module: Any = importlib.import_module(adaptive_name(f"{method_of(cfg)}_distributed"))
    recipe_class = getattr(module, f"Adaptive{module.StockRecipe.__name__}")
    with setting_up(), _without_weights(module.StockRecipe):
        recipe: Any = type(recipe_class.__name__, (recipe_class, _SetUpOnFakes), {})(_without_files(cfg))
        recipe.mode, recipe.num_layers, recipe.true_nums = mode, num_layers, []
        recipe._enable_activation_offloading = cfg.get("enable_activation_offloading", False)
        recipe.setup(recipe.cfg)
    return recipe


def _without_files(cfg: DictConfig) -> DictConfig:
    """The config of a recipe whose set-up reads no files, on the device of fake tensors."""
    changes = {
        "device": "cpu",
        "enable_activation_offloading": False,  # which recipes refuse on a CPU
        "fsdp_cpu_offload": False,  # tensors in host memory are marked by their kind
        "optimizer": stand_in_for_optimizer(cfg.optimizer),
        "tokenizer": {"_component_": "builtins.object"},
        "profiler": None,
        "resume_from_checkpoint": False,
        "batch_size": 1,
    }
    return DictConfig(resolved(cfg) | changes)


class _SetUpOnFakes(AdaptiveRecipe):
    """A base class between an adaptive and its stock recipe, whose models are made fake as they are set up.

    Attributes:
        mode: that of the fake tensors.
        num_layers: layers of each model to build; None: all.
        true_nums: how many layers each of the config's models has, in the order in which they are set up.
    """

    mode: FakeStep
    num_layers: int | None
    true_nums: list[int]

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = cfg
        self._settings = replace(AdaptiveSettings.from_cfg(cfg), memory_limit_bytes=None)  # nothing is metered
        self._stop_request = StopRequest()
        super(AdaptiveRecipe, self).__init__(cfg=cfg)  # pyright: ignore[reportCallIssue]
        self._is_rank_zero = False  # which would log
        self._clip_grad_norm = cfg.get("clip_grad_norm", None)
        self._checkpoint_client = SimpleNamespace(load_base_checkpoint=self.load_checkpoint)

    def setup(self, cfg: DictConfig) -> None:
        """Set up as the stock recipe does. For one rank, as the stock recipe for one device does."""
        with self.mode.faking():
            super(AdaptiveRecipe, self).setup(cfg)  # pyright: ignore[reportAttributeAccessIssue]
        self._activations = Activations(self.activations_handling_ctx)
        method, compiles = method_of(cfg), cfg.get("compile", False)
        if self.world_size > 1:
            return
        if method == "knowledge_distillation":
            self._teacher_model.requires_grad_(True)
        if method == "lora_dpo" and compiles:
            _compiling().compile_layers(self._model)
        if method == "lora_finetune" and compiles and not hasattr(self._loss_fn, "num_output_chunks"):
            self._loss_fn = _compiling().compile_loss(self._loss_fn)  # which the recipe for several ranks ignores

    def load_checkpoint(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {training.MODEL_KEY: {}}

    _load_checkpoint = _load_ref_checkpoint = load_teacher_checkpoint = load_checkpoint

    def _setup_model(self, **how: Any) -> nn.Module:
        return self._faked(super()._setup_model, how)  # pyright: ignore[reportAttributeAccessIssue]

    def _setup_reference_model(self, **how: Any) -> nn.Module:
        return self._faked(super()._setup_reference_model, how)  # pyright: ignore[reportAttributeAccessIssue]

    def _setup_teacher_model(self, **how: Any) -> nn.Module:
        return self._faked(super()._setup_teacher_model, how)  # pyright: ignore[reportAttributeAccessIssue]

    def _faked(self, set_up: Callable[..., nn.Module], how: dict[str, Any]) -> nn.Module:
        """The model that ``set_up`` returns, as fake tensors.

        Raises:
            InputError: it is neither a text model nor one of texts and images.
        """
        key = "model" if "cfg_model" in how else "teacher_model"
        if "lora_weights_state_dict" in how:
            how["lora_weights_state_dict"] = {"any": None}  # or new ones would be drawn
        vars(torchtune_activations.checkpoint_wrapper).pop("_count", None)
        with _disable_current_modes(), layers_limited_to(self.num_layers, str(self.cfg[key]._component_)) as counts:
            model = set_up(**how)
        if not isinstance(_text_part(model), TransformerDecoder):
            kind = type(model).__name__
            raise InputError(
                f"`{key}` must be a TransformerDecoder, alone or in a DeepFusionModel, but is a {kind} instead."
            )
        self.true_nums.append(counts[0] if counts else len(_layers_of(model)))
        make_fake(model)
        return model

    def _setup_data(self, *_: Any, **__: Any) -> Any:
        return None, ()  # of sampler and loader, or in the place of the loader alone: only its length is read

    def _setup_lr_scheduler(self, *_: Any, **__: Any) -> None:
        return None

    def row_format(self) -> RowFormat:
        return TokenRows(self._loss_fn.ignore_index)  # also of texts with images: there is no sample to see


def _loads_of(model: nn.Module) -> Iterator[Events]:
    """How the weights of a model come onto a GPU. Call it in the fake mode.

    First rotations of all positions are computed: from the angles, their cosines and their sines.
    """
    for module in model.modules():
        rotations = getattr(module, "cache", None)
        if hasattr(module, "build_rope_cache") and isinstance(rotations, torch.Tensor):
            yield load([rotations.nbytes], temporary=[rotations.nbytes // 2] * 3)
    in_4_bits: dict[Any, Events] = {}
    for weight in model.parameters():
        if isinstance(weight, NF4Tensor):
            if weight.shape not in in_4_bits:
                in_4_bits[weight.shape] = _load_in_4_bits(weight)
            yield in_4_bits[weight.shape]
        else:
            yield load(part.nbytes for part in plain_parts(weight))


def _load_in_4_bits(weight: NF4Tensor) -> Events:
    """The load of a weight that is packed on the GPU (``stock/load.py``)."""
    trace = StepTrace(like_cuda=True)
    unpacked = torch.empty(weight.shape, dtype=weight.dtype)
    trace.mark(unpacked, "temporaries")
    trace.enter_phase("loading")
    with trace:
        packed = to_nf4(unpacked, block_size=weight.block_size, scaler_block_size=weight.scaler_block_size)
        del unpacked
    events = (one._replace(phase=BEFORE, operation="loading", kind="temporaries") for one in trace.events())
    del packed  # which the trace saw until now
    return without_loops(tuple(events))


def _text_part(model: Any) -> Any:
    """The model, or its decoder if it has an encoder of images."""
    return model.decoder if isinstance(model, DeepFusionModel) else model


def _layers_of(model: Any) -> Any:
    return _text_part(model).layers


def _compiling() -> Any:
    """The module for `compile`, which takes time to import."""
    return importlib.import_module("torchtune_adaptive.plan.trace.compiled_code")


@contextmanager
def _without_weights(stock_recipe: Any) -> Iterator[None]:
    """Within the context the stock recipe's models keep the meta tensors they are built with, and nothing compiles."""
    with ExitStack() as stack:
        stack.enter_context(
            mock.patch.multiple(
                stock_recipe._setup_model.__globals__["training"],
                load_from_full_model_state_dict=_loads_nothing,
                validate_no_params_on_meta_device=lambda _: None,
                compile_model=lambda model, **_: _compiling().compile_layers(model),
                compile_loss=lambda loss, **_: _compiling().compile_loss(loss),
            )
        )
        stack.enter_context(mock.patch.object(torchtune_offloading, "OffloadActivations", OffloadedActivations))
        # Selective checkpointing counts layers over all models of a process, in an attribute.
        stack.enter_context(mock.patch.dict(vars(torchtune_activations.checkpoint_wrapper)))
        yield


def _loads_nothing(model: nn.Module, *_: Any, **__: Any) -> tuple[list[str], list[str]]:
    """``load_from_full_model_state_dict`` of a model that keeps its meta tensors: no name is missing or unexpected."""
    for module in model.modules():
        if isinstance(module, DoRALinear):  # would compute its magnitude from the weights
            module.initialize_dora_magnitude = lambda: None
    return [], []
