"""TRL's trainers, traced on a model without weights, as `tune-adaptive plan --hf` plans them."""

# pyright: reportMissingImports=false

import functools
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from torchtune_adaptive.errors import InputError
from torchtune_adaptive.output import quietly
from torchtune_adaptive.plan.any_loop import plan_of_loop
from torchtune_adaptive.plan.decide import Plan
from torchtune_adaptive.plan.gpu import Card
from torchtune_adaptive.plan.hugging_face.changes import ways_to_fit
from torchtune_adaptive.plan.hugging_face.run import HuggingFaceRun
from torchtune_adaptive.plan.hugging_face.tracing import RunTracer
from torchtune_adaptive.plan.hugging_face.training import without_torchao
from torchtune_adaptive.plan.hugging_face.trl_stand_ins import tokens_of_a_tile
from torchtune_adaptive.plan.trace.events import Events
from torchtune_adaptive.plan.trace.loading import load

pytestmark = pytest.mark.integrations

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 4000,
    "tie_word_embeddings": False,
}
LINEAR = 4 * (4 * 256 * 256 + 3 * 256 * 512)
ADAPTERS = 4 * 16 * (4 * (256 + 256) + 3 * (256 + 512))  # of rank 16 on all of these
WEIGHTS = LINEAR + 2 * 4000 * 256 + (2 * 4 + 1) * 256


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("llama")
    (directory / "config.json").write_text(json.dumps(LLAMA))
    return str(directory)


def run_of(
    path: str, *, trainer: str = "sft", ranks: int = 1, seq_len: int = 1024, mean_len: int | None = None, **keys: Any
) -> HuggingFaceRun:
    return HuggingFaceRun(path=path, seq_len=seq_len, trainer=trainer, keys=keys, ranks=ranks, mean_len=mean_len)


def plan_of(run: HuggingFaceRun, memory: str = "24GiB") -> Plan:
    card = Card.named(memory)
    return plan_of_loop(RunTracer(run).trace(), card, ranks=run.ranks, batch_sizes=[1], title="", assumptions="")


@functools.cache
def planned(path: str, **options: Any) -> Plan:
    return plan_of(run_of(path, **options))


def bytes_of(plan: Plan, kind: str) -> float:
    return plan.size(4).kinds.get(kind, 0)


def test_the_loss_of_a_large_batch_works_on_one_tile_of_tokens(path: str) -> None:
    tracer = RunTracer(run_of(path))
    assert tracer.sizes() == [5, 6, 1, 2, 3]  # 5 rows of 1023 tokens are more than a tile
    assert tokens_of_a_tile() == 4096
    few = tracer.traced(4, sizes=tracer.sizes())
    assert few.step.at(40) == tracer.traced(4, sizes=[40, 41]).events(40)
    assert few.step.at(4) == tracer.traced(4, sizes=[4, 3]).events(4)


@pytest.mark.parametrize(
    "options",
    [
        {"use_peft": True, "fsdp": True},
        {"use_peft": True},  # by DDP, as the following; q_proj and v_proj have adapters
        {"use_peft": True, "load_in_4bit": True, "dtype": "bfloat16", "gradient_checkpointing": False},
        {"trainer": "dpo"},  # whose reference is among the other tensors
    ],
    ids=lambda options: " ".join(options),
)
def test_many_layers_on_ranks_are_planned_from_few_and_take_what_all_of_them_take(
    options: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 10}))
    tracer = RunTracer(run_of(str(tmp_path), ranks=2, **options))
    few, whole = tracer.trace(), tracer.traced(None, sizes=tracer.sizes())
    assert few.traced_layers == (4, 6)
    assert all(few.step.at(rows) == whole.step.at(rows) for rows in (1, max(tracer.sizes()) + 5))


@pytest.mark.parametrize("trainer", ["sft", "dpo"])
def test_rows_that_are_padded_need_a_mask_in_each_layer(trainer: str, path: str) -> None:
    run = run_of(path, trainer=trainer, dtype="bfloat16", use_peft=True, gradient_checkpointing=False)
    padded, full = plan_of(run), plan_of(replace(run, mean_len=run.seq_len))
    masks = 4 * 16 * 1024**2 * 2 * (2 if trainer == "dpo" else 1)  # 4 layers, 16 rows, in bfloat16
    assert padded.size(16).allocated_bytes - full.size(16).allocated_bytes == pytest.approx(masks, rel=0.2)


def test_rows_one_after_the_other_take_what_their_mean_says(path: str) -> None:
    options: dict[str, Any] = {"dtype": "bfloat16", "padding_free": True, "attn_implementation": "flash_attention_2"}
    options |= {"max_length": None}  # which TRL asks for
    run = run_of(path, **options)
    assert run.usual_len == 1024
    short = plan_of(replace(run, mean_len=512))
    assert short.size(15).allocated_bytes == pytest.approx(plan_of(run).size(8).allocated_bytes, rel=0.01)  # 8 x 1024
    with pytest.raises(InputError) as caught:
        run_of(path, packing=True, mean_len=512)
    assert str(caught.value) == "`--mean-len` is 512, but packed rows have 1024 tokens each."


def test_weights_of_8_bits_are_loaded_and_multiplied_as_on_a_gpu(path: str) -> None:
    options: dict[str, Any] = {"use_peft": True, "dtype": "bfloat16", "lora_target_modules": "all-linear"}
    plain, packed = planned(path, **options), planned(path, **options, load_in_8bit=True)
    assert packed.step.num_parameters == WEIGHTS + ADAPTERS
    saved = bytes_of(plain, "parameters") - bytes_of(packed, "parameters")
    assert saved == pytest.approx(LINEAR + 2 * ADAPTERS, rel=0.03)
    model = run_of(path, load_in_8bit=True, dtype="bfloat16").model
    assert model.quantized is not None
    with torch.device("meta"):
        _, embedding, head, norm, down, *_ = model.quantized.loads(model.build())
    assert [embedding, head, norm] == [load([2 * 4000 * 256])] * 2 + [load([2 * 256])]
    values = 256 * 512
    assert down == load([4 * 256, values], temporary=[2 * values, 2 * values])
    events = RunTracer(run_of(path, **options, load_in_8bit=True)).traced(1, sizes=[2]).events(2)
    assert sum(event.num_bytes == 4 * 2 * 1024 * 512 for event in events) >= 2  # in int32, of two layers of the MLP


@pytest.mark.parametrize("trainer", ["sft", "transformers"])
def test_ligers_kernels_take_less_and_leave_transformers_as_it_was(trainer: str, path: str) -> None:
    from transformers.models.llama import modeling_llama

    before = dict(vars(modeling_llama))
    options: dict[str, Any] = {"trainer": trainer, "dtype": "bfloat16", "gradient_checkpointing": False}
    liger = planned(path, **options, use_liger_kernel=True)
    assert vars(modeling_llama) == before
    usual = planned(path, **options)
    assert liger.size(16).allocated_bytes < 0.9 * usual.size(16).allocated_bytes


def test_weights_of_4_bits_take_half_a_byte_and_their_scales(path: str) -> None:
    options: dict[str, Any] = {"use_peft": True, "dtype": "bfloat16", "lora_target_modules": "all-linear"}
    plain, packed = planned(path, **options), planned(path, **options, load_in_4bit=True)
    nested = planned(path, **options, load_in_4bit=True, use_bnb_nested_quant=True)
    assert plain.step.num_parameters == packed.step.num_parameters == WEIGHTS + ADAPTERS
    saved = bytes_of(plain, "parameters") - bytes_of(packed, "parameters")
    assert saved == pytest.approx(1.5 * LINEAR + 2 * ADAPTERS, rel=0.03)  # whose adapters TRL keeps in bfloat16
    scales, of_nested = (bytes_of(plan, "other tensors") for plan in (packed, nested))
    assert scales == pytest.approx(LINEAR / 64 * 4, rel=0.3)  # the allocator rounds up
    assert of_nested < scales


@pytest.mark.parametrize("is_nested", [False, True])
def test_weights_of_4_bits_are_loaded_in_the_order_of_their_names(path: str, is_nested: bool) -> None:
    """As transformers loads them, after it has taken all they need at once: its names of layers are numbers."""
    keys: dict[str, Any] = {"load_in_4bit": True, "dtype": "bfloat16", "use_bnb_nested_quant": is_nested}
    with torch.device("meta"):
        model = run_of(path, **keys).model
        assert model.quantized is not None
        at_once, *loads = model.quantized.loads(model.build())
    embedding, norm, attention, mlp = (2 * 4000 * 256, 2 * 256, 256 * 256, 256 * 512)

    def packed(values: int) -> Events:
        num_bytes, blocks = values // 2, values // 64
        if is_nested:
            return load([num_bytes, blocks], temporary=[2 * values, 4 * blocks])
        return load([4 * blocks, num_bytes], temporary=[2 * values])

    layer = [load([norm]), *[packed(mlp)] * 3, load([norm]), *[packed(attention)] * 4]
    assert loads == [load([embedding]), load([embedding]), *layer * 4, load([norm])]
    taken, given_back = at_once
    assert (taken.num_bytes, given_back.taken) == (2 * embedding + 9 * norm + LINEAR // 2, 0)


def test_pairs_have_a_reference_unless_there_are_adapters_or_it_is_computed_before(path: str) -> None:
    options: dict[str, Any] = {"trainer": "dpo", "dtype": "bfloat16"}
    pairs, before = planned(path, **options), planned(path, **options, precompute_ref_log_probs=True)
    adapters = planned(path, **options, use_peft=True)
    assert bytes_of(pairs, "other tensors") - bytes_of(before, "other tensors") == pytest.approx(2 * WEIGHTS, rel=0.03)
    assert bytes_of(adapters, "other tensors") < WEIGHTS
    assert pairs.size(8).allocated_bytes > planned(path, dtype="bfloat16").size(8).allocated_bytes


def test_the_trainers_own_arguments_change_what_a_step_takes(path: str) -> None:
    usual = planned(path, dtype="bfloat16").size(16).allocated_bytes
    kept = planned(path, dtype="bfloat16", gradient_checkpointing=False).size(16).allocated_bytes
    offloaded = planned(path, dtype="bfloat16", gradient_checkpointing=False, activation_offloading=True)
    assert usual < kept
    assert offloaded.size(16).allocated_bytes < kept
    full = plan_of(run_of(path, dtype="bfloat16", mean_len=1024)).size(16).allocated_bytes
    packed = planned(path, dtype="bfloat16", packing=True, attn_implementation="flash_attention_2")
    assert packed.size(16).allocated_bytes == pytest.approx(full, rel=0.02)
    masked = planned(path, dtype="bfloat16", packing=True)
    assert masked.size(16).allocated_bytes > 1.2 * packed.size(16).allocated_bytes  # a matrix of all pairs of tokens


def test_short_rows_whose_smallest_tensors_are_not_offloaded_are_planned(path: str) -> None:
    tracer = RunTracer(run_of(path, seq_len=512, use_peft=True, dtype="bfloat16", activation_offloading=True))
    followed = tracer.traced(None, sizes=tracer.sizes()).step
    assert {len(followed.at(rows)) for rows in (1, 2)} != {len(followed.at(rows)) for rows in (3, 4)}
    assert followed.at(6) == tracer.traced(None, sizes=[6, 7]).events(6)


def test_adapters_are_named_as_trl_takes_them_and_refused_with_the_reason_of_peft(path: str) -> None:
    def parameters(**keys: Any) -> int:
        run = run_of(path, use_peft=True, **keys)
        with quietly(), without_torchao(), torch.device("meta"):
            return sum(one.numel() for one in run.with_adapters(run.model.build()).parameters())

    assert parameters(lora_target_modules=["all-linear"]) == parameters(lora_target_modules="all-linear")
    wrong = {
        "lora_r": (0, "ValueError: `r` should be a positive"),
        "lora_dropout": (7.0, "ValueError: dropout probability"),
        "lora_target_modules": (5, "TypeError: "),
        "lora_modules_to_save": (5, "TypeError: "),
    }
    for key, (value, reason) in wrong.items():
        with pytest.raises(InputError) as caught:
            parameters(**{key: value})
        assert str(caught.value).startswith(f"peft refuses what the `lora_` keys say: {reason}")


def test_adapters_under_fsdp2_are_sharded_with_the_weights(path: str) -> None:
    options: dict[str, Any] = {"use_peft": True, "dtype": "bfloat16"}
    one, two = planned(path, **options), planned(path, **options, ranks=2, fsdp=True)
    assert bytes_of(two, "parameters") == pytest.approx(bytes_of(one, "parameters") / 2, rel=0.05)
    with pytest.raises(InputError) as caught:
        run_of(path, **options, ranks=2, fsdp=True, load_in_4bit=True)
    assert str(caught.value) == "`load_in_4bit` and `load_in_8bit` are not planned together with `fsdp`."


def test_ways_to_fit_say_which_keys_make_it_fit(path: str) -> None:
    run, memory = run_of(path, seq_len=64), "560MiB"
    plan = plan_of(run, memory)
    assert not plan.fits
    ways = list(ways_to_fit(run, plan, lambda changed: plan_of(changed, memory)))
    found = {way.change: way.fits for way in ways}
    assert list(found)[:2] == ["dtype=bfloat16", "use_peft=True dtype=bfloat16"]
    assert found["use_peft=True dtype=bfloat16"]


def test_weights_of_8_bits_have_a_way_out_by_checkpointing_that_reaches_their_inputs(path: str) -> None:
    run = run_of(path, dtype="bfloat16", use_peft=True, load_in_8bit=True)
    planned = plan_of(run)
    reached, packed = itertools.islice(ways_to_fit(run, planned, plan_of), 2)
    assert reached.change == "gradient_checkpointing_kwargs.use_reentrant=True"
    assert reached.length is not None
    assert reached.length.largest_batch_size is not None
    assert planned.decisive.largest_batch_size is not None
    assert reached.length.largest_batch_size > 1.3 * planned.decisive.largest_batch_size
    assert packed.change == "use_peft=True dtype=bfloat16 load_in_4bit=True load_in_8bit=False"


def test_a_plan_leaves_trl_as_it_was(path: str) -> None:
    from trl.kernels import chunked_logprob

    planned(path, dtype="bfloat16")
    assert not chunked_logprob._use_triton(torch.device("cpu"))
    assert "range" not in vars(chunked_logprob)
