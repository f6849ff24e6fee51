"""Full finetuning by FSDP2 with a batch size that is searched for and may grow.

    tune run --nproc_per_node 2 adaptive_full_finetune_distributed --config CONFIG use_maximum_batch_size=True

CONFIG is any stock config of full finetuning, or one of ours. The keys are those of the stock recipe
``full_finetune_distributed`` and of ``torchtune_adaptive.settings``.
"""

from typing import Any

import torch
from omegaconf import DictConfig
from torchtune import config
from torchtune.training.checkpointing._checkpoint_client import TrainingProgress
from torchtune.training.lr_schedulers import get_lr

from torchtune_adaptive.launch import launch, run_recipe
from torchtune_adaptive.loop import AdaptiveLoop, StepTotals
from torchtune_adaptive.micro_step import MicroStep
from torchtune_adaptive.stock.load import load_stock_recipe

StockRecipe: Any = load_stock_recipe("full_finetune_distributed").FullFinetuneRecipeDistributed


class AdaptiveFullFinetuneRecipeDistributed(AdaptiveLoop, StockRecipe):
    """The stock recipe with our loop. With ``optimizer_in_bwd`` gradients never meet: each is used where it arises."""

    def _backward(self, loss_sum: torch.Tensor, num_tokens: torch.Tensor) -> None:
        if self._optimizer_in_bwd:
            sums = self._totals(MicroStep(loss_sum.detach(), num_tokens))
            loss_sum = loss_sum * (self.world_size / sums.num_tokens)
        super()._backward(loss_sum, num_tokens)

    def _finish_window(self, micro_steps: MicroStep) -> StepTotals:
        if self._optimizer_in_bwd:
            return self._step_totals(self._totals(micro_steps), grad_norm=None)
        return super()._finish_window(micro_steps)

    def _zero_gradients(self) -> None:
        for optimizer in self._optim_ckpt_wrapper.optim_map.values() if self._optimizer_in_bwd else [self._optimizer]:
            optimizer.zero_grad()

    def _learning_rate(self) -> float:
        return get_lr(self._stepping())

    def _stepping(self) -> Any:
        return self._optim_ckpt_wrapper if self._optimizer_in_bwd else self._optimizer

    def _save(self, epoch: int) -> None:
        kept = ("seed", "epochs_run", "total_epochs", "max_steps_per_epoch")
        progress = TrainingProgress(
            **{name: getattr(self, name) for name in kept}, dataloader_state_dict=self._dataloader.state_dict()
        )
        self._checkpoint_client.save_checkpoint(self._model, self._stepping(), progress, epoch)


@config.parse
def recipe_main(cfg: DictConfig) -> None:
    """Full finetuning with an adaptive batch size: stock keys, plus ``use_maximum_batch_size`` and ``adaptive``."""
    run_recipe(AdaptiveFullFinetuneRecipeDistributed, cfg)


if __name__ == "__main__":
    launch(recipe_main)
