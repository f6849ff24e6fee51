"""What every contestant trains: the same model, optimizer and data, on the same card."""

import functools
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torchtune.models.llama2 import llama2

from benchmarks.peers.card import Card, card_on
from benchmarks.peers.data import IGNORED, SEED, VOCAB_SIZE, Batch, Rows, padded
from torchtune_adaptive.engine.memory.meter import device_memory_bytes

STEPS = 20  # of the training that follows a search
SMALL = {
    "vocab_size": VOCAB_SIZE,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 4,
    "embed_dim": 64,
    "intermediate_dim": 176,
    "attn_dropout": 0.1,
}
LARGE = {
    "vocab_size": 32_000,
    "num_layers": 6,
    "num_heads": 12,
    "num_kv_heads": 12,
    "embed_dim": 768,
    "intermediate_dim": 2048,
    "attn_dropout": 0.1,
}


class Model(nn.Module):
    """A Llama that gives the loss."""

    def __init__(self, max_seq_len: int, geometry: Mapping[str, Any] = SMALL) -> None:
        super().__init__()
        self.decoder: Any = llama2(max_seq_len=max_seq_len, **geometry)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.decoder(tokens).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


class Task:
    """A limit and data on a device, and what a contestant has done there so far.

    Args:
        limit_bytes: None: what the device has.
        geometry: of the model.

    Attributes:
        card: contestants search and train inside ``with task.card:``; this package searches by its own meter.
        steps: optimizer steps completed.
    """

    def __init__(
        self, device: torch.device, limit_bytes: int | None, rows: Rows, geometry: Mapping[str, Any] = SMALL
    ) -> None:
        self.device = device
        self.limit_bytes = limit_bytes or device_memory_bytes(device)
        self.rows = rows
        self._geometry = geometry
        self.steps = 0
        self.card: Card = card_on(device, device_memory_bytes(device))
        self._warm_up()
        self.card = card_on(device, self.limit_bytes)
        self.steps = 0

    def collate(self, rows: Sequence[np.ndarray]) -> Batch:
        """Rows as a batch on the host."""
        with self.card.on_host():
            return padded(rows)

    def take(self, start: int, rows: int) -> Batch:
        """A batch of ``rows`` rows of the data from ``start`` on, on the card."""
        return self.card.place(self.collate(self.rows.in_order(start, rows)))

    def new_model(self) -> Model:
        with self.device:
            return Model(self.rows.greatest, self._geometry)

    def new_optimizer(self, model: nn.Module) -> torch.optim.AdamW:
        """AdamW with its defaults, whose completed steps are counted."""
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step = optimizer.step

        @functools.wraps(step)
        def step_and_count(*args: Any, **kwargs: Any) -> Any:  # a search of ours runs no hooks
            result = step(*args, **kwargs)
            self.steps += 1
            return result

        optimizer.step = step_and_count
        return optimizer

    def train_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
        """A whole step on a batch that is on the device."""
        model(**batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    def trained(self, size: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
        """Trains at ``size``; whether it survived, in words."""
        self.card.hold(model, optimizer)
        for step in range(STEPS):
            try:
                with self.card:
                    self.train_step(model, optimizer, self.take(step * size, size))
            except torch.OutOfMemoryError:
                return f"OOM at step {step + 1}"
        return "yes"

    def _warm_up(self) -> None:
        """Two steps of another model, so that no search includes what Python and PyTorch do once per process."""
        seed_everything()
        model = self.new_model()
        optimizer = self.new_optimizer(model)
        with self.card:
            for _ in range(2):
                self.train_step(model, optimizer, self.take(0, 1))
        seed_everything()


def seed_everything() -> None:
    """Seed the generators of Python, NumPy and PyTorch, the same in every process of this benchmark."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
