"""How much memory each change of a config would save, alone and all together."""

from collections.abc import Callable, Iterator
from functools import partial

from omegaconf import DictConfig

from torchtune_adaptive.plan.decide import Card, Trace
from torchtune_adaptive.plan.suggestions import Suggestion, lora_version, with_checkpointing, with_values
from torchtune_adaptive.plan.trace.client import trace
from torchtune_adaptive.stock.configs import is_lora, method_of

AS_IT_IS, TOGETHER = "as it is", "all changes of the config together"


def what_if(
    cfg: DictConfig, *, world_size: int, card: Card, seq_len: int, batch_size: int, traced_by: Trace = trace
) -> Iterator[Suggestion]:
    """Plan ``cfg`` with ``batch_size`` rows of ``seq_len`` tokens as it is, with each change, and with all.

    The only requested size of each plan is ``batch_size``.
    """
    options = {"card": card, "seq_lens": [seq_len], "batch_sizes": [batch_size], "traced_by": traced_by}
    planned = partial(Suggestion.planned, world_size=world_size, **options)
    yield planned(AS_IT_IS, cfg)
    together = cfg
    for name, change in _CHANGES.items():
        if (changed := change(cfg)) is not None:
            yield planned(name, changed)
        together = change(together) or together
    yield planned(TOGETHER, together)
    yield planned(f"{2 * world_size} ranks", cfg, world_size=2 * world_size)


def _checkpointing(cfg: DictConfig) -> DictConfig | None:
    if cfg.get("enable_activation_checkpointing", False):
        return None
    return with_checkpointing(cfg)


def _offloading(cfg: DictConfig) -> DictConfig | None:
    """torchtune offloads only together with checkpointing, and not on a CPU."""
    if cfg.get("enable_activation_offloading", False) or str(cfg.device).startswith("cpu"):
        return None
    return with_values(_checkpointing(cfg) or cfg, {"enable_activation_offloading": True})


def _compiled(cfg: DictConfig) -> DictConfig | None:
    """torchtune does not support this in quantization-aware training."""
    if cfg.get("compile", False) or "quantizer" in cfg:
        return None
    return with_values(cfg, {"compile": True})


def _chunked_loss(cfg: DictConfig) -> DictConfig | None:
    if str(cfg.loss._component_) != "torch.nn.CrossEntropyLoss":
        return None
    return with_values(cfg, {"loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"}})


def _optimizer_of_8_bits(cfg: DictConfig) -> DictConfig | None:
    if str(cfg.optimizer._component_) not in ("torch.optim.Adam", "torch.optim.AdamW"):
        return None
    return with_values(
        cfg, {"optimizer": {"_component_": "torchao.optim.AdamW8bit", "lr": cfg.optimizer.get("lr", 1e-3)}}
    )


def _steps_in_backward(cfg: DictConfig) -> DictConfig | None:
    """torchtune supports this only in full finetuning, without gradient accumulation and clipping."""
    if method_of(cfg) != "full_finetune" or cfg.get("optimizer_in_bwd", False):
        return None
    return with_values(cfg, {"optimizer_in_bwd": True, "gradient_accumulation_steps": 1, "clip_grad_norm": None})


def _qlora(cfg: DictConfig) -> DictConfig | None:
    lora = cfg if is_lora(cfg) else lora_version(cfg)
    if lora is None or lora.model.get("quantize_base", False) or ".qlora_" in str(lora.model._component_):
        return None
    return with_values(lora, {"model": dict(lora.model) | {"quantize_base": True}})


_CHANGES: dict[str, Callable[[DictConfig], DictConfig | None]] = {
    "activation checkpointing": _checkpointing,
    "checkpointing and activation offloading": _offloading,
    "compile": _compiled,
    "chunked loss": _chunked_loss,
    "8-bit optimizer (torchao)": _optimizer_of_8_bits,
    "LoRA": lora_version,
    "QLoRA": _qlora,
    "optimizer_in_bwd": _steps_in_backward,  # last: all together include LoRA, with which it cannot be combined
}
