"""Full finetuning on one device with a batch size found by a search, which can grow.

    tune run adaptive_full_finetune_single_device --config CONFIG use_maximum_batch_size=True

CONFIG is any stock config of full finetuning on one device; ``torchtune_adaptive.settings`` has further keys.
"""

from torchtune_adaptive.launch import check_first, launch

if __name__ == "__main__":
    check_first()  # the imports below take seconds

from torchtune_adaptive.stock.load import load_stock_recipe
from torchtune_adaptive.stock.recipe import AdaptiveRecipe

StockRecipe = load_stock_recipe("full_finetune_single_device").FullFinetuneRecipeSingleDevice


class AdaptiveFullFinetuneRecipeSingleDevice(AdaptiveRecipe, StockRecipe):
    """The stock recipe with the adaptive training loop.

    With ``optimizer_in_bwd`` gradients are not divided by the number of tokens, as in torchtune.
    """

    on_several_ranks = False
    _normalizes_in_backward = False


if __name__ == "__main__":
    launch(AdaptiveFullFinetuneRecipeSingleDevice)
