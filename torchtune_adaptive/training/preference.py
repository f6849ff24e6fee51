"""Direct preference optimization (Rafailov et al. 2023, https://arxiv.org/abs/2305.18290)."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX
from torchtune.modules.peft import disable_adapter

from torchtune_adaptive.training.objectives import Loss

# Maps a batch to log probabilities [pairs] and logits [pairs, S, vocabulary] of chosen and rejected answers:
# (chosen, rejected, chosen logits, rejected logits).
PairForward: TypeAlias = Callable[[Any], tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, eq=False)
class Preference:
    """The loss of pairs of answers, by a trained policy and a frozen reference.

    A batch is a tuple of tokens and labels, both [2 * pairs, S]: first all chosen answers, then all rejected ones.

    Attributes:
        policy: torchtune's ``concatenated_forward`` of the trained model.
        reference: the ``concatenated_forward`` of the reference model.
        loss_fn: returns loss [pairs], rewards of chosen and of rejected answers [pairs].
        counts_masked_pairs: count pairs whose tokens are all masked, as torchtune does.
    """

    policy: PairForward
    reference: PairForward
    loss_fn: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    _: KW_ONLY
    counts_masked_pairs: bool

    def __call__(self, batch: tuple[torch.Tensor, torch.Tensor]) -> Loss:
        tokens, labels = batch
        chosen, rejected, chosen_logits, rejected_logits = self.policy(batch)
        logits = {"logits/chosen": chosen_logits.detach().mean(), "logits/rejected": rejected_logits.detach().mean()}
        del chosen_logits, rejected_logits  # the largest tensors; the reference's can reuse their memory
        with torch.no_grad():
            reference_chosen, reference_rejected, *_ = self.reference(batch)
        losses, chosen_rewards, rejected_rewards = self.loss_fn(chosen, rejected, reference_chosen, reference_rejected)
        counts = torch.ones_like(losses)
        if not self.counts_masked_pairs:
            counts = (labels != CROSS_ENTROPY_IGNORE_IDX).any(dim=1).view(2, -1).any(dim=0).to(losses.dtype)
        pairs = counts.sum()
        metrics = {
            "rewards/chosen": chosen_rewards,
            "rewards/rejected": rejected_rewards,
            "rewards/accuracies": (chosen_rewards > rejected_rewards).to(losses.dtype),
            "rewards/margins": chosen_rewards - rejected_rewards,
            "log_probs/chosen": chosen.detach(),
            "log_probs/rejected": rejected.detach(),
        }
        sums = {name: (values * counts).sum() for name, values in metrics.items()}
        sums |= {name: mean * pairs for name, mean in logits.items()}
        num_tokens = tokens.new_full((), tokens.numel())  # without waiting for the device
        return Loss((losses * counts).sum(), pairs, num_tokens, sums)


def preference_to_base(
    forward: Callable[..., Any], model: nn.Module, loss_fn: Any, *, counts_masked_pairs: bool
) -> Preference:
    """The objective whose policy is ``model``, and whose reference is the same model without its LoRA adapters.

    Args:
        forward: torchtune's ``concatenated_forward``, with arguments model and batch.
        loss_fn, counts_masked_pairs: see ``Preference``.
    """

    def reference(batch: Any) -> Any:
        with disable_adapter(model):
            return forward(model, batch)

    return Preference(partial(forward, model), reference, loss_fn, counts_masked_pairs=counts_masked_pairs)
