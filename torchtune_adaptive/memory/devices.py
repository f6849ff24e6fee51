"""The meter of a device, and the limits that it can keep."""

from collections.abc import Sequence

import torch
from torch import nn

from torchtune_adaptive.errors import InputError
from torchtune_adaptive.memory.cpu_meter import CpuMeter
from torchtune_adaptive.memory.cuda_meter import CudaMeter
from torchtune_adaptive.memory.meter import MemoryMeter, device_memory_bytes
from torchtune_adaptive.text import format_bytes


def meter_for(
    device: torch.device, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], *, exact: bool = True
) -> MemoryMeter:
    """The meter of ``device``, on which ``model`` computes; what model and optimizers hold there is counted as live.

    Raises:
        InputError: the device is neither the CPU nor CUDA.
    """
    if device.type == "cuda":
        return CudaMeter(device, exact=exact)
    device_memory_bytes(device)  # refuses any device but the CPU
    meter = CpuMeter(exact=exact)
    parameters = list(model.parameters())
    states = [list(values.values()) for optimizer in optimizers for values in optimizer.state.values()]
    meter.count([parameters, [parameter.grad for parameter in parameters], list(model.buffers()), states])
    return meter


def check_limit(limit_bytes: int | None, device: torch.device) -> None:
    """Check that a search can keep to ``limit_bytes`` of ``device``.

    Raises:
        InputError: there is no limit on the CPU, or the limit is above what the device has.
    """
    device_bytes = device_memory_bytes(device)
    if limit_bytes is None and device.type == "cpu":
        raise InputError("`memory_limit` must be given for a search on the CPU, for example 512MiB, but is None.")
    if limit_bytes is not None and limit_bytes > device_bytes:
        raise InputError(
            f"`memory_limit` must be at most what the device has ({format_bytes(device_bytes)}),"
            f" but is {format_bytes(limit_bytes)} ({limit_bytes} bytes) instead."
        )
