"""A model of transformers, built from its config.json alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from torchtune_adaptive.engine.memory.operations import OperationMode
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.plan.hugging_face.model import LanguageModel
from torchtune_adaptive.plan.hugging_face.quantized import unpacked
from torchtune_adaptive.plan.hugging_face.run_keys import ModelKeys

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
GPT = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4}
GPT |= {"vocab_size": 1000, "n_positions": 128}


class OperationsSeen(OperationMode):
    """Notes the shapes of the tensors that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        self.shapes |= {tuple(one.shape) for one in tree_leaves(result) if isinstance(one, torch.Tensor)}
        return result


def model_of(folder: Path, config: dict[str, Any], **keys: Any) -> LanguageModel:
    (folder / "config.json").write_text(json.dumps(config))
    return LanguageModel(str(folder), ModelKeys(**keys))


def built(model: LanguageModel, num_layers: int | None = None) -> nn.Module:
    with torch.device("meta"):
        return model.build(num_layers)


@pytest.mark.slow
def test_a_model_is_built_without_memory_with_its_first_layers(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    model = model_of(tmp_path, LLAMA | {"model_type": "qwen3", "layer_types": kinds}, dtype="bfloat16")
    two: Any = built(model, 2)
    assert {(one.device.type, one.dtype) for one in two.parameters()} == {("meta", torch.bfloat16)}
    assert two.config.layer_types == kinds[:2]
    assert (model.num_layers, [kind for (kind,) in model.kinds_of_layers]) == (3, kinds)
    per_layer = sum(one.numel() for one in two.model.layers[0].parameters())
    whole, of_two = (sum(one.numel() for one in some.parameters()) for some in (built(model), two))
    assert whole == of_two + per_layer


@pytest.mark.slow
@pytest.mark.parametrize("nested", [False, True])
def test_layers_of_4_bits_unpack_their_weights_in_the_forward_pass_with_the_same_result(nested: bool) -> None:
    bitsandbytes: Any = pytest.importorskip("bitsandbytes.nn")
    layer = bitsandbytes.Linear4bit(64, 128, compute_dtype=torch.float32, compress_statistics=nested)
    layer.to("cpu")
    rows = torch.randn(3, 64)
    expected = layer(rows)
    with unpacked(), OperationsSeen() as seen:
        found = layer(rows)
    assert torch.allclose(found, expected, atol=1e-5)
    assert (128, 64) in seen.shapes
    with OperationsSeen() as seen:
        layer(rows)
    assert (128, 64) not in seen.shapes


@pytest.mark.slow
def test_weights_have_the_type_that_the_keys_or_the_config_say(tmp_path: Path) -> None:
    assert model_of(tmp_path, LLAMA).dtype == torch.float32
    assert model_of(tmp_path, LLAMA, dtype="auto").dtype == torch.float32
    assert model_of(tmp_path, LLAMA | {"torch_dtype": "bfloat16"}, dtype="auto").dtype == torch.bfloat16
    assert model_of(tmp_path, LLAMA, dtype="float16").dtype == torch.float16
    with pytest.raises(InputError) as caught:
        _ = model_of(tmp_path, LLAMA, dtype="int33").dtype
    assert str(caught.value) == "`dtype` must be auto or a type of torch such as bfloat16, but is 'int33' instead."


@pytest.mark.slow
def test_flash_attention_needs_not_be_installed_and_takes_no_matrix_of_masks(tmp_path: Path) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    model: Any = built(model_of(tmp_path, LLAMA, attn_implementation="flash_attention_2"))
    name = model.config._attn_implementation
    queries, keys = torch.ones(2, 4, 8, 16), torch.ones(2, 2, 8, 16)
    padding = torch.ones(2, 8, dtype=torch.bool)
    assert AttentionMaskInterface()[name](attention_mask=padding) is None
    attended, _ = AttentionInterface()[name](model, queries, keys, keys, None, scaling=0.25)
    assert torch.equal(attended, torch.ones(2, 8, 4, 16))
    padding[1, 5:] = False
    mask = AttentionMaskInterface()[name](attention_mask=padding)
    with OperationsSeen() as seen:
        attended, _ = AttentionInterface()[name](model, queries, keys, keys, mask, scaling=0.25)
    assert torch.equal(attended, padding[..., None, None].expand(2, 8, 4, 16).float())
    assert (13, 4, 16) in seen.shapes  # queries without padding


@pytest.mark.slow
def test_rows_longer_than_a_table_of_positions_are_refused(tmp_path: Path) -> None:
    model = model_of(tmp_path, GPT)
    with pytest.raises(InputError) as caught:
        model.require_row_length(built(model), 129)
    assert model.longest_row == 128
    assert str(caught.value) == (
        f"`--seq-len` must be at most 128, the number of positions that {str(tmp_path)!r} has embeddings for, but is"
        " 129 instead."
    )
    model.require_row_length(built(model), 128)
    rotary = model_of(tmp_path, LLAMA | {"max_position_embeddings": 64})
    rotary.require_row_length(built(rotary), 128)  # computed for rows of any length


def test_weights_that_are_quantized_on_disk_are_refused(tmp_path: Path) -> None:
    quantized = LLAMA | {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    with pytest.raises(InputError) as caught:
        built(model_of(tmp_path, quantized))
    assert str(caught.value) == (
        f"Weights that are quantized on disk are not planned, but {str(tmp_path)!r} has the `quantization_config`"
        " {'quant_method': 'bitsandbytes', 'load_in_4bit': True}."
    )


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        built(LanguageModel(str(tmp_path), ModelKeys()))
    message = str(caught.value)
    assert message.startswith(f"`--hf` {str(tmp_path)!r} is no causal language model: ")
    assert "\n" not in message


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"hidden_size": -64}, {"hidden_size": "64"}, {"num_attention_heads": 0}])
def test_a_config_with_wrong_values_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        built(model_of(tmp_path, LLAMA | changes))
    assert str(caught.value).startswith(f"`--hf` {str(tmp_path)!r} cannot be built from its config: ")


def test_code_beside_a_config_is_not_run_and_nobody_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    made = tmp_path / "made"
    (tmp_path / "mine.py").write_text(f"import os\n\nos.mkdir({str(made)!r})\nConfig = None\n")
    model = model_of(tmp_path, {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}})
    with pytest.raises(InputError, match=r"^`--hf` .* is no causal language model: "):
        built(model)
    assert not made.exists()
