"""Quantization-aware LoRA finetuning by FSDP2 with a batch size found by a search, which can grow.

    tune run --nproc_per_node 2 adaptive_qat_lora_finetune_distributed --config CONFIG use_maximum_batch_size=True

CONFIG is any stock config of quantization-aware LoRA finetuning; ``torchtune_adaptive.settings`` has further keys.
"""

from torchtune_adaptive.launch import check_first, launch

if __name__ == "__main__":
    check_first()  # the imports below take seconds

from torchtune_adaptive.stock.load import load_stock_recipe
from torchtune_adaptive.stock.recipe import AdaptiveRecipe

StockRecipe = load_stock_recipe("qat_lora_finetune_distributed").QATLoRAFinetuneRecipeDistributed


class AdaptiveQATLoRAFinetuneRecipeDistributed(AdaptiveRecipe, StockRecipe):
    """The stock recipe with the adaptive training loop."""


if __name__ == "__main__":
    launch(AdaptiveQATLoRAFinetuneRecipeDistributed)
