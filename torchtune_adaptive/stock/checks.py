"""Refuse a config before its set-up: values with which torchtune would fail late, or train otherwise than it says.

A refusal is an ``InputError`` whose sentence names the key and quotes the value. What torchtune's own set-up refuses is
left to it, files and folders among them. The last part needs torch, whose import takes seconds.
"""

import contextlib
import difflib
import fnmatch
import inspect
import itertools
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.errors import InputError, is_number, quote, require_integer
from torchtune_adaptive.settings import BLOCK_KEYS, TOP_LEVEL_KEYS, AdaptiveSettings, named_by_path
from torchtune_adaptive.stock.configs import config_of, resolved
from torchtune_adaptive.stock.installed import adaptive_name, recipe_files, stock_recipe_files

if TYPE_CHECKING:
    from torch import nn


@named_by_path()
def check_config(cfg: DictConfig, *, ranks: int) -> AdaptiveSettings:
    """The settings in ``cfg``, whose interpolations must be unresolved."""
    check_top_level_keys(cfg)
    settings = AdaptiveSettings.from_cfg(cfg)
    check_options(cfg, settings, ranks=ranks)
    return settings


def check_run(arguments: Sequence[str], *, ranks: int) -> None:
    """Check the config and the overrides in the ``arguments`` of a recipe."""
    cfg = config_of(arguments)
    if cfg is not None:  # the user does not ask for help
        check_config(cfg, ranks=ranks)


# ---- top-level keys

# In a YAML file, a line that begins with a word and a colon; in a recipe, `cfg.seed` and `cfg.get("seed")`.
_KEY = re.compile(r"""^(\w+):|\bcfg\.(?!get\b)(\w+)|\bcfg\.get\(\s*["'](\w+)""", re.MULTILINE)
_INTERPOLATED = re.compile(r"\$\{\.*([^.:}\[\s]+)")
# difflib's ratio from which a key is taken for a typo. Users have keys of their own that are like torchtune's, such as
# `batch_size_val` (0.83); ours are long, and no other keys are like them.
_ALIKE = 0.85
_ALIKE_BLOCK = 0.8  # of a block, such as `modle`, which users have fewer of
_LIKE_OURS = {"use_maximum_batch_size": 0.75, "batch_increase_function": 0.75, "adaptive": 0.85}  # not `adapter`


def check_top_level_keys(cfg: DictConfig) -> None:
    """Refuse a top-level key that is almost one that an adaptive recipe reads, or belongs in `adaptive`.

    torchtune would ignore it. A key that the config itself interpolates is the user's own. ``cfg`` must have its
    interpolations unresolved.
    """
    content: Any = OmegaConf.to_container(cfg)
    known = {*TOP_LEVEL_KEYS, *_stock_keys()}
    unknown = {str(key): value for key, value in content.items() if str(key) not in known}
    interpolated = set(_INTERPOLATED.findall(OmegaConf.to_yaml(cfg))) if unknown else set()
    read = [key for key, is_read in _stock_keys().items() if is_read]
    for key, value in unknown.items():
        if key in interpolated:
            continue
        name = key.lower().replace("-", "_")
        alike = _ALIKE_BLOCK if isinstance(value, dict) else _ALIKE
        meant = [f"adaptive.{name}"] if name in BLOCK_KEYS else difflib.get_close_matches(name, read, 1, alike)
        meant = meant or [
            ours for ours, alike in _LIKE_OURS.items() if difflib.get_close_matches(name, [ours], 1, alike)
        ]
        if meant:
            raise InputError(f"No recipe reads the top-level key {quote(key)}; did you mean `{meant[0]}`?")


@cache
def _stock_keys() -> dict[str, bool]:
    """Each top-level key of torchtune's recipes and configs, and whether it is one of a recipe that ours extend."""
    keys: dict[str, bool] = {}
    for recipe, paths in stock_recipe_files().items():
        is_extended = adaptive_name(recipe) in recipe_files()
        for key in (key for path in paths for key in keys_read(path)):
            keys[key] = keys.get(key, False) or is_extended
    return keys


def keys_read(path: Path) -> list[str]:
    """The top-level keys of the recipe or the config at ``path``."""
    return ["".join(words) for words in _KEY.findall(path.read_text(encoding="utf-8"))]  # one of the pattern's groups


# ---- torchtune's options, alone and with ours

# Keys that torchtune uses as booleans without a check.
_FLAGS = (
    "compile",
    "enable_activation_checkpointing",
    "enable_activation_offloading",
    "enable_async_checkpointing",
    "fsdp_cpu_offload",
    "log_peak_memory_stats",
    "optimizer_in_bwd",
    "save_adapter_weights_only",
    "shuffle",
)
# Minimum values of integers with which torchtune would train otherwise than they say, or fail after it has loaded the
# model, or later. A number from the environment is a text: `${oc.decode:${oc.env:NAME}}` makes it one.
_LEAST = {
    "batch_size": 1,
    "epochs": 1,
    "gradient_accumulation_steps": 1,
    "log_every_n_steps": 1,
    "tensor_parallel_dim": 1,
}
_LEAST_OR_NULL = {"max_steps_per_epoch": 1, "fake_quant_after_n_steps": 0}
_LEAST_IN_BLOCKS = {"tokenizer.max_seq_len": 2, "model.lora_rank": 1}  # a row of one token has none to predict
_BLOCKS = ("checkpointer", "loss", "model", "optimizer", "tokenizer")  # without which a set-up fails unclearly
_OUTPUT_DIRS = ("output_dir", "log_dir")  # of the config, and of checkpointers, loggers and profilers in it


def check_options(cfg: DictConfig, settings: AdaptiveSettings, *, ranks: int) -> None:
    """Check that a config's options mean what they say, and can be combined with the adaptive settings."""
    check_values(cfg, settings)
    _check_output_dirs(cfg)
    on_cpu = _is_on_cpu(cfg)
    if on_cpu and cfg.get("fsdp_cpu_offload", False):
        raise InputError("`fsdp_cpu_offload: True` needs a GPU.")
    if on_cpu and ranks > 1 and cfg.get("enable_async_checkpointing", False):
        # torchtune runs them in the process group of training. On a GPU they use its CPU backend, which training does
        # not.
        raise InputError(
            f"`enable_async_checkpointing: True` needs a GPU or one rank: on {ranks} CPU ranks its collectives would"
            " mix with those of training."
        )


def check_values(cfg: DictConfig, settings: AdaptiveSettings) -> None:
    """The part of ``check_options`` that does not depend on this machine: also for a plan."""
    check_flags(cfg, _FLAGS)
    for name in _BLOCKS:
        if name in cfg and not isinstance(cfg[name], DictConfig):
            raise InputError(f"`{name}` must be a mapping, but is {quote(cfg[name])} instead.")
    _check_numbers(cfg)
    _check_loss(cfg)
    if settings.searches_on(str(cfg.get("device")).partition(":")[0]):
        _check_searchable(cfg, on_cpu=_is_on_cpu(cfg))
    _check_steps_in_backward(cfg, settings)
    _check_tensor_parallel(cfg, settings)


def _is_on_cpu(cfg: DictConfig) -> bool:
    return str(cfg.get("device")).startswith("cpu")


def why_unrecoverable(cfg: DictConfig) -> str:
    """Why training cannot recover from an out-of-memory error, as part of a sentence; "" if it can."""
    if cfg.get("optimizer_in_bwd", False):
        return "with `optimizer_in_bwd` parameters change before the ranks can agree on a step"
    if cfg.get("compile", False) and cfg.get("tensor_parallel_dim", 1) > 1:
        return "with `compile` and `tensor_parallel_dim` above 1 collectives of compiled code are not seen"
    if str(cfg.device).partition(":")[0] not in ("cpu", "cuda"):
        return f"it supports the CPU and CUDA, not `device` {cfg.device}"
    return ""


def check_flags(cfg: DictConfig, names: Sequence[str]) -> None:
    """Refuse a value that is neither true nor false, such as "no", which Python takes for true."""
    for name in names:
        if cfg.get(name) not in (True, False, None):
            raise InputError(f"`{name}` must be True or False, but is {quote(cfg[name])} instead.")


def is_finite_number(value: object) -> bool:
    """Whether ``value`` is a finite number. A bool is not one."""
    return is_number(value) and math.isfinite(value)


def _check_numbers(cfg: DictConfig) -> None:
    for name, minimum in _LEAST.items():
        require_integer(name, cfg.get(name, 1), minimum=minimum)
    for name, minimum in _LEAST_OR_NULL.items():
        if cfg.get(name) is not None:
            require_integer(name, cfg[name], minimum=minimum)
    for name, minimum in _LEAST_IN_BLOCKS.items():
        if (value := OmegaConf.select(cfg, name)) is not None:
            require_integer(name, value, minimum=minimum)
    rate = OmegaConf.select(cfg, "optimizer.lr", default=0)
    if is_number(rate) and not is_finite_number(rate):
        raise InputError(f"`optimizer.lr` must be a finite number, but is {quote(rate)} instead.")
    clips_at = cfg.get("clip_grad_norm")
    if clips_at not in (None, "inf", math.inf) and not (is_finite_number(clips_at) and clips_at >= 0):
        rule = "`clip_grad_norm` must be a number of at least 0, inf or null"
        raise InputError(f"{rule}, but is {quote(clips_at)} instead.")
    ratio = cfg.get("kd_ratio", 0)
    if not is_finite_number(ratio) or not 0 <= ratio <= 1:
        raise InputError(f"`kd_ratio` must be in [0, 1], but is {quote(ratio)} instead.")


def _check_loss(cfg: DictConfig) -> None:
    """Refuse a loss that is not a mean over tokens: recipes multiply it by their number, so that parts add up."""
    reduction = OmegaConf.select(cfg, "loss.reduction")
    if reduction not in (None, "mean"):
        raise InputError(f"`loss.reduction` must be mean, but is {quote(reduction)} instead.")
    require_integer("loss.num_output_chunks", OmegaConf.select(cfg, "loss.num_output_chunks", default=1), minimum=1)


def _check_output_dirs(cfg: DictConfig) -> None:
    """Refuse a folder like ~/run, for which torchtune would make a folder named ~, and one that cannot be named."""
    if "output_dir" in cfg and not isinstance(cfg.output_dir, str):
        raise InputError(f"`output_dir` must be a folder, but is {quote(cfg.output_dir)} instead.")
    content: Any = OmegaConf.to_container(cfg)
    blocks = {f"{name}.": block for name, block in content.items() if isinstance(block, dict)}
    paths = {
        f"{prefix}{name}": block.get(name) for prefix, block in {"": content, **blocks}.items() for name in _OUTPUT_DIRS
    }
    for name, path in paths.items():
        if str(path).startswith("~"):
            rule = f"`{name}` must not begin with ~, which only a shell replaces"
            raise InputError(f"{rule}, but is {quote(path)} instead.")
        try:
            os.fsencode(str(path))
        except UnicodeEncodeError as error:
            rule = f"`{name}` must be in the file system's encoding ({sys.getfilesystemencoding()})"
            raise InputError(f"{rule}, but is {quote(path)} instead.") from error


def _check_searchable(cfg: DictConfig, *, on_cpu: bool) -> None:
    """Refuse options with which a search cannot measure or undo a step."""
    if cfg.get("compile", False) and cfg.get("tensor_parallel_dim", 1) > 1:
        raise InputError(
            "A search cannot see the collectives of compiled code, so that `compile: True` cannot be combined with"
            f" `tensor_parallel_dim: {cfg.tensor_parallel_dim}`."
        )
    if cfg.get("compile", False) and on_cpu:
        raise InputError("A search on the CPU cannot measure the memory of compiled code: it needs `compile: False`.")


def _check_steps_in_backward(cfg: DictConfig, settings: AdaptiveSettings) -> None:
    """With `optimizer_in_bwd`, refuse options that need several micro-steps or a scaled learning rate."""
    if not cfg.get("optimizer_in_bwd", False):
        return
    defaults, names = AdaptiveSettings(), ["global_batch_size", "max_tokens_per_micro_batch"]
    if settings.batch_increase_function is not None:
        names.append("growth_limit")
    if settings.searches:  # otherwise the batch stays that of the config, and so does the rate
        names.append("lr_scaling")
    for name in names:
        value = getattr(settings, name)
        if value != getattr(defaults, name):
            raise InputError(f"`optimizer_in_bwd: True` cannot be combined with `{name}: {value}`.")
    if settings.needs_gradient_noise:
        raise InputError(
            "`optimizer_in_bwd: True` cannot be combined with a `batch_increase_function` that measures gradients."
        )


def _check_tensor_parallel(cfg: DictConfig, settings: AdaptiveSettings) -> None:
    """With tensor parallelism, refuse what needs one norm of gradients that are sharded over different meshes."""
    dim, clips_at = cfg.get("tensor_parallel_dim", 1), cfg.get("clip_grad_norm")
    if dim > 1 and clips_at is not None:
        raise InputError(
            f"`tensor_parallel_dim: {dim}` cannot be combined with `clip_grad_norm: {clips_at}`: torch cannot clip"
            " gradients of different meshes."
        )
    if dim > 1 and settings.needs_gradient_noise:
        raise InputError(
            f"`tensor_parallel_dim: {dim}` cannot be combined with a `batch_increase_function` that measures gradients."
        )


# ---- what needs torch: the device, components, the model


def check_device(cfg: DictConfig) -> None:
    """Refuse a device that this machine does not have. torchtune would train on the CPU instead of a missing GPU."""
    import torch

    if cfg.get("device") is None:
        return  # torchtune takes the best that there is
    device, count = None, 0
    with contextlib.suppress(AttributeError, RuntimeError):  # torch has no device of that name, or no module for it
        device = torch.device(str(cfg.device))
        count = torch.get_device_module(device).device_count()
    if device is None or (device.index or 0) >= count:
        raise InputError(
            f"`device` must be cpu or one of this machine, but is {quote(cfg.device)} instead; torch sees {count}."
        )
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if local_ranks > count and device.type != "cpu":
        raise InputError(
            f"`--nproc_per_node` must be at most {count}, the number of {device.type} devices, but is {local_ranks}"
            " instead."
        )


def check_components(cfg: DictConfig) -> None:
    """Refuse a text for a component's argument that is a number or a flag. Some are used only in training.

    A component that cannot be imported is left to torchtune's set-up.
    """
    from torchtune.config._utils import _get_component_from_path

    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # as torchtune, before it creates a component
    for name, block in resolved(cfg).items():
        path = block.get("_component_") if isinstance(block, dict) else None
        if not isinstance(path, str):
            continue
        try:
            parameters = _parameters(_get_component_from_path(path))
        except Exception:  # importing runs any code
            continue
        for key, value in block.items():
            wanted = _wanted(parameters[key]) if key in parameters else ""
            if wanted and isinstance(value, str | list | dict):
                raise InputError(f"`{name}.{key}` must be {wanted}, but is {quote(value)} instead.")


def _parameters(component: Any) -> dict[str, inspect.Parameter]:
    """The parameters by name, with their annotations evaluated if that is possible; none if they cannot be read."""
    for evaluates in (True, False):
        try:
            return dict(inspect.signature(component, eval_str=evaluates).parameters)
        except Exception:  # an annotation can be any code; what is written in C may have no signature
            continue
    return {}


def _wanted(parameter: inspect.Parameter) -> str:
    """What a parameter takes, if it is clear: "a number" or "True or False"; otherwise "".

    Of a parameter without an annotation, only a default like 1e-3 is clear.
    """
    from torch import Tensor

    annotation = parameter.annotation
    if annotation is parameter.empty:
        return "a number" if isinstance(parameter.default, float) else ""
    is_union = get_origin(annotation) in (Union, UnionType)
    types = {*(get_args(annotation) if is_union else (annotation,))} - {NoneType, Tensor}
    if types == {bool}:
        return "True or False"
    return "a number" if types and types <= {int, float} else ""


def check_model(model: "nn.Module", settings: AdaptiveSettings, tensor_parallel_plan: Mapping[str, Any]) -> None:
    """Refuse a model that cannot be searched, or that lacks a module of the plan for tensor parallelism.

    torchtune has no format of samples for a model with images among its tokens. torch only warns of a missing module.

    Args:
        tensor_parallel_plan: empty without tensor parallelism.
    """
    from torchtune.modules.model_fusion import EarlyFusionModel

    if settings.searches and isinstance(model, EarlyFusionModel):
        raise InputError(f"A search does not support a `model` of type {type(model).__name__}.")
    for pattern in tensor_parallel_plan:
        if not fnmatch.filter((name for name, _ in model.named_modules()), pattern):
            raise InputError(f"`tensor_parallel_plan` has {quote(pattern)}, which no module of the model matches.")


_TOKENS = ("tokens", "chosen_input_ids", "rejected_input_ids")  # the ids in a sample, of all kinds of data sets


def check_models(models: Sequence["nn.Module"], dataset: Any) -> None:
    """Refuse a teacher whose predictions have other tokens than the student's, and models that do not fit the data.

    Args:
        models: the trained one first, then a teacher, or the reference of DPO, which is built as the trained one.
    """
    named: dict[str, nn.Module] = dict(zip(("model", "teacher_model"), models, strict=False))
    sizes = {name: size for name, model in named.items() if (size := vocabulary_of(model)) is not None}
    if len(sizes) == 2 and sizes["teacher_model"] != sizes["model"]:
        raise InputError(
            f"`teacher_model` needs the vocabulary of `model` ({sizes['model']} tokens), but has"
            f" {sizes['teacher_model']}."
        )
    check_first_sample(named, dataset)


def check_first_sample(models: Mapping[str, "nn.Module"], dataset: Any) -> None:
    """Refuse models, by their names in the config, that do not take the first sample. Other samples are not read.

    torch would fail in the first step, on a GPU without naming the cause.
    """
    from torchtune_adaptive.engine.distributed.snapshot import keep_random_states
    from torchtune_adaptive.training.batch.row_format import load_sample, longest_row

    with keep_random_states():  # the data set's transforms may use them
        row = load_sample(dataset, 0)
    for tokens, (name, model) in itertools.product((row[key] for key in _TOKENS if key in row), models.items()):
        size, longest = vocabulary_of(model), longest_row(model)
        if size is not None and (odd := [one for one in map(int, tokens) if not 0 <= one < size]):
            raise InputError(
                f"The first sample of `dataset` has token {odd[0]}, but `{name}` has a vocabulary of {size} tokens."
            )
        if longest is not None and len(tokens) > longest:
            raise InputError(
                f"The first sample of `dataset` has {len(tokens)} tokens, but `{name}` a max_seq_len of {longest}."
            )


def vocabulary_of(model: "nn.Module") -> int | None:
    """The number of tokens that ``model`` knows, None if that is not known."""
    from torchtune_adaptive.training.batch.row_format import decoder_of

    return getattr(getattr(decoder_of(model), "tok_embeddings", None), "num_embeddings", None)
