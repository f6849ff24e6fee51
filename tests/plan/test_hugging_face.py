"""A run of a Hugging Face model, built from its config.json alone."""

import functools
import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchtune_adaptive.errors import InputError
from torchtune_adaptive.plan.any_loop import plan_max_batch_size
from torchtune_adaptive.plan.decide import Plan
from torchtune_adaptive.plan.hugging_face import HuggingFaceRun
from torchtune_adaptive.plan.trace.loop import trace_loop

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "tie_word_embeddings": False,
}
WEIGHTS = 2 * 1000 * 64 + 3 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 128 + 2 * 64) + 64


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("llama")
    (directory / "config.json").write_text(json.dumps(LLAMA))
    return str(directory)


@functools.cache  # a plan takes a second
def planned(path: str, **options: Any) -> Plan:
    run = HuggingFaceRun(path=path, seq_len=128, **options)
    functions = run.build_model, run.build_optimizer, run.train_step, run.make_batch
    return plan_max_batch_size(*functions, memory="24GiB", ranks=run.ranks, batch_sizes=[4])


def bytes_of(plan: Plan, kind: str) -> float:
    return plan.decisive.asked[0].kinds[kind]


@pytest.mark.slow
def test_weights_gradients_and_optimizer_state_have_the_types_of_the_run(path: str) -> None:
    low, full, mixed = (planned(path), planned(path, dtype="fp32"), planned(path, dtype="mixed"))
    assert [plan.step.num_parameters for plan in (low, full, mixed)] == [WEIGHTS] * 3
    wide = pytest.approx(4 * WEIGHTS, rel=0.02)  # the allocator rounds each tensor up
    assert [bytes_of(plan, "parameters") for plan in (low, full, mixed)] == [
        pytest.approx(2 * WEIGHTS, rel=0.03),
        wide,
        wide,
    ]
    assert bytes_of(full, "optimizer state") == pytest.approx(8 * WEIGHTS, rel=0.03)
    assert bytes_of(low, "activations") < bytes_of(full, "activations")


@pytest.mark.slow
def test_checkpointing_and_a_chunked_loss_take_less(path: str) -> None:
    usual = planned(path)
    assert planned(path, checkpointing=False).size(64).allocated_bytes > usual.size(64).allocated_bytes
    chunked = planned(path, loss="chunked")
    assert chunked.size(64).allocated_bytes < usual.size(64).allocated_bytes - 2 * 64 * 128 * 1000
    assert chunked.step.num_parameters == WEIGHTS


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_many_layers_are_planned_from_few_and_take_what_all_of_them_take(tmp_path: Path, ranks: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 10}))
    run = HuggingFaceRun(path=str(tmp_path), seq_len=64, ranks=ranks)
    few, whole = (
        run.trace(),
        trace_loop(run.build_model, run.build_optimizer, run.train_step, run.make_batch, ranks=ranks),
    )
    assert (few.num_layers, few.traced_layers) == (10, (4, 6))
    assert [few.step.at(rows) for rows in (1, 2, 5)] == [whole.step.at(rows) for rows in (1, 2, 5)]
    assert (few.num_parameters, few.num_trainable) == (whole.num_parameters, whole.num_trainable)


def _run_of(directory: Path, **changes: Any) -> HuggingFaceRun:
    (directory / "config.json").write_text(json.dumps(LLAMA | changes))
    return HuggingFaceRun(path=str(directory), seq_len=64)


@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        ({"num_hidden_layers": 10}, (4, 6, 8)),
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
    assert _run_of(tmp_path, **changes)._few_layers() == counts


@pytest.mark.slow
def test_a_model_whose_later_layers_differ_is_traced_whole(tmp_path: Path) -> None:
    mixture = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 10}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32, "mlp_only_layers": [8]}
    run = _run_of(tmp_path, **mixture, **experts)
    with torch.device("meta"):
        few, more, whole = (
            sum(one.numel() for one in replace(run, num_layers=number).build_model().parameters())
            for number in (4, 6, None)
        )
    assert run._num_parameters() == whole != few + 3 * (more - few)  # the ninth layer has no experts


@pytest.mark.slow
def test_two_ranks_hold_half_of_the_weights(path: str) -> None:
    one, two = planned(path), planned(path, ranks=2)
    assert bytes_of(two, "parameters") == pytest.approx(bytes_of(one, "parameters") / 2, rel=0.05)
    assert two.step.num_parameters == WEIGHTS


@pytest.mark.slow
def test_sgd_has_no_state_and_accumulation_keeps_gradients(path: str) -> None:
    assert "optimizer state" not in planned(path, optimizer="sgd").decisive.used.kinds
    once, twice = planned(path, optimizer="sgd"), planned(path, optimizer="sgd", micro_steps=4)
    assert twice.decisive.asked[0].phases["forward"] > once.decisive.asked[0].phases["forward"]


@pytest.mark.slow
def test_bitsandbytes_is_imported_before_the_trace_pretends_to_have_a_gpu(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu: dict[str, bool] = {}
    real = importlib.import_module

    def recorded(name: str, package: str | None = None) -> Any:
        on_gpu.setdefault(name, torch.cuda.is_available())
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", recorded)
    planned(path, optimizer="adafactor")
    assert on_gpu["transformers.optimization"]
    assert "bitsandbytes" in on_gpu
    assert not on_gpu["bitsandbytes"]


@pytest.mark.slow
def test_a_model_without_fused_attention_has_what_transformers_chooses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Gemma2PreTrainedModel

    monkeypatch.setattr(Gemma2PreTrainedModel, "_supports_sdpa", False)  # as transformers 5.23 has it, 5.20 not
    gemma = LLAMA | {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "head_dim": 16}
    (tmp_path / "config.json").write_text(json.dumps(gemma))
    run = HuggingFaceRun(path=str(tmp_path), seq_len=128)
    assert "; eager attention, as the model has no other in transformers; " in run.assumptions
    plan = planned(str(tmp_path))
    assert (
        plan.size(9).allocated_bytes - plan.size(8).allocated_bytes > 3 * 4 * 128 * 128
    )  # attention weights of four heads


GPT = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4}
GPT |= {"vocab_size": 1000, "n_positions": 128}


@pytest.mark.slow
def test_rows_longer_than_a_table_of_positions_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT))
    run = HuggingFaceRun(path=str(tmp_path), seq_len=129)
    with torch.device("meta"), pytest.raises(InputError) as caught:
        run.build_model()
    assert run.longest_row == 128
    assert str(caught.value) == (
        f"`--seq-len` must be at most 128, the number of positions that {str(tmp_path)!r} has embeddings for, but is"
        " 129 instead."
    )
    assert planned(str(tmp_path)).fits  # rows of 128 tokens


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    quantized = LLAMA | {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    (tmp_path / "config.json").write_text(json.dumps(quantized))
    with pytest.raises(InputError) as caught:
        planned(str(tmp_path))
    assert str(caught.value) == (
        f"Quantized weights are not planned, but {str(tmp_path)!r} has the `quantization_config`"
        " {'quant_method': 'bitsandbytes', 'load_in_4bit': True}."
    )


@pytest.mark.slow
def test_rotary_positions_take_rows_of_any_length(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"max_position_embeddings": 64}))
    assert planned(str(tmp_path)).fits  # rows of 128 tokens


def test_the_assumptions_are_one_sentence(path: str) -> None:
    run = HuggingFaceRun(path=path, seq_len=8, lora_rank=16, lora_modules=("q_proj", "v_proj"), ranks=2)
    assert run.assumptions == (
        "Assumed: weights and computation in bfloat16; every layer recomputed in the backward pass; LoRA of rank 16 on"
        " q_proj, v_proj with no dropout; optimizer adamw_torch_fused; loss over all logits at once; flash attention"
        " without a padding mask; gradients clipped; each layer sharded by FSDP2."
    )


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"dtype": "fp8"}, "`dtype` must be one of bf16, fp32, mixed, but is 'fp8' instead."),
        (
            {"optimizer": "lion"},
            "`optimizer` must be one of adamw_torch, adamw_torch_fused, sgd, adafactor, but is 'lion' instead.",
        ),
        ({"loss": "none"}, "`loss` must be one of full, chunked, but is 'none' instead."),
        ({"lora_rank": 0}, "`lora` must be at least 1, but is 0 instead."),
        ({"lora_dropout": 1.0}, "`lora_dropout` must be in [0, 1), but is 1.0 instead."),
        ({"micro_steps": 0}, "`micro_steps` must be at least 1, but is 0 instead."),
    ],
)
def test_a_bad_value_is_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        HuggingFaceRun(path="x", seq_len=8, **options)
    assert str(caught.value) == sentence


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        HuggingFaceRun(path=str(tmp_path), seq_len=8).build_model()
    message = str(caught.value)
    assert message.startswith(f"`--hf` {str(tmp_path)!r} is no causal language model: ")
    assert "\n" not in message


def test_a_missing_package_is_named(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with torch.device("meta"), pytest.raises(InputError) as caught:
        HuggingFaceRun(path=path, seq_len=8, lora_rank=4).build_model()
    assert str(caught.value) == "A plan of LoRA needs peft: `pip install peft` installs it."


def test_the_model_is_built_without_memory(path: str) -> None:
    with torch.device("meta"):
        model = HuggingFaceRun(path=path, seq_len=8).build_model()
    assert isinstance(model, nn.Module)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_code_beside_a_config_is_not_run_and_nobody_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    made = tmp_path / "made"
    (tmp_path / "mine.py").write_text(f"import os\n\nos.mkdir({str(made)!r})\nConfig = None\n")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}))
    with pytest.raises(InputError, match=r"^`--hf` .* is no causal language model: "):
        planned(str(tmp_path))
    assert not made.exists()
