"""LoRA finetuning by FSDP2 with a batch size found by a search, which can grow.

    tune run --nproc_per_node 2 adaptive_lora_finetune_distributed --config CONFIG use_maximum_batch_size=True

CONFIG is any stock config of LoRA finetuning or of this package; ``torchtune_adaptive.settings`` has further keys.
"""

from torchtune_adaptive.launch import check_first, launch

if __name__ == "__main__":
    check_first()  # the imports below take seconds

import torch
from omegaconf import DictConfig
from torchao.dtypes.nf4tensor import NF4Tensor
from torchtune import config

from torchtune_adaptive.errors import InputError
from torchtune_adaptive.stock.load import load_stock_recipe
from torchtune_adaptive.stock.recipe import AdaptiveRecipe

StockRecipe = load_stock_recipe("lora_finetune_distributed").LoRAFinetuneRecipeDistributed


class AdaptiveLoRAFinetuneRecipeDistributed(AdaptiveRecipe, StockRecipe):
    """The stock recipe with the adaptive training loop."""

    def setup(self, cfg: DictConfig) -> None:
        """Refuse a model that one rank cannot load, then set up. A collective."""
        if self.world_size == 1 and cfg.get("fsdp_cpu_offload", False):
            refuse_quantized(cfg.model)
        super().setup(cfg)


def refuse_quantized(cfg_model: DictConfig) -> None:
    """Refuse an NF4 model if one rank would shard it for offloading, because FSDP2 cannot gather it.

    Delete with the last supported torch without https://github.com/pytorch/pytorch/pull/197999.

    Raises:
        InputError: the model has NF4 weights.
    """
    with torch.device("meta"):
        model = config.instantiate(cfg_model)
    if any(isinstance(parameter, NF4Tensor) for parameter in model.parameters()):
        raise InputError("`fsdp_cpu_offload` must be False for a quantized model on one rank, but is True instead.")


if __name__ == "__main__":
    launch(AdaptiveLoRAFinetuneRecipeDistributed)
