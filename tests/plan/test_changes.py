"""Changes of a config that need less memory: each is planned with that change, and named by it."""

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from omegaconf import DictConfig, OmegaConf

from tests.support.plans import GIB, MIB, Asked, FakeTracer, planned, rows_of, step_of, tables
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.plan.changes import AS_IT_IS, TOGETHER, lora_version, ways_to_fit, what_if
from torchtune_adaptive.plan.config_plan import ConfigLaunch
from torchtune_adaptive.plan.decide import PlannedChange
from torchtune_adaptive.plan.gpu import Card
from torchtune_adaptive.plan.show.text import what_if_text
from torchtune_adaptive.plan.trace.step_events import TracedStep
from torchtune_adaptive.plan.ways import enough_ranks

# ---- what makes a config fit


FULL_CFG = {
    "device": "cuda",
    "use_maximum_batch_size": True,
    "optimizer_in_bwd": True,
    "model": {"_component_": "torchtune.models.llama2.llama2", "num_layers": 32, "embed_dim": 4096},
    "enable_activation_checkpointing": False,
    "ac_mode": "selective",
}
LORA_MODEL = {"_component_": "torchtune.models.llama2.lora_llama2", "lora_attn_modules": ["q_proj"], "lora_rank": 4}


def full_cfg(**changes: Any) -> DictConfig:
    return OmegaConf.create(FULL_CFG | changes)


def as_a_model_would(asked: Asked) -> TracedStep:
    """A model's usual memory: state is sharded and small with LoRA, and rows are cheaper with checkpointing."""
    trained = 2 * GIB if "lora_attn_modules" in asked.cfg.model else 100 * GIB
    checkpointed = asked.cfg.get("enable_activation_checkpointing", False)
    bytes_per_token = MIB if checkpointed else 8 * MIB
    return step_of(
        *(
            rows_of(
                seq_len, held_bytes=(trained + 14 * GIB) / asked.world_size, bytes_per_row=seq_len * bytes_per_token
            )
            for seq_len in asked.seq_lens
        )
    )


class Helped(NamedTuple):
    """The changes that were planned, and what the tracer was asked for them."""

    found: list[PlannedChange]
    asked: list[Asked]

    @property
    def changes(self) -> list[str]:
        return [way.change for way in self.found]


def helped(
    cfg: DictConfig, step_for: Callable[[Asked], TracedStep] = as_a_model_would, *, seq_len: int = 4096
) -> Helped:
    tracer = FakeTracer(step_for)
    card = Card(name="a card", memory_bytes=80 * GIB)
    launch = ConfigLaunch(title="any", cfg=cfg, world_size=1, card=card, seq_lens=(64, seq_len))
    planned = launch.plan(tracer)
    tracer.asked.clear()
    return Helped(list(ways_to_fit(launch, planned, tracer)), tracer.asked)


def ranks_asked(result: Helped) -> list[int]:
    return [asked.world_size for asked in result.asked if asked.world_size > 1]


def test_every_change_is_planned_for_the_longest_rows_as_it_is_named() -> None:
    as_it_is = full_cfg()
    result = helped(as_it_is)
    assert as_it_is == full_cfg()
    checkpointed = full_cfg(enable_activation_checkpointing=True, ac_mode=None)
    lora = result.asked[1].cfg
    assert result.changes == [
        "enable_activation_checkpointing=True",
        "LoRA and checkpointing: model=torchtune.models.llama2.lora_llama2, rank 8",
        "4 ranks",
    ]  # not shorter rows: what does not depend on them is too much
    assert result.asked == [
        Asked(checkpointed, 1, (4096,)),
        Asked(lora, 1, (4096,)),
        Asked(as_it_is, 4, (4096,)),
    ]
    for way, asked in zip(result.found, result.asked, strict=True):
        step = as_a_model_would(asked)
        own = planned(asked.cfg, step, world_size=asked.world_size, batch_sizes=[1])
        assert way.length == own.lengths[0]


def test_lora_is_planned_with_the_arguments_of_the_model_and_as_its_recipe_takes_it() -> None:
    cfg = helped(full_cfg()).asked[1].cfg
    assert cfg.model.items() >= (FULL_CFG["model"] | {"_component_": "torchtune.models.llama2.lora_llama2"}).items()
    assert list(cfg.model.lora_attn_modules) == ["q_proj", "v_proj", "output_proj"]
    assert (cfg.enable_activation_checkpointing, cfg.ac_mode, cfg.optimizer_in_bwd) == (True, None, False)


def test_lora_of_a_model_with_images_has_adapters_in_the_parts_that_the_config_trains() -> None:
    trains = {"decoder_trainable": False, "encoder_trainable": True, "fusion_trainable": True}
    lora = lora_version(OmegaConf.create(FULL_CFG | {"model": FULL_CFG["model"] | trains}))
    assert lora is not None
    parts = [lora.model[f"{part}_trainable"] for part in ("decoder", "encoder", "fusion")]
    assert parts == ["frozen", "lora", "lora"]


@pytest.mark.parametrize(
    ("held_gib", "row_gib", "asked"),
    [
        (100, 1, [2]),
        (900, 1, [16]),
        (10**6, 1, []),  # 512 ranks are too few
        (100, 90, []),  # what one row needs is not sharded
    ],
)
def test_of_more_ranks_the_first_number_that_fits_is_planned(held_gib: int, row_gib: int, asked: list[int]) -> None:
    def shared(asked: Asked) -> TracedStep:
        return step_of(
            rows_of(asked.seq_lens[-1], held_bytes=held_gib * GIB / asked.world_size, bytes_per_row=row_gib * GIB)
        )

    result = helped(full_cfg(), shared, seq_len=512)
    assert ranks_asked(result) == asked
    assert [one for one in result.changes if one.endswith(" ranks")] == [f"{ranks} ranks" for ranks in asked]
    assert all(way.fits for way in result.found if way.change.endswith(" ranks"))


@pytest.mark.parametrize(
    ("gib_per_row_of_512", "seq_len", "tried"),
    [
        (20, 4096, [2048, 1024]),
        (40, 4096, [2048, 1024, 512]),
        (10**6, 1023, []),
        (10**6, 1024, [512]),
        (10**6, 3000, [1500, 750]),
    ],
)
def test_of_shorter_rows_down_to_512_tokens_the_longest_that_fit_are_suggested(
    gib_per_row_of_512: int, seq_len: int, tried: list[int]
) -> None:
    def per_token(asked: Asked) -> TracedStep:
        tokens = asked.seq_lens[-1]
        return step_of(rows_of(tokens, held_bytes=GIB, bytes_per_row=gib_per_row_of_512 * GIB * tokens / 512))

    result = helped(full_cfg(), per_token, seq_len=seq_len)
    assert [asked.seq_lens[0] for asked in result.asked if asked.seq_lens[0] != seq_len] == tried
    assert [one for one in result.changes if one.startswith("rows")] == [f"rows of {one} tokens" for one in tried[-1:]]


def test_more_ranks_are_tried_until_they_fit_or_one_number_of_them_is_refused() -> None:
    def unevenly(asked: Asked) -> TracedStep:
        held = {1: 100, 2: 75, 4: 72}.get(asked.world_size, 10)
        return step_of(rows_of(asked.seq_lens[-1], held_bytes=held * GIB, bytes_per_row=10 * GIB))

    def on_up_to_two_ranks(asked: Asked) -> TracedStep:
        if asked.world_size > 2:
            raise InputError("too many.")
        return unevenly(asked)

    assert ranks_asked(helped(full_cfg(), unevenly, seq_len=512)) == [2, 4, 8]
    result = helped(full_cfg(), on_up_to_two_ranks, seq_len=512)
    assert ranks_asked(result) == [2, 4]
    assert result.found[-1] == PlannedChange("4 ranks", None, "too many.")


def test_a_change_that_a_config_has_is_not_planned() -> None:
    assert helped(full_cfg(model=LORA_MODEL, enable_activation_checkpointing=True)).changes == [
        "2 ranks",
        "rows of 2048 tokens",
    ]


@pytest.mark.parametrize("component", ["tests.plan.test_changes.full_cfg", "torchtune.models.llama2.no_such_model"])
def test_a_model_of_others_or_that_torchtune_has_without_lora_has_no_lora_version(component: str) -> None:
    assert lora_version(full_cfg(model={"_component_": component})) is None


# ---- what each change would save

CHUNKED = "torchtune.modules.loss.CEWithChunkedOutputLoss"


def plain_cfg(**changes: Any) -> DictConfig:
    plain = {
        "device": "cuda",
        "model": FULL_CFG["model"],
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 0.1, "fused": True},
        "loss": {"_component_": "torch.nn.CrossEntropyLoss"},
        "batch_size": 3,
        "gradient_accumulation_steps": 4,
        "clip_grad_norm": 1.0,
    }
    return OmegaConf.create(plain | changes)


def effects_of(cfg: DictConfig, *, refuses_lora: bool = False) -> tuple[dict[str, PlannedChange], dict[str, Asked]]:
    """By change: its effect, and the request that was traced for it."""

    def step_for(asked: Asked) -> TracedStep:
        if refuses_lora and "lora_attn_modules" in asked.cfg.model:
            raise InputError("`model` is wrong.")
        held = 10 if "lora_attn_modules" in asked.cfg.model else 40
        return step_of(rows_of(asked.seq_lens[-1], held_bytes=held * GIB // asked.world_size, bytes_per_row=512 * MIB))

    tracer = FakeTracer(step_for)
    card = Card(name="a card", memory_bytes=80 * GIB)
    launch = ConfigLaunch(title="any", cfg=cfg, world_size=2, card=card, seq_lens=(128, 512), batch_sizes=(3,))
    found = list(what_if(launch, tracer))
    names = [effect.change for effect in found]
    return dict(zip(names, found, strict=True)), dict(zip(names, tracer.asked, strict=True))


def changes(cfg: DictConfig, other: DictConfig) -> dict[str, Any]:
    """The keys of ``other`` whose values differ from those in ``cfg``."""
    return {str(key): value for key, value in other.items() if cfg.get(key) != value}


def test_each_change_is_planned_alone_and_all_of_the_config_together() -> None:
    cfg = plain_cfg()
    _, asked = effects_of(cfg)
    lora = changes(cfg, lora_version(cfg) or cfg)
    checkpointing = {"enable_activation_checkpointing": True}
    expected = {
        AS_IT_IS: {},
        "activation checkpointing": checkpointing,
        "checkpointing and activation offloading": checkpointing | {"enable_activation_offloading": True},
        "compile": {"compile": True},
        "chunked loss": {"loss": {"_component_": CHUNKED}},
        "8-bit optimizer (torchao)": {"optimizer": {"_component_": "torchao.optim.AdamW8bit", "lr": 0.1}},
        "LoRA": lora,
        "QLoRA": lora | {"model": lora["model"] | {"quantize_base": True}},
        "optimizer_in_bwd": {"optimizer_in_bwd": True, "gradient_accumulation_steps": 1, "clip_grad_norm": None},
    }
    assert list(asked) == [*expected, TOGETHER, "4 ranks"]
    made = {name: changes(cfg, one.cfg) for name, one in asked.items() if name != TOGETHER}
    assert made == expected | {"4 ranks": {}}
    assert [one.world_size for one in asked.values()] == [2] * 10 + [4]
    assert {one.seq_lens for one in asked.values()} == {(512,)}  # the longest
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
    effects, asked = effects_of(plain_cfg(**has))
    assert list(effects) == [AS_IT_IS, "QLoRA", TOGETHER, "4 ranks"]
    assert asked["QLoRA"].cfg.model == LORA_MODEL | {"quantize_base": True}
    quantized = {"model": LORA_MODEL | {"quantize_base": True}}
    assert "QLoRA" not in effects_of(plain_cfg(**has | quantized))[0]


@pytest.mark.parametrize(
    ("keys", "change"),
    [
        ({"quantizer": {"_component_": "any"}}, "compile"),
        ({"device": "cpu:0"}, "checkpointing and activation offloading"),
    ],
)
def test_changes_that_a_config_cannot_have_are_left_out(keys: dict[str, Any], change: str) -> None:
    assert change not in effects_of(plain_cfg(**keys))[0]


def test_the_table_has_the_largest_saving_first_and_what_cannot_be_planned_last() -> None:
    effects, _ = effects_of(plain_cfg(), refuses_lora=True)
    text = what_if_text(effects.values())
    first, *_ = text.splitlines()
    assert first == "With a batch of 3 rows of 512 tokens, in GiB:"
    ((header, *rows),) = tables(text)
    assert header == ["change", "process", "saved", "fits", "largest batch"]
    assert rows[0][0] == "4 ranks"
    saved = {row[0]: row[2] for row in rows}
    assert saved[AS_IT_IS] == saved["compile"] == "0.00"
    assert saved["4 ranks"] == "10.00"  # half of 20 GiB
    last = [line.partition(": not planned, ") for line in text.splitlines()[-3:]]
    assert [name for name, _, _ in last] == ["- LoRA", "- QLoRA", f"- {TOGETHER}"]
    assert {reason for _, _, reason in last} == {"`model` is wrong."}


@pytest.mark.parametrize(
    ("world_size", "is_sharded", "ranks"), [(8, False, [8, 16, 32]), (1, False, [2, 4, 8]), (8, True, [16, 32, 64])]
)
def test_a_run_with_a_copy_on_each_rank_needs_no_more_ranks_to_be_sharded(
    world_size: int, is_sharded: bool, ranks: list[int]
) -> None:
    kinds = {"parameters": 6 * GIB, "gradients": 6 * GIB, "optimizer state": 12 * GIB, "activations": GIB}
    one_row = SimpleNamespace(kinds=kinds, allocated_bytes=25 * GIB, reserved_bytes=25 * GIB, process_bytes=26 * GIB)
    device = SimpleNamespace(usable_bytes=15 * GIB)
    planned: Any = SimpleNamespace(size=lambda rows: one_row, world_size=world_size, device=device)
    assert list(itertools.islice(enough_ranks(planned, is_sharded=is_sharded), 3)) == ranks
