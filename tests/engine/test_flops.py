"""Operations are counted as the usual formula has them, whatever is computed again. A card's name tells its peak."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchtune.models.llama3 import llama3, lora_llama3
from torchtune.models.qwen2 import qwen2
from torchtune.modules import TransformerSelfAttentionLayer
from torchtune.training import set_activation_checkpointing

from torchtune_adaptive.engine.flops import MatrixProducts, peak_flops

LAYERS, WIDTH, ROWS, LENGTH = 3, 64, 2, 48
SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "num_layers": LAYERS,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": WIDTH,
    "max_seq_len": LENGTH,
    "intermediate_dim": 256,
}


def counted(model: nn.Module) -> float:
    """Operations of a forward and backward pass."""
    tokens = torch.arange(ROWS * LENGTH).reshape(ROWS, LENGTH)
    with MatrixProducts() as products:
        model(tokens).float().square().mean().backward()
    return products.flops


def formula(model: nn.Module, *, trained: int, frozen: int) -> float:
    """So many operations per token for trained and for frozen weights of matrices, and those of attention."""
    weights = [(one.requires_grad, one.numel()) for name, one in model.named_parameters() if one.ndim == 2]
    embedding = model.tok_embeddings.weight  # pyright: ignore  # is only looked up
    weights.remove((embedding.requires_grad, embedding.numel()))  # pyright: ignore
    per_token = sum((trained if is_trained else frozen) * number for is_trained, number in weights)
    return ROWS * LENGTH * (per_token + 12 * LAYERS * WIDTH * LENGTH)


def checkpointed(model: nn.Module) -> nn.Module:
    set_activation_checkpointing(model, {TransformerSelfAttentionLayer})
    return model


def reentrant(model: Any) -> nn.Module:
    """Each layer checkpointed as older trainers do it."""
    for layer in model.layers:
        layer.forward = _computed_again(layer.forward)
    return model


def _computed_again(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda hidden, **options: torch.utils.checkpoint.checkpoint(forward, hidden, use_reentrant=True)  # pyright: ignore


@pytest.mark.parametrize("build", [llama3, qwen2])
@pytest.mark.parametrize("changed", [lambda model: model, checkpointed, reentrant])
def test_a_model_takes_six_operations_per_weight_and_token(
    build: Callable[..., nn.Module], changed: Callable[[nn.Module], nn.Module]
) -> None:
    model = build(**SHAPE)
    expected = formula(model, trained=6, frozen=0)
    assert counted(changed(model)) == expected


def test_frozen_weights_take_four() -> None:
    model = lora_llama3(["q_proj", "v_proj"], lora_rank=4, lora_alpha=8, **SHAPE)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora" in name)
    expected = formula(model, trained=6, frozen=4)
    # The first layer passes no gradient on: that of its three projections is not computed.
    assert 0.97 * expected < counted(model) < expected


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L40", None),
    ],
)
def test_the_peak_is_that_of_the_card_in_bfloat16(
    monkeypatch: pytest.MonkeyPatch, name: str, peak: float | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert peak_flops(torch.device("cuda", 0), torch.bfloat16) == peak
    assert peak_flops(torch.device("cuda", 0), torch.float32) is None
    assert peak_flops(torch.device("cpu"), torch.bfloat16) is None
