"""The device of a part, what it trains there, and the tables of its results."""

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from torchtune_adaptive.engine.memory.meter import device_memory_bytes
from torchtune_adaptive.text import format_bytes

SIMULATED = "Simulated GPU"  # the name of one
_GIB, _MIB = 2**30, 2**20
# The memory of cards that are imitated by a limit; one above the real card's memory means the whole card.
_CARDS_BYTES = (24 * _GIB, 40 * _GIB, 80 * _GIB)


def compute_alike() -> None:
    """Have the same operations give the same bits each time. Attention's gradients on a GPU do not by default."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)


@dataclass(frozen=True, kw_only=True)
class Section:
    """A table of a part's results, with the sentences that it needs, and its figures for a program to read."""

    title: str
    header: list[str]
    rows: list[list[str]] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    data: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A device and what is trained on it.

    Attributes:
        configs: the configs whose sizes are searched for, the most important first.
        seq_len: tokens of a row.
        limits_bytes: the memory of the cards that this one imitates.
        lora, full: the configs that other parts train.
        rank_model: the model for ranks that share the device; empty for the config's own. Few weights and many
            activations: weights pass through the host in every micro-step, and only activations fill the memory.
        deadline: when a part should end, by ``time.monotonic()``.
        directory: for all files that a part writes.
    """

    device: torch.device
    configs: tuple[str, ...]
    seq_len: int
    limits_bytes: tuple[int, ...]
    lora: str
    full: str
    rank_model: dict[str, Any]
    rank_limit_bytes: int
    deadline: float
    directory: Path

    @property
    def is_rehearsal(self) -> bool:
        """Whether there is no GPU to measure."""
        return self.device.type == "cpu"

    @property
    def is_simulated(self) -> bool:
        """Whether the GPU computes nothing, so that times mean nothing."""
        return self.device.type == "cuda" and torch.cuda.get_device_name(self.device) == SIMULATED

    @property
    def has_values(self) -> bool:
        """Whether losses and parameters are computed."""
        return not self.is_simulated or os.environ.get("SIMULATED_VALUES") == "1"

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def limit_text(self, limit_bytes: int) -> str:
        """A limit for a table."""
        whole = " (whole card)" if not self.is_rehearsal and limit_bytes == device_memory_bytes(self.device) else ""
        return format_bytes(limit_bytes) + whole


def stage_for(directory: Path, *, seconds: float) -> Stage:
    """The first CUDA device with models of 1, 3 and 8 billion parameters, or the CPU with tiny ones."""
    deadline = time.monotonic() + seconds
    if not torch.cuda.is_available():
        return Stage(
            device=torch.device("cpu"),
            configs=("tiny/full", "tiny/lora"),
            seq_len=64,
            limits_bytes=(8 * _MIB, 48 * _MIB, 96 * _MIB),
            lora="tiny/lora",
            full="tiny/full",
            rank_model={},
            rank_limit_bytes=256 * _MIB,
            deadline=deadline,
            directory=directory,
        )
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    card_bytes = device_memory_bytes(device)
    return Stage(
        device=device,
        configs=(
            "llama3_2/1B_full",
            "llama3_1/8B_lora",
            "llama3_2/1B_lora",
            "llama3_1/8B_full",
            "llama3_2/3B_full",
            "llama3_2/3B_lora",
        ),
        seq_len=2048,
        limits_bytes=tuple(sorted({min(limit_bytes, card_bytes) for limit_bytes in _CARDS_BYTES})),
        lora="llama3_2/1B_lora",
        full="llama3_2/1B_full",
        rank_model={
            "_component_": "torchtune.models.llama3_2.llama3_2",
            "vocab_size": 8192,
            "num_layers": 4,
            "num_heads": 8,
            "num_kv_heads": 4,
            "embed_dim": 512,
            "max_seq_len": 4096,
            "intermediate_dim": 2048,
        },
        rank_limit_bytes=4 * _GIB,
        deadline=deadline,
        directory=directory,
    )
