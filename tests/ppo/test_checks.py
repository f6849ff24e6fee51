"""Options of PPO that torchtune reads only during training are refused before it."""

from typing import Any

import pytest
from omegaconf import OmegaConf
from torch import nn

from torchtune_adaptive.errors import InputError
from torchtune_adaptive.ppo.checks import check_ppo_models, check_turns

TURNS: dict[str, Any] = {
    "batch_size": 4,
    "forward_batch_size": 4,
    "ppo_batch_size": 2,
    "gradient_accumulation_steps": 1,
    "ppo_epochs": 1,
    "num_steps": 8,
    "max_generated_tokens": 1,
    "stop_token_ids": [2, 3],
    "temperature": 0.7,
    "kl_coeff": 0,
    "gamma": 1,
    "lmbda": 0.9,
    "reward_penalty": -3,
}


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"max_generated_tokens": 0}, "`max_generated_tokens` must be at least 1, but is 0 instead."),
        ({"kl_coeff": float("nan")}, "`kl_coeff` must be a number, but is nan instead."),
        ({"stop_token_ids": 2}, "`stop_token_ids` must be a list of integers, but is 2 instead."),
        ({"stop_token_ids": ["a"]}, "`stop_token_ids` must be a list of integers, but is ['a'] instead."),
        ({"enable_kv_cache": "on"}, "`enable_kv_cache` must be True or False, but is 'on' instead."),
        ({"top_k": 0}, "`top_k` must be at least 1, but is 0 instead."),
    ],
)
def test_values_of_ppo_are_checked(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError) as refused:
        check_turns(OmegaConf.create(TURNS | config))
    assert str(refused.value) == sentence


@pytest.mark.parametrize("name", sorted(TURNS.keys() - {"stop_token_ids"}))
def test_no_number_of_ppo_may_be_missing(name: str) -> None:
    check_turns(OmegaConf.create(TURNS))
    check_turns(OmegaConf.create(TURNS | {"stop_token_ids": None}))
    with pytest.raises(InputError, match=f"`{name}` must be an? .*, but is None instead"):
        check_turns(OmegaConf.create({key: value for key, value in TURNS.items() if key != name}))


def with_vocabulary(tokens: int) -> nn.Module:
    model = nn.Module()
    model.tok_embeddings = nn.Embedding(tokens, 1)
    return model


def test_a_reward_model_must_know_every_token_that_the_policy_can_generate() -> None:
    policy, prompts = with_vocabulary(8), [{"tokens": [7]}]
    for fits in (with_vocabulary(8), with_vocabulary(9), nn.Linear(1, 1)):
        check_ppo_models(policy, fits, prompts)
    with pytest.raises(InputError) as refused:
        check_ppo_models(policy, with_vocabulary(7), prompts)
    assert str(refused.value) == (
        "`reward_and_value_model` must have at least the vocabulary of `policy_model` (8 tokens), but has 7 instead."
    )
    with pytest.raises(InputError, match="has token 8, but `policy_model` has a vocabulary of 8 tokens"):
        check_ppo_models(policy, with_vocabulary(9), [{"tokens": [8]}])
