"""Changes of a config or a launch that need less memory: how much each would save, and which make it fit."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from omegaconf import DictConfig

from torchtune_adaptive.plan.config_plan import ConfigLaunch
from torchtune_adaptive.plan.decide import Plan, PlannedChange
from torchtune_adaptive.plan.trace.tracer import Tracer
from torchtune_adaptive.plan.ways import enough_ranks, first_that_fits, planned_change, shorter_rows
from torchtune_adaptive.stock.configs import is_lora, method_of, resolved

AS_IT_IS, TOGETHER = "as it is", "all changes of the config together"
_LORA = {
    "lora_attn_modules": ["q_proj", "v_proj", "output_proj"],
    "apply_lora_to_mlp": True,
    "lora_rank": 8,
    "lora_alpha": 16,
}
_SCHEDULE = {  # LoRA recipes need one; most configs for full finetuning have none
    "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
    "num_warmup_steps": 100,
}


def what_if(launch: ConfigLaunch, tracer: Tracer) -> Iterator[PlannedChange]:
    """Plan the launch as it is, with each change of its config, with all of them, and with twice as many ranks.

    The launch must have one batch size.
    """
    yield _planned(AS_IT_IS, launch, tracer)
    together = launch.cfg
    for name, change in _CHANGES.items():
        if (changed := change(launch.cfg)) is not None:
            yield _planned(name, replace(launch, cfg=changed), tracer)
        together = change(together) or together
    yield _planned(TOGETHER, replace(launch, cfg=together), tracer)
    yield _planned(f"{2 * launch.world_size} ranks", _on_ranks(launch, 2 * launch.world_size), tracer)


def ways_to_fit(launch: ConfigLaunch, planned: Plan, tracer: Tracer) -> Iterator[PlannedChange]:
    """Plan changes of a launch that does not fit, as ``planned``: checkpointing, LoRA, more ranks, shorter rows.

    The only requested size of each plan is one row.
    """
    launch = replace(launch, batch_sizes=(1,))
    checkpointed = with_checkpointing(launch.cfg)
    if checkpointed is not None:
        yield _planned("enable_activation_checkpointing=True", replace(launch, cfg=checkpointed), tracer)
    lora = lora_version(checkpointed or launch.cfg)
    if lora is not None:
        name = f"LoRA and checkpointing: model={lora.model._component_}, rank {lora.model.lora_rank}"
        yield _planned(name, replace(launch, cfg=lora), tracer)
    yield from first_that_fits(
        _planned(f"{ranks} ranks", _on_ranks(launch, ranks), tracer) for ranks in enough_ranks(planned)
    )
    yield from first_that_fits(
        _planned(f"rows of {seq_len} tokens", replace(launch, seq_lens=(seq_len,)), tracer)
        for seq_len in shorter_rows(planned, max(launch.seq_lens))
    )


def _planned(name: str, launch: ConfigLaunch, tracer: Tracer) -> PlannedChange:
    """The plan of the longest rows alone."""
    return planned_change(name, lambda: replace(launch, seq_lens=(max(launch.seq_lens),)).plan(tracer))


def _on_ranks(launch: ConfigLaunch, ranks: int) -> ConfigLaunch:
    return replace(launch, world_size=ranks, ranks_of_machine=min(ranks, launch.ranks_of_machine or ranks))


def _with(cfg: DictConfig, changes: Mapping[str, object]) -> DictConfig:
    """A copy of ``cfg`` with other top-level values."""
    return DictConfig(resolved(cfg) | dict(changes))


def with_checkpointing(cfg: DictConfig) -> DictConfig | None:
    """The config with the activations of every layer checkpointed. None if it is so."""
    if cfg.get("enable_activation_checkpointing", False):
        return None
    return _with(cfg, {"enable_activation_checkpointing": True, "ac_mode": None})


def lora_version(cfg: DictConfig) -> DictConfig | None:
    """The config with the LoRA version of its model. None if it uses LoRA, or torchtune has no such version."""
    if is_lora(cfg):
        return None
    package, _, name = str(cfg.model._component_).rpartition(".")
    if not package.startswith("torchtune.models.") or not hasattr(importlib.import_module(package), f"lora_{name}"):
        return None
    model = dict(cfg.model) | {"_component_": f"{package}.lora_{name}"} | _LORA
    for key in cfg.model:
        if str(key).endswith("_trainable"):  # a part of a model of texts and images
            model[key] = "lora" if cfg.model[key] else "frozen"
    schedule = cfg.get("lr_scheduler") or _SCHEDULE
    return _with(cfg, {"model": model, "lr_scheduler": schedule, "optimizer_in_bwd": False})


def _offloading(cfg: DictConfig) -> DictConfig | None:
    """torchtune offloads only together with checkpointing, and not on a CPU."""
    if cfg.get("enable_activation_offloading", False) or str(cfg.device).startswith("cpu"):
        return None
    return _with(with_checkpointing(cfg) or cfg, {"enable_activation_offloading": True})


def _compiled(cfg: DictConfig) -> DictConfig | None:
    """torchtune does not support this in quantization-aware training."""
    if cfg.get("compile", False) or "quantizer" in cfg:
        return None
    return _with(cfg, {"compile": True})


def _chunked_loss(cfg: DictConfig) -> DictConfig | None:
    if str(cfg.loss._component_) != "torch.nn.CrossEntropyLoss":
        return None
    return _with(cfg, {"loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"}})


def _optimizer_of_8_bits(cfg: DictConfig) -> DictConfig | None:
    if str(cfg.optimizer._component_) not in ("torch.optim.Adam", "torch.optim.AdamW"):
        return None
    return _with(cfg, {"optimizer": {"_component_": "torchao.optim.AdamW8bit", "lr": cfg.optimizer.get("lr", 1e-3)}})


def _steps_in_backward(cfg: DictConfig) -> DictConfig | None:
    """torchtune supports this only in full finetuning, without gradient accumulation and clipping."""
    if method_of(cfg) != "full_finetune" or cfg.get("optimizer_in_bwd", False):
        return None
    return _with(cfg, {"optimizer_in_bwd": True, "gradient_accumulation_steps": 1, "clip_grad_norm": None})


def _qlora(cfg: DictConfig) -> DictConfig | None:
    lora = cfg if is_lora(cfg) else lora_version(cfg)
    if lora is None or lora.model.get("quantize_base", False) or ".qlora_" in str(lora.model._component_):
        return None
    return _with(lora, {"model": dict(lora.model) | {"quantize_base": True}})


_CHANGES: dict[str, Callable[[DictConfig], DictConfig | None]] = {
    "activation checkpointing": with_checkpointing,
    "checkpointing and activation offloading": _offloading,
    "compile": _compiled,
    "chunked loss": _chunked_loss,
    "8-bit optimizer (torchao)": _optimizer_of_8_bits,
    "LoRA": lora_version,
    "QLoRA": _qlora,
    "optimizer_in_bwd": _steps_in_backward,  # last: all together include LoRA, with which it cannot be combined
}
