"""Find and load a config by its name or path."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from torchtune_adaptive.errors import InputError, did_you_mean, quote, reason_of
from torchtune_adaptive.stock.installed import config_dir, config_files, stock_config_files

# Stock recipes with an adaptive version, without "_distributed" and "_single_device".
Method: TypeAlias = Literal[
    "full_finetune", "lora_finetune", "full_dpo", "lora_dpo", "knowledge_distillation", "qat", "qat_lora_finetune"
]
_DPO_LOSSES = ("torchtune.rlhf.loss.DPOLoss", "torchtune.rlhf.loss.RSOLoss")
_REINFORCEMENT_LOSSES = ("torchtune.rlhf.", "torchtune.dev.")  # the prefixes of all other such losses
_EARLY_EXIT = ("early_exit_loss", "layer_dropout")
_HELP = {"-h", "--help"}


def resolve_config_argument(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with the config's name replaced by its path.

    The name is looked up among this package's configs, then among torchtune's. Any other name is read as a path.

    Raises:
        InputError: the config does not exist or is incomplete, or an override cannot be applied.
    """
    cfg = config_of(arguments)
    if cfg is not None:
        resolved(cfg)  # torchtune's parser would fail with a traceback
    place = arguments.index("--config") + 1
    return [*arguments[:place], str(config_path(arguments[place])), *arguments[place + 1 :]]


def config_of(arguments: Sequence[str]) -> DictConfig | None:
    """The config that a recipe's ``arguments`` name, with their overrides; None if they ask for help.

    Raises:
        InputError: the config does not exist, or an override cannot be applied.
    """
    if "--config" not in arguments or arguments[-1] == "--config":
        raise InputError("`--config` needs the name or path of a config.")
    place = arguments.index("--config")
    overrides = [*arguments[:place], *arguments[place + 2 :]]
    return load_config(arguments[place + 1], overrides) if _HELP.isdisjoint(overrides) else None


def config_path(name: str) -> Path:
    """The file of the config of that name: an adaptive one, else a stock one. Any other name is taken as a path."""
    own = config_dir() / f"{name}.yaml"
    return own if own.is_file() else stock_config_files().get(name, Path(name))


def load_config(name: str, overrides: Sequence[str] = ()) -> DictConfig:
    """Load a config by name or path, with overrides as for ``tune run``.

    Raises:
        InputError: the config does not exist, is not a YAML mapping, or an override cannot be applied.
    """
    path = _readable_path(name)
    _refuse_malformed(overrides)
    try:
        # OmegaConf reads 2e-5 as a number, unlike YAML. Interpolations are not resolved yet.
        content: Any = OmegaConf.to_container(OmegaConf.load(path))
        if not all(isinstance(key, str) for key in content):
            raise TypeError("keys must be words")
    except (OmegaConfBaseException, TypeError, ValueError, yaml.YAMLError) as error:
        raise InputError(f"`--config` {str(path)!r} is not a config: {reason_of(error)}.") from error
    try:
        return _overridden(content, overrides)
    except (OmegaConfBaseException, TypeError, ValueError, yaml.YAMLError) as error:
        given = quote(" ".join(overrides))
        raise InputError(f"Overrides {given} do not fit the config: {reason_of(error)}.") from error


def resolved(cfg: DictConfig) -> dict[str, Any]:
    """Return the config as plain containers, with its interpolations resolved.

    Raises:
        InputError: an interpolation refers to a key that does not exist, or a value is missing.
    """
    try:
        content: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise InputError(f"The config is not complete: {reason_of(error)}.") from error
    return content


def flattened(cfg: DictConfig) -> dict[str, Any]:
    """The config's values as JSON values, by dotted keys. Items of a list have their indices as keys.

    >>> flattened(OmegaConf.create({"seed": 1, "optimizer": {"lr": 0.1, "betas": [0.9]}}))
    {'seed': 1, 'optimizer.lr': 0.1, 'optimizer.betas.0': 0.9}
    """
    flat: dict[str, Any] = {}

    def add(key: str, value: Any) -> None:
        if isinstance(value, dict | list):
            for name, one in value.items() if isinstance(value, dict) else enumerate(value):
                add(f"{key}.{name}" if key else str(name), one)
        else:
            flat[key] = value if isinstance(value, int | float | str | None) else repr(value)

    add("", resolved(cfg))
    return flat


def is_lora(cfg: DictConfig) -> bool:
    """Whether ``cfg`` is for LoRA finetuning instead of full finetuning."""
    return isinstance(cfg.get("model"), DictConfig) and "lora_attn_modules" in cfg.model


def data_parallel_ranks(cfg: DictConfig, ranks: int) -> int:
    """The number of ranks with different samples. Only full finetuning has tensor parallelism.

    Raises:
        InputError: ``tensor_parallel_dim`` does not divide the number of ``ranks``.
    """
    dim = cfg.get("tensor_parallel_dim", 1)
    if dim == 1 or method_of(cfg) != "full_finetune":
        return ranks
    if ranks % dim:
        raise InputError(f"`tensor_parallel_dim` must divide the number of ranks ({ranks}), but is {dim} instead.")
    return ranks // dim


def method_of(cfg: DictConfig) -> Method:
    """The training method for ``cfg``, derived from its content, because a config does not name its recipe.

    Raises:
        InputError: there is no adaptive recipe for it.

    >>> loss = {"_component_": "torchtune.rlhf.loss.DPOLoss"}
    >>> method_of(OmegaConf.create({"model": {"lora_attn_modules": ["q_proj"]}, "optimizer": {}, "loss": loss}))
    'lora_dpo'
    """
    loss = _component(cfg, "loss")
    if loss.startswith(_REINFORCEMENT_LOSSES) and loss not in _DPO_LOSSES:
        raise InputError(f"`loss` must be one of finetuning, distillation or DPO, but is {quote(loss)} instead.")
    for key in _EARLY_EXIT:
        if cfg.get(key) is not None:
            raise InputError(f"No adaptive recipe supports early exits: `{key}` is {quote(cfg[key])}.")
    for key in ("model", "optimizer", "loss"):
        if cfg.get(key) is None:
            raise InputError(f"The config has no `{key}`, which training needs.")
    if cfg.get("teacher_model") is not None:
        if not is_lora(cfg):
            raise InputError(f"A `teacher_model` needs a LoRA `model`, not {quote(_component(cfg, 'model'))}.")
        return "knowledge_distillation"
    if loss in _DPO_LOSSES:
        if not is_lora(cfg) and cfg.get("ref_checkpointer") is None:
            raise InputError("DPO without LoRA needs a `ref_checkpointer`.")
        return "lora_dpo" if is_lora(cfg) else "full_dpo"
    if cfg.get("quantizer") is not None:
        return "qat_lora_finetune" if is_lora(cfg) else "qat"
    return "lora_finetune" if is_lora(cfg) else "full_finetune"


def _component(cfg: DictConfig, key: str) -> str:
    """The component's dotted name in a block of the config; "" if there is none."""
    block = cfg.get(key)
    return str(block.get("_component_", "")) if isinstance(block, DictConfig) else ""


def _overridden(content: dict[str, Any], overrides: Sequence[str]) -> DictConfig:
    """The config ``content`` with ``overrides``, read as ``tune run`` reads them."""
    cfg, chosen = OmegaConf.create(content), []
    for override in overrides:
        key, _, value = override.partition("=")
        if key.startswith("~"):
            _remove(cfg, key[1:])
            continue
        if key in cfg and isinstance(cfg[key], DictConfig) and "_component_" in cfg[key]:
            key += "._component_"
        if "max_filename" in key:  # with leading zeros
            value = f"!!str {value}"
        chosen.append(f"{key}={'!!null' if value == 'None' else value}")
    merged = OmegaConf.merge(cfg, OmegaConf.from_dotlist(chosen))
    assert isinstance(merged, DictConfig)
    return merged


def _remove(cfg: DictConfig, key: str) -> None:
    """Remove the dotted ``key``, and its block if that becomes empty."""
    above, _, name = key.rpartition(".")
    block = OmegaConf.select(cfg, above) if above else cfg
    if not isinstance(block, DictConfig) or name not in block:
        raise ValueError(f"there is no key {key} to remove")
    if name == "_component_" or (isinstance(block[name], DictConfig) and "_component_" in block[name]):
        raise ValueError(f"{key} is a component, which cannot be removed")
    del block[name]
    if above and not block:
        _remove(cfg, above)


def _readable_path(name: str) -> Path:
    path = Path(name)
    try:
        path = config_path(name)
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        hint = did_you_mean(name, {known.lower(): known for known in (*config_files(), *stock_config_files())})
        raise InputError(f"`--config` must be the name or path of a config, but is {name!r} instead{hint}") from error
    except (OSError, RecursionError, ValueError, yaml.YAMLError) as error:  # ValueError: not text, or not a path
        shown = quote(str(path))
        raise InputError(f"`--config` {shown} is not a YAML file: {reason_of(error)}.") from error
    if not isinstance(content, dict):
        raise InputError(f"`--config` must be a YAML mapping, but {str(path)!r} holds {type(content).__name__}.")
    return path


def _refuse_malformed(overrides: Sequence[str]) -> None:
    for override in overrides:
        if override.startswith("-") or (override.count("=") != 1 and not override.startswith("~")):
            raise InputError(f"An override must have the form key=value, but is {override!r} instead.")
