"""Direct preference optimization by FSDP2 with a batch size found by a search, which can grow.

    tune run --nproc_per_node 2 adaptive_full_dpo_distributed --config CONFIG use_maximum_batch_size=True

CONFIG is any stock config of full DPO; ``torchtune_adaptive.settings`` has further keys.
"""

from torchtune_adaptive.launch import check_first, launch

if __name__ == "__main__":
    check_first()  # the imports below take seconds

from functools import partial

from omegaconf import DictConfig
from torch import nn

from torchtune_adaptive.errors import InputError
from torchtune_adaptive.stock.load import load_stock_recipe
from torchtune_adaptive.stock.recipe import AdaptiveRecipe
from torchtune_adaptive.training.batch.row_format import PreferenceRows
from torchtune_adaptive.training.preference import Preference

StockRecipe = load_stock_recipe("full_dpo_distributed").FullDPORecipeDistributed


class AdaptiveFullDPORecipeDistributed(AdaptiveRecipe, StockRecipe):
    """The stock recipe with the adaptive training loop. Policy and reference are both on the device."""

    def __init__(self, cfg: DictConfig) -> None:
        if cfg.get("optimizer_in_bwd", False):
            raise InputError("`optimizer_in_bwd` must be False for full DPO, as in torchtune, but is True instead.")
        super().__init__(cfg)

    def models(self) -> list[nn.Module]:
        return [self._model, self._ref_model]

    def row_format(self) -> PreferenceRows:
        return PreferenceRows()

    def objective(self, *, as_stock: bool) -> Preference:
        policy = partial(self.concatenated_forward, self._model)
        reference = partial(self.concatenated_forward, self._ref_model, activations_handling=False)
        return Preference(policy, reference, self._loss_fn, counts_masked_pairs=as_stock)


if __name__ == "__main__":
    launch(AdaptiveFullDPORecipeDistributed)
