"""The names that a ``python`` block of a document may use without defining them.

They are what a reader has: a model, an optimizer, a data loader, and a step of training. The loader has the samples of
one optimizer step. ``optimizer.zero_grad`` keeps the gradients, so that a later block can use them. A train step
allocates a GiB for each sample, but does not write to it.
"""

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from adaptive_full_finetune_distributed import AdaptiveFullFinetuneRecipeDistributed
from torch import Tensor, nn

VOCABULARY, ROW_TOKENS = 32, 8
GIB = 2**30


class _KeepsGradients(torch.optim.AdamW):
    def zero_grad(self, set_to_none: bool = True) -> None: ...


def document_names() -> dict[str, Any]:
    """The names, each with a new object."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY))
    optimizer = _KeepsGradients(model.parameters(), lr=0.01)

    def make_batch(n: int) -> Tensor:
        return torch.randint(VOCABULARY, (n, ROW_TOKENS))

    def collate(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
        tokens = torch.stack(rows)
        return tokens, tokens

    def loss_of(tokens: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten(), reduction="sum")

    def micro_step(rows: list[Tensor]) -> tuple[Tensor, int]:
        tokens, labels = collate(rows)
        loss_sum = loss_of(tokens)
        loss_sum.backward()
        return loss_sum.detach(), labels.numel()

    def train_step(batch: Tensor) -> None:
        activations = [torch.empty(GIB, dtype=torch.uint8) for _ in batch]
        loss_of(batch).backward()
        del activations
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad = None

    def planned_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
        F.cross_entropy(model(batch).flatten(0, 1), batch.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return {
        "AdaptiveFullFinetuneRecipeDistributed": AdaptiveFullFinetuneRecipeDistributed,
        "F": F,
        "build_model": lambda: nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)),
        "build_optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        "collate": collate,
        "dist": dist,
        "loader": [list(make_batch(4))],
        "make_batch": make_batch,
        "micro_step": micro_step,
        "model": model,
        "optimizer": optimizer,
        "planned_step": planned_step,
        "recipe": SimpleNamespace(train=lambda: None),
        "torch": torch,
        "train_step": train_step,
    }
