"""Recognise an out-of-memory error and free what it left behind. The only room that reads error texts."""

import gc

import torch

# Each text as its backend prints it. Errors of the collective library are left out on purpose: after them
# nobody knows whether the collective was issued, so they must end the process.
_TEXTS = (
    "CUDA out of memory",  # caching allocator, when re-raised as a plain RuntimeError
    "CUDA error: out of memory",  # driver
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Failed to CUDA calloc",
    "HIP out of memory",
    "XPU out of memory",
    "MPS backend out of memory",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that a device or the host had no memory left for an allocation."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    is_collective = isinstance(error, torch.distributed.DistBackendError) or "NCCL" in str(error)
    return isinstance(error, RuntimeError) and not is_collective and any(text in str(error) for text in _TEXTS)


def free_memory(device: torch.device) -> None:
    """Free what a failed step kept alive. Call it after leaving the ``except`` block: its traceback pins tensors.

    The backward of a scalar empties the autograd engine's queue, in which a failed backward leaves tasks
    that hold the whole graph.
    """
    with torch.inference_mode(False), torch.enable_grad():
        torch.zeros(1, device=device, requires_grad=True).sum().backward()
    gc.collect()
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
