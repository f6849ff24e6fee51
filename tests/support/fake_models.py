"""Models for plans that are not torchtune's own: a component that a config can name."""

import sys
from typing import Any

import torch
from torch import nn
from torchtune.models.llama2 import llama2
from torchtune.modules import TransformerDecoder

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 64,
    "intermediate_dim": 96,
    "max_seq_len": 64,
}


def of_another_builder(depth: int) -> TransformerDecoder:
    """A model whose number of layers is not an argument ``num_layers`` of a builder of torchtune."""
    model: Any = llama2(num_layers=1, **SIZES)
    model.layers.extend(llama2(num_layers=1, **SIZES).layers[0] for _ in range(depth - 1))
    return model


class Scaled(nn.Module):
    """Scales what ``block`` returns by a buffer, which it makes in its first forward pass if it ``is_lazy``."""

    scale: torch.Tensor | None

    def __init__(self, block: nn.Module, *, is_lazy: bool) -> None:
        super().__init__()
        self.block = block
        self.register_buffer("scale", None if is_lazy else torch.ones(64), persistent=False)

    def forward(self, activations: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the shape of ``activations``."""
        if self.scale is None:
            self.scale = torch.ones(64)
        return self.block(activations) * self.scale


def with_a_buffer(num_layers: int, is_lazy: int) -> TransformerDecoder:
    """A model whose first layer has a buffer, made in its first forward pass if it ``is_lazy``."""
    model = llama2(num_layers=num_layers, **SIZES)
    block: Any = model.layers[0]
    block.mlp = Scaled(block.mlp, is_lazy=bool(is_lazy))
    return model


def of_images() -> nn.Module:
    """A model that is not a text decoder."""
    return nn.Linear(4, 4)


class FailsInItsStep(torch.optim.SGD):
    """An optimizer that raises an error in its step."""

    def step(self, closure: Any = None) -> Any:
        raise ZeroDivisionError("division by zero")


class EndsInItsStep(torch.optim.SGD):
    """An optimizer that would end its process."""

    def step(self, closure: Any = None) -> Any:
        sys.exit(0)


class InterruptedInItsStep(torch.optim.SGD):
    """An optimizer during whose step a user presses Ctrl-C."""

    def step(self, closure: Any = None) -> Any:
        raise KeyboardInterrupt


def interrupted() -> nn.Module:
    """A loss during whose set-up a user presses Ctrl-C."""
    raise KeyboardInterrupt
