"""Distillation: mean losses add up as in the stock recipe, or a step may be cut into any micro-batches."""

from typing import Any

import pytest
import torch
from torch import nn
from torchtune.modules.loss import CEWithChunkedOutputLoss, ForwardKLLoss, ForwardKLWithChunkedOutputLoss

from torchtune_adaptive.training.distillation import Distillation

IGNORED = -100
ROWS = torch.tensor([[1, 2, 3, 0], [4, 3, IGNORED, 2], [IGNORED, 1, IGNORED, 2]])


class Model(nn.Module):
    """Looks up the logits of each token in a table; returns them as a whole or in two chunks."""

    def __init__(self, seed: int, *, chunked: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.table = nn.Parameter(torch.randn(5, 5, generator=generator))
        self._chunked = chunked

    def forward(self, tokens: torch.Tensor) -> Any:
        logits = self.table[tokens]
        return list(logits.chunk(2, dim=1)) if self._chunked else logits


def losses(chunked: bool) -> tuple[Any, Any]:
    if chunked:
        return CEWithChunkedOutputLoss(num_output_chunks=2), ForwardKLWithChunkedOutputLoss(num_output_chunks=2)
    return nn.CrossEntropyLoss(ignore_index=IGNORED), ForwardKLLoss(ignore_index=IGNORED)


def trained(cuts: list[torch.Tensor], *, as_stock: bool = False, chunked: bool = False) -> tuple[Any, list[Any]]:
    """The student's gradient divided by the total weight, and the losses of the micro-batches."""
    student, teacher = Model(0, chunked=chunked), Model(1, chunked=chunked)
    distillation = Distillation(student, teacher, *losses(chunked), ratio=0.25, means_add_up=as_stock)
    found = [distillation({"tokens": rows.clamp(min=0), "labels": rows.clone()}) for rows in cuts]
    for loss in found:
        loss.total.backward()
    assert student.table.grad is not None
    assert teacher.table.grad is None
    weight = sum(int(loss.weight) for loss in found)
    return student.table.grad / weight, found


@pytest.mark.parametrize("chunked", [False, True])
def test_a_step_is_the_same_however_it_is_cut(chunked: bool) -> None:
    whole, (one,) = trained([ROWS], chunked=chunked)
    cut, found = trained([ROWS[:1], ROWS[1:]], chunked=chunked)
    torch.testing.assert_close(whole, cut)
    for name in ("loss", "class_loss", "kd_loss"):
        torch.testing.assert_close(one.metrics[name], sum(loss.metrics[name] for loss in found))
    assert one.weight == sum(loss.weight for loss in found) == (ROWS[:, 1:] != IGNORED).sum()


def test_logits_in_chunks_have_the_same_loss() -> None:
    _, (whole,) = trained([ROWS])
    _, (chunked,) = trained([ROWS], chunked=True)
    torch.testing.assert_close(whole.metrics, chunked.metrics)


def test_the_stock_recipes_gradient_is_too_small_by_the_tokens_of_a_micro_batch() -> None:
    right, _ = trained([ROWS])
    as_stock, (loss,) = trained([ROWS], as_stock=True)
    assert loss.weight == (ROWS != IGNORED).sum()
    torch.testing.assert_close(as_stock * loss.weight, right)
    torch.testing.assert_close(loss.metrics["loss"], loss.total.detach() * loss.weight)


def test_the_loss_is_the_mix_of_both() -> None:
    _, (loss,) = trained([ROWS])
    mixed = 0.75 * loss.metrics["class_loss"] + 0.25 * loss.metrics["kd_loss"]
    torch.testing.assert_close(loss.metrics["loss"], mixed)
    torch.testing.assert_close(loss.total.detach(), mixed)


@pytest.mark.parametrize("as_stock", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_micro_batch_without_a_label_adds_nothing(chunked: bool, as_stock: bool) -> None:
    alone, _ = trained([ROWS], chunked=chunked, as_stock=as_stock)
    gradient, (silent, loss) = trained([torch.full((1, 4), IGNORED), ROWS], chunked=chunked, as_stock=as_stock)
    assert torch.equal(gradient, alone)
    assert [silent.weight, silent.total, *silent.metrics.values()] == [0] * 5
    assert silent.total.requires_grad  # its backward pass has the collectives of every other
    assert loss.weight > 0
