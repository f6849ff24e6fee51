"""Check options of stock configs: invalid ones, and those that conflict with search, growth or recovery."""

import math
import os
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING

from omegaconf import DictConfig, ListConfig

from torchtune_adaptive.batch.noise_scale import MeasuredSchedule
from torchtune_adaptive.errors import InputError, as_integer, quote, require_integer
from torchtune_adaptive.settings import AdaptiveSettings

if TYPE_CHECKING:
    from torch import nn

# Settings that only this package's training loop and its search support.
_OF_OUR_TRAINING = (
    "batch_increase_function",
    "global_batch_size",
    "max_tokens_per_micro_batch",
    "lr_scaling",
    "objective",
    "reuse_found_size",
)
_BLOCKS = ("checkpointer", "loss", "metric_logger", "model", "optimizer", "tokenizer")
_BLOCKS_OF_PPO = ("policy_model", "reward_and_value_model")
_BLOCKS_OF_PPO += ("ref_policy_checkpointer", "value_checkpointer", "reward_checkpointer")
# Keys that torchtune uses as booleans without a check.
_FLAGS = ("compile", "enable_activation_checkpointing", "enable_activation_offloading", "optimizer_in_bwd", "shuffle")
_FLAGS_OF_PPO = ("enable_kv_cache", "penalise_no_eos", "whiten_rewards")
# Minimum values of integers that torchtune does not check before training; they may be null.
_LEAST = {
    "batch_size": 1,
    "gradient_accumulation_steps": 1,
    "max_steps_per_epoch": 1,
    "fake_quant_after_n_steps": 0,
    "min_response_length": 0,
    "seed": 0,
    "top_k": 1,
}
_SIZES_OF_PPO = ("batch_size", "forward_batch_size", "ppo_batch_size", "gradient_accumulation_steps")
_SIZES_OF_PPO += ("ppo_epochs", "num_steps", "max_generated_tokens")
_NUMBERS_OF_PPO = ("temperature", "kl_coeff", "gamma", "lmbda", "reward_penalty")


def check_options(cfg: DictConfig, settings: AdaptiveSettings, *, ranks: int) -> None:
    """Check before the set-up that a config's options can be combined with the adaptive settings.

    Raises:
        InputError: they cannot; the message quotes the option.
    """
    _check_blocks(cfg, _BLOCKS)
    _check_flags(cfg, _FLAGS)
    _check_numbers(cfg)
    if settings.searches:
        _check_searchable(cfg)
    _check_installed(cfg)
    _check_offloading(cfg)
    _check_steps_after_backward(cfg, settings)
    _check_checkpointing(cfg, ranks=ranks)


def check_turns(cfg: DictConfig) -> None:
    """Check the PPO options that torchtune reads only during training.

    Raises:
        InputError: a value is missing, or of another type.
    """
    _check_blocks(cfg, _BLOCKS_OF_PPO)
    _check_flags(cfg, _FLAGS_OF_PPO)
    for name in _SIZES_OF_PPO:
        require_integer(name, cfg.get(name), minimum=1)
    for name in _NUMBERS_OF_PPO:
        if not _is_number(cfg.get(name)):
            raise InputError(f"`{name}` must be a number, but is {quote(cfg.get(name))} instead.")
    stops = cfg.get("stop_token_ids")
    if stops and not (isinstance(stops, ListConfig) and all(as_integer(one) is not None for one in stops)):
        raise InputError(f"`stop_token_ids` must be a list of integers, but is {quote(stops)} instead.")


def check_finds_sizes_only(settings: AdaptiveSettings, *, method: str) -> None:
    """Check that only sizes of micro-batches are adapted if torchtune's own loop trains.

    Raises:
        InputError: the settings require more.
    """
    defaults = AdaptiveSettings()
    for name in _OF_OUR_TRAINING:
        value, default = getattr(settings, name), getattr(defaults, name)
        if value != default:
            wanted_value = "null" if default is None else default
            raise InputError(f"`{name}` must be {wanted_value} for {method}, but is {quote(value)} instead.")


def why_unrecoverable(cfg: DictConfig) -> str:
    """Why training cannot recover from an out-of-memory error, as part of a sentence; "" if it can."""
    if cfg.get("optimizer_in_bwd", False):
        return "with `optimizer_in_bwd` parameters change before the ranks can agree on a step"
    if cfg.get("tensor_parallel_dim", 1) > 1:
        return "with `tensor_parallel_dim` above 1 collectives depend on the batch"
    if str(cfg.device).partition(":")[0] not in ("cpu", "cuda"):
        return f"it supports the CPU and CUDA, not `device` {cfg.device}"
    return ""


def _check_searchable(cfg: DictConfig) -> None:
    """Refuse options with which a search cannot measure or undo a step."""
    tensor_parallel_dim = cfg.get("tensor_parallel_dim", 1)
    if tensor_parallel_dim > 1:
        raise InputError(
            f"`tensor_parallel_dim` must be 1 for a batch size search, but is {tensor_parallel_dim} instead."
        )
    if cfg.get("compile", False) and str(cfg.device).startswith("cpu"):
        raise InputError(
            "`compile` must be False for a search on the CPU, where the memory of compiled code cannot be measured,"
            " but is True instead."
        )


def check_model(model: "nn.Module", settings: AdaptiveSettings) -> None:
    """Check that a search can create the longest samples for ``model``.

    Raises:
        InputError: the model takes images.
    """
    from torchtune.modules.model_fusion import DeepFusionModel, EarlyFusionModel  # takes seconds

    if settings.searches and isinstance(model, DeepFusionModel | EarlyFusionModel):
        kind = next(kind for kind in (DeepFusionModel, EarlyFusionModel) if isinstance(model, kind))
        raise InputError(
            "`model` must be a text model for a batch size search, whose probes have no images,"
            f" but is a {kind.__name__} instead."
        )


def _check_blocks(cfg: DictConfig, names: Sequence[str]) -> None:
    """Refuse a component that is not a mapping. torchtune would fail later, differently in each recipe."""
    for name in names:
        if name in cfg and not isinstance(cfg[name], DictConfig):
            raise InputError(f"`{name}` must be a mapping, but is {quote(cfg[name])} instead.")


def _check_flags(cfg: DictConfig, names: Sequence[str]) -> None:
    for name in names:
        if cfg.get(name) not in (True, False, None):
            raise InputError(f"`{name}` must be True or False, but is {quote(cfg[name])} instead.")


def _check_numbers(cfg: DictConfig) -> None:
    """Refuse numbers with which torchtune would fail later, or train differently than intended."""
    for name, minimum in _LEAST.items():
        if cfg.get(name) is not None:
            require_integer(name, cfg[name], minimum=minimum)
    for name in ("epochs", "log_every_n_steps"):
        require_integer(name, cfg.get(name, 1), minimum=1)
    clips_at = cfg.get("clip_grad_norm")
    if not _is_number(clips_at) and clips_at not in (None, "inf", math.inf):
        raise InputError(f"`clip_grad_norm` must be a number, inf or null, but is {quote(clips_at)} instead.")
    ratio = cfg.get("kd_ratio", 0)
    if not _is_number(ratio) or not 0 <= ratio <= 1:
        raise InputError(f"`kd_ratio` must be in [0, 1], but is {quote(ratio)} instead.")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_installed(cfg: DictConfig) -> None:
    """Refuse an optimizer of a missing package. torchtune would fail after it has loaded the model."""
    component = str(cfg.get("optimizer", {}).get("_component_", "torch"))
    package = component.partition(".")[0]
    if package not in sys.modules and PathFinder.find_spec(package, [*sys.path, os.getcwd()]) is None:
        raise InputError(f"`optimizer` must be of an installed package, but is {quote(component)} instead.")


def _check_offloading(cfg: DictConfig) -> None:
    """Refuse offloading if the device is the CPU: torchtune and FSDP2 would fail during set-up."""
    for name in ("fsdp_cpu_offload", "enable_activation_offloading"):
        if cfg.get(name, False) and str(cfg.device).startswith("cpu"):
            raise InputError(f"`{name}` must be False on a CPU, which has no other memory, but is True instead.")


def _check_steps_after_backward(cfg: DictConfig, settings: AdaptiveSettings) -> None:
    """With `optimizer_in_bwd`, refuse options that need several micro-steps or a scaled learning rate."""
    if not cfg.get("optimizer_in_bwd", False):
        return
    defaults = AdaptiveSettings()
    for name in ("global_batch_size", "max_tokens_per_micro_batch", "growth_limit", "lr_scaling"):
        value = getattr(settings, name)
        if value != getattr(defaults, name):
            raise InputError(f"`optimizer_in_bwd` must be False with `{name}` {value}, but is True instead.")
    if isinstance(settings.batch_increase_function, MeasuredSchedule):
        raise InputError(
            "`optimizer_in_bwd` must be False with a `batch_increase_function` that measures gradients,"
            " but is True instead."
        )


def _check_checkpointing(cfg: DictConfig, *, ranks: int) -> None:
    """Refuse background saving on several CPU ranks, where its collectives would mix with those of training.

    torchtune runs them in the process group of training. On a GPU they use its CPU backend, which training does not.
    """
    if cfg.get("enable_async_checkpointing", False) and str(cfg.device).startswith("cpu") and ranks > 1:
        raise InputError(
            f"`enable_async_checkpointing` must be False on {ranks} CPU ranks, whose collectives in the background"
            " would mix with those of training, but is True instead."
        )
