"""Run adaptive and stock recipes inside a test's own process and see every logged step and the end state."""

import copy
import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torch.distributed.tensor import DTensor
from torchtune import training
from torchtune.training.metric_logging import MetricLoggerInterface

from tests.support.ranks import DEVICE
from torchtune_adaptive.engine.distributed.snapshot import keep_random_states
from torchtune_adaptive.engine.loop import Loop
from torchtune_adaptive.engine.memory.devices import meter_for, meter_of_run
from torchtune_adaptive.engine.memory.phases import Phases
from torchtune_adaptive.stock import recipe
from torchtune_adaptive.stock.configs import load_config
from torchtune_adaptive.tiny import DATA_NAME, MODEL_GEOMETRY, MODEL_NAME, PAIRS_NAME, TOKENIZER_NAME
from torchtune_adaptive.training.batch.micro_batches import MicroBatch
from torchtune_adaptive.training.train_step import TrainStep

Step = dict[str, float]
RECIPES = {
    "full": ("adaptive_full_finetune_distributed", "AdaptiveFullFinetuneRecipeDistributed"),
    "lora": ("adaptive_lora_finetune_distributed", "AdaptiveLoRAFinetuneRecipeDistributed"),
    "full_single": ("adaptive_full_finetune_single_device", "AdaptiveFullFinetuneRecipeSingleDevice"),
    "lora_single": ("adaptive_lora_finetune_single_device", "AdaptiveLoRAFinetuneRecipeSingleDevice"),
    "full_dpo": ("adaptive_full_dpo_distributed", "AdaptiveFullDPORecipeDistributed"),
    "lora_dpo": ("adaptive_lora_dpo_distributed", "AdaptiveLoRADPORecipeDistributed"),
    "lora_dpo_single": ("adaptive_lora_dpo_single_device", "AdaptiveLoRADPORecipeSingleDevice"),
    "lora_kd": ("adaptive_knowledge_distillation_distributed", "AdaptiveKDRecipeDistributed"),
    "lora_kd_single": ("adaptive_knowledge_distillation_single_device", "AdaptiveKDRecipeSingleDevice"),
    "full_qat": ("adaptive_qat_distributed", "AdaptiveQATRecipeDistributed"),
    "lora_qat": ("adaptive_qat_lora_finetune_distributed", "AdaptiveQATLoRAFinetuneRecipeDistributed"),
}
SHALLOW = {"model__num_layers": 2}
COMMON: dict[str, Any] = SHALLOW | {
    "epochs": 1,
    "batch_size": 2,
    "tokenizer__max_seq_len": 64,
    "optimizer__lr": 1e-2,
    "lr_scheduler__num_warmup_steps": 1,
    "adaptive__memory_limit": None,
}
TEACHER_NAME = "teacher.pt"
_QUANTIZER = {"_component_": "torchtune.training.quantization.Int8DynActInt4WeightQATQuantizer", "groupsize": 32}
_PAIRS: dict[str, Any] = {
    "dataset": {
        "_component_": "torchtune.datasets.preference_dataset",
        "source": "json",
        "data_files": f"${{tiny_dir}}/{PAIRS_NAME}",
        "split": "train",
    },
    "loss": {"_component_": "torchtune.rlhf.loss.DPOLoss", "beta": 0.1},
}
# What a method's config adds to that of full or LoRA finetuning.
METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {},
    "full_dpo": _PAIRS | {"ref_checkpointer": "${checkpointer}"},
    "lora_dpo": _PAIRS | {"clip_grad_norm": None},
    "lora_kd": {
        "teacher_model": {"_component_": "torchtune.models.llama2.llama2"} | MODEL_GEOMETRY,
        "teacher_checkpointer": "${checkpointer}",
        "teacher_checkpointer__checkpoint_files": [TEACHER_NAME],
        "kd_loss": {"_component_": "torchtune.modules.loss.ForwardKLWithChunkedOutputLoss"},
        "kd_ratio": 0.5,
        "clip_grad_norm": None,
    },
    "full_qat": {"quantizer": _QUANTIZER, "fake_quant_after_n_steps": 2},
    "lora_qat": {"quantizer": _QUANTIZER},
}


class RecordingLogger(MetricLoggerInterface):
    """Keeps what a recipe logs, as floats; the last one made is ``RecordingLogger.last``."""

    last: "RecordingLogger"

    def __init__(self, **_: Any) -> None:
        self.steps: list[Step] = []
        RecordingLogger.last = self

    def log(self, name: str, data: Any, step: int) -> None:
        raise AssertionError("recipes log dictionaries")

    def log_config(self, config: DictConfig) -> None: ...

    def log_dict(self, payload: Any, step: int) -> None:
        self.steps.append({"step": step} | {name: float(value) for name, value in payload.items()})

    def close(self) -> None: ...


def shallow_assets(tiny_dir: Path) -> Path:
    """Where the assets of ``tiny_dir`` are with two of the model's four layers, for runs with ``SHALLOW``.

    The whole model is there as a teacher.
    """
    directory = tiny_dir.with_name(f"{tiny_dir.name}_shallow")
    if not directory.exists():
        directory.mkdir()
        for name in (DATA_NAME, PAIRS_NAME, TOKENIZER_NAME):
            (directory / name).symlink_to(tiny_dir / name)
        (directory / TEACHER_NAME).symlink_to(tiny_dir / MODEL_NAME)
        dropped = range(SHALLOW["model__num_layers"], MODEL_GEOMETRY["num_layers"])
        prefixes = tuple(f"layers.{layer}." for layer in dropped)
        model = torch.load(tiny_dir / MODEL_NAME)
        torch.save(
            {name: value for name, value in model.items() if not name.startswith(prefixes)}, directory / MODEL_NAME
        )
    return directory


_loaded = functools.cache(load_config)  # its YAML takes as long as a train step


def tiny_config(kind: str, tiny_dir: Path, output_dir: Path, **overrides: Any) -> DictConfig:
    """The config of a method on the test's own data; keys of overrides may be dotted with "__"."""
    method = kind.removesuffix("_single")
    cfg = copy.deepcopy(_loaded(f"tiny/{method.partition('_')[0]}"))
    quiet = {"tiny_dir": str(tiny_dir), "output_dir": str(output_dir), "device": DEVICE}
    quiet |= {"metric_logger": {"_component_": "tests.support.recipe_runs.RecordingLogger"}}
    for key, value in (METHODS[method] | quiet | overrides).items():
        if value == "${checkpointer}":
            value = OmegaConf.create(OmegaConf.to_container(cfg.checkpointer))
        OmegaConf.update(cfg, key.replace("__", "."), value, merge=False)
    return cfg


def resuming_config(
    kind: str, tiny_dir: Path, output_dir: Path, *, checkpoint: str | None = None, **overrides: Any
) -> DictConfig:
    """As ``tiny_config``, for an adaptive run resumed from a checkpoint in ``output_dir``, by default the latest."""
    place = True if checkpoint is None else str(output_dir / checkpoint)
    return tiny_config(kind, tiny_dir, output_dir, resume_from_checkpoint=place, **overrides)


def adaptive_recipe(kind: str) -> type:
    """The adaptive recipe class of ``RECIPES``."""
    module, name = RECIPES[kind]
    return getattr(__import__(module), name)


def stock_recipe(kind: str) -> Any:
    """The stock recipe class that the adaptive one extends."""
    return adaptive_recipe(kind).__bases__[1]


def set_up(recipe_class: Any, cfg: DictConfig) -> Any:
    """The recipe, ready to train."""
    training.set_seed(seed=cfg.seed)
    recipe = recipe_class(cfg=cfg)
    recipe.setup(cfg=cfg)
    return recipe


def trained(recipe: Any) -> tuple[list[Step], dict[str, torch.Tensor]]:
    """Train a recipe that is set up; the steps that rank 0 logged, and this rank's parameters."""
    # The stock recipes' `train` clears a device cache, which a CPU does not have; the adaptive loop skips this there.
    with mock.patch.object(training, "cleanup_before_training", gc.collect):
        recipe.train()
    is_rank_zero = not dist.is_initialized() or dist.get_rank() == 0
    return recipe._metric_logger.steps if is_rank_zero else [], local_parameters(recipe._model)


def finished(recipe_class: Any, cfg: DictConfig) -> tuple[list[Step], dict[str, torch.Tensor], Any]:
    """Set up and train; the steps that rank 0 logged, this rank's parameters, and the recipe."""
    recipe = set_up(recipe_class, cfg)
    return *trained(recipe), recipe


def with_micro_batches(recipe_class: Any, size_at: Callable[[int], int | None]) -> Any:
    """The recipe with micro-batches of ``size_at(step)``, steps counted from 0; None: as large as they may be."""

    class WithMicroBatches(recipe_class):
        def before_step(self, step: int) -> None:
            super().before_step(step)
            micro_batches = self.trainer.micro_batches
            micro_batches.resize(size_at(step) or micro_batches.largest.size)
            self.trainer.recoverable.backoff.next_trial = None  # otherwise larger ones would be tried

    return WithMicroBatches


def without_saving(recipe_class: Any) -> Any:
    """The recipe, which saves no checkpoints."""

    class WithoutSaving(recipe_class):
        def save_checkpoint(self, epoch: int) -> None: ...

    return WithoutSaving


@contextmanager
def meters_of_recipes() -> Iterator[list[Any]]:
    """Inside, collects the memory meters of the recipes that are set up."""
    made: list[Any] = []

    def make(*args: Any, **options: Any) -> Any:
        made.append(meter_of_run(*args, **options))
        return made[-1]

    with mock.patch.object(recipe, "meter_of_run", make):
        yield made


def local_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """This rank's part of each parameter, copied."""
    return {
        name: (value.to_local() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in model.named_parameters()
    }


def loop_of(recipe: Any, *, is_metered: bool = True) -> Loop:
    """The loop of the train step of a recipe that is set up, with an exact meter of its own or with none."""
    step: TrainStep = recipe.trainer.step
    meter = meter_for(step.device, torch.nn.ModuleList(step.models), step.policy.optimizers) if is_metered else None
    return replace(step, phases=Phases(step.models, meter), meter=meter).loop(recipe._consensus)


def metered_peaks(recipe: Any, row: Any, sizes: Sequence[int], *, micro_steps: int = 1) -> list[int]:
    """The peaks of whole steps of each of ``sizes`` times ``row``. The first step also makes the optimizers' state."""
    loop, peaks = loop_of(recipe), []
    meter = loop.meter_for_probes()
    for size in sizes:
        meter.reset()
        with meter, keep_random_states():
            loop.step([MicroBatch([row] * size)] * micro_steps)
        peaks.append(meter.peak_bytes)
    return peaks
