"""Quantization-aware training by FSDP2 with a batch size found by a search, which can grow.

    tune run --nproc_per_node 2 adaptive_qat_distributed --config CONFIG use_maximum_batch_size=True

CONFIG is any stock config of quantization-aware training; ``torchtune_adaptive.settings`` has further keys.
"""

from torchtune_adaptive.launch import check_first, launch

if __name__ == "__main__":
    check_first()  # the imports below take seconds

from torchtune.training import quantization

from torchtune_adaptive.stock.load import load_stock_recipe
from torchtune_adaptive.stock.recipe import AdaptiveRecipe

StockRecipe = load_stock_recipe("qat_distributed").QATRecipeDistributed


class AdaptiveQATRecipeDistributed(AdaptiveRecipe, StockRecipe):
    """The stock recipe with the adaptive training loop. Probes use fake quantization, which needs more memory."""

    _is_fake_quantized = True

    def before_step(self, step: int) -> None:
        """Keep fake quantization off until the configured step."""
        wanted = step >= (self._fake_quant_after_n_steps or 0)
        if wanted != self._is_fake_quantized:
            switch = quantization._get_enable_fake_quant if wanted else quantization._get_disable_fake_quant
            self._model.apply(switch(self._quantizer_mode))
            self._is_fake_quantized = wanted


if __name__ == "__main__":
    launch(AdaptiveQATRecipeDistributed)
