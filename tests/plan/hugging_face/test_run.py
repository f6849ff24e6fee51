"""transformers' Trainer, traced on a model without weights. TRL's: ``tests/integrations/test_plans_of_trl.py``."""

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.plan.hugging_face.test_model import LLAMA
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.plan.any_loop import plan_of_loop
from torchtune_adaptive.plan.decide import Plan
from torchtune_adaptive.plan.gpu import Card
from torchtune_adaptive.plan.hugging_face.run import HuggingFaceRun
from torchtune_adaptive.plan.hugging_face.tracing import RunTracer

# Of the model with one layer: embeddings and output, the layer, and the last norm.
WEIGHTS = 2 * 1000 * 64 + (64 * (64 + 32 + 32 + 64) + 3 * 64 * 128 + 2 * 64) + 64


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("llama")
    (directory / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 1}))
    return str(directory)


def run_of(folder: str | Path, *, ranks: int = 1, **keys: Any) -> HuggingFaceRun:
    return HuggingFaceRun(path=str(folder), seq_len=64, trainer="transformers", keys=keys, ranks=ranks)


@functools.cache  # a plan takes a second
def planned(path: str, *, ranks: int = 1, offloads: bool = False, **keys: Any) -> Plan:
    if offloads:
        keys["fsdp_config"] = {"cpu_offload": True}
    traced = RunTracer(run_of(path, ranks=ranks, **keys)).trace()
    return plan_of_loop(traced, Card.named("24GiB"), ranks=ranks, batch_sizes=[4], title="", assumptions="")


def bytes_of(plan: Plan, kind: str) -> float:
    return plan.size(4).kinds.get(kind, 0)


@pytest.mark.slow
def test_weights_gradients_and_state_have_the_types_that_the_trainer_gives_them(path: str) -> None:
    low, mixed = planned(path, dtype="bfloat16"), planned(path, bf16=True)
    assert [plan.step.num_parameters for plan in (low, mixed)] == [WEIGHTS] * 2
    assert [bytes_of(plan, "parameters") for plan in (low, mixed)] == [
        pytest.approx(2 * WEIGHTS, rel=0.03),  # the allocator rounds each tensor up
        pytest.approx(4 * WEIGHTS, rel=0.03),
    ]
    assert bytes_of(mixed, "optimizer state") == pytest.approx(8 * WEIGHTS, rel=0.03)
    assert bytes_of(planned(path, optim="sgd"), "optimizer state") == 0
    assert bytes_of(low, "activations") < bytes_of(mixed, "activations")
    assert (
        not RunTracer(run_of(path, dtype="bfloat16")).traced(1, sizes=[2]).step.state_exists
    )  # the first step makes it


@pytest.mark.slow
def test_checkpointing_takes_less_and_accumulation_keeps_gradients(path: str) -> None:
    usual = planned(path, dtype="bfloat16")
    recomputed = planned(path, dtype="bfloat16", gradient_checkpointing=True)
    assert recomputed.size(64).allocated_bytes < usual.size(64).allocated_bytes
    accumulated = planned(path, dtype="bfloat16", gradient_accumulation_steps=4)
    kept = accumulated.size(4).phases["forward"] - usual.size(4).phases["forward"]
    assert kept == pytest.approx(2 * WEIGHTS, rel=0.05)


@pytest.mark.slow
def test_optimizers_of_8_bits_hold_the_state_of_bitsandbytes_and_that_of_embeddings_in_32(path: str) -> None:
    embedding = 1000 * 64
    small = 2 * 64 + 64 + 2 * 32 * 64  # norms and the projections of keys and values, below 4096 elements
    matrices = WEIGHTS - embedding - small
    held = bytes_of(planned(path, optim="adamw_8bit"), "optimizer state")
    assert held == pytest.approx(2 * matrices * (1 + 4 / 256) + 8 * (embedding + small), rel=0.015)


@pytest.mark.slow
def test_ranks_have_copies_with_buckets_of_gradients_or_parts_under_fsdp2(path: str) -> None:
    one, copies = planned(path), planned(path, ranks=2)
    parts = planned(path, ranks=2, fsdp=True)
    assert bytes_of(copies, "parameters") == bytes_of(one, "parameters")
    assert bytes_of(copies, "other tensors") - bytes_of(one, "other tensors") == pytest.approx(4 * WEIGHTS, rel=0.02)
    assert bytes_of(parts, "parameters") == pytest.approx(bytes_of(one, "parameters") / 2, rel=0.05)
    assert parts.step.num_parameters == WEIGHTS
    offloaded = planned(path, ranks=2, fsdp=True, offloads=True)
    assert bytes_of(offloaded, "optimizer state") == 0 < bytes_of(parts, "optimizer state")


@pytest.mark.slow
def test_a_key_that_asks_for_a_kind_of_gpu_but_changes_no_size_is_left_out(path: str) -> None:
    assert planned(path, tf32=True).size(4).allocated_bytes == planned(path).size(4).allocated_bytes


@pytest.mark.slow
def test_sharding_that_the_trainer_offloads_is_planned_so_and_no_other(path: str) -> None:
    by_a_word = planned(path, ranks=2, fsdp="full_shard auto_wrap offload")
    assert bytes_of(by_a_word, "optimizer state") == 0
    without_fsdp = planned(path, offloads=True)
    assert bytes_of(without_fsdp, "optimizer state") == bytes_of(planned(path), "optimizer state") > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        {"bf16": True, "fsdp": True},
        {"gradient_checkpointing": False},  # by DDP
    ],
    ids=lambda keys: " ".join(keys),
)
def test_many_layers_are_planned_from_few_and_take_what_all_of_them_take(keys: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 10}))
    tracer = RunTracer(run_of(tmp_path, ranks=2, **keys))
    few, whole = tracer.trace(), tracer.traced(None, sizes=[2])
    assert (few.num_layers, few.traced_layers) == (10, (4, 6))
    assert few.step.at(2) == whole.step.at(2)
    assert few.num_parameters == whole.num_parameters


@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        ({"num_hidden_layers": 11}, (5, 7, 9)),
        ({"num_hidden_layers": 8}, None),
        (
            {
                "model_type": "qwen3",
                "num_hidden_layers": 30,
                "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 10,
            },
            (12, 18, 24),
        ),
    ],
)
def test_few_layers_hold_two_periods_of_what_the_config_says_of_each(
    changes: dict[str, Any], counts: tuple[int, ...] | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | changes))
    assert RunTracer(run_of(tmp_path)).few_layers() == counts


@pytest.mark.slow
def test_a_model_whose_later_layers_differ_is_traced_whole(tmp_path: Path) -> None:
    mixture = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 10}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32, "mlp_only_layers": [8]}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | mixture | experts))
    tracer = RunTracer(run_of(tmp_path))
    assert tracer.few_layers() == (4, 6, 8)
    assert tracer.traced_with(4, 6, 8) is None  # the ninth layer has no experts


def test_rows_are_as_long_as_the_keys_the_trainer_or_the_model_say(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"max_position_embeddings": 96}))

    def length(seq_len: int | None, **keys: Any) -> int:
        return HuggingFaceRun.of(str(tmp_path), trainer="transformers", keys=keys, seq_len=seq_len, ranks=1).seq_len

    assert (length(None), length(200)) == (96, 200)


def test_the_assumptions_are_one_sentence(path: str) -> None:
    import transformers

    run = run_of(path, ranks=2, use_peft=True, lora_r=4, dtype="bfloat16", optim="paged_adamw_8bit")
    assert run.assumptions == (
        f"Assumed: Trainer of transformers {transformers.__version__}; weights loaded in bfloat16; LoRA of rank 4;"
        " paged optimizer state not counted, as it can move to the host; a copy of the model on each rank (DDP); all"
        " else as its arguments say, and rows of up to 64 tokens, padded to the longest of a batch."
    )
    assert replace(run, mean_len=64).assumptions.endswith(", and rows of 64 tokens.")
    assert replace(run, mean_len=9).assumptions.endswith(", and rows of 9 tokens, padded to the longest of a batch.")


@pytest.mark.slow
def test_a_batch_is_padded_unless_its_rows_are_equally_long(path: str) -> None:
    padded = replace(run_of(path, dtype="bfloat16"), seq_len=48)
    uses_masks = {
        mean_len: [
            any(event.num_bytes == 2 * rows * 48 * 48 for event in traced.events(rows)) for rows in (1, 2)
        ]  # a mask of all pairs of tokens in bfloat16
        for mean_len in (None, 48)
        for traced in (RunTracer(replace(padded, mean_len=mean_len)).traced(1, sizes=[2, 1]),)
    }
    assert uses_masks == {None: [False, True], 48: [False, False]}


def test_a_mean_that_no_rows_have_is_refused(path: str) -> None:
    with pytest.raises(InputError) as caught:
        replace(run_of(path), mean_len=65)
    assert str(caught.value) == "`--mean-len` must be at most 64, the tokens of the longest row, but is 65 instead."


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"fsdp": True}, "`fsdp` needs several ranks: `--nproc_per_node` is 1."),
        ({"fsdp_config": "fsdp.json"}, "`fsdp_config` must be a mapping of keys, but is 'fsdp.json' instead."),
        ({"fsdp": True, "fsdp_config": {"version": 1}}, "FSDP1 is not planned: `fsdp_config.version` must be 2."),
        ({"gradient_accumulation_steps": 0}, "`gradient_accumulation_steps` must be at least 1, but is 0 instead."),
        ({"ddp_bucket_cap_mb": -1}, "`ddp_bucket_cap_mb` must be at least 1, but is -1 instead."),
        ({"use_dora": True, "load_in_8bit": True}, "`use_dora` is not planned with weights in 4 or 8 bits."),
    ],
)
def test_keys_that_cannot_be_planned_are_refused_before_a_trace(keys: dict[str, Any], sentence: str, path: str) -> None:
    with pytest.raises(InputError) as caught:
        run_of(path, **keys)
    assert str(caught.value).startswith(sentence)


@pytest.mark.slow
def test_what_the_trainer_refuses_is_refused_in_its_words(path: str) -> None:
    with pytest.raises(InputError, match=r"^TrainingArguments refuses these keys: .*adamw_9bit"):
        RunTracer(run_of(path, optim="adamw_9bit")).trace()


@pytest.mark.slow
def test_accelerate_and_the_environment_are_as_before(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    from accelerate.state import PartialState

    monkeypatch.setenv("WORLD_SIZE", "7")
    RunTracer(run_of(path, ranks=2)).traced(1, sizes=[2])
    assert os.environ["WORLD_SIZE"] == "7"
    assert "MASTER_PORT" not in os.environ
    assert PartialState._shared_state == {}
