"""Recognise out-of-memory errors, and free the memory of a failed step. The only module that reads error texts."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb

import torch
from torch.distributed import distributed_c10d

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
# What libraries say of an allocation that failed, but of other failures too: it depends on what the device has left.
_UNCLEAR_TEXTS = ("CUDNN_STATUS_INTERNAL_ERROR", "CUBLAS_STATUS_NOT_INITIALIZED")
_TOO_LITTLE_BYTES = 256 * 2**20  # outside torch's allocator, for what such a library allocates at once (an estimate)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` means that an allocation failed, on a device or on the host.

    Some texts count only while the device has almost no free memory, so ask at once. False for errors of the
    collective library: see ``is_out_of_memory_in_collective``.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and not _is_of_collective(error) and _says_out_of_memory(str(error))


def is_out_of_memory_in_collective(error: BaseException, *, handled: BaseException | None = None) -> bool:
    """Return whether memory ran out within a collective. The collective may or may not have been issued.

    ``handled``: as for ``errors_behind``.
    """
    return any(
        isinstance(one, (torch.OutOfMemoryError, MemoryError))
        or "out of memory" in str(one)  # as in NCCL's "Cuda failure 2"
        or _says_out_of_memory(str(one))
        for one in errors_behind(error, handled=handled)
        if _is_of_collective(one)
    )


def comes_from_out_of_memory(error: BaseException, *, handled: BaseException | None = None) -> bool:
    """Return whether ``error`` is an out-of-memory error, or was raised while one was being handled.

    For example, torchtune's activation offloading raises its own error when its context is left in mid-forward.
    False if any of these errors comes from a collective. ``handled``: as for ``errors_behind``.
    """
    chain = list(errors_behind(error, handled=handled))
    return any(map(is_out_of_memory, chain)) and not any(map(_is_of_collective, chain))


def errors_behind(error: BaseException | None, *, handled: BaseException | None = None) -> Iterator[BaseException]:
    """Yield ``error``, the error that was being handled when it was raised, and so on.

    Args:
        handled: the error that was already being handled before the step began, if any. It and those behind it are left
            out: they say nothing about the step.
    """
    while error is not None and error is not handled:
        yield error
        error = error.__context__


def _says_out_of_memory(message: str) -> bool:
    # For its message CUDA's allocator asks NVML for the processes on the GPU. Where NVML does not answer, as on a MIG
    # slice in a container, it raises another error instead (github.com/pytorch/pytorch/issues/197312).
    lacks_processes = "NVML_SUCCESS" in message and "CUDACachingAllocator" in message
    if lacks_processes or any(text in message for text in _TEXTS):
        return True
    return any(text in message for text in _UNCLEAR_TEXTS) and _device_is_full()


def _device_is_full() -> bool:
    """Whether CUDA's current device has too little memory left for what libraries allocate past torch's allocator."""
    try:
        return torch.cuda.is_initialized() and torch.cuda.mem_get_info()[0] < _TOO_LITTLE_BYTES
    except RuntimeError:  # after another error the device may not answer
        return False


def _is_of_collective(error: BaseException) -> bool:
    if isinstance(error, torch.distributed.DistBackendError) or "NCCL" in str(error):
        return True
    return any(frame.f_code.co_filename == distributed_c10d.__file__ for frame, _ in walk_tb(error.__traceback__))


def free_memory(device: torch.device) -> None:
    """Free the memory of a failed step. Call it after the ``except`` block, whose traceback keeps tensors alive.

    A failed backward pass leaves tasks in the autograd engine's queue, and these keep the whole graph alive. The
    backward pass of a scalar empties the queue.
    """
    _collect(device)  # so that there is memory for the scalar
    with torch.inference_mode(False), torch.enable_grad():
        torch.zeros(1, device=device, requires_grad=True).sum().backward()
    _collect(device)


@contextmanager
def only_new_garbage() -> Iterator[None]:
    """Context: ``free_memory`` collects garbage only among objects created in this context.

    That takes almost no time. Collecting all objects of imports and set-up can take longer than a train step, and
    finds nothing. If other code has already frozen objects (``gc.freeze``), this context does nothing.
    """
    gc.collect()
    this_module = globals()  # now in the oldest generation, or frozen; to count what is frozen takes longer
    if not any(one is this_module for one in gc.get_objects(generation=2)):
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
        # Expandable segments are unmapped after waiting for one stream only, but FSDP2 uses others too.
        torch.get_device_module(device).synchronize(device)
        torch.get_device_module(device).empty_cache()
