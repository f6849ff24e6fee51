"""Digests of the state that training begins with, made on the host, so that no card counts the copies."""

import hashlib
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.on_gpu.stage import has_values


def state_of(model: nn.Module, optimizer: Any) -> dict[str, str]:
    """A digest of the bits of each part of the present state; {} where values are not computed.

    Args:
        optimizer: None: one that has no state yet.
    """
    device = next(model.parameters()).device
    if not has_values(device):
        return {}
    state = {
        "parameters": _digest(model.parameters()),
        "buffers": _digest(model.buffers()),
        "optimizer": optimizer_state(optimizer),
        "torch RNG": _digest([torch.get_rng_state()]),
        "Python RNG": _digest([random.getstate()]),
        "NumPy RNG": _digest(np.random.get_state()),
    }
    if torch.cuda.is_initialized():
        state["CUDA RNG"] = _digest(torch.cuda.get_rng_state_all())
    return state


def optimizer_state(optimizer: Any) -> str:
    """A digest of what ``optimizer`` keeps for each parameter, in the parameters' order."""
    if optimizer is None:
        return _digest([])
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    kept = [
        (index, name, value)
        for index, parameter in enumerate(parameters)
        for name, value in sorted(optimizer.state.get(parameter, {}).items())
    ]
    return _digest(part for one in kept for part in one)


def changed(before: dict[str, str], after: dict[str, str]) -> list[str] | None:
    """The parts that differ; None if there is nothing to compare."""
    return [name for name in before if before[name] != after[name]] if before else None


def _digest(values: Iterable[Any]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for value in values:
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu().numpy()
        digest.update(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())
    return digest.hexdigest()
