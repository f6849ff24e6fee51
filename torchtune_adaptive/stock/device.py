"""The device that a config names."""

import os

import torch
from omegaconf import DictConfig

from torchtune_adaptive.errors import InputError, quote


def check_device(cfg: DictConfig) -> None:
    """Refuse a device that this machine does not have. torchtune would train on the CPU instead of a missing GPU.

    Raises:
        InputError: it is no device, or this machine has no such device for this rank.
    """
    if cfg.get("device") is None:
        return  # torchtune takes the best that there is
    given = quote(cfg.device)
    try:
        device = torch.device(str(cfg.device))
    except RuntimeError as error:  # torch has no device of that name
        raise InputError(f"`device` must be one that torch knows, as cpu or cuda, but is {given} instead.") from error
    if device.type == "cpu":
        return
    count = _count(device)
    if count == 0:
        raise InputError(
            f"`device` must be cpu or one that this machine has, but is {given} and torch sees no"
            f" {_NAMES.get(device.type, device.type)} device."
        )
    if (device.index or 0) >= count:
        raise InputError(f"`device` must be one of the {count} that this machine has, but is {given} instead.")
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if local_ranks > count:
        raise InputError(
            f"`--nproc_per_node` must be at most {count}, the {_NAMES.get(device.type, device.type)} devices of this"
            f" machine, but is {local_ranks} instead."
        )


_NAMES = {"cuda": "CUDA"}


def _count(device: torch.device) -> int:
    """The devices of this type that torch sees on this machine."""
    try:
        return torch.get_device_module(device).device_count()
    except (AttributeError, RuntimeError):  # torch has the name, but no module for it
        return 0
