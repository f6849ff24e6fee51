"""Changes of a config that change how fast it trains, and nothing in what is trained but rounding."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from omegaconf import DictConfig

KINDS = ("checkpointing", "compile", "resharding", "loss")
_EVERY = (4, 2)  # one layer in so many is checkpointed
_CHUNKED_LOSS, _CHUNKS = "torchtune.modules.loss.CEWithChunkedOutputLoss", 8  # torchtune's number of chunks


@dataclass(frozen=True)
class Change:
    """Keys of a config with other values.

    Attributes:
        words: what is changed, for a table.
        values: by key; one within another as "outer.inner".
        memory: whether the step needs more of it, less, or about as much. Less makes a step slower, unless it allows a
            larger micro-batch.
    """

    words: str
    values: Mapping[str, Any]
    memory: Literal["more", "less", "same"] = "more"


@dataclass(frozen=True)
class Question:
    """What a kind of change asks, with its alternatives, the fastest first if memory were endless.

    Attributes:
        ends_with_memory: an alternative that is not short of memory makes the later ones needless.
    """

    kind: str
    alternatives: Sequence[Change]
    ends_with_memory: bool = False


def questions_of(cfg: DictConfig, *, recipe: str, ranks: int, kinds: Sequence[str] = KINDS) -> list[Question]:
    """What can be changed in ``cfg`` for ``recipe``, in the order of how much it usually brings.

    Args:
        cfg: with its interpolations resolved.
        kinds: of ``KINDS``.
    """
    asked = {
        "checkpointing": _checkpointing(cfg, recipe),
        "compile": _compiling(cfg),
        "resharding": _resharding(cfg, ranks),
        "loss": _chunks_of_loss(cfg),
    }
    found = (
        Question(kind, tuple(asked[kind]), ends_with_memory=kind == "checkpointing") for kind in KINDS if kind in kinds
    )
    return [question for question in found if question.alternatives]


def _checkpointing(cfg: DictConfig, recipe: str) -> Iterator[Change]:
    """Less of it if there is some, more if there is none: that may allow larger micro-batches."""
    is_whole, offloads = bool(cfg.get("enable_activation_checkpointing")), bool(cfg.get("enable_activation_offloading"))
    is_selective = not is_whole and cfg.get("ac_mode") is not None
    selects = recipe.startswith("adaptive_full_finetune_distributed")  # no other recipe reads these keys
    stays: dict[str, Any] = {"enable_activation_offloading": False} if offloads else {}
    has_some = is_whole or is_selective
    off: dict[str, Any] = {"ac_mode": None} if is_selective else {}
    if has_some:
        yield Change("no checkpointing", {"enable_activation_checkpointing": False} | off | stays)
    if selects and not is_selective:
        for every in _EVERY:
            selected = {"enable_activation_checkpointing": False, "ac_mode": "selective", "ac_option": every}
            yield Change(f"one layer in {every} checkpointed", selected | stays, "more" if has_some else "less")
    if offloads:
        yield Change("no offloading", stays)
    if not is_whole:
        yield Change("all layers checkpointed", {"enable_activation_checkpointing": True} | off, "less")
    if "enable_activation_offloading" in cfg and not offloads and cfg.get("device") == "cuda":
        whole = {"enable_activation_checkpointing": True, "enable_activation_offloading": True}
        yield Change("all layers checkpointed, activations offloaded", whole | off, "less")


def _compiling(cfg: DictConfig) -> Iterator[Change]:
    if not cfg.get("compile") and "quantizer" not in cfg:  # which torchtune does not compile
        yield Change("compile", {"compile": True}, "same")


def _resharding(cfg: DictConfig, ranks: int) -> Iterator[Change]:
    if ranks > 1 and cfg.get("fsdp_reshard_after_forward", True):
        yield Change("no resharding", {"fsdp_reshard_after_forward": False})


def _chunks_of_loss(cfg: DictConfig) -> Iterator[Change]:
    """Fewer: each chunk adds to the gradient of all output weights. More, if memory is short."""
    loss = cfg.get("loss")
    if loss is None or loss.get("_component_") != _CHUNKED_LOSS or "kd_loss" in cfg:  # which must have as many
        return
    chunks = loss.get("num_output_chunks", _CHUNKS)
    if chunks > 1:
        yield Change("loss in one piece", {"loss.num_output_chunks": 1})
    yield Change(f"loss in {4 * chunks} chunks", {"loss.num_output_chunks": 4 * chunks}, "less")
