"""The loss of pairs of answers: sums over pairs, so that a step may be cut anywhere, and pairs that do not count."""

from typing import Any

import pytest
import torch
from torchtune.rlhf.loss import DPOLoss

from torchtune_adaptive.training.preference import Preference

IGNORED = -100
VOCABULARY = 5


def forward(scale: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> Any:
    """Log probabilities by a "model" of one number, as torchtune's forward gives them."""
    tokens, labels = batch
    logits = scale * torch.nn.functional.one_hot(tokens, VOCABULARY).float()
    log_probs = (scale * tokens.float().cos() * (labels != IGNORED)).sum(dim=1)
    pairs = len(tokens) // 2
    return log_probs[:pairs], log_probs[pairs:], logits[:pairs], logits[pairs:]


REFERENCE = torch.tensor(0.5, requires_grad=True)  # the scale of the reference, which must not be trained


def objective(scale: torch.Tensor, *, counts_masked_pairs: bool = False) -> Preference:
    return Preference(
        lambda batch: forward(scale, batch),
        lambda batch: forward(REFERENCE, batch),
        DPOLoss(beta=0.3),
        counts_masked_pairs=counts_masked_pairs,
    )


def batch_of(*pairs: tuple[list[int], list[int]], masked: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of ``pairs``, of which the last ``masked`` have no token that counts."""
    tokens = torch.tensor([chosen for chosen, _ in pairs] + [rejected for _, rejected in pairs])
    labels = tokens.clone()
    for answer in (0, 1):
        end = (answer + 1) * len(pairs)
        labels[end - masked : end] = IGNORED
    return tokens, labels


PAIRS = (([1, 2], [3, 4]), ([2, 2], [0, 1]), ([4, 1], [1, 3]))


def test_a_step_is_the_same_however_its_pairs_are_cut() -> None:
    gradients, sums = [], []
    for cuts in ([PAIRS], [PAIRS[:1], PAIRS[1:]]):
        scale = torch.tensor(1.5, requires_grad=True)
        losses = [objective(scale)(batch_of(*pairs)) for pairs in cuts]
        for loss in losses:
            loss.total.backward()
        total = losses[0].detached()
        for loss in losses[1:]:
            total += loss.detached()
        gradients.append(scale.grad)
        sums.append({"loss": total.total, "pairs": total.weight, "tokens": total.num_tokens} | total.metrics)
    torch.testing.assert_close(*gradients)
    assert REFERENCE.grad is None
    torch.testing.assert_close(*sums)
    assert sums[0]["pairs"] == 3
    assert sums[0]["tokens"] == 12


def test_figures_are_sums_over_pairs() -> None:
    scale = torch.tensor(1.5, requires_grad=True)
    loss = objective(scale)(batch_of(*PAIRS))
    chosen, rejected, *_ = forward(scale, batch_of(*PAIRS))
    margins = 0.3 * (chosen - rejected) * (1 - 0.5 / 1.5)
    torch.testing.assert_close(loss.metrics["rewards/margins"], margins.sum().detach())
    torch.testing.assert_close(loss.total, -torch.nn.functional.logsigmoid(margins).sum())
    assert loss.metrics["rewards/accuracies"] == (margins > 0).sum()
    assert 0 < loss.metrics["rewards/accuracies"] < 3
    assert loss.metrics["logits/chosen"] == pytest.approx(3 * 1.5 / VOCABULARY)
    assert not any(value.requires_grad for value in loss.metrics.values())


@pytest.mark.parametrize(("as_stock", "pairs"), [(True, 3), (False, 2)])
def test_a_pair_without_a_token_that_counts_is_counted_only_if_asked_for(as_stock: bool, pairs: int) -> None:
    scale = torch.tensor(1.5, requires_grad=True)
    loss = objective(scale, counts_masked_pairs=as_stock)(batch_of(*PAIRS, masked=1))
    whole = objective(scale)(batch_of(*PAIRS[:2]))
    assert loss.weight == pairs
    assert loss.metrics["rewards/chosen"] == whole.metrics["rewards/chosen"]
    extra = (pairs - 2) * torch.tensor(2.0).log()
    torch.testing.assert_close(loss.total, whole.total + extra)
