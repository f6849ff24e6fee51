"""Recognise out-of-memory errors, and free the memory of a failed step. The only module that reads error texts."""

import builtins
import errno
import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb
from typing import Any

import torch
from torch.distributed import distributed_c10d

_GROUP: Any = getattr(builtins, "BaseExceptionGroup", ())  # since Python 3.11
_TOO_LITTLE_BYTES = 256 * 2**20  # outside torch's allocator, for what a library allocates at once (an estimate)


def _device_is_full() -> bool:
    """Whether CUDA's current device has too little memory left for what libraries allocate past torch's allocator."""
    try:
        return torch.cuda.is_initialized() and torch.cuda.mem_get_info()[0] < _TOO_LITTLE_BYTES
    except RuntimeError:  # after another error the device may not answer
        return False


def _workspace_may_have_failed() -> bool:
    """Whether CUDA's allocator has refused memory in this process, or the device is full. True without CUDA."""
    try:
        if not torch.cuda.is_initialized():
            return True
        return torch.cuda.memory_stats().get("num_ooms", 0) > 0 or _device_is_full()
    except RuntimeError:
        return False


# What is printed after an allocation has failed, as regular expressions, and by whom.
_TEXTS = (
    "(CUDA|HIP|XPU|MPS backend|NPU) out of memory",  # torch's allocators, where re-raised as a RuntimeError; torch_npu
    "Caught OutOfMemoryError in ",  # torch/_utils.py, from a replica, thread or worker
    # CUDA and ROCm
    "(CUDA|HIP) error: out of memory",  # torch, c10/cuda/CUDAException.cpp
    r"cuda runtime error \(2\) ?: out of memory",  # torch before 1.5 and extensions, THC/THCGeneral.cpp
    r"CUDA driver error: (out of memory|2(?!\d))",  # torch, c10/cuda/driver_api.h; 2 is of memory
    "(CUDA|NVRTC)_ERROR_OUT_OF_MEMORY",  # numba and cuda-python, by the name of the driver's error; nvrtc.h
    r"Triton Error \[(CUDA|HIP)\]: .*out of memory",  # triton, driver.c of backends/nvidia and backends/amd
    # libraries of CUDA and ROCm
    "_STATUS_ALLOC_FAILED",  # cublas, cudnn, cusolver, cusparse, hipblas and hipsparse
    "_ALLOCATION_FAILED",  # cudnn 9 (CUDNN_STATUS_INTERNAL_ERROR_HOST_..., _DEVICE_...), curand
    "CUFFT_ALLOC_FAILED",  # cufft.h
    "MAGMA_ERR_(DEVICE|HOST)_ALLOC",  # magma, magma_types.h
    "rocblas_status_memory_error",  # rocblas-types.h
    "miopenStatusAllocFailed",  # miopen.h
    "Failed to CUDA calloc",  # nccl, include/alloc.h
    "CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input",  # no workspace
    # other devices
    "_ERROR_OUT_OF_(DEVICE|HOST)_MEMORY",  # oneAPI: unified runtime (UR_RESULT_), Level Zero (ZE_RESULT_), PI_
    r"Invalid buffer size: [\d.]+ [KMGT]i?B",  # torch, mps/MPSAllocator.mm: more than a buffer may have
    "PT_DEVMEM Allocation failed for size",  # Gaudi's bridge (huggingface/optimum-habana#1469)
    "workspace Allocation of size .* failed",  # Gaudi's bridge (HabanaAI/Model-References#10)
    # host
    "DefaultCPUAllocator: (can't allocate|not enough) memory",  # torch, c10/core/impl/alloc_cpu.cpp
    "Cannot allocate memory",  # strerror(ENOMEM), for example of fork and mmap
    "std::bad_alloc",  # C++
    "could not create a memory object",  # oneDNN, dnnl.hpp
    "mkl_malloc: failed to allocate memory",  # MKL in extensions (SYSTRAN/faster-whisper#390)
)
# What is printed after other failures, too, and whether it means that an allocation has failed now.
_UNCLEAR_TEXTS = {
    # torch catches the allocator's error for each algorithm, and other errors too (pytorch/pytorch#108645)
    "(GET|FIND) was unable to find an engine to execute this computation": _workspace_may_have_failed,  # Conv_v8.cpp
    "Unable to find a valid cuDNN algorithm": _workspace_may_have_failed,  # torch, native/cudnn/Conv_v7.cpp
    "CUSPARSE_STATUS_INSUFFICIENT_RESOURCES": _workspace_may_have_failed,  # cusparse: memory, or its mode
    "CUDNN_STATUS_INTERNAL_ERROR": _device_is_full,  # cudnn, for example at the first attention
    "CUBLAS_STATUS_NOT_INITIALIZED": _device_is_full,  # cublas, in cublasCreate
}


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` means that an allocation failed, on a device or on the host.

    Some texts count only while the device has little free memory, so ask at once. False for errors of the
    collective library: see ``is_out_of_memory_in_collective``.
    """
    if _is_out_of_memory_by_type(error):
        return True
    return isinstance(error, RuntimeError) and not _is_of_collective(error) and _says_out_of_memory(str(error))


def is_out_of_memory_in_collective(error: BaseException, *, handled: BaseException | None = None) -> bool:
    """Return whether memory ran out within a collective. The collective may or may not have been issued.

    ``handled``: as for ``errors_behind``.
    """
    return any(
        _is_out_of_memory_by_type(one)
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
    """Yield ``error``, the error that was being handled when it was raised, its cause, members of a group, and so on.

    Args:
        handled: the error that was already being handled before the step began, if any. It and those behind it are left
            out: they say nothing about the step.
    """
    waiting, seen = [error], {id(handled)}
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        members = getattr(one, "exceptions", ()) if isinstance(one, _GROUP) else ()
        waiting += [*reversed(members), one.__cause__, one.__context__]


def _says_out_of_memory(message: str) -> bool:
    # For its message CUDA's allocator asks NVML for the processes on the GPU. Where NVML does not answer, as on a MIG
    # slice in a container, it raises another error instead (github.com/pytorch/pytorch/issues/197312).
    lacks_processes = "NVML_SUCCESS" in message and "CUDACachingAllocator" in message
    return (
        lacks_processes
        or any(re.search(text, message) for text in _TEXTS)
        or any(re.search(text, message) and counts() for text, counts in _UNCLEAR_TEXTS.items())
    )


def _is_out_of_memory_by_type(error: BaseException) -> bool:
    is_by_number = isinstance(error, OSError) and error.errno == errno.ENOMEM
    return is_by_number or isinstance(error, (torch.OutOfMemoryError, MemoryError))


def _is_of_collective(error: BaseException) -> bool:
    if isinstance(error, torch.distributed.DistBackendError) or "NCCL" in str(error):
        return True
    return any(frame.f_code.co_filename == distributed_c10d.__file__ for frame, _ in walk_tb(error.__traceback__))


def free_memory(device: torch.device) -> None:
    """Free the memory of a failed step. Call it after the ``except`` block, whose traceback keeps tensors alive.

    A failed backward pass leaves tasks in the autograd engine's queue, and these keep the whole graph alive. The
    backward pass of a scalar empties the queue.
    """
    try:
        _empty_queue(device)
        is_empty = True
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        is_empty = False
    gc.collect()  # takes tenths of a second in a large program
    empty_cache(device)
    if not is_empty:
        _empty_queue(device)
        gc.collect()
        empty_cache(device)


def empty_cache(device: torch.device) -> None:
    """Give back what the device's allocator has cached."""
    if device.type != "cpu":
        # Expandable segments are unmapped after waiting for one stream only, but FSDP2 uses others too.
        torch.get_device_module(device).synchronize(device)
        torch.get_device_module(device).empty_cache()


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


def _empty_queue(device: torch.device) -> None:
    with torch.inference_mode(False), torch.enable_grad():
        torch.zeros(1, device=device, requires_grad=True).sum().backward()
