"""Load a stock recipe of the installed torchtune by file: its ``recipes`` package cannot be imported, on purpose.

The loaded module is a private copy. Two of the names it uses are replaced there, and nowhere else:
``training.get_memory_stats``, which raises on the CPU, and ``init_process_group``, which would start the
group a second time.
"""

import importlib.util
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torchtune
from torchtune import training

SUPPORTED_TORCHTUNE = "0.6.1"


def load_stock_recipe(name: str) -> ModuleType:
    """The stock recipe module ``name``, for example "full_finetune_distributed".

    Raises:
        ImportError: another torchtune than the supported one is installed.
    """
    installed = version("torchtune")
    if installed != SUPPORTED_TORCHTUNE:
        raise ImportError(f"torchtune must be version {SUPPORTED_TORCHTUNE}, but is {installed} instead.")
    path = _recipe_dir() / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"torchtune_adaptive._stock.{name}", path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    vars(module)["training"] = _TrainingOnAnyDevice()
    vars(module)["init_process_group"] = start_process_group
    return module


def stock_config_dir() -> Path:
    """Where the stock configs lie."""
    return _recipe_dir() / "configs"


def start_process_group(backend: str) -> None:
    """Start the default process group with ``backend``, unless there is one."""
    if not dist.is_initialized():
        dist.init_process_group(backend)


def _recipe_dir() -> Path:
    return Path(torchtune.__file__).parent.parent / "recipes"


class _TrainingOnAnyDevice:
    """``torchtune.training``, but for memory statistics on the CPU, which are empty and not logged."""

    def __getattr__(self, name: str) -> Any:
        return getattr(training, name)

    def get_memory_stats(self, device: torch.device, reset_stats: bool = True) -> dict[str, float]:
        return {} if device.type == "cpu" else training.get_memory_stats(device, reset_stats)

    def log_memory_stats(self, stats: dict[str, float]) -> None:
        if stats:
            training.log_memory_stats(stats)
