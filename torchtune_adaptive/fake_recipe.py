"""A recipe's train step without memory, data or weights: model and optimizer of a config as fake tensors.

Works on a process of its own: it starts a process group of which only one rank exists. Fake tensors are on the device
"cpu", because a fake "cuda" aborts the process on a machine without one; what CUDA would do otherwise is set up here.
"""

import contextlib
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torchtune.training._activation_offloading as torchtune_offloading
import torchtune.training.activations as torchtune_activations
from omegaconf import DictConfig, ListConfig, OmegaConf
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtune import config
from torchtune.config._errors import InstantiationError
from torchtune.config._utils import _get_component_from_path
from torchtune.modules import TransformerDecoder
from torchtune.modules.peft import DoRALinear

from torchtune_adaptive.errors import InputError, quote, reason_of
from torchtune_adaptive.stand_ins import OffloadedActivations, stand_in_for_optimizer
from torchtune_adaptive.trace import CUDA_GRANULARITY_BYTES, ON_HOST, StepTrace


class FakeRecipe:
    """The first rank of a recipe that trains by ``cfg`` with ``world_size`` ranks.

    Args:
        num_layers: build only so many of the model's layers; None: all.

    Attributes:
        num_layers: layers that were built.
        true_num_layers: layers that the config's model has.

    Raises:
        InputError: the config's model is none that can be planned.
    """

    def __init__(self, cfg: DictConfig, *, world_size: int, num_layers: int | None = None) -> None:
        self.cfg = _on_fake_device(cfg)
        self._like_cuda = str(cfg.device).startswith("cuda")
        self._keeps_on_host = bool(cfg.get("fsdp_cpu_offload", False))
        start_fake_process_group(world_size)
        self._recipe = _recipe_class(self.cfg, like_cuda=self._like_cuda)()
        with _layers_limited_to(num_layers, str(cfg.model._component_)) as true_counts:
            self._recipe.set_up_model()
        self.model: Any = self._recipe._model
        if not isinstance(self.model, TransformerDecoder):
            kind = type(self.model).__name__
            raise InputError(f"`model` must be a text model (a TransformerDecoder), but is a {kind} instead.")
        self.num_layers = len(self.model.layers)
        self.true_num_layers = true_counts[0] if true_counts else self.num_layers
        self._fake_mode = FakeTensorMode()
        with self._as_on_device():
            _make_fake(self.model)
            self._recipe.set_up_step()
        self._warm = False

    def trace(self, batch_size: int, seq_len: int) -> StepTrace:
        """One steady-state step over micro-batches of ``batch_size`` rows of ``seq_len`` tokens."""
        recipe = self._recipe
        micro_batches = [(batch_size, seq_len)] * min(2, recipe._gradient_accumulation_steps)
        on_host = self._keeps_on_host
        trace = StepTrace(granularity_bytes=CUDA_GRANULARITY_BYTES if self._like_cuda else 1, steps_on_host=on_host)
        with self._as_on_device():
            if not self._warm:  # makes the optimizer's state, and lets DTensor work out shardings on global shapes
                recipe._run_window(micro_batches)
                self._warm = True
            trace.mark(list(self.model.buffers()), "parameters")
            trace.mark(list(self.model.parameters()), ON_HOST if on_host else "parameters")
            states = [list(optimizer.state.values()) for optimizer in recipe.optimizers()]
            trace.mark(states, ON_HOST if on_host else "optimizer state")
            recipe.tracer = trace
            with trace:
                recipe._run_window(micro_batches)
            recipe.tracer = None
        return trace

    def figures(self) -> dict[str, int]:
        """Figures of the model over all ranks that are lines in its number of layers, see ``TracedStep``."""
        numbers = [parameter.numel() for parameter in self.model.parameters()]
        return {
            "num_parameters": sum(numbers),
            "paged_bytes": sum(getattr(optimizer, "paged_bytes", 0) for optimizer in self._recipe.optimizers()),
            "attention_width": self.model.num_heads * self.model.head_dim,
        }

    @contextmanager
    def _as_on_device(self) -> Iterator[None]:
        with self._fake_mode, _optimizers_choose_as_on_cuda() if self._like_cuda else contextlib.nullcontext():
            yield


def is_lora(cfg: DictConfig) -> bool:
    """Whether ``cfg`` is one of LoRA finetuning, else of full finetuning."""
    return "lora_attn_modules" in cfg.model


def _is_packed(dataset: Any) -> bool:
    """Whether the config's `dataset` gives packs; of several all do, or none."""
    one = dataset[0] if isinstance(dataset, ListConfig) else dataset
    return bool(one.get("packed", False))


def start_fake_process_group(world_size: int) -> None:
    """Be rank 0 of ``world_size`` ranks of which no other exists; a group that there is ends."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())


def _on_fake_device(cfg: DictConfig) -> DictConfig:
    content: Any = OmegaConf.to_container(cfg, resolve=True)
    wants_offloading = bool(content.get("enable_activation_offloading", False))
    changes = {"device": "cpu", "enable_activation_offloading": False, "compile": False}
    optimizer = stand_in_for_optimizer(cfg.optimizer)
    return DictConfig(content | changes | {"wants_offloading": wants_offloading, "optimizer": optimizer})


def _recipe_class(cfg: DictConfig, *, like_cuda: bool) -> Any:
    """Our recipe of the method, but that it has no data, reads no checkpoint and takes no tensor's value."""
    lora = is_lora(cfg)
    module: Any = importlib.import_module(f"adaptive_{'lora' if lora else 'full'}_finetune_distributed")
    stock = module.StockRecipe
    names = stock._setup_model.__globals__
    if not isinstance(names["training"], _TrainingOnFakes):
        names["training"] = _TrainingOnFakes(names["training"])
    names["validate_missing_and_unexpected_for_lora"] = lambda **_: None
    ours = module.AdaptiveLoRAFinetuneRecipeDistributed if lora else module.AdaptiveFullFinetuneRecipeDistributed

    class Fake(ours):
        tracer: StepTrace | None = None
        _meter = None

        def __init__(self) -> None:
            stock.__init__(self, cfg)
            self._compile = False
            self._optimizer_in_bwd = cfg.get("optimizer_in_bwd", False)

        def set_up_model(self) -> None:
            # Selective checkpointing counts layers over all models of a process: delete when torchtune begins anew.
            vars(torchtune_activations.checkpoint_wrapper).pop("_count", None)
            weights = {"base_model_state_dict": {}, "lora_weights_state_dict": {"any": None}}
            more = {"ac_mode": cfg.get("ac_mode", None), "ac_option": cfg.get("ac_option", None)}
            self._model = self._setup_model(
                cfg_model=cfg.model,
                enable_activation_checkpointing=self._enable_activation_checkpointing,
                enable_activation_offloading=cfg.wants_offloading,
                fsdp_cpu_offload=False,  # what is on the host is told apart by its kind
                reshard_after_forward=cfg.get("fsdp_reshard_after_forward", True),
                custom_sharded_layers=cfg.get("custom_sharded_layers", None),
                **(weights if lora else {"model_state_dict": {}} | more),
            )

        def set_up_step(self) -> None:
            how = {} if lora else {"optimizer_in_bwd": self._optimizer_in_bwd}
            self._optimizer = self._setup_optimizer(cfg_optimizer=cfg.optimizer, **how)
            self._loss_fn = config.instantiate(cfg.loss)
            if hasattr(self._loss_fn, "num_output_chunks"):
                self._model.set_num_output_chunks(self._loss_fn.num_output_chunks)

        def optimizers(self) -> list[torch.optim.Optimizer]:
            return list(self._optim_ckpt_wrapper.optim_map.values()) if self._optimizer_in_bwd else [self._optimizer]

        def _collated(self, rows: tuple[int, int]) -> dict[str, torch.Tensor]:
            names = ("tokens", "labels", "input_pos") if _is_packed(cfg.dataset) else ("tokens", "labels")
            batch = {name: torch.zeros(rows, dtype=torch.long) for name in names}
            if "input_pos" in batch and not like_cuda:
                # CUDA has a block mask for flex attention instead, whose memory is taken for that of causal attention.
                batch["mask"] = torch.zeros(*rows, rows[1], dtype=torch.bool)
            return batch

        def _enter_phase(self, name: str) -> None:
            if self.tracer is not None:
                if name == "clip":
                    gradients = [parameter.grad for parameter in self._model.parameters()]
                    self.tracer.mark(gradients, ON_HOST if cfg.get("fsdp_cpu_offload", False) else "gradients")
                self.tracer.enter_phase(name)

        def _step_totals(self, *_: Any, **__: Any) -> None:
            return None

    return Fake


class _TrainingOnFakes:
    """``torchtune.training`` as the stock recipe sees it, but that models keep the meta tensors they were built of."""

    def __init__(self, training: Any) -> None:
        self._training = training

    def __getattr__(self, name: str) -> Any:
        return getattr(self._training, name)

    def load_from_full_model_state_dict(self, model: nn.Module, *_: Any, **__: Any) -> tuple[list[str], list[str]]:
        for module in model.modules():
            if isinstance(module, DoRALinear):  # would compute its magnitude of the weights
                module.initialize_dora_magnitude = lambda: None
        return [], []

    def validate_no_params_on_meta_device(self, _: nn.Module) -> None:
        return None

    def get_act_offloading_ctx_manager(self, model: nn.Module, enabled: bool) -> Any:
        torchtune_offloading.OffloadActivations = OffloadedActivations  # pyright: ignore[reportAttributeAccessIssue]
        return self._training.get_act_offloading_ctx_manager(model, enabled)


@contextmanager
def _layers_limited_to(num_layers: int | None, component: str) -> Iterator[list[int]]:
    """Let ``component`` make a model of ``num_layers`` layers; gives a list that the true number is put into.

    A config names a whole model, such as ``llama3_1_70b``, which calls a builder with its number of layers.
    """
    _import_builders(component)
    true_counts: list[int] = []
    replaced: list[tuple[dict[str, Any], str, Any]] = []

    def limited(builder: Callable[..., Any], signature: inspect.Signature) -> Callable[..., Any]:
        @functools.wraps(builder)
        def build(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            true_counts.append(bound.arguments["num_layers"])
            bound.arguments["num_layers"] = num_layers or bound.arguments["num_layers"]
            return builder(*bound.args, **bound.kwargs)

        return build

    try:
        for name, module in list(sys.modules.items()):
            if name.startswith("torchtune.models."):
                for key, value in list(vars(module).items()):
                    if inspect.isfunction(value) and "num_layers" in (signature := inspect.signature(value)).parameters:
                        replaced.append((vars(module), key, value))
                        vars(module)[key] = limited(value, signature)
        yield true_counts
    finally:
        for names, key, value in replaced:
            names[key] = value


def _import_builders(component: str) -> None:
    """Import the modules of a ``component`` of torchtune.

    Raises:
        InputError: it cannot be imported; the message says why.
    """
    try:
        _get_component_from_path(component)
    except InstantiationError as error:
        reason = reason_of(error.__cause__ or error)
        raise InputError(
            f"`model` must be one that can be imported, but {quote(component)} is not: {reason}."
        ) from error


def _make_fake(model: nn.Module) -> None:
    """Replace parameters and buffers by fake ones; under the fake mode. What modules share they go on sharing."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for tensors, wrap in ((module._parameters, _fake_parameter), (module._buffers, _fake_like)):
            for name, tensor in tensors.items():
                if tensor is not None:
                    key = id(tensor)
                    made[key] = made.get(key, (tensor, None))[1] or wrap(tensor)  # pyright: ignore[reportArgumentType]
                    tensors[name] = made[key]


def _fake_parameter(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(_fake_like(parameter), requires_grad=parameter.requires_grad)


def _fake_like(tensor: Any) -> Any:
    """A fake tensor on the CPU for a real or meta ``tensor``, which may wrap others."""
    if isinstance(tensor, DTensor):
        return DTensor(_fake_like(tensor._local_tensor), tensor._spec, requires_grad=False)
    if hasattr(tensor, "__tensor_flatten__"):
        names, context = tensor.__tensor_flatten__()
        if "tensor_meta" in context:  # NF4 keeps its device there
            context = context | {"tensor_meta": replace(context["tensor_meta"], device=torch.device("cpu"))}
        parts = {name: _fake_like(getattr(tensor, name)) for name in names}
        return type(tensor).__tensor_unflatten__(parts, context, tensor.shape, tensor.stride())
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


@contextmanager
def _optimizers_choose_as_on_cuda() -> Iterator[None]:
    """On CUDA an optimizer told nothing takes its step over lists of tensors, on a CPU over one after the other."""
    module: Any = sys.modules["torch.optim.optimizer"]
    devices = module._get_foreach_kernels_supported_devices
    module._get_foreach_kernels_supported_devices = lambda: [*devices(), "cpu"]
    try:
        yield
    finally:
        module._get_foreach_kernels_supported_devices = devices
