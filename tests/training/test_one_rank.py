"""One rank without sharding: LoRA equals the stock recipe bit for bit, and NF4 models train."""

import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from adaptive_lora_finetune_distributed import refuse_quantized
from torch.distributed.tensor import DTensor
from torchao.dtypes.nf4tensor import NF4Tensor, to_nf4
from torchtune import training

from tests.support.faults import same_bits
from tests.support.ranks import run_on_ranks
from tests.support.recipe_runs import (
    SHALLOW,
    Step,
    adaptive_recipe,
    finished,
    shallow_assets,
    stock_recipe,
    tiny_config,
)
from torchtune_adaptive.engine.memory.operations import plain_parts
from torchtune_adaptive.errors import InputError

SHARDING = ("shard_model", "load_from_full_model_state_dict", "gather_cpu_state_dict")
DORA: dict[str, Any] = {
    "model__use_dora": True,
    "model__lora_dropout": 0.1,
    "clip_grad_norm": 0.05,
    "gradient_accumulation_steps": 2,
    "enable_activation_checkpointing": True,
}
COMMON: dict[str, Any] = SHALLOW | {
    "epochs": 1,
    "dataset__split": "train[:32]",
    "tokenizer__max_seq_len": 32,
    "optimizer__lr": 1e-2,
    "lr_scheduler__num_warmup_steps": 2,
    "adaptive__memory_limit": None,
}
SEARCHED = {
    "epochs": 2,
    "enable_activation_checkpointing": True,
    "use_maximum_batch_size": True,
    "adaptive__memory_limit": "10MiB",
}


def _figures(steps: list[Step]) -> list[tuple[float, ...]]:
    return [tuple(step[name] for name in ("step", "loss", "lr", "grad_norm")) for step in steps]


def _trained(recipe: Any) -> dict[str, torch.Tensor]:
    """Copies of the parameters that the optimizer has moved."""
    named = {name: value for name, value in recipe._model.named_parameters() if value in recipe._optimizer.state}
    return {name: (p.to_local() if isinstance(p, DTensor) else p).detach().clone() for name, p in named.items()}


def _is_base_of_checkpoint(recipe: Any, checkpoint: dict[str, torch.Tensor]) -> bool:
    """Whether every frozen parameter equals the checkpoint's bit for bit, quantized where the model is."""
    frozen = {name: p for name, p in recipe._model.named_parameters() if not p.requires_grad}
    frozen = {name.replace("_checkpoint_wrapped_module.", ""): p for name, p in frozen.items()}
    return frozen.keys() == checkpoint.keys() and all(
        torch.equal(own, expected)
        for name, p in frozen.items()
        for own, expected in zip(
            plain_parts(p),
            plain_parts(to_nf4(checkpoint[name]) if isinstance(p, NF4Tensor) else checkpoint[name]),
            strict=True,
        )
    )


def _train_plain(tiny_dir: Path, output_dir: Path) -> dict[str, Any]:
    """Train with the stock recipe, which shards, and with the adaptive one."""
    cfg = tiny_config("lora", tiny_dir, output_dir, **COMMON | DORA)
    stock = stock_recipe("lora")
    with mock.patch.multiple(
        stock.train.__globals__["training"], **{name: getattr(training, name) for name in SHARDING}
    ):
        stock_steps, _, stock_run = finished(stock, cfg)
    steps, _, run = finished(adaptive_recipe("lora"), cfg)
    return {
        "sharded": [any(isinstance(p, DTensor) for p in one._model.parameters()) for one in (stock_run, run)],
        "steps": (_figures(stock_steps), _figures(steps)),
        "same adapters": same_bits(_trained(stock_run), _trained(run)),
        "base kept": _is_base_of_checkpoint(run, torch.load(tiny_dir / "model.pt")),
    }


def _resume_dora(tiny_dir: Path, output_dir: Path) -> bool:
    """Whether the adapters of a run, and their magnitudes, equal those of one that is resumed after an epoch."""

    def run(**overrides: Any) -> dict[str, torch.Tensor]:
        cfg = tiny_config("lora", tiny_dir, output_dir, **COMMON | DORA | {"epochs": 2} | overrides)
        return _trained(finished(adaptive_recipe("lora"), cfg)[2])

    whole = run()
    shutil.rmtree(output_dir / "epoch_1")
    return same_bits(whole, run(resume_from_checkpoint=True))


def _run_quantized(tiny_dir: Path, output_dir: Path, **overrides: Any) -> tuple[list[Step], Any]:
    overrides = COMMON | {"model__quantize_base": True} | overrides
    steps, _, recipe = finished(adaptive_recipe("lora"), tiny_config("lora", tiny_dir, output_dir, **overrides))
    return steps, recipe


def _train_quantized(tiny_dir: Path, output_dir: Path) -> dict[str, Any]:
    """Runs with a search, and resumed with another search."""
    steps, recipe = _run_quantized(tiny_dir, output_dir, **SEARCHED)
    saved = torch.load(output_dir / "epoch_1" / "model-00001-of-00001.bin")
    adapters = torch.load(output_dir / "epoch_1" / "adapter_model.pt")
    shutil.rmtree(output_dir / "epoch_1")
    resumed_steps, resumed = _run_quantized(tiny_dir, output_dir, **SEARCHED, resume_from_checkpoint=True)
    # No trained tensor may be memory-mapped to the file it was loaded from: reading it would now kill this process.
    (output_dir / "epoch_0" / "adapter_model.pt").write_bytes(b"")
    projection = recipe._model.layers[0].attn.q_proj
    return {
        "quantized": sum(isinstance(p, NF4Tensor) for p in recipe._model.parameters()),
        "base kept": _is_base_of_checkpoint(recipe, torch.load(tiny_dir / "model.pt")),
        "state": [name for name, p in recipe._model.named_parameters() if p in recipe._optimizer.state],
        "found": recipe.trainer.sizes.result,
        "steps": steps,
        "resumed": resumed_steps,
        "same when resumed": same_bits(_trained(recipe), _trained(resumed)),
        "base": projection.weight.to(torch.float32),
        "adapters": [adapters[f"layers.0.attn.q_proj.lora_{part}.weight"] for part in "ab"],
        "saved": saved["layers.0.attn.q_proj.weight"],
    }


def _train_alone(rank: int, tiny_dir: Path, output_dir: Path) -> dict[str, Any]:
    return {
        "DoRA": _train_plain(tiny_dir, output_dir / "plain"),
        "DoRA resumes": _resume_dora(tiny_dir, output_dir / "resumed"),
        "quantized": _train_quantized(tiny_dir, output_dir / "quantized"),
    }


@pytest.fixture(scope="module")
def outcomes(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (outcome,) = run_on_ranks(_train_alone, 1, shallow_assets(tiny_dir), tmp_path_factory.mktemp("one_rank"))
    return outcome


def test_without_shards_every_figure_and_every_adapter_equals_the_stock_recipe(outcomes: dict[str, Any]) -> None:
    outcome = outcomes["DoRA"]
    assert outcome["sharded"] == [True, False]
    stock_steps, steps = outcome["steps"]
    assert len(stock_steps) >= 4
    assert steps == stock_steps
    assert outcome["same adapters"]


def test_a_resumed_run_keeps_the_magnitudes_that_dora_has_trained(outcomes: dict[str, Any]) -> None:
    assert outcomes["DoRA resumes"]


@pytest.mark.parametrize("case", ["DoRA", "quantized"])
def test_training_and_saving_leave_the_base_as_the_checkpoint_has_it(case: str, outcomes: dict[str, Any]) -> None:
    assert outcomes[case]["base kept"]


def test_a_quantized_base_is_searched_and_trained_with_state_for_adapters_alone(outcomes: dict[str, Any]) -> None:
    outcome = outcomes["quantized"]
    assert outcome["quantized"] == 2 * 7  # layers, projections of each
    assert outcome["found"].batch_size > 1
    assert {step["batch_size"] for step in outcome["steps"]} == {outcome["found"].batch_size}
    assert max(step["peak_memory_bytes"] for step in outcome["steps"]) <= outcome["found"].memory_limit_bytes
    assert outcome["steps"][-1]["loss"] < outcome["steps"][0]["loss"] - 0.1
    assert len(outcome["state"]) == 2 * 6 * 2
    assert all("lora_" in name for name in outcome["state"])


def test_a_quantized_checkpoint_holds_base_and_adapters_merged(outcomes: dict[str, Any]) -> None:
    lora_a, lora_b = outcomes["quantized"]["adapters"]
    merged = outcomes["quantized"]["base"] + 16 / 8 * lora_b @ lora_a
    assert lora_b.abs().max() > 0
    torch.testing.assert_close(outcomes["quantized"]["saved"], merged)


def test_a_quantized_run_resumes_as_if_uninterrupted(outcomes: dict[str, Any]) -> None:
    outcome = outcomes["quantized"]
    resumed = _figures(outcome["resumed"])
    assert len(resumed) == len(outcome["steps"]) // 2
    assert resumed == _figures(outcome["steps"])[len(resumed) :]
    assert outcome["same when resumed"]


@pytest.mark.slow
def test_offloading_a_quantized_model_is_refused_in_one_sentence(tiny_dir: Path, tmp_path: Path) -> None:
    refuse_quantized(tiny_config("lora", tiny_dir, tmp_path).model)
    with pytest.raises(InputError, match="`fsdp_cpu_offload` must be False for a quantized model on one rank, but"):
        refuse_quantized(tiny_config("lora", tiny_dir, tmp_path, model__quantize_base=True).model)
