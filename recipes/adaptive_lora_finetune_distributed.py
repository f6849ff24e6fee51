"""LoRA finetuning by FSDP2 with a batch size that is searched for and may grow.

    tune run --nproc_per_node 2 adaptive_lora_finetune_distributed --config CONFIG use_maximum_batch_size=True

CONFIG is any stock config of LoRA finetuning, or one of ours. The keys are those of the stock recipe
``lora_finetune_distributed`` and of ``torchtune_adaptive.settings``.
"""

from typing import Any

from omegaconf import DictConfig
from torchtune import config, training

from torchtune_adaptive.launch import launch, run_recipe
from torchtune_adaptive.loop import AdaptiveLoop
from torchtune_adaptive.stock import load_stock_recipe

StockRecipe: Any = load_stock_recipe("lora_finetune_distributed").LoRAFinetuneRecipeDistributed


class AdaptiveLoRAFinetuneRecipeDistributed(AdaptiveLoop, StockRecipe):
    """The stock recipe with our loop."""

    def _save(self, epoch: int) -> None:
        self.save_checkpoint(epoch=epoch)


@config.parse
def recipe_main(cfg: DictConfig) -> None:
    """LoRA finetuning with an adaptive batch size: stock keys, plus ``use_maximum_batch_size`` and ``adaptive``."""
    if cfg.get("fsdp_cpu_offload", False):
        training.set_torch_num_threads()  # the optimizer then runs on the CPU, with all of its cores
    run_recipe(AdaptiveLoRAFinetuneRecipeDistributed, cfg)


if __name__ == "__main__":
    launch(recipe_main)
