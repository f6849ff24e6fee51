"""How much host memory the models and optimizers of a config need."""

from collections import Counter
from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn
from torch.distributed.tensor import DTensor

from torchtune_adaptive.engine.memory.operations import local_part, plain_parts
from torchtune_adaptive.plan.host_memory import pinned_bytes

_CONVERTING = "torchtune.training.FullModelHFCheckpointer"
_PERMUTED = ("q_proj.weight", "k_proj.weight")
# Which weights torchtune copies when it converts a checkpoint at loading and at saving, by the type of model. Types not
# listed here permute the heads of queries and keys both times. The others only rename and split.
_COPIED: MappingProxyType[str, tuple[tuple[str, ...], tuple[str, ...]]] = MappingProxyType(
    {"QWEN2": ((), ())}
    | dict.fromkeys(("PHI3_MINI", "PHI4"), ((), (*_PERMUTED, "v_proj.weight", "w1.weight", "w3.weight")))
)


def host_figures(
    cfg: DictConfig,
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    activation_bytes_per_token: Iterable[int],
) -> dict[str, int]:
    """The figures for ``HostFigures.from_flat`` of ``models``, the trained one first, as they are on one rank.

    Args:
        activation_bytes_per_token: bytes per token of each activation that a forward pass offloads.
    """
    trained, *frozen = models
    parameters = [parameter for model in models for parameter in model.parameters()]
    buffers = [buffer for model in models for buffer in model.buffers()]
    with_gradients = [parameter for parameter in parameters if parameter.requires_grad]
    state = [value for optimizer in optimizers for values in optimizer.state.values() for value in values.values()]
    paged = sum(getattr(optimizer, "paged_bytes", 0) for optimizer in optimizers)  # which may move to the host
    weights_on_host, state_on_host = 0, paged
    if cfg.get("fsdp_cpu_offload", False):
        weights_on_host = _local_bytes(parameters, pinned=True)
        state_on_host += _local_bytes(with_gradients, pinned=True) + _local_bytes(state)
    loaded, saved = _copied_names(cfg, "checkpointer")
    others, _ = _copied_names(cfg, "teacher_checkpointer" if "teacher_checkpointer" in cfg else "ref_checkpointer")
    return {
        "weights": _whole_bytes(trained.parameters()),
        "frozen_weights": sum(_whole_bytes(model.parameters()) for model in frozen),
        "load_copies": _named_bytes(trained, loaded),
        "frozen_load_copies": sum(_named_bytes(model, others) for model in frozen),
        "save_copies": 0 if cfg.get("save_adapter_weights_only", False) else _named_bytes(trained, saved),
        "local": _local_bytes([*parameters, *buffers]),
        "trained": _local_bytes([*with_gradients, *buffers]),
        "state": paged + _local_bytes(state),
        "whole_state": sum(map(_whole_state_bytes, optimizers)),
        "offloaded_weights": weights_on_host,
        "offloaded": weights_on_host + state_on_host,
        **{str(size): count for size, count in Counter(activation_bytes_per_token).items()},
    }


def _copied_names(cfg: DictConfig, key: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Suffixes of the names of weights that the checkpointer of ``key`` copies at loading, and at saving."""
    checkpointer: Any = cfg.get(key) or {}
    if checkpointer.get("_component_") != _CONVERTING:
        return (), ()
    return _COPIED.get(str(checkpointer.get("model_type")), (_PERMUTED, _PERMUTED))


def _named_bytes(model: nn.Module, ends: tuple[str, ...]) -> int:
    return _whole_bytes(weight for name, weight in model.named_parameters() if name.endswith(ends))


def _whole_bytes(tensors: Iterable[Any]) -> int:
    """Bytes of the tensors over all ranks, in their data types before quantization."""
    return sum(one.numel() * one.dtype.itemsize for one in tensors if isinstance(one, torch.Tensor))


def _whole_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of its state over all ranks. Stand-ins hold plain tensors for the local part of a sharded parameter."""
    whole_bytes = getattr(optimizer, "whole_paged_bytes", 0)
    for parameter, values in optimizer.state.items():
        tensors = [value for value in values.values() if isinstance(value, torch.Tensor)]
        local = [one for one in tensors if one.dim() > 0 and not isinstance(one, DTensor)]
        whole_bytes += _whole_bytes(tensors) - _whole_bytes(local)
        whole_bytes += round(_whole_bytes(local) * parameter.numel() / max(1, local_part(parameter).numel()))
    return whole_bytes


def _local_bytes(tensors: Iterable[Any], *, pinned: bool = False) -> int:
    """Bytes of this rank's parts of the tensors."""
    sizes = [part.nbytes for tensor in tensors for part in plain_parts(tensor)]
    return sum(map(pinned_bytes, sizes) if pinned else sizes)
