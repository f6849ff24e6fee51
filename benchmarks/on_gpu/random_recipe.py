"""Adaptive and stock recipes with random weights and random rows, which need no files and no hub."""

import gc
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
from torchao.dtypes.nf4tensor import NF4Tensor, to_nf4
from torchtune import training

from benchmarks.live import Watch, kind_of, live_recipe
from benchmarks.on_gpu.random_rows import Lengths
from benchmarks.on_gpu.stage import Stage
from tests.support.recipe_runs import RecordingLogger, adaptive_recipe, stock_recipe
from torchtune_adaptive.engine.memory.operations import local_part
from torchtune_adaptive.engine.memory.out_of_memory import free_memory
from torchtune_adaptive.stock.checkpoints import AtomicCheckpointer
from torchtune_adaptive.stock.configs import load_config
from torchtune_adaptive.stock.load import start_process_group

_STANDARD_DEVIATION = 0.02
_SMALLEST_VOCABULARY = 1000  # of the models that are trained here


def random_config(
    stage: Stage, name: str, *, num_rows: int, lengths: Lengths = "equal", **overrides: Any
) -> DictConfig:
    """The config ``name`` over random rows on the stage's device; keys of ``overrides`` may be dotted with "__"."""
    cfg = load_config(name)
    rows = f"{__package__}.random_rows"
    ours: dict[str, Any] = {
        "device": str(stage.device.type),
        "output_dir": str(stage.directory / "out"),
        "tokenizer": {"_component_": f"{rows}.PlainTokenizer", "max_seq_len": stage.seq_len},
        "dataset": {
            "_component_": f"{rows}.{'RandomPairs' if kind_of(cfg).endswith('_dpo') else 'RandomRows'}",
            "num_rows": num_rows,
            "vocab_size": _SMALLEST_VOCABULARY,
            "lengths": lengths,
        },
        "metric_logger": {"_component_": f"{RecordingLogger.__module__}.{RecordingLogger.__name__}"},
        "log_peak_memory_stats": False,
        "gradient_accumulation_steps": 1,
        "seed": 0,
        "adaptive": {},
    }
    for key in (key for key in list(cfg) if str(key).endswith("checkpointer")):
        ours |= {f"{key}__checkpoint_dir": str(stage.directory), f"{key}__checkpoint_files": []}  # nothing is read
    for key, value in (ours | overrides).items():
        OmegaConf.update(cfg, key.replace("__", "."), value, merge=False)
    return cfg


def live_random_recipe(
    cfg: DictConfig,
    *,
    stock: bool = False,
    watch: Watch | None = None,
    shard: Callable[[nn.Module], None] | None = None,
) -> Any:
    """A recipe with random weights; ``shard`` gets the sharded model before it computes. A collective."""
    kind = kind_of(cfg)
    recipe_class: Any = stock_recipe(kind) if stock else adaptive_recipe(kind)

    class RandomWeights(recipe_class):
        def __init__(self, cfg: DictConfig) -> None:
            super().__init__(cfg=cfg)
            if kind == "full":
                self._checkpoint_client.load_base_checkpoint = self.load_checkpoint

        def load_checkpoint(self, *_: Any, **__: Any) -> dict[str, Any]:
            return {training.MODEL_KEY: {}}

        _load_checkpoint = _load_ref_checkpoint = load_teacher_checkpoint = load_checkpoint

        def keep_whole(self) -> AtomicCheckpointer:
            return AtomicCheckpointer(None, self._folder)  # without files there is no checkpointer of torchtune's

        def setup(self, cfg: DictConfig) -> None:
            names = stock_recipe(kind)._setup_model.__globals__
            loading = mock.patch.object(names["training"], "load_from_full_model_state_dict", _draw_weights)
            validating = mock.patch.dict(names, {"validate_missing_and_unexpected_for_lora": lambda **_: None})
            with loading, validating:
                super().setup(cfg=cfg)

        def _setup_model(self, *args: Any, **kwargs: Any) -> nn.Module:
            model = super()._setup_model(*args, **kwargs)
            if shard is not None:
                shard(model)
            return model

    return live_recipe(cfg, RandomWeights, watch=watch)


def logged(recipe: Any) -> list[dict[str, float]]:
    """The list to which a recipe adds each step that it logs; empty on ranks other than 0."""
    return recipe._metric_logger.steps if recipe._is_rank_zero else []


def events_of(recipe: Any) -> list[str]:
    """What happened to the sizes of micro-batches in training, in sentences."""
    return [entry["reason"] for entry in recipe.trainer.run_log.history if "samples_per_step" not in entry]


def apart(ours: list[float], theirs: list[float]) -> float:
    """How far the losses of two recipes are apart at most, relative to those of the second."""
    pairs = zip(ours, theirs, strict=True)
    return max(0.0 if one == other else abs(one - other) / (abs(other) or 1.0) for one, other in pairs)


def apart_text(difference: float) -> str:
    """A result of ``apart`` for a table."""
    return "the same" if difference == 0 else f"apart by {difference:.1e}"


def let_go(recipe: Any) -> None:
    """Free what a recipe holds, but for the process group, which the next one uses."""
    device = recipe._device
    vars(recipe).clear()
    gc.collect()
    free_memory(device)


def start_group(stage: Stage) -> None:
    """The default process group, of this process alone without a launcher."""
    start_process_group("gloo" if stage.is_rehearsal else "nccl")


def _draw_weights(model: nn.Module, _: Any, device: torch.device, *__: Any, **___: Any) -> tuple[list[str], list[str]]:
    """Replaces ``load_from_full_model_state_dict``: draws the weights that are still on the meta device."""
    missing = {name: value for name, value in model.named_parameters() if value.is_meta}
    drawn = {name.replace(_CHECKPOINT_PREFIX, ""): _drawn(value, device) for name, value in missing.items()}
    model.load_state_dict(drawn, strict=False, assign=True)
    return [], []


def _drawn(place: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Random values for ``place``, or for this rank's shard of it; scales of normalisations are 1."""
    if isinstance(place, NF4Tensor):
        return to_nf4(torch.empty(place.shape, dtype=place.dtype, device=device).normal_(std=_STANDARD_DEVIATION))
    value = torch.empty_like(place, device=device)
    local = local_part(value)
    if place.dim() == 1:
        local.fill_(1.0)
    else:
        local.normal_(std=_STANDARD_DEVIATION)
    return value
