"""PPO: the sizes found are those that fit in a metered run of torchtune's own loop, and nothing else changes."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from omegaconf import DictConfig
from torch import nn
from torchtune.modules import KVCache, attention

from tests.support.faults import same_bits
from tests.support.ppo_runs import (
    ANSWERS_PER_STEP,
    LIMIT_BYTES,
    PROMPT_TOKENS,
    logged_steps,
    ppo_assets,
    ppo_config,
)
from tests.support.ranks import run_alone
from tests.support.recipe_runs import local_parameters
from tests.support.run_logs import events_in
from torchtune_adaptive.engine.memory.devices import meter_for
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.ppo import recipe as ppo

SEARCHING = {"use_maximum_batch_size": True, "adaptive": {"memory_limit": LIMIT_BYTES, "margin": 0.0}}
# torchtune cuts texts to one token less than the tokenizer's length, and keeps the labels with the prompts.
TOKEN_BYTES, LABEL_BYTES = 20_000 * ANSWERS_PER_STEP, 8 * ANSWERS_PER_STEP * PROMPT_TOKENS


def _recipe(cfg: DictConfig, *, stock: bool = False) -> Any:
    recipe = (ppo.StockRecipe if stock else ppo.AdaptivePPOFullFinetuneRecipeSingleDevice)(cfg)
    recipe.save_checkpoint = lambda *_, **__: None
    recipe.setup(cfg)
    return recipe


def _models(recipe: Any) -> nn.ModuleList:
    return nn.ModuleList([recipe._policy_model, recipe._value_model, recipe._ref_policy_model, recipe._reward_model])


def _told(generated: int, trained: int) -> dict[str, int]:
    """The keys of torchtune that set the sizes that a search would find."""
    return {"forward_batch_size": generated, "gradient_accumulation_steps": ANSWERS_PER_STEP // trained}


def _trained(cfg: DictConfig, *, stock: bool = False) -> tuple[list[dict[str, float]], dict[str, Any], tuple[int, int]]:
    """What was logged, the weights of all four models, and the sizes used."""
    recipe = _recipe(cfg, stock=stock)
    recipe.train()
    sizes = recipe._forward_batch_size, recipe._ppo_backward_batch_size
    return logged_steps(), local_parameters(_models(recipe)), sizes


def _metered(cfg: DictConfig) -> tuple[list[dict[str, float]], dict[str, Any], tuple[int, int]]:
    """What torchtune's own loop has logged, the weights, and the metered peaks of generating and of training."""
    recipe = _recipe(cfg, stock=True)
    meter = meter_for(recipe._device, _models(recipe), [recipe._optimizer])
    generate = recipe.generate_trajectory_batched
    generating, training = [0], [0]

    def generate_metered(*args: Any) -> Any:
        training.append(meter.peak_bytes)
        meter.reset()
        trajectory = generate(*args)
        generating.append(meter.peak_bytes)
        meter.reset()
        return trajectory

    recipe.generate_trajectory_batched = generate_metered
    meter.reset()
    with meter:
        recipe.train()
    return logged_steps(), local_parameters(_models(recipe)), (max(generating), max(*training, meter.peak_bytes))


def _sizes_found(output_dir: Path) -> dict[str, int]:
    """What the last run's searches have chosen, by torchtune's keys."""
    return {name: size for one in events_in(output_dir, "search") for name, size in one["chosen"].items()}


def _search(assets: Path, output_dir: Path) -> dict[str, Any]:
    steps, parameters, sizes = _trained(ppo_config(assets, output_dir, **SEARCHING))
    searches = {one["of"]: one for one in events_in(output_dir, "search")}
    told_steps, told_parameters, fitting = _metered(ppo_config(assets, output_dir, **_told(6, 2)))
    next_larger = ppo_config(assets, output_dir, **_told(12, 3))
    return {
        "found": _sizes_found(output_dir),
        "probes": searches["trained"]["probes"],
        "used": sizes,
        "steps": (steps, told_steps),
        "parameters equal": same_bits(parameters, told_parameters),
        "fitting": fitting,
        "next larger": _metered(next_larger)[-1],
    }


@pytest.fixture(scope="module")
def assets(tiny_dir: Path) -> Path:
    return ppo_assets(tiny_dir)


@pytest.fixture(scope="module")
def searched(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_alone(_search, assets, tmp_path_factory.mktemp("ppo"))


def test_a_search_finds_what_torchtunes_own_loop_fits(searched: dict[str, Any]) -> None:
    assert searched["found"] == _told(6, 2)
    assert max(searched["fitting"]) <= LIMIT_BYTES < min(searched["next larger"])
    (probe_bytes,) = [probe["peak_bytes"] for probe in searched["probes"] if probe["batch_size"] == 2]
    assert -LABEL_BYTES <= probe_bytes - searched["fitting"][1] <= TOKEN_BYTES


def test_a_search_restores_all_state_and_training_equals_the_stock_recipe_with_those_sizes(
    searched: dict[str, Any],
) -> None:
    assert searched["used"] == (6, 2)
    steps, told = searched["steps"]
    assert len(told) == 2
    assert steps == told
    assert searched["parameters equal"]


def _search_in_backward(assets: Path, output_dir: Path) -> dict[str, Any]:
    options = {"optimizer_in_bwd": True, "gradient_accumulation_steps": 1}
    roomy = SEARCHING | {"adaptive": {"memory_limit": "64MiB"}}
    told = ppo_config(assets, output_dir, **options, forward_batch_size=12)
    steps, parameters, sizes = _trained(ppo_config(assets, output_dir, **options, **roomy))
    told_steps, told_parameters, _ = _trained(told, stock=True)
    cfg = ppo_config(assets, output_dir, **options, **SEARCHING)
    refusing = ppo.AdaptivePPOFullFinetuneRecipeSingleDevice(cfg)
    with pytest.raises(InputError) as refused:
        refusing.setup(cfg)
    recipe = _recipe(ppo_config(assets, output_dir, **options))
    trained = [*recipe._policy_model.parameters(), *recipe._value_model.parameters()]
    return {
        "saved": (len(recipe._optim_ckpt_wrapper.state_dict()), len(trained)),
        "used": sizes,
        "steps": (steps, told_steps),
        "parameters equal": same_bits(parameters, told_parameters),
        "refused": str(refused.value),
        "sizes after the refusal": (refusing._forward_batch_size, refusing._ppo_backward_batch_size),
    }


@pytest.mark.exhaustive
def test_optimizers_that_step_in_backward_are_restored_and_need_a_step_that_fits_at_once(
    assets: Path, tmp_path: Path
) -> None:
    found = run_alone(_search_in_backward, assets, tmp_path)
    assert found["used"] == (12, 12)
    assert found["saved"] == (42, 42)
    steps, told = found["steps"]
    assert steps == told
    assert found["parameters equal"]
    assert found["refused"] == (
        "With `optimizer_in_bwd: True`, `ppo_batch_size` must be at most 4, which fit at once, but is 12 instead."
    )
    assert found["sizes after the refusal"] == (2, 12)  # those of the config


def _out_of_memory_among_caches(assets: Path, output_dir: Path) -> bool:
    """Whether a turn that ran out of memory while making the second layer's cache left a cache."""
    recipe = _recipe(ppo_config(assets, output_dir, max_generated_tokens=2))
    prompts = torch.ones(1, 4, dtype=torch.long)
    made: list[KVCache] = []

    def cache(*args: Any, **kwargs: Any) -> KVCache:
        if made:
            raise torch.OutOfMemoryError("no room for a cache")
        made.append(KVCache(*args, **kwargs))
        return made[0]

    with mock.patch.object(attention, "KVCache", cache), pytest.raises(torch.OutOfMemoryError):
        recipe.generate_trajectory(prompts)
    was_left = recipe._policy_model.caches_are_setup()
    recipe._release()
    recipe._use(1, 1)
    recipe.generate_trajectory(prompts)  # fails if there is a cache already
    return was_left


def test_a_cache_that_a_failed_turn_left_is_dropped(assets: Path, tmp_path: Path) -> None:
    assert run_alone(_out_of_memory_among_caches, assets, tmp_path)


def _diverge(assets: Path, output_dir: Path) -> list[dict[str, Any]]:
    keys: dict[str, Any] = {"optimizer__lr": 1e30, "adaptive__save_every_n_steps": 1}
    keys |= {"num_steps": 16, "batch_size": 4, "ppo_batch_size": 4, "gradient_accumulation_steps": 1}
    keys |= {"tokenizer__max_seq_len": 24, "max_generated_tokens": 4, "forward_batch_size": 4}
    _recipe(ppo_config(assets, output_dir, **keys)).train()
    return events_in(output_dir, "not finite")


def test_the_first_loss_that_is_not_finite_is_named_with_the_last_good_checkpoint(assets: Path, tmp_path: Path) -> None:
    (event,) = run_alone(_diverge, assets, tmp_path)
    assert event["figures"] == "loss nan"
    assert event["checkpoint"] == str(tmp_path / f"step_{event['step'] - 2}")


# Keys, values that are refused, and the beginning of the message.
REFUSED = [
    ("adaptive", {"global_batch_size": 8}, "`adaptive.global_batch_size` must be null for PPO, but is 8 instead."),
    ("num_steps", None, "`num_steps` must be an integer, but is None instead."),
    ("checkpointer__output_dir", "", "`checkpointer.output_dir` must be a folder, but is '' instead."),
    (
        "value_checkpointer__output_dir",
        "${output_dir}/value/..",
        "`value_checkpointer.output_dir` and the policy's folder must differ, but both are '",
    ),
    ("dataset__split", "train[:4]", "`batch_size` must be at most 4, the prompts of `dataset`, but is 12 instead."),
    ("dataset__column", "nope", "`dataset` cannot load its first sample: KeyError: 'nope'."),
    (
        "dataset",
        {"_component_": "tests.ppo.test_ppo.beyond_the_vocabulary"},
        "The first sample of `dataset` has token 2048, but `policy_model` has a vocabulary of 2048 tokens.",
    ),
    ("max_generated_tokens", 1000, "Rows have 1095 tokens, but the model takes at most 512."),
]


def beyond_the_vocabulary(tokenizer: Any, **_: Any) -> list[Any]:
    """A data set that a config can name."""
    return [{"tokens": [1, 2048], "labels": [1, 2048]}] * 40


def _refusals(assets: Path, output_dir: Path) -> list[str]:
    found = []
    for key, value, _ in REFUSED:
        with pytest.raises(InputError) as refused:
            _recipe(ppo_config(assets, output_dir, **{key: value})).train()
        found.append(str(refused.value))
    return found


def test_values_that_cannot_work_are_refused_in_one_sentence(assets: Path, tmp_path: Path) -> None:
    found = run_alone(_refusals, assets, tmp_path)
    assert [text[: len(sentence)] for text, (*_, sentence) in zip(found, REFUSED, strict=True)] == [
        sentence for *_, sentence in REFUSED
    ]
    assert all("\n" not in text and text[-1] == "." for text in found)
