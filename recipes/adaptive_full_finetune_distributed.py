"""Full finetuning by FSDP2 with a batch size found by a search, which can grow.

    tune run --nproc_per_node 2 adaptive_full_finetune_distributed --config CONFIG use_maximum_batch_size=True

CONFIG is any stock config of full finetuning or of this package; ``torchtune_adaptive.settings`` has further keys.
"""

from torchtune_adaptive.launch import check_first, launch

if __name__ == "__main__":
    check_first()  # the imports below take seconds

from typing import Any

from torchtune.training.checkpointing._checkpoint_client import TrainingProgress

from torchtune_adaptive.stock.checkpoints import AtomicCheckpointer, WholeCheckpointClient
from torchtune_adaptive.stock.load import load_stock_recipe
from torchtune_adaptive.stock.recipe import AdaptiveRecipe

StockRecipe = load_stock_recipe("full_finetune_distributed").FullFinetuneRecipeDistributed


class AdaptiveFullFinetuneRecipeDistributed(AdaptiveRecipe, StockRecipe):
    """The stock recipe with the adaptive training loop."""

    def keep_whole(self) -> AtomicCheckpointer:
        whole = AtomicCheckpointer(self._checkpoint_client._get_checkpointer(), self._folder)
        self._checkpoint_client = WholeCheckpointClient(self._cfg, whole)
        return whole

    def _setup_lr_scheduler(self, cfg_lr_scheduler: Any, num_training_steps: int, last_epoch: int) -> Any:
        """As torchtune, also after ``enable_async_checkpointing``, whose checkpoints lack the schedule's base rate."""
        for optimizer in self.optimizer_policy().optimizers if last_epoch >= 0 else []:
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", optimizer.defaults["lr"])
        return super()._setup_lr_scheduler(cfg_lr_scheduler, num_training_steps, last_epoch)

    def save_checkpoint(self, epoch: int) -> None:
        """Save by torchtune's checkpoint client, as the stock recipe does in its loop. A collective."""
        kept = ("seed", "epochs_run", "total_epochs", "max_steps_per_epoch")
        progress = TrainingProgress(
            **{name: getattr(self, name) for name in kept}, dataloader_state_dict=self._dataloader.state_dict()
        )
        optimizer = self._optim_ckpt_wrapper if self._optimizer_in_bwd else self._optimizer
        self._checkpoint_client.save_checkpoint(self._model, optimizer, progress, epoch)


if __name__ == "__main__":
    launch(AdaptiveFullFinetuneRecipeDistributed)
