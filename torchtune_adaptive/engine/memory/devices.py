"""Make the meter for a device, and check a memory limit against the device."""

import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchtune_adaptive.engine.memory.cpu_meter import CpuMeter
from torchtune_adaptive.engine.memory.cuda_meter import CudaMeter
from torchtune_adaptive.engine.memory.meter import MemoryMeter, device_memory_bytes
from torchtune_adaptive.engine.optimizers import optimizers_within
from torchtune_adaptive.errors import InputError, quote
from torchtune_adaptive.text import format_bytes, parse_memory

_LIGHTNING = ("lightning", "lightning_fabric", "pytorch_lightning")  # its packages
_NO_CACHING = "PYTORCH_NO_CUDA_MEMORY_CACHING"  # of torch, for debugging


def meter_for(
    device: torch.device, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], *, exact: bool = True
) -> MemoryMeter:
    """Make a meter for ``device``, on which ``model`` computes. It counts tensors of the model and the optimizers.

    Raises:
        InputError: the device is neither the CPU nor CUDA.
    """
    if device.type == "cuda":
        return CudaMeter(device, exact=exact)
    device_memory_bytes(device)  # refuses any device except the CPU
    meter = CpuMeter(exact=exact)
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters]
    states = [one.state for one in optimizers_within(optimizers)]
    meter.count([parameters, gradients, list(model.buffers()), states])
    return meter


def meter_of_run(
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    device: torch.device,
    limit_bytes: int | None,
) -> MemoryMeter | None:
    """The meter of a training run; None on a CPU without a limit, where it would only cost time."""
    if device.type != "cuda" and (device.type != "cpu" or limit_bytes is None):
        return None
    return meter_for(device, nn.ModuleList(models), optimizers, exact=False)


def optimizers_of(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The optimizers of an argument that is one, or several of them. Of one in a wrapper of a trainer, torch's own.

    Raises:
        InputError: it is something else.
    """
    several = list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
    several = [getattr(one, "optimizer", one) if _is_wrapper(one) else one for one in several]
    for one in several:
        if not isinstance(one, torch.optim.Optimizer):
            raise InputError(
                f"`optimizer` must be an optimizer of torch, or several, but is {quote(optimizer)} instead."
            )
    return several


def _is_wrapper(optimizer: Any) -> bool:
    """Whether an optimizer is accelerate's, which has not called its base's ``__init__`` and so has no hooks, or
    Lightning's. Neither has a state of its own.
    """
    is_of_lightning = any(one.__module__.partition(".")[0] in _LIGHTNING for one in type(optimizer).__mro__)
    return is_of_lightning or not hasattr(optimizer, "_optimizer_step_pre_hooks")


def computing_device(model: nn.Module) -> torch.device:
    """The device on which ``model`` computes: that of its parameters, or with FSDP2's CPU offload the GPU.

    Raises:
        InputError: the model is no module, or has no parameters.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"`model` must be a module of torch, but is {quote(model)} instead.")
    if isinstance(model, torch.jit.ScriptModule):  # which takes no hooks
        raise InputError("`model` must be a module that runs in Python, but is one of `torch.jit` instead.")
    parameter = next(model.parameters(), None)
    if parameter is None:
        raise InputError("`model` has no parameters.")
    mesh_type = parameter.device_mesh.device_type if isinstance(parameter, DTensor) else parameter.device.type
    if mesh_type == parameter.device.type:
        return parameter.device
    return torch.device(mesh_type, torch.get_device_module(mesh_type).current_device())


def wait_for(device: torch.device) -> None:
    """Wait until ``device`` has done what was queued. A CPU has no queue."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def limit_bytes_of(memory_limit: int | str | None) -> int | None:
    """The bytes of an argument that is a whole number, or a text such as "80GiB"; None if there is no limit."""
    return None if memory_limit is None else parse_memory(memory_limit)


def check_limit(limit_bytes: int | None, device: torch.device) -> None:
    """Check that ``device`` can have a memory limit of ``limit_bytes``.

    Raises:
        InputError: the limit is None on the CPU, or above the memory of the device, or CUDA's allocator is turned off.
    """
    device_bytes = device_memory_bytes(device)
    uncached = os.environ.get(_NO_CACHING)
    if device.type == "cuda" and uncached is not None:
        raise InputError(
            f"`{_NO_CACHING}` is set ({uncached!r}), but only CUDA's caching allocator can limit memory: unset it."
        )
    if limit_bytes is None and device.type == "cpu":
        raise InputError("A search on the CPU needs `memory_limit`, for example 512MiB.")
    if limit_bytes is not None and limit_bytes > device_bytes:
        raise InputError(
            f"`memory_limit` must be at most what the device has ({format_bytes(device_bytes)}),"
            f" but is {format_bytes(limit_bytes)} ({limit_bytes} bytes) instead."
        )


def describe_peak(meter: MemoryMeter | None) -> str:
    """Peak so far and limit as text, for messages; without a limit, what is available now.

    >>> describe_peak(None)
    'not metered'
    """
    if meter is None:
        return "not metered"
    peak = f"peak {format_bytes(meter.peak_bytes)}"
    if meter.limit_bytes is None:
        return f"{peak}, now {format_bytes(meter.available_bytes)} available"
    return f"{peak}, limit {format_bytes(meter.limit_bytes)}"


def allowed_bytes(device: torch.device, limit_bytes: int | None) -> int | None:
    """The memory of ``device`` that a run may use: the user's limit, else a GPU's whole memory, else None."""
    return limit_bytes or (device_memory_bytes(device) if device.type == "cuda" else None)
