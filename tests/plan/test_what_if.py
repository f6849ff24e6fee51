"""The memory that each change of a config would save is planned with that change alone, and with all together."""

from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from tests.support.plans import GIB, MIB, Asked, FakeTracer, peaks, step_of, tables
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.plan.decide import Card
from torchtune_adaptive.plan.show.text import what_if_text
from torchtune_adaptive.plan.suggestions import Suggestion
from torchtune_adaptive.plan.trace.peaks import TracedStep
from torchtune_adaptive.plan.what_if import AS_IT_IS, TOGETHER, what_if

MODEL = {"_component_": "torchtune.models.llama2.llama2", "num_layers": 32, "embed_dim": 4096}
LORA_MODEL = {"_component_": "torchtune.models.llama2.lora_llama2", "lora_attn_modules": ["q_proj"], "lora_rank": 4}
CHUNKED = "torchtune.modules.loss.CEWithChunkedOutputLoss"


def cfg_of(**changes: Any) -> DictConfig:
    plain = {
        "device": "cuda",
        "model": MODEL,
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 0.1, "fused": True},
        "loss": {"_component_": "torch.nn.CrossEntropyLoss"},
        "batch_size": 3,
        "gradient_accumulation_steps": 4,
        "clip_grad_norm": 1.0,
    }
    return OmegaConf.create(plain | changes)


def effects_of(cfg: DictConfig, *, refuses_lora: bool = False) -> tuple[dict[str, Suggestion], dict[str, Asked]]:
    """By change: its effect, and the request that was traced for it."""

    def step_for(asked: Asked) -> TracedStep:
        if refuses_lora and "lora_attn_modules" in asked.cfg.model:
            raise InputError("`model` is wrong.")
        held = 10 if "lora_attn_modules" in asked.cfg.model else 40
        return step_of(peaks(512, held_bytes=held * GIB // asked.world_size, bytes_per_row=512 * MIB))

    tracer = FakeTracer(step_for)
    card = Card(memory_bytes=80 * GIB)
    found = list(what_if(cfg, world_size=2, card=card, seq_len=512, batch_size=3, traced_by=tracer))
    names = [effect.change for effect in found]
    return dict(zip(names, found, strict=True)), dict(zip(names, tracer.asked, strict=True))


def changes(cfg: DictConfig, other: DictConfig) -> dict[str, Any]:
    """The keys of ``other`` whose values differ from those in ``cfg``."""
    return {str(key): value for key, value in other.items() if cfg.get(key) != value}


def test_each_change_is_planned_alone_and_all_of_the_config_together() -> None:
    cfg = cfg_of()
    effects, asked = effects_of(cfg)
    assert list(effects) == [
        AS_IT_IS,
        "activation checkpointing",
        "checkpointing and activation offloading",
        "compile",
        "chunked loss",
        "8-bit optimizer (torchao)",
        "LoRA",
        "QLoRA",
        "optimizer_in_bwd",
        TOGETHER,
        "4 ranks",
    ]
    made = {name: changes(cfg, one.cfg) for name, one in asked.items()}
    assert made[AS_IT_IS] == made["4 ranks"] == {}
    assert [one.world_size for one in asked.values()] == [2] * 10 + [4]
    assert made["activation checkpointing"] == {"enable_activation_checkpointing": True}
    assert made["checkpointing and activation offloading"] == {
        "enable_activation_checkpointing": True,
        "enable_activation_offloading": True,
    }
    assert made["compile"] == {"compile": True}
    assert made["chunked loss"] == {"loss": {"_component_": CHUNKED}}
    assert made["8-bit optimizer (torchao)"] == {"optimizer": {"_component_": "torchao.optim.AdamW8bit", "lr": 0.1}}
    in_backward = {"optimizer_in_bwd": True, "gradient_accumulation_steps": 1, "clip_grad_norm": None}
    assert made["optimizer_in_bwd"] == in_backward
    assert asked["LoRA"].cfg.model._component_ == "torchtune.models.llama2.lora_llama2"
    assert asked["QLoRA"].cfg.model == asked["LoRA"].cfg.model | {"quantize_base": True}
    together = asked[TOGETHER].cfg
    assert together.model == asked["QLoRA"].cfg.model
    assert together.enable_activation_offloading
    assert together.loss._component_ == CHUNKED
    assert together.optimizer._component_ == "torchao.optim.AdamW8bit"
    assert not together.optimizer_in_bwd  # LoRA recipes do not have it
    assert (together.gradient_accumulation_steps, together.clip_grad_norm) == (4, 1.0)


def test_changes_that_a_config_already_has_are_left_out() -> None:
    has = {"enable_activation_checkpointing": True, "enable_activation_offloading": True, "model": LORA_MODEL}
    has |= {
        "compile": True,
        "loss": {"_component_": CHUNKED},
        "optimizer": {"_component_": "torch.optim.SGD", "lr": 0.1},
    }
    effects, asked = effects_of(cfg_of(**has))
    assert list(effects) == [AS_IT_IS, "QLoRA", TOGETHER, "4 ranks"]
    assert asked["QLoRA"].cfg.model == LORA_MODEL | {"quantize_base": True}
    quantized = {"model": LORA_MODEL | {"quantize_base": True}}
    assert "QLoRA" not in effects_of(cfg_of(**has | quantized))[0]


@pytest.mark.parametrize(
    ("keys", "change"),
    [
        ({"quantizer": {"_component_": "any"}}, "compile"),
        ({"device": "cpu"}, "checkpointing and activation offloading"),
        ({"device": "cpu:0"}, "checkpointing and activation offloading"),
    ],
)
def test_changes_that_a_config_cannot_have_are_left_out(keys: dict[str, Any], change: str) -> None:
    assert change not in effects_of(cfg_of(**keys))[0]


def test_the_table_has_the_largest_saving_first_and_what_cannot_be_planned_last() -> None:
    effects, _ = effects_of(cfg_of(), refuses_lora=True)
    text = what_if_text(effects.values())
    first, *_ = text.splitlines()
    assert first == "With a batch of 3 rows of 512 tokens, in GiB:"
    ((header, *rows),) = tables(text)
    assert header == ["change", "process", "saved", "fits", "largest batch"]
    assert rows[0][0] == "4 ranks"
    saved = {row[0]: row[2] for row in rows}
    assert saved[AS_IT_IS] == saved["compile"] == "0.00"
    assert saved["4 ranks"] == "12.00"  # half of 20 GiB, plus a fifth as GPU overhead
    last = [line.partition(": not planned, ") for line in text.splitlines()[-3:]]
    assert [name for name, _, _ in last] == ["- LoRA", "- QLoRA", f"- {TOGETHER}"]
    assert {reason for _, _, reason in last} == {"`model` is wrong."}
