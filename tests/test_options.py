"""Stock options that cannot be combined with adaptive ones are refused by name before anything is set up."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from torch import nn
from torchtune.modules.model_fusion import DeepFusionModel, EarlyFusionModel

from torchtune_adaptive.batch.noise_scale import gradient_noise_scale
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.settings import AdaptiveSettings
from torchtune_adaptive.stock.options import check_model, check_options, check_turns, why_unrecoverable

SEARCHES: dict[str, Any] = {"use_maximum_batch_size": True}


def check(config: dict[str, Any], *, ranks: int = 1, **settings: Any) -> None:
    check_options(OmegaConf.create({"device": "cuda"} | config), AdaptiveSettings(**settings), ranks=ranks)


def refusal(config: dict[str, Any], *, ranks: int = 1, **settings: Any) -> str:
    with pytest.raises(InputError) as refused:
        check(config, ranks=ranks, **settings)
    return str(refused.value)


# ---- searches


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (
            {"tensor_parallel_dim": 2},
            "`tensor_parallel_dim` must be 1 for a batch size search, but is 2 instead.",
        ),
        (
            {"compile": True, "device": "cpu"},
            "`compile` must be False for a search on the CPU, where the memory of compiled code cannot be measured,"
            " but is True instead.",
        ),
    ],
)
def test_options_that_a_search_cannot_measure_or_undo_are_refused_only_with_a_search(
    config: dict[str, Any], sentence: str
) -> None:
    assert refusal(config, **SEARCHES) == sentence
    assert refusal(config, batch_increase_function=lambda epoch, size: 1) == sentence
    check(config)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"optimizer_in_bwd": False, "tensor_parallel_dim": 1, "compile": False, "enable_async_checkpointing": False},
        {"compile": True, "device": "cuda:1"},
        {"compile": False, "device": "cpu"},
        {"optimizer_in_bwd": True},
    ],
)
def test_other_options_pass(config: dict[str, Any]) -> None:
    check(config, **SEARCHES)


# ---- numbers


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"batch_size": 0}, "`batch_size` must be at least 1, but is 0 instead."),
        ({"fake_quant_after_n_steps": -1}, "`fake_quant_after_n_steps` must be at least 0, but is -1 instead."),
        ({"fake_quant_after_n_steps": "x"}, "`fake_quant_after_n_steps` must be an integer, but is 'x' instead."),
        ({"seed": "x"}, "`seed` must be an integer, but is 'x' instead."),
        ({"log_every_n_steps": None}, "`log_every_n_steps` must be an integer, but is None instead."),
        ({"log_every_n_steps": 0}, "`log_every_n_steps` must be at least 1, but is 0 instead."),
        ({"clip_grad_norm": "abc"}, "`clip_grad_norm` must be a number, inf or null, but is 'abc' instead."),
        ({"kd_ratio": 1.5}, "`kd_ratio` must be in [0, 1], but is 1.5 instead."),
        ({"kd_ratio": True}, "`kd_ratio` must be in [0, 1], but is True instead."),
        ({"kd_ratio": "half"}, "`kd_ratio` must be in [0, 1], but is 'half' instead."),
        ({"compile": "yes"}, "`compile` must be True or False, but is 'yes' instead."),
        ({"shuffle": [1]}, "`shuffle` must be True or False, but is [1] instead."),
        ({"optimizer": None}, "`optimizer` must be a mapping, but is None instead."),
        ({"checkpointer": "x"}, "`checkpointer` must be a mapping, but is 'x' instead."),
    ],
)
def test_values_of_stock_keys_are_checked(config: dict[str, Any], sentence: str) -> None:
    assert refusal(config) == sentence


def test_null_and_the_bounds_are_accepted() -> None:
    check({"batch_size": 1, "gradient_accumulation_steps": 1, "fake_quant_after_n_steps": None, "kd_ratio": 0})
    check({"clip_grad_norm": 1.0})
    check({"clip_grad_norm": "inf"})
    check({"clip_grad_norm": float("inf")})
    check({"fake_quant_after_n_steps": 0, "kd_ratio": 1, "compile": None, "shuffle": 1, "seed": None})


@pytest.mark.parametrize("name", ["epochs", "max_steps_per_epoch", "log_every_n_steps"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_run_without_a_step_is_refused(name: str, value: int) -> None:
    assert refusal({name: value}) == f"`{name}` must be at least 1, but is {value} instead."
    check({"epochs": 1, "max_steps_per_epoch": None})


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
        ({"num_steps": None}, "`num_steps` must be an integer, but is None instead."),
        ({"forward_batch_size": "x"}, "`forward_batch_size` must be an integer, but is 'x' instead."),
        ({"max_generated_tokens": 0}, "`max_generated_tokens` must be at least 1, but is 0 instead."),
        ({"gamma": "one"}, "`gamma` must be a number, but is 'one' instead."),
        ({"temperature": None}, "`temperature` must be a number, but is None instead."),
        ({"kl_coeff": float("nan")}, "`kl_coeff` must be a number, but is nan instead."),
        ({"stop_token_ids": 2}, "`stop_token_ids` must be a list of integers, but is 2 instead."),
        ({"stop_token_ids": ["a"]}, "`stop_token_ids` must be a list of integers, but is ['a'] instead."),
        ({"enable_kv_cache": "on"}, "`enable_kv_cache` must be True or False, but is 'on' instead."),
        ({"policy_model": "x"}, "`policy_model` must be a mapping, but is 'x' instead."),
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


# ---- steps within backward


@pytest.mark.parametrize(
    ("name", "value"),
    [("global_batch_size", 8), ("max_tokens_per_micro_batch", 512), ("growth_limit", "none"), ("lr_scaling", "sqrt")],
)
def test_steps_within_backward_cannot_be_cut_or_scaled(name: str, value: Any) -> None:
    assert refusal({"optimizer_in_bwd": True}, **{name: value}) == (
        f"`optimizer_in_bwd` must be False with `{name}` {value}, but is True instead."
    )
    check({"optimizer_in_bwd": False}, **{name: value})
    check({}, **{name: value})


def test_steps_within_backward_cannot_measure_the_gradients_of_half_a_batch() -> None:
    growing: dict[str, Any] = {"batch_increase_function": gradient_noise_scale()}
    assert refusal({"optimizer_in_bwd": True}, **growing) == (
        "`optimizer_in_bwd` must be False with a `batch_increase_function` that measures gradients,"
        " but is True instead."
    )
    check({"optimizer_in_bwd": False}, **growing)


# ---- packages, a CPU, and images


def test_an_optimizer_of_a_package_that_is_not_installed_is_refused() -> None:
    config = {"optimizer": {"_component_": "no_such_package.optim.PagedAdamW8bit"}}
    assert refusal(config) == (
        "`optimizer` must be of an installed package, but is 'no_such_package.optim.PagedAdamW8bit' instead."
    )
    for component in ("torch.optim.AdamW", "torchao.optim.AdamW8bit", "tests.recipe_runs.adamw_with_tensor_rate"):
        check({"optimizer": {"_component_": component}})


def test_an_optimizer_of_a_file_in_the_working_directory_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_optimizers.py").touch()
    config = {"optimizer": {"_component_": "my_optimizers.Mine"}}
    assert "my_optimizers.Mine" in refusal(config)
    monkeypatch.chdir(tmp_path)
    check(config)


@pytest.mark.parametrize("name", ["fsdp_cpu_offload", "enable_activation_offloading"])
def test_offloading_from_a_cpu_is_refused(name: str) -> None:
    assert refusal({"device": "cpu", name: True}) == (
        f"`{name}` must be False on a CPU, which has no other memory, but is True instead."
    )
    check({"device": "cpu", name: False})
    check({"device": "cuda", name: True})


@pytest.mark.parametrize("kind", [DeepFusionModel, EarlyFusionModel])
def test_a_model_of_images_is_trained_but_not_searched(kind: Any) -> None:
    model, searches = kind.__new__(kind), AdaptiveSettings(use_maximum_batch_size=True)
    with pytest.raises(
        InputError, match=rf"`model` must be a text model .*, but is a {kind.__name__} instead"
    ) as refused:
        check_model(model, searches)
    assert "\n" not in str(refused.value)
    check_model(model, AdaptiveSettings())
    check_model(nn.Linear(1, 1), searches)


# ---- checkpoints in the background


def test_saving_in_the_background_is_refused_on_several_cpu_ranks_alone() -> None:
    saves = {"enable_async_checkpointing": True}
    assert refusal(saves | {"device": "cpu"}, ranks=3) == (
        "`enable_async_checkpointing` must be False on 3 CPU ranks, whose collectives in the background would mix"
        " with those of training, but is True instead."
    )
    check(saves | {"device": "cpu"}, ranks=1)
    check(saves, ranks=3)
    check({"enable_async_checkpointing": False, "device": "cpu"}, ranks=3)
    check({"device": "cpu"}, ranks=3)


# ---- recovery


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"device": "cpu"}, ""),
        ({"device": "cuda"}, ""),
        ({"device": "cuda:3"}, ""),
        ({"device": "cuda", "optimizer_in_bwd": False, "tensor_parallel_dim": 1}, ""),
        (
            {"device": "cuda", "optimizer_in_bwd": True},
            "with `optimizer_in_bwd` parameters change before the ranks can agree on a step",
        ),
        (
            {"device": "cuda", "tensor_parallel_dim": 2},
            "with `tensor_parallel_dim` above 1 collectives depend on the batch",
        ),
        ({"device": "xpu:0"}, "it supports the CPU and CUDA, not `device` xpu:0"),
        ({"device": "mps"}, "it supports the CPU and CUDA, not `device` mps"),
    ],
)
def test_the_reason_why_a_config_cannot_recover_is_named(config: dict[str, Any], reason: str) -> None:
    assert why_unrecoverable(OmegaConf.create(config)) == reason
