"""Refuse a config before its set-up: values with which torchtune would fail late, or train otherwise than it says.

A refusal is an ``InputError`` whose sentence names the key and quotes the value. What torchtune's own set-up refuses is
left to it. The last part needs torch, whose import takes seconds.
"""

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
from importlib.machinery import PathFinder
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.errors import InputError, is_number, quote, require_integer
from torchtune_adaptive.settings import CONFIG_KEYS, AdaptiveSettings, named_by_path, unread_key
from torchtune_adaptive.stock.configs import config_of, is_lora, resolved
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
    """Check the config and the overrides in the ``arguments`` of a recipe, and the files that the run reads."""
    cfg = config_of(arguments)
    if cfg is not None:  # the user does not ask for help
        check_config(cfg, ranks=ranks)
        check_input_files(cfg)


# ---- top-level keys

# In a YAML file, a line that begins with a word and a colon; in a recipe, `cfg.seed` and `cfg.get("seed")`.
_KEY = re.compile(r"""^(\w+):|\bcfg\.(?!get\b)(\w+)|\bcfg\.get\(\s*["'](\w+)""", re.MULTILINE)
_INTERPOLATED = re.compile(r"\$\{\.*([^.:}\[\s]+)")
_ALIKE = 0.85  # difflib's ratio: one letter more, less or different in a word of five; most other words are far below


def check_top_level_keys(cfg: DictConfig) -> None:
    """Refuse a top-level key that is almost one that an adaptive recipe reads. torchtune would ignore it.

    A key that the config itself interpolates is the user's own. ``cfg`` must have its interpolations unresolved.
    """
    ours = {key.path.partition(".")[0] for key in CONFIG_KEYS}
    unknown = [key for key in map(str, cfg) if key not in ours | _stock_keys().keys()]
    interpolated = set(_INTERPOLATED.findall(OmegaConf.to_yaml(cfg))) if unknown else set()
    read = [*ours, *(key for key, is_read in _stock_keys().items() if is_read)]
    for key in unknown:
        nearest = difflib.get_close_matches(key.lower().replace("-", "_"), read, n=1, cutoff=_ALIKE)
        if nearest and key not in interpolated:
            raise unread_key(key, meant=nearest[0])


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
_FLAGS = ("compile", "enable_activation_checkpointing", "enable_activation_offloading", "optimizer_in_bwd", "shuffle")
# Minimum values of integers with which torchtune would train otherwise than they say, or fail after the set-up.
_LEAST = {"batch_size": 1, "epochs": 1, "log_every_n_steps": 1}
_LEAST_OR_NULL = {"gradient_accumulation_steps": 1, "max_steps_per_epoch": 1, "fake_quant_after_n_steps": 0}
_OUTPUT_DIRS = ("output_dir", "log_dir")  # of the config, and of checkpointers, loggers and profilers in it


def check_options(cfg: DictConfig, settings: AdaptiveSettings, *, ranks: int) -> None:
    """Check that a config's options mean what they say, and can be combined with the adaptive settings."""
    check_values(cfg, settings)
    _check_output_dirs(cfg)
    _check_optimizer(cfg)
    on_cpu = _is_on_cpu(cfg)
    if on_cpu and cfg.get("fsdp_cpu_offload", False):
        raise InputError("`fsdp_cpu_offload` must be False on a CPU, which has no other memory, but is True instead.")
    if on_cpu and ranks > 1 and cfg.get("enable_async_checkpointing", False):
        # torchtune runs them in the process group of training. On a GPU they use its CPU backend, which training does
        # not.
        raise InputError(
            f"`enable_async_checkpointing` must be False on {ranks} CPU ranks, whose collectives in the background"
            " would mix with those of training, but is True instead."
        )


def check_values(cfg: DictConfig, settings: AdaptiveSettings) -> None:
    """The part of ``check_options`` that does not depend on this machine and its packages: also for a plan."""
    check_flags(cfg, _FLAGS)
    _check_numbers(cfg)
    _check_loss(cfg)
    if settings.searches_on(str(cfg.get("device")).partition(":")[0]):
        _check_searchable(cfg, on_cpu=_is_on_cpu(cfg))
    _check_steps_after_backward(cfg, settings)
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
    clips_at = cfg.get("clip_grad_norm")
    if clips_at not in (None, "inf", math.inf) and not (is_finite_number(clips_at) and clips_at >= 0):
        rule = "`clip_grad_norm` must be a number of at least 0, inf or null"
        raise InputError(f"{rule}, but is {quote(clips_at)} instead.")
    ratio = cfg.get("kd_ratio", 0)
    if not is_finite_number(ratio) or not 0 <= ratio <= 1:
        raise InputError(f"`kd_ratio` must be in [0, 1], but is {quote(ratio)} instead.")


def _require_mapping(name: str, cfg: DictConfig) -> None:
    if name in cfg and not isinstance(cfg[name], DictConfig):
        raise InputError(f"`{name}` must be a mapping, but is {quote(cfg[name])} instead.")


def _check_loss(cfg: DictConfig) -> None:
    """Refuse a loss that is not a mean over tokens: recipes multiply it by their number, so that parts add up."""
    _require_mapping("loss", cfg)
    reduction, chunks = (OmegaConf.select(cfg, f"loss.{name}") for name in ("reduction", "num_output_chunks"))
    if reduction not in (None, "mean"):
        raise InputError(f"`loss.reduction` must be mean, but is {quote(reduction)} instead.")
    if chunks is not None:
        require_integer("loss.num_output_chunks", chunks, minimum=1)


def _check_output_dirs(cfg: DictConfig) -> None:
    """Refuse a folder like ~/run, where torchtune would write into a folder named ~."""
    if "output_dir" in cfg and not isinstance(cfg.output_dir, str):
        raise InputError(f"`output_dir` must be a folder, but is {quote(cfg.output_dir)} instead.")
    content: Any = OmegaConf.to_container(cfg)
    blocks = {f"{name}.": block for name, block in content.items() if isinstance(block, dict)}
    for prefix, block in {"": content, **blocks}.items():
        for name in _OUTPUT_DIRS:
            _check_encodable(f"{prefix}{name}", value := block.get(name))
            if str(value).startswith("~"):
                rule = f"`{prefix}{name}` must not begin with ~, which only a shell replaces"
                raise InputError(f"{rule}, but is {quote(value)} instead.")


def _check_encodable(name: str, path: object) -> None:
    try:
        os.fsencode(str(path))
    except UnicodeEncodeError as error:
        rule = f"`{name}` must be a path in the file system's encoding, which is {sys.getfilesystemencoding()} here"
        raise InputError(f"{rule}, but is {quote(path)} instead.") from error


def _check_optimizer(cfg: DictConfig) -> None:
    """Refuse an optimizer of a package that is not installed: many stock configs use bitsandbytes.

    torchtune would fail after it has loaded the model.
    """
    _require_mapping("optimizer", cfg)
    component = str(OmegaConf.select(cfg, "optimizer._component_", default="torch"))
    package = component.partition(".")[0]
    if package not in sys.modules and PathFinder.find_spec(package, [*sys.path, os.getcwd()]) is None:
        raise InputError(f"`optimizer` must be of an installed package, but is {quote(component)} instead.")


def _check_searchable(cfg: DictConfig, *, on_cpu: bool) -> None:
    """Refuse options with which a search cannot measure or undo a step."""
    if cfg.get("compile", False) and cfg.get("tensor_parallel_dim", 1) > 1:
        raise InputError(
            f"`compile` must be False for a search with `tensor_parallel_dim` {cfg.tensor_parallel_dim}, because"
            " collectives of compiled code are not seen, but is True instead."
        )
    if cfg.get("compile", False) and on_cpu:
        raise InputError(
            "`compile` must be False for a search on the CPU, where the memory of compiled code cannot be measured,"
            " but is True instead."
        )


def _check_steps_after_backward(cfg: DictConfig, settings: AdaptiveSettings) -> None:
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
            raise InputError(f"`optimizer_in_bwd` must be False with `{name}` {value}, but is True instead.")
    if settings.needs_gradient_noise:
        raise InputError(
            "`optimizer_in_bwd` must be False with a `batch_increase_function` that measures gradients,"
            " but is True instead."
        )


def _check_tensor_parallel(cfg: DictConfig, settings: AdaptiveSettings) -> None:
    """With tensor parallelism, refuse what needs one norm of gradients that are sharded over different meshes."""
    dim = require_integer("tensor_parallel_dim", cfg.get("tensor_parallel_dim", 1), minimum=1)
    clips_at = cfg.get("clip_grad_norm")
    if dim > 1 and clips_at is not None:
        raise InputError(
            f"`clip_grad_norm` must be null with `tensor_parallel_dim` {dim}, because torch cannot clip gradients of"
            f" different meshes, but is {quote(clips_at)} instead."
        )
    if dim > 1 and settings.needs_gradient_noise:
        raise InputError(
            "`tensor_parallel_dim` must be 1 with a `batch_increase_function` that measures gradients,"
            f" but is {dim} instead."
        )


# ---- files and folders that tokenizers and checkpointers read

# torchtune's blocks and arguments of such names read a local path. `output_dir` is written to.
_TOKENIZER, _CHECKPOINTER = "tokenizer", "checkpointer"
_PATH = re.compile(r"(?!output_dir$)(.*_)?(path|file|dir)")


def check_input_files(cfg: DictConfig) -> None:
    """Refuse a path that does not exist, of torchtune's tokenizers, and of its checkpointers unless the run resumes."""
    kinds = (_TOKENIZER,) if cfg.get("resume_from_checkpoint", False) else (_TOKENIZER, _CHECKPOINTER)
    for name, block in resolved(cfg).items():
        if name == "ref_checkpointer" and is_lora(cfg):
            continue  # the reference is the policy without its adapters
        if name.endswith(kinds) and isinstance(block, dict) and str(block.get("_component_")).startswith("torchtune."):
            _check_paths(name, block)


def _check_paths(name: str, block: dict[str, Any]) -> None:
    for key, value in block.items():
        if _PATH.fullmatch(key) and isinstance(value, str):
            _check_encodable(f"{name}.{key}", value)
            if not Path(value).exists():
                raise InputError(f"`{name}.{key}` must exist, but is {quote(value)} instead.")
    folder, files = block.get("checkpoint_dir"), block.get("checkpoint_files")
    if not isinstance(folder, str) or not isinstance(files, list):
        return  # torchtune also takes a mapping, which describes the files' names
    for file in files:
        if isinstance(file, str) and not Path(folder, file).exists():
            raise InputError(
                f"`{name}.checkpoint_files` must be files of {quote(folder)}, but {quote(file)} is not one."
            )


# ---- what needs torch: the device, components, the model

INSTALL_TORCHVISION = "`pip install torchvision` provides it"


def check_device(cfg: DictConfig) -> None:
    """Refuse a device that this machine does not have. torchtune would train on the CPU instead of a missing GPU."""
    import torch

    if cfg.get("device") is None:
        return  # torchtune takes the best that there is
    given = quote(cfg.device)
    try:
        device = torch.device(str(cfg.device))
    except RuntimeError as error:  # torch has no device of that name
        raise InputError(f"`device` must be one that torch knows, as cpu or cuda, but is {given} instead.") from error
    if device.type == "cpu":
        return
    name = "CUDA" if device.type == "cuda" else device.type
    try:
        count = torch.get_device_module(device).device_count()
    except (AttributeError, RuntimeError):  # torch has the name, but no module for it
        count = 0
    if count == 0:
        raise InputError(
            f"`device` must be cpu or one that this machine has, but is {given} and torch sees no {name} device."
        )
    if (device.index or 0) >= count:
        raise InputError(f"`device` must be one of the {count} that this machine has, but is {given} instead.")
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if local_ranks > count:
        raise InputError(
            f"`--nproc_per_node` must be at most {count}, the {name} devices of this machine, but is {local_ranks}"
            " instead."
        )


def check_components(cfg: DictConfig) -> None:
    """Refuse a text for a component's argument that is a number or a flag. Some are used only in training.

    A component that cannot be imported is left to torchtune's set-up, unless it needs torchvision.
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
        except Exception as error:  # importing runs any code
            if lacks_torchvision(error):
                raise InputError(
                    f"`{name}` must be one that can be imported, but {quote(path)} needs torchvision:"
                    f" {INSTALL_TORCHVISION}."
                ) from error
            continue
        for key, value in block.items():
            wanted = _wanted(parameters[key]) if key in parameters else ""
            if wanted and isinstance(value, str | list | dict):
                raise InputError(f"`{name}.{key}` must be {wanted}, but is {quote(value)} instead.")


def lacks_torchvision(error: Exception) -> bool:
    """Whether torchtune could not import a component because torchvision is not installed."""
    cause = error.__cause__ or error
    return isinstance(cause, ModuleNotFoundError) and cause.name == "torchvision"


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
        raise InputError(
            "`model` must be a text model or a DeepFusionModel for a batch size search,"
            f" but is a {type(model).__name__} instead."
        )
    for pattern in tensor_parallel_plan:
        if not fnmatch.filter((name for name, _ in model.named_modules()), pattern):
            raise InputError(
                f"`tensor_parallel_plan` must name modules of the model, but has {quote(pattern)}, which matches none."
            )


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
            f"`teacher_model` must have the vocabulary of `model` ({sizes['model']} tokens), but has"
            f" {sizes['teacher_model']} instead."
        )
    check_first_sample(named, dataset)


def check_first_sample(models: Mapping[str, "nn.Module"], dataset: Any) -> None:
    """Refuse models, by their names in the config, that do not take the first sample. Other samples are not read.

    torch would fail in the first step, on a GPU without naming the cause.
    """
    from torchtune_adaptive.engine.distributed.snapshot import keep_random_states
    from torchtune_adaptive.training.batch.row_format import decoder_of, load_sample

    with keep_random_states():  # the data set's transforms may use them
        row = load_sample(dataset, 0)
    for tokens, (name, model) in itertools.product((row[key] for key in _TOKENS if key in row), models.items()):
        size, longest = vocabulary_of(model), getattr(decoder_of(model), "max_seq_len", None)
        if size is not None and (odd := [one for one in map(int, tokens) if not 0 <= one < size]):
            raise InputError(
                f"`tokenizer` must give tokens below {size}, the vocabulary of `{name}`, but gives {odd[0]} in the"
                " first sample of `dataset`."
            )
        if longest is not None and len(tokens) > longest:
            raise InputError(
                f"`{name}` must take the rows of `dataset`, but has a max_seq_len of {longest}, and the first sample"
                f" has {len(tokens)} tokens."
            )


def vocabulary_of(model: "nn.Module") -> int | None:
    """The number of tokens that ``model`` knows, None if that is not known."""
    from torchtune_adaptive.training.batch.row_format import decoder_of

    return getattr(getattr(decoder_of(model), "tok_embeddings", None), "num_embeddings", None)
