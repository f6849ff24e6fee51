"""Recognise an out-of-memory error and free what it left behind. The only room that reads error texts."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Each text as its backend prints it.
_TEXTS = (
    "CUDA out of memory",  # caching allocator, when re-raised as a plain RuntimeError
    "CUDA error: out of memory",  # driver
    "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "_STATUS_ALLOC_FAILED",  # CUBLAS, CUDNN, CUSOLVER, HIPBLAS
    "CUFFT_ALLOC_FAILED",
    "_ALLOCATION_FAILED",  # CUDNN_STATUS_INTERNAL_ERROR_HOST, _DEVICE
    "CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input",  # no workspace
    "Failed to CUDA calloc",
    "HIP out of memory",
    "HIP error: out of memory",
    "XPU out of memory",
    "MPS backend out of memory",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that a device or the host had no memory left for an allocation."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return (
        isinstance(error, RuntimeError) and not _is_of_collective(error) and any(text in str(error) for text in _TEXTS)
    )


def is_out_of_memory_in_collective(error: BaseException) -> bool:
    """Whether the collective library had no memory left: then nobody knows whether the collective was issued."""
    texts = (*_TEXTS, "out of memory")  # NCCL: "Cuda failure 2 'out of memory'"
    return any(_is_of_collective(one) and any(text in str(one) for text in texts) for one in errors_behind(error))


def comes_from_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` is out of memory, or arose while such an error was on its way.

    torchtune's activation offloading, for one, cannot close its context in mid-forward and raises one of its own.
    Not if a collective failed on the way.
    """
    chain = list(errors_behind(error))
    return any(map(is_out_of_memory, chain)) and not any(map(_is_of_collective, chain))


def errors_behind(error: BaseException | None) -> Iterator[BaseException]:
    """``error``, the one that was on its way when it arose, and so on."""
    while error is not None:
        yield error
        error = error.__context__


def _is_of_collective(error: BaseException) -> bool:
    return isinstance(error, torch.distributed.DistBackendError) or "NCCL" in str(error)


def free_memory(device: torch.device) -> None:
    """Free what a failed step kept alive. Call it after leaving the ``except`` block: its traceback pins tensors.

    The backward of a scalar empties the autograd engine's queue, in which a failed backward leaves tasks
    that hold the whole graph.
    """
    _collect(device)  # lest there be no room for the scalar
    with torch.inference_mode(False), torch.enable_grad():
        torch.zeros(1, device=device, requires_grad=True).sum().backward()
    _collect(device)


@contextmanager
def only_new_garbage() -> Iterator[None]:
    """Within it ``free_memory`` looks for garbage only among what has been made since, which takes next to no time.

    To go through all that imports and set-up have made takes longer than many a train step, and finds nothing. Where
    somebody has frozen objects before, they stay frozen afterwards.
    """
    gc.collect()
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _collect(device: torch.device) -> None:
    gc.collect()
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
