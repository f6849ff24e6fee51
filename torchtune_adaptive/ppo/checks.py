"""Options of a PPO run that torchtune reads only during training, and settings that its training loop cannot use."""

from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, ListConfig

from torchtune_adaptive.errors import InputError, as_integer, quote, require_integer
from torchtune_adaptive.settings import AdaptiveSettings, named_by_path
from torchtune_adaptive.stock.checks import (
    check_config,
    check_first_sample,
    check_flags,
    is_finite_number,
    vocabulary_of,
)

if TYPE_CHECKING:
    from torch import nn

# Settings that only this package's training loop and its search support.
_OF_OUR_TRAINING = (
    "batch_increase_function",
    "global_batch_size",
    "max_tokens_per_micro_batch",
    "lr_scaling",
    "objective",
)
_FLAGS = ("enable_kv_cache", "penalise_no_eos", "whiten_rewards")
_SIZES = ("batch_size", "forward_batch_size", "ppo_batch_size", "gradient_accumulation_steps")
_SIZES += ("ppo_epochs", "num_steps", "max_generated_tokens")
_NUMBERS = ("temperature", "kl_coeff", "gamma", "lmbda", "reward_penalty")


@named_by_path()
def check_ppo_config(cfg: DictConfig) -> AdaptiveSettings:
    """The settings in ``cfg``, whose interpolations must be unresolved.

    Raises:
        InputError: a key or a value is refused, or the settings require more than PPO adapts: sizes of micro-batches.
    """
    settings, defaults = check_config(cfg, ranks=1), AdaptiveSettings()
    for name in _OF_OUR_TRAINING:
        value, default = getattr(settings, name), getattr(defaults, name)
        if value != default:
            wanted_value = "null" if default is None else default
            raise InputError(f"`{name}` must be {wanted_value} for PPO, but is {quote(value)} instead.")
    check_turns(cfg)
    return settings


def check_turns(cfg: DictConfig) -> None:
    """Check the options of a turn.

    Raises:
        InputError: a value is missing, or of another type.
    """
    check_flags(cfg, _FLAGS)
    for name in _SIZES:
        require_integer(name, cfg.get(name), minimum=1)
    for name, minimum in (("min_response_length", 0), ("top_k", 1)):
        if cfg.get(name) is not None:
            require_integer(name, cfg[name], minimum=minimum)
    for name in _NUMBERS:
        if not is_finite_number(cfg.get(name)):
            raise InputError(f"`{name}` must be a number, but is {quote(cfg.get(name))} instead.")
    stops = cfg.get("stop_token_ids")
    if stops and not (isinstance(stops, ListConfig) and all(as_integer(one) is not None for one in stops)):
        raise InputError(f"`stop_token_ids` must be a list of integers, but is {quote(stops)} instead.")


def check_ppo_models(policy: "nn.Module", reward: "nn.Module", dataset: Any) -> None:
    """Refuse models that do not fit each other or the first prompt.

    Args:
        reward: built as the value model; it reads what the policy generates, which can be any token that this knows.
    """
    ours, theirs = vocabulary_of(policy), vocabulary_of(reward)
    if ours is not None and theirs is not None and theirs < ours:
        raise InputError(
            f"`reward_and_value_model` must have at least the vocabulary of `policy_model` ({ours} tokens), but has"
            f" {theirs} instead."
        )
    check_first_sample({"policy_model": policy, "reward_and_value_model": reward}, dataset)
