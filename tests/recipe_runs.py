"""Run recipes, ours and the stock ones, inside a test's own process and see every logged step and the end state."""

import gc
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torch.distributed.tensor import DTensor
from torchtune import training
from torchtune.training.metric_logging import MetricLoggerInterface

from torchtune_adaptive.stock.configs import resolve_config_argument

Step = dict[str, float]
RECIPES = {
    "full": ("adaptive_full_finetune_distributed", "AdaptiveFullFinetuneRecipeDistributed"),
    "lora": ("adaptive_lora_finetune_distributed", "AdaptiveLoRAFinetuneRecipeDistributed"),
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


def adamw_with_tensor_rate(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """An optimizer that a config can name, with its learning rate in a tensor."""
    return torch.optim.AdamW(parameters, lr=torch.tensor(lr), fused=True)


def no_samples(tokenizer: Any, **_: Any) -> list[Any]:
    """A data set that a config can name, without a sample."""
    return []


def tiny_config(kind: str, tiny_dir: Path, output_dir: Path, **overrides: Any) -> DictConfig:
    """The config ``tiny/full`` or ``tiny/lora`` on the test's own data; keys of overrides may be dotted with "__"."""
    path = resolve_config_argument(["--config", f"tiny/{kind}"])[1]
    cfg = OmegaConf.load(path)
    assert isinstance(cfg, DictConfig)
    quiet = {"tiny_dir": str(tiny_dir), "output_dir": str(output_dir)}
    quiet |= {"metric_logger": {"_component_": "tests.recipe_runs.RecordingLogger"}}
    for key, value in (quiet | overrides).items():
        OmegaConf.update(cfg, key.replace("__", "."), value, merge=False)
    return cfg


def adaptive_recipe(kind: str) -> type:
    """Our recipe class "full" or "lora"."""
    module, name = RECIPES[kind]
    return getattr(__import__(module), name)


def stock_recipe(kind: str) -> Any:
    """The stock recipe class below ours."""
    return adaptive_recipe(kind).__bases__[1]


def finished(recipe_class: Any, cfg: DictConfig) -> tuple[list[Step], dict[str, torch.Tensor], Any]:
    """Set up and train; the steps that rank 0 logged, this rank's parameters, and the recipe."""
    training.set_seed(seed=cfg.seed)
    recipe = recipe_class(cfg=cfg)
    # The stock recipes' `train` clears a device cache, which the CPU has not; our loop does not ask for it there.
    with mock.patch.object(training, "cleanup_before_training", gc.collect):
        recipe.setup(cfg=cfg)
        recipe.train()
    steps = RecordingLogger.last.steps if dist.get_rank() == 0 else []
    return steps, local_parameters(recipe._model), recipe


def local_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """This rank's part of each parameter, copied."""
    return {
        name: (value.to_local() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in model.named_parameters()
    }


def same_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Whether both hold the same tensors, bit for bit."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
