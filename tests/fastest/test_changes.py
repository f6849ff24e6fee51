"""What can be changed in a config so that it trains the same, faster."""

from typing import Any

import pytest
from omegaconf import OmegaConf

from torchtune_adaptive.fastest.changes import KINDS, questions_of

FULL, LORA = "adaptive_full_finetune_distributed", "adaptive_lora_finetune_single_device"
CHECKPOINTED = {"enable_activation_checkpointing": True}
OFFLOADS = {"enable_activation_offloading": False, "device": "cuda"}
CHUNKED = "torchtune.modules.loss.CEWithChunkedOutputLoss"
SELECTIVE = {"enable_activation_checkpointing": False, "ac_mode": "selective", "ac_option": 2}


def asked(recipe: str, *, ranks: int = 1, kinds: tuple[str, ...] = KINDS, **keys: Any) -> dict[str, list[str]]:
    questions = questions_of(OmegaConf.create(keys), recipe=recipe, ranks=ranks, kinds=kinds)
    return {one.kind: [change.words for change in one.alternatives] for one in questions}


@pytest.mark.parametrize(
    ("recipe", "keys", "words"),
    [
        (
            FULL,
            CHECKPOINTED,
            ["no checkpointing", "one layer in 4 checkpointed", "one layer in 2 checkpointed"],
        ),
        (FULL, {}, ["one layer in 4 checkpointed", "one layer in 2 checkpointed", "all layers checkpointed"]),
        (FULL, SELECTIVE, ["no checkpointing", "all layers checkpointed"]),
        (LORA, CHECKPOINTED, ["no checkpointing"]),
        (LORA, CHECKPOINTED | {"enable_activation_offloading": True}, ["no checkpointing", "no offloading"]),
        (LORA, {}, ["all layers checkpointed"]),
        (LORA, CHECKPOINTED | OFFLOADS, ["no checkpointing", "all layers checkpointed, activations offloaded"]),
        (LORA, CHECKPOINTED | OFFLOADS | {"device": "cpu"}, ["no checkpointing"]),
    ],
)
def test_less_checkpointing_is_asked_for_first_and_only_what_the_recipe_reads(
    recipe: str, keys: dict[str, Any], words: list[str]
) -> None:
    assert asked(recipe, **keys)["checkpointing"] == words


def test_what_is_so_already_or_not_supported_is_not_asked_for() -> None:
    assert asked(LORA, kinds=("compile", "resharding")) == {"compile": ["compile"]}
    assert asked(FULL, ranks=2, kinds=("compile", "resharding"), compile=True) == {"resharding": ["no resharding"]}
    assert asked(FULL, ranks=2, kinds=("resharding",), fsdp_reshard_after_forward=False) == {}
    assert asked(FULL, kinds=("compile",), quantizer={"groupsize": 32}) == {}


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ({"_component_": CHUNKED}, ["loss in one piece", "loss in 32 chunks"]),
        ({"_component_": CHUNKED, "num_output_chunks": 1}, ["loss in 4 chunks"]),
        ({"_component_": "my.Loss", "num_output_chunks": 8}, []),
    ],
)
def test_only_torchtunes_chunked_loss_has_other_chunks(loss: dict[str, Any], words: list[str]) -> None:
    assert asked(LORA, kinds=("loss",), loss=loss) == ({"loss": words} if words else {})
    assert asked(LORA, kinds=("loss",), loss=loss, kd_loss={}) == {}


def test_offloading_ends_with_checkpointing_on_which_it_depends() -> None:
    cfg = OmegaConf.create(CHECKPOINTED | {"enable_activation_offloading": True})
    ((nothing, no_offloading),) = (one.alternatives for one in questions_of(cfg, recipe=LORA, ranks=1)[:1])
    off = {"enable_activation_offloading": False}
    assert nothing.values == {"enable_activation_checkpointing": False} | off
    assert no_offloading.values == off


def test_a_mode_of_selective_checkpointing_is_taken_back() -> None:
    nothing, everything = questions_of(OmegaConf.create(SELECTIVE), recipe=FULL, ranks=1)[0].alternatives
    assert nothing.values == {"enable_activation_checkpointing": False, "ac_mode": None}
    assert everything.values == {"enable_activation_checkpointing": True, "ac_mode": None}
    assert (nothing.memory, everything.memory) == ("more", "less")
