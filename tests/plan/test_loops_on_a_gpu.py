"""Plans of loops reserve what torch's allocator for CUDA reserves, on the simulated GPU."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.apart import batch_sizes
from tests.support.ranks import run_alone
from torchtune_adaptive.plan.trace.loop import trace_loop

pytestmark = pytest.mark.simulated_gpu
WIDTH, TOKENS, VOCABULARY, SAMPLES = 256, 128, 4000, 9
Optimizer = torch.optim.Optimizer


class GroupedAttention(nn.Module):
    """Four heads that share one of keys and of values, called as ``nn.MultiheadAttention``."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH + 2 * WIDTH // 4)

    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor]:
        heads = self.project(hidden).split([WIDTH, WIDTH // 4, WIDTH // 4], -1)
        heads = [one.unflatten(-1, (-1, WIDTH // 4)).transpose(1, 2) for one in heads]
        found = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return (found.transpose(1, 2).flatten(2),)


class Layer(nn.Module):
    """Attention by torch's module, which has tokens first, or with heads that share keys and values."""

    def __init__(self, *, is_grouped: bool) -> None:
        super().__init__()
        self.attention: Any = GroupedAttention() if is_grouped else nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        return hidden + self.down(F.gelu(self.up(hidden)))


def build_model(*, is_grouped: bool) -> nn.Module:
    layers = (Layer(is_grouped=is_grouped) for _ in range(3))
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *layers, nn.Linear(WIDTH, VOCABULARY))


def backward(model: nn.Module, tokens: torch.Tensor) -> None:
    F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()


def cleared_last(model: nn.Module, optimizer: Optimizer, tokens: torch.Tensor) -> None:
    backward(model, tokens)
    optimizer.step()
    optimizer.zero_grad()


def cleared_first(model: nn.Module, optimizer: Optimizer, tokens: torch.Tensor) -> None:
    optimizer.zero_grad()
    backward(model, tokens)
    optimizer.step()


def filled_with_zeros(model: nn.Module, optimizer: Optimizer, tokens: torch.Tensor) -> None:
    backward(model, tokens)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def with_average(model: Any, optimizer: Optimizer, tokens: torch.Tensor) -> None:
    cleared_last(model, optimizer, tokens)
    if not hasattr(model, "average"):
        model.average = [one.detach().clone() for one in model.parameters()]


def make_batch(num_samples: int) -> torch.Tensor:
    return torch.zeros(num_samples, TOKENS, dtype=torch.long, device="cuda")


def reserved(train_step: Callable[..., None], is_grouped: bool) -> tuple[int, int]:
    """Reserved bytes, planned and of the third step."""
    build = partial(build_model, is_grouped=is_grouped)
    traced = trace_loop(build, lambda model: torch.optim.AdamW(model.parameters()), train_step, make_batch)
    model = build().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        train_step(model, optimizer, make_batch(SAMPLES))
    return batch_sizes(traced.step).memory(SAMPLES).reserved_bytes, torch.cuda.max_memory_reserved()


@pytest.mark.parametrize("is_grouped", [False, True], ids=["torch's attention", "grouped heads"])
@pytest.mark.parametrize("train_step", [cleared_last, cleared_first, filled_with_zeros, with_average])
def test_a_loop_reserves_what_is_planned(train_step: Callable[..., None], is_grouped: bool) -> None:
    planned, found = run_alone(reserved, train_step, is_grouped)
    assert planned == found
