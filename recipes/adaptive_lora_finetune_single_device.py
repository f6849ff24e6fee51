"""LoRA finetuning on one device with a batch size found by a search, which can grow.

    tune run adaptive_lora_finetune_single_device --config CONFIG use_maximum_batch_size=True

CONFIG is any stock config of LoRA finetuning on one device; ``torchtune_adaptive.settings`` has further keys.
"""

from torchtune_adaptive.launch import check_first, launch

if __name__ == "__main__":
    check_first()  # the imports below take seconds

from torchtune_adaptive.stock.load import load_stock_recipe
from torchtune_adaptive.stock.recipe import AdaptiveRecipe

StockRecipe = load_stock_recipe("lora_finetune_single_device").LoRAFinetuneRecipeSingleDevice


class AdaptiveLoRAFinetuneRecipeSingleDevice(AdaptiveRecipe, StockRecipe):
    """The stock recipe with the adaptive training loop."""

    on_several_ranks = False


if __name__ == "__main__":
    launch(AdaptiveLoRAFinetuneRecipeSingleDevice)
