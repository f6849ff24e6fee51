"""Load a stock recipe of the installed torchtune from its file, and set it up.

torchtune prevents imports of its ``recipes`` package. The loaded module is a private copy, in which three names are
replaced. Some functions of ``training`` fail on the CPU or with one rank. ``init_process_group`` would start the group
a second time. ``swap_lora_linear_with_qat`` uses a class that torchao has renamed.
"""

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from importlib.metadata import version
from itertools import chain, count
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
from torchao.dtypes.nf4tensor import NF4Tensor, to_nf4
from torchao.quantization.qat import FakeQuantizeConfig
from torchtune import config, training
from torchtune.modules.peft import DoRALinear
from torchtune.training.memory import OptimizerInBackwardWrapper
from torchtune.training.quantization import swap_lora_linear_with_qat

from torchtune_adaptive.errors import InputError, place_of, quote, reason_of
from torchtune_adaptive.stock.installed import module_from_file, recipe_dir

SUPPORTED_TORCHTUNE = "0.6.1"
_PACKAGE = "torchtune_adaptive._stock."  # of the modules of stock recipes
_ADDRESSES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def load_stock_recipe(name: str) -> Any:
    """The module of the stock recipe ``name``, for example "full_finetune_distributed".

    Raises:
        ImportError: another torchtune than the supported one is installed.
    """
    installed = version("torchtune")
    if installed != SUPPORTED_TORCHTUNE:
        raise ImportError(f"torchtune must be version {SUPPORTED_TORCHTUNE}, but is {installed} instead.")
    module = module_from_file(f"{_PACKAGE}{name}", recipe_dir() / f"{name}.py")
    vars(module)["training"] = _TrainingAnywhere()
    vars(module)["init_process_group"] = start_process_group
    if "swap_lora_linear_with_qat" in vars(module):
        vars(module)["swap_lora_linear_with_qat"] = _swap_lora_linear_with_qat
    return module


def is_of_stock(one: type) -> bool:
    """Whether a class is that of a stock recipe, and not of one that extends it."""
    return one.__module__.startswith(_PACKAGE)


def start_process_group(backend: str) -> None:
    """Start the default process group with ``backend``, unless there is one. A rank that is alone needs no port.

    Raises:
        InputError: it cannot be started as the environment says.
    """
    if dist.is_initialized():
        return
    with connecting():
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            dist.init_process_group(backend)
        else:
            store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]  # documented, but not in `__all__`
            dist.init_process_group(backend, store=store, rank=0, world_size=1)


@contextmanager
def connecting() -> Iterator[None]:
    """Context: starts a process group.

    Raises:
        InputError: the ranks cannot connect; the message has the error, and the addresses in the environment.
    """
    try:
        if not 0 <= int(os.environ.get("RANK", 0)) < int(os.environ.get("WORLD_SIZE", 1)):  # torch would wait
            raise ValueError("`RANK` must be from 0 to below `WORLD_SIZE`")
        yield
    except (RuntimeError, ValueError) as error:
        given = quote({name: os.environ[name] for name in _ADDRESSES if name in os.environ})
        raise InputError(f"The ranks cannot connect with {given}: {reason_of(error)}.") from error


@contextmanager
def setting_up() -> Iterator[None]:
    """Context: any error becomes an ``InputError`` for the config, because its components can be any code.

    Raises:
        InputError: the set-up failed; the message has the error and its place in the code.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        refusal = _cannot_set_up(error)
        _free_quietly(error)
        raise refusal from error


@contextmanager
def keeping_magnitudes() -> Iterator[None]:
    """Context: DoRA keeps its trained magnitudes. On several ranks torchtune would replace them after loading them."""
    with mock.patch.object(DoRALinear, "initialize_dora_magnitude"):
        yield


def with_samples(data: Any) -> Any:
    """``data``, which is a data loader, or a sampler and a data loader.

    Samples that do not fill a batch are dropped, also in distillation on several ranks, where torchtune trains on them:
    its learning rate schedule would have other steps than ours.

    Raises:
        InputError: there are no samples, with which torchtune would end at once.
    """
    loader = data[-1] if isinstance(data, tuple) else data
    if len(loader.dataset) == 0:
        raise InputError("`dataset` has no samples.")
    if getattr(loader, "batch_sampler", None) is not None:
        loader.batch_sampler.drop_last = True
    return data


def _cannot_set_up(error: Exception) -> InputError:
    """The error for the user, with the place in the code, and the block that torchtune was creating, if any."""
    reason = f"{reason_of(error)} ({place_of(error)})"
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        if frame.f_code is config.instantiate.__code__:  # only here: `f_locals` would keep what other frames hold
            block = frame.f_locals["config"]
            if isinstance(block, DictConfig):
                values, name = quote(OmegaConf.to_container(block)), block._get_full_key(None)
                return InputError(f"`{name}` cannot be created from {values}: {reason}.")
            break
    return InputError(f"The recipe cannot be set up: {reason}.")


def _free_quietly(error: Exception) -> None:
    """Free the objects that ``error`` holds. Python would print errors in ``__del__`` of incomplete components."""
    printing, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        traceback.clear_frames(error.__traceback__)
    finally:
        sys.unraisablehook = printing


class _TrainingAnywhere:
    """``torchtune.training``, fixed for the CPU, which has no memory statistics, and for one rank."""

    def __getattr__(self, name: str) -> Any:
        return getattr(training, name)

    def get_memory_stats(self, device: torch.device, reset_stats: bool = True) -> dict[str, float]:
        return {} if device.type == "cpu" else training.get_memory_stats(device, reset_stats)

    def log_memory_stats(self, stats: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if stats:
            training.log_memory_stats(stats, *args, **kwargs)

    def shard_model(self, model: Any, *args: Any, cpu_offload: bool, **kwargs: Any) -> None:
        """As torchtune, but one rank shards a model only to offload it. Otherwise sharding would only add copies.

        QLoRA would also fail in its first forward pass: on one rank FSDP2 (torch 2.9.1 to 2.13) returns only one of the
        three parts of NF4 weights (https://github.com/pytorch/pytorch/pull/197999).
        """
        if not _is_alone(cpu_offload=cpu_offload):
            training.shard_model(model, *args, cpu_offload=cpu_offload, **kwargs)

    def load_from_full_model_state_dict(
        self,
        model: nn.Module,
        full_sd: dict[str, torch.Tensor],
        device: torch.device,
        strict: bool = False,
        cpu_offload: bool = False,
    ) -> Any:
        """As torchtune, with two differences on one rank: NF4 weights stay NF4, and weights are not memory-mapped.

        On the CPU torchtune would leave weights mapped to their files, and a run that overwrites these files would
        change them.
        """
        if not _is_alone(cpu_offload=cpu_offload):
            return training.load_from_full_model_state_dict(model, full_sd, device, strict, cpu_offload)
        # Not its state_dict(): torchtune's hook for NF4 moves it to the CPU, which fails for a model on meta.
        own = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
        places = {name.replace(_CHECKPOINT_PREFIX, ""): place for name, place in own}
        loaded = {name: _alike(places.get(name), value, device) for name, value in full_sd.items()}
        return model.load_state_dict(loaded, strict=strict, assign=True)

    def create_optim_in_bwd_wrapper(self, model: nn.Module, optim_dict: dict[nn.Parameter, Any]) -> Any:
        """As torchtune, but with every optimizer of ``optim_dict``: PPO trains two models, and would save only one."""
        names = {parameter: name for name, parameter in model.named_parameters()}
        others = (f"other.{place}" for place in count())
        return OptimizerInBackwardWrapper(
            {names.get(parameter) or next(others): optimizer for parameter, optimizer in optim_dict.items()}
        )

    def gather_cpu_state_dict(
        self, model: nn.Module, is_rank_zero: bool, device: torch.device, adapter_weights_only: bool = False
    ) -> dict[str, torch.Tensor]:
        """As torchtune, but as a copy: on one CPU rank the adapters would be merged into the trained weights."""
        gathered = training.gather_cpu_state_dict(model, is_rank_zero, device, adapter_weights_only)
        if dist.get_world_size() > 1 or device.type != "cpu":
            return gathered
        return {name: value.clone() for name, value in gathered.items()}


def _swap_lora_linear_with_qat(module: nn.Module, *qat_configs: Any) -> None:
    """As torchtune, which uses ``FakeQuantizeConfig``: since torchao 0.13 quantizers return its base class."""
    renamed = [
        FakeQuantizeConfig(**{part.name: getattr(one, part.name) for part in fields(one)}) for one in qat_configs
    ]
    swap_lora_linear_with_qat(module, *renamed)


def _is_alone(*, cpu_offload: bool) -> bool:
    """Whether a model is not sharded: there is one rank, and FSDP2 is not needed for offloading."""
    return dist.get_world_size() == 1 and not cpu_offload


def _alike(place: torch.Tensor | None, value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of ``value`` on ``device`` in the type of ``place``; ``value`` itself if ``place`` does not exist."""
    if place is None:
        return value
    if isinstance(place, NF4Tensor):
        value = value.to(device, place.dtype)
        return to_nf4(value, block_size=place.block_size, scaler_block_size=place.scaler_block_size)
    return value.to(device, place.dtype, copy=True)
