"""Knowledge distillation by FSDP2 with a batch size found by a search, which can grow.

    tune run --nproc_per_node 2 adaptive_knowledge_distillation_distributed --config CONFIG use_maximum_batch_size=True

CONFIG is any stock config of knowledge distillation; ``torchtune_adaptive.settings`` has further keys.
"""

from torchtune_adaptive.launch import check_first, launch

if __name__ == "__main__":
    check_first()  # the imports below take seconds

from typing import Any

from torch import nn

from torchtune_adaptive.stock.load import load_stock_recipe
from torchtune_adaptive.stock.recipe import AdaptiveRecipe
from torchtune_adaptive.training.distillation import Distillation

StockRecipe = load_stock_recipe("knowledge_distillation_distributed").KDRecipeDistributed


class AdaptiveKDRecipeDistributed(AdaptiveRecipe, StockRecipe):
    """The stock recipe with the adaptive training loop. Student and teacher are both on the device."""

    def models(self) -> list[nn.Module]:
        return [self._model, self._teacher_model]

    def losses(self) -> list[Any]:
        return [self._loss_fn, self._kd_loss_fn]

    def objective(self, *, as_stock: bool) -> Distillation:
        return Distillation(
            self._model, self._teacher_model, *self.losses(), ratio=self._kd_ratio, means_add_up=as_stock
        )


if __name__ == "__main__":
    launch(AdaptiveKDRecipeDistributed)
