"""Direct preference optimization of LoRA adapters by FSDP2 with a batch size found by a search, which can grow.

    tune run --nproc_per_node 2 adaptive_lora_dpo_distributed --config CONFIG use_maximum_batch_size=True

CONFIG is any stock config of LoRA DPO; ``torchtune_adaptive.settings`` has further keys.
"""

from torchtune_adaptive.launch import check_first, launch

if __name__ == "__main__":
    check_first()  # the imports below take seconds

from torchtune_adaptive.stock.load import load_stock_recipe
from torchtune_adaptive.stock.recipe import AdaptiveRecipe
from torchtune_adaptive.training.batch.row_format import PreferenceRows
from torchtune_adaptive.training.preference import Preference, preference_to_base

StockRecipe = load_stock_recipe("lora_dpo_distributed").LoRADPORecipeDistributed


class AdaptiveLoRADPORecipeDistributed(AdaptiveRecipe, StockRecipe):
    """The stock recipe with the adaptive training loop. The reference is the policy without its adapters."""

    def row_format(self) -> PreferenceRows:
        return PreferenceRows()

    def objective(self, *, as_stock: bool) -> Preference:
        return preference_to_base(self.concatenated_forward, self._model, self._loss_fn, counts_masked_pairs=as_stock)


if __name__ == "__main__":
    launch(AdaptiveLoRADPORecipeDistributed)
