"""Suggest changes of a config that does not fit, and plan each of them."""

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from torchtune_adaptive.errors import InputError
from torchtune_adaptive.plan.decide import Card, LengthPlan, Trace, plan
from torchtune_adaptive.plan.trace.client import trace
from torchtune_adaptive.stock.configs import is_lora, resolved
from torchtune_adaptive.training.batch.limits import halvings

_MOST_RANKS = 512
_SHORTEST_ROWS = 512
_LORA = {
    "lora_attn_modules": ["q_proj", "v_proj", "output_proj"],
    "apply_lora_to_mlp": True,
    "lora_rank": 8,
    "lora_alpha": 16,
}


@dataclass(frozen=True)
class Suggestion:
    """A change of the config or the launch, with its plan, or the reason why it cannot be planned."""

    change: str
    length: LengthPlan | None
    refused: str = ""

    @classmethod
    def planned(cls, change: str, cfg: DictConfig, **options: Any) -> "Suggestion":
        """Plan ``cfg``, which has the change, for one row length; ``options`` are those of ``plan``."""
        try:
            return cls(change, plan(cfg, **options).lengths[0])
        except InputError as error:
            return cls(change, None, str(error))


def suggestions(
    cfg: DictConfig, *, world_size: int, card: Card, seq_len: int, traced_by: Trace = trace
) -> Iterator[Suggestion]:
    """Plan changes that need less memory: checkpointing, LoRA, more ranks, shorter rows.

    The number of ranks is doubled until the config fits, and only the last number is suggested. Rows are shortened in
    the same way.
    """

    def planned(change: str, changed: DictConfig, *, ranks: int = world_size, tokens: int = seq_len) -> Suggestion:
        return Suggestion.planned(change, changed, world_size=ranks, card=card, seq_lens=[tokens], traced_by=traced_by)

    checkpointed = with_checkpointing(cfg)
    if not cfg.get("enable_activation_checkpointing", False):
        yield planned("enable_activation_checkpointing=True", checkpointed)
    lora = lora_version(checkpointed)
    if lora is not None:
        yield planned(f"LoRA and checkpointing: model={lora.model._component_}, rank {lora.model.lora_rank}", lora)
    yield from _last_tried(planned(f"{ranks} ranks", cfg, ranks=ranks) for ranks in _doublings(world_size, _MOST_RANKS))
    yield from _last_tried(
        planned(f"rows of {tokens} tokens", cfg, tokens=tokens)
        for tokens in halvings(seq_len // 2, above=_SHORTEST_ROWS - 1)
    )


def _last_tried(candidates: Iterator[Suggestion]) -> Iterator[Suggestion]:
    """Try the candidates until one fits or cannot be planned, and yield the last one tried, if any."""
    last = None
    for last in candidates:
        if last.length is None or last.length.exact_batch_size != 0:
            break
    if last is not None:
        yield last


def _doublings(number: int, most: int) -> Iterator[int]:
    """Twice ``number``, four times ``number``, and so on up to ``most``."""
    while (number := 2 * number) <= most:
        yield number


def with_values(cfg: DictConfig, changes: Mapping[str, object]) -> DictConfig:
    """A copy of ``cfg`` with other top-level values."""
    return DictConfig(resolved(cfg) | dict(changes))


def with_checkpointing(cfg: DictConfig) -> DictConfig:
    """A copy of ``cfg`` that checkpoints the activations of every layer."""
    return with_values(cfg, {"enable_activation_checkpointing": True, "ac_mode": None})


def lora_version(cfg: DictConfig) -> DictConfig | None:
    """The config with the LoRA version of its model. None if it uses LoRA, or torchtune has no such version."""
    if is_lora(cfg):
        return None
    package, _, name = str(cfg.model._component_).rpartition(".")
    if not package.startswith("torchtune.models.") or not hasattr(importlib.import_module(package), f"lora_{name}"):
        return None
    arguments = {key: value for key, value in cfg.model.items() if key != "_component_"}
    model = arguments | {"_component_": f"{package}.lora_{name}"} | _LORA
    return with_values(cfg, {"model": model, "optimizer_in_bwd": False})
