"""A recipe's train step without memory, data or weights: model and optimizer of a config as fake tensors.

Works on a process of its own: it starts a process group of which only one rank exists. Fake tensors are on the device
"cpu", because a fake "cuda" aborts the process on a machine without one; what CUDA would do otherwise is set up here.
"""

import contextlib
import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torchtune.training._activation_offloading as torchtune_offloading
import torchtune.training.activations as torchtune_activations
from omegaconf import DictConfig, ListConfig
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtune import config
from torchtune.modules import TransformerDecoder
from torchtune.modules.peft import DoRALinear

from torchtune_adaptive.batch.row_format import Row
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.memory.phases import Phases
from torchtune_adaptive.plan.cuda_stand_ins import OffloadedActivations, stand_in_for_optimizer
from torchtune_adaptive.plan.fake_model import layers_limited_to, make_fake
from torchtune_adaptive.plan.trace import CUDA_GRANULARITY_BYTES, ON_HOST, Mark, StepTrace
from torchtune_adaptive.stock.configs import is_lora, resolved
from torchtune_adaptive.training.objectives import NextToken
from torchtune_adaptive.training.train_step import TrainStep


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
        recipe = _recipe_of(self.cfg)
        with layers_limited_to(num_layers, str(cfg.model._component_)) as true_counts:
            _set_up_model(recipe, self.cfg)
        self.model: Any = recipe._model
        if not isinstance(self.model, TransformerDecoder):
            kind = type(self.model).__name__
            raise InputError(f"`model` must be a text model (a TransformerDecoder), but is a {kind} instead.")
        self.num_layers = len(self.model.layers)
        self.true_num_layers = true_counts[0] if true_counts else self.num_layers
        self._micro_steps = min(2, recipe._gradient_accumulation_steps)
        self._fake_mode = FakeTensorMode()
        with self._as_on_device():
            make_fake(self.model)
            _set_up_optimizer_and_loss(recipe, self.cfg)
        self._stepping = recipe.stepping()
        self._loss_fn, self._activations = recipe._loss_fn, recipe.activations_handling_ctx
        self._is_warm = False

    def trace(self, batch_size: int, seq_len: int) -> StepTrace:
        """One steady-state step over micro-batches of ``batch_size`` rows of ``seq_len`` tokens."""
        micro_batches = [[{"num_tokens": seq_len}] * batch_size] * self._micro_steps
        on_host = self._keeps_on_host
        trace = StepTrace(
            granularity_bytes=CUDA_GRANULARITY_BYTES if self._like_cuda else 1,
            steps_on_host=on_host,
            by_gloo=not self._like_cuda,
        )
        with self._as_on_device():
            if not self._is_warm:
                # The first step makes the optimizer's state, and lets DTensor work out shardings on global shapes; some
                # optimizers take other operations in the second.
                for _ in range(2):
                    self._train_step(Phases([], None), micro_batches)
                self._is_warm = True
            trace.mark(list(self.model.buffers()), "parameters")
            trace.mark(list(self.model.parameters()), ON_HOST if on_host else "parameters")
            states = [list(optimizer.state.values()) for optimizer in self._stepping.optimizers]
            trace.mark(states, ON_HOST if on_host else "optimizer state")
            phases = _TracedPhases([self.model], trace, gradients_are=ON_HOST if on_host else "gradients")
            with trace:
                self._train_step(phases, micro_batches)
            phases.remove()
        return trace

    def figures(self) -> dict[str, int]:
        """Figures of the model over all ranks that are lines in its number of layers, see ``TracedStep``."""
        numbers = [parameter.numel() for parameter in self.model.parameters()]
        return {
            "num_parameters": sum(numbers),
            "paged_bytes": sum(getattr(optimizer, "paged_bytes", 0) for optimizer in self._stepping.optimizers),
            "attention_width": self.model.num_heads * self.model.head_dim,
        }

    def _train_step(self, phases: Phases, micro_batches: list[list[Row]]) -> None:
        objective = NextToken(self.model, self._loss_fn, self._activations, weight_depends_on_cut=True)
        device = torch.device("cpu")
        TrainStep(objective, self._stepping, collate=self._collate, device=device, phases=phases, meter=None)(
            micro_batches
        )

    def _collate(self, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        """A batch of the shape of ``rows``, without content."""
        shape = len(rows), rows[0]["num_tokens"]
        names = ("tokens", "labels", "input_pos") if _is_packed(self.cfg.dataset) else ("tokens", "labels")
        batch = {name: torch.zeros(shape, dtype=torch.long) for name in names}
        if "input_pos" in batch and not self._like_cuda:
            # CUDA has a block mask for flex attention instead, whose memory is taken for that of causal attention.
            batch["mask"] = torch.zeros(*shape, shape[1], dtype=torch.bool)
        return batch

    @contextmanager
    def _as_on_device(self) -> Iterator[None]:
        with self._fake_mode, _optimizers_choose_as_on_cuda() if self._like_cuda else contextlib.nullcontext():
            yield


class _TracedPhases(Phases):
    """Tells a trace the phase, and marks gradients before they are clipped."""

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
    """Whether the config's `dataset` gives packs; of several all do, or none."""
    one = dataset[0] if isinstance(dataset, ListConfig) else dataset
    return bool(one.get("packed", False))


def start_fake_process_group(world_size: int) -> None:
    """Be rank 0 of ``world_size`` ranks of which no other exists; another group that there is ends."""
    if dist.is_initialized():
        if dist.get_backend() == "fake" and dist.get_world_size() == world_size:
            return
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())


def _on_fake_device(cfg: DictConfig) -> DictConfig:
    content = resolved(cfg)
    wants_offloading = bool(content.get("enable_activation_offloading", False))
    changes = {"device": "cpu", "enable_activation_offloading": False, "compile": False}
    optimizer = stand_in_for_optimizer(cfg.optimizer)
    return DictConfig(content | changes | {"wants_offloading": wants_offloading, "optimizer": optimizer})


def _recipe_of(cfg: DictConfig) -> Any:
    """The recipe of the method as its own set-up finds it, but that it reads no checkpoint and takes fake weights."""
    kind = "LoRA" if is_lora(cfg) else "Full"
    module: Any = importlib.import_module(f"adaptive_{kind.lower()}_finetune_distributed")
    names = module.StockRecipe._setup_model.__globals__
    if not isinstance(names["training"], _TrainingOnFakes):
        names["training"] = _TrainingOnFakes(names["training"])
    names["validate_missing_and_unexpected_for_lora"] = lambda **_: None
    recipe_class = getattr(module, f"Adaptive{kind}FinetuneRecipeDistributed")
    recipe = recipe_class.__new__(recipe_class)
    module.StockRecipe.__init__(recipe, cfg)
    recipe._compile = False
    recipe._optimizer_in_bwd = cfg.get("optimizer_in_bwd", False)
    return recipe


def _set_up_model(recipe: Any, cfg: DictConfig) -> None:
    # Selective checkpointing counts layers over all models of a process: delete when torchtune begins anew.
    vars(torchtune_activations.checkpoint_wrapper).pop("_count", None)
    weights = {"base_model_state_dict": {}, "lora_weights_state_dict": {"any": None}}
    more = {"ac_mode": cfg.get("ac_mode", None), "ac_option": cfg.get("ac_option", None)}
    recipe._model = recipe._setup_model(
        cfg_model=cfg.model,
        enable_activation_checkpointing=recipe._enable_activation_checkpointing,
        enable_activation_offloading=cfg.wants_offloading,
        fsdp_cpu_offload=False,  # what is on the host is told apart by its kind
        reshard_after_forward=cfg.get("fsdp_reshard_after_forward", True),
        custom_sharded_layers=cfg.get("custom_sharded_layers", None),
        **(weights if is_lora(cfg) else {"model_state_dict": {}} | more),
    )


def _set_up_optimizer_and_loss(recipe: Any, cfg: DictConfig) -> None:
    how = {} if is_lora(cfg) else {"optimizer_in_bwd": recipe._optimizer_in_bwd}
    recipe._optimizer = recipe._setup_optimizer(cfg_optimizer=cfg.optimizer, **how)
    recipe._loss_fn = config.instantiate(cfg.loss)
    if hasattr(recipe._loss_fn, "num_output_chunks"):
        recipe._model.set_num_output_chunks(recipe._loss_fn.num_output_chunks)


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
def _optimizers_choose_as_on_cuda() -> Iterator[None]:
    """On CUDA an optimizer told nothing takes its step over lists of tensors, on a CPU over one after the other."""
    module: Any = sys.modules["torch.optim.optimizer"]
    devices = module._get_foreach_kernels_supported_devices
    module._get_foreach_kernels_supported_devices = lambda: [*devices(), "cpu"]
    try:
        yield
    finally:
        module._get_foreach_kernels_supported_devices = devices
