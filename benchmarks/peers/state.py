"""Digests of the state that training begins with, made on the host, so that no card counts the copies."""

import hashlib
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn


def state_of(model: nn.Module, optimizer: Any) -> dict[str, str]:
    """A digest of the bits of each part of the present state. None is an optimizer that has no state yet."""
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


def changed(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """The parts that differ."""
    return [name for name in before if before[name] != after[name]]


def _digest(values: Iterable[Any]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for value in values:
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu().numpy()
        digest.update(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())
    return digest.hexdigest()
