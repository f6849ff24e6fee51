"""Models for plans that are not torchtune's own: a component that a config can name."""

import os
import signal
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
    """A model whose number of layers torchtune's builders are not asked for by name."""
    model: Any = llama2(num_layers=1, **SIZES)
    model.layers.extend(llama2(num_layers=1, **SIZES).layers[0] for _ in range(depth - 1))
    return model


def with_one_wide_layer(num_layers: int, wide: int) -> TransformerDecoder:
    """A model whose layer number ``wide`` holds more than the others."""
    model = llama2(num_layers=num_layers, **SIZES)
    if wide < len(model.layers):
        block: Any = model.layers[wide]
        block.mlp = nn.Sequential(nn.Linear(64, 512), nn.SiLU(), nn.Linear(512, 64))
    return model


def of_images() -> nn.Module:
    """A model that is no decoder of text."""
    return nn.Linear(4, 4)


class FailsInItsStep(torch.optim.SGD):
    """An optimizer with a mistake."""

    def step(self, closure: Any = None) -> Any:
        raise ZeroDivisionError("division by zero")


class EndsItsProcess(torch.optim.SGD):
    """An optimizer that breaks down, as one whose own code reads where nothing is."""

    def step(self, closure: Any = None) -> Any:
        os.kill(os.getpid(), signal.SIGSEGV)
