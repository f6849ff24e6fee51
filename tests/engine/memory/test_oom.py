"""Out-of-memory errors are recognised, and the tensors of a failed step are freed."""

import builtins
import errno
import gc
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from torchtune_adaptive.engine.memory import out_of_memory
from torchtune_adaptive.engine.memory.out_of_memory import (
    comes_from_out_of_memory,
    free_memory,
    is_out_of_memory,
    is_out_of_memory_in_collective,
    only_new_garbage,
)

CPU = torch.device("cpu")

# As the backends print them, with the surrounding text.
OUT_OF_MEMORY_TEXTS = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.10 GiB",
    'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/pytorch/c10/cuda/CUDACachingAllocator.cpp":1407',
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.",
    "Failed to CUDA calloc 42 bytes",
    "HIP out of memory. Tried to allocate 2.00 GiB",
    "XPU out of memory. Tried to allocate 2.00 GiB",
    "MPS backend out of memory (MPS allocated: 17.00 GB, other allocations: 1.00 GB)",
    "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate",
    "[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory: you tried to allocate",
    "Caught OutOfMemoryError in replica 0 on device 0.\nOriginal Traceback (most recent call last):",
    "cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/THCGeneral.cpp:663",
    "CUDA driver error: out of memory",
    "CUDA driver error: 2",
    "[CUresult.CUDA_ERROR_OUT_OF_MEMORY] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY",
    "Triton Error [CUDA]: out of memory",
    "Triton Error [HIP]:  Code: 2, Messsage: out of memory",
    "nvrtc: error: NVRTC_ERROR_OUT_OF_MEMORY",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "cuFFT error: CUFFT_ALLOC_FAILED",
    "magma_dgetrf returned MAGMA_ERR_DEVICE_ALLOC",
    "rocblas_status_memory_error",
    "miopenStatusAllocFailed",
    "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
    "UR error: UR_RESULT_ERROR_OUT_OF_HOST_MEMORY",
    "Invalid buffer size: 19.38 GiB",
    "NPU out of memory. Tried to allocate 260.00 MiB (NPU 0; 28.50 GiB total capacity)",
    "[Rank:0] FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::234881024 (224)MB",
    "FATAL ERROR :: MODULE:SYNHELPER workspace Allocation of size ::14493510400 failed!",
    "std::bad_alloc",
    "[Errno 12] Cannot allocate memory",
    "could not create a memory object",
    "mkl_malloc: failed to allocate memory",
)
OTHER_TEXTS = (
    "CUDA error: device-side assert triggered",
    'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/pytorch/c10/cuda/PeerToPeerAccess.cpp":30',
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer",
    "CUDA error: too many resources requested for launch",
    "CUDA driver error: 209",
    "Triton Error [HIP]:  Code: 1, Messsage: invalid argument",
    "out of resource: shared memory, Required: 131072, Hardware limit: 101376. Reducing block sizes may help.",
    "out of resource: tensor memory, Required: 768, Hardware limit: 512.",
    "level_zero backend failed with error: 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)",
    "Graph compile failed. synStatus=synStatus 26 [Generic failure].",
    "Invalid buffer size: 0",
    "Placeholder buffer size is not large enough to contain the Tensor storage of size 4",
    "Output size of the matrix multiplication is larger than currently supported by the MPS backend: 72250,72250",
    "DataLoader worker (pid 5) is killed by signal: Bus error. It is possible that dataloader's workers are out of"
    " shared memory. Please try to raise your shared memory limit.",
    "unable to mmap 4096 bytes from file </model.safetensors>: Permission denied (13)",
    "libgomp.so.1: cannot allocate memory in static TLS block",
    "Pin memory thread exited unexpectedly",
    "out of memory",
    "",
)
# As torch prints them when every algorithm has failed, perhaps for want of a workspace.
WORKSPACE_TEXTS = (
    "GET was unable to find an engine to execute this computation",
    "FIND was unable to find an engine to execute this computation",
    "Unable to find a valid cuDNN algorithm to run convolution",
    "CUDA error: CUSPARSE_STATUS_INSUFFICIENT_RESOURCES when calling `cusparseSpGEMM_workEstimation(handle)`",
)
UNCLEAR_TEXTS = (
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",  # seen on an H200 without free memory, at the first attention
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
)
COLLECTIVE_TEXTS = (
    "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error, NCCL version 2.27.3\nCUDA out of memory.",
    "NCCL Error 1: unhandled cuda error. Last error: Failed to CUDA calloc 8388608 bytes",
    "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'",
    "NCCL error in: NCCLUtils.cpp:93, unhandled cuda error, NCCL version 2.28.9\nncclUnhandledCudaError: Call to CUDA"
    " function failed.\nLast error:\nCuda failure 'out of memory'",  # on an H200
)
OTHER_COLLECTIVE_TEXTS = (
    "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled system error, NCCL version 2.27.3",
    "NCCL communicator was aborted on rank 1.",
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer",
)


@pytest.mark.parametrize("text", OUT_OF_MEMORY_TEXTS)
def test_a_backends_text_is_out_of_memory_in_a_runtime_error_alone_and_of_another_kind_in_a_collective(
    text: str,
) -> None:
    assert is_out_of_memory(RuntimeError(text))
    assert not is_out_of_memory_in_collective(RuntimeError(text))
    for kind in (ValueError, KeyError, OSError, AssertionError):
        assert not is_out_of_memory(kind(text))
    for error in (dist.DistBackendError(text), RuntimeError(f"NCCL error: {text}")):
        assert is_out_of_memory_in_collective(error)
        assert not is_out_of_memory(error)


@pytest.mark.parametrize("text", COLLECTIVE_TEXTS)
def test_a_text_of_the_collective_library_is_out_of_memory_in_a_collective(text: str) -> None:
    for error in (dist.DistBackendError(text), RuntimeError(text)):
        assert is_out_of_memory_in_collective(error)
        assert not is_out_of_memory(error)


@pytest.mark.parametrize("text", [*OTHER_TEXTS, *OTHER_COLLECTIVE_TEXTS])
def test_any_other_text_is_not_out_of_memory(text: str) -> None:
    for error in (RuntimeError(text), *([dist.DistBackendError(text)] if text in OTHER_COLLECTIVE_TEXTS else [])):
        assert not is_out_of_memory(error)
        assert not is_out_of_memory_in_collective(error)


@pytest.mark.parametrize(
    ("texts", "free_mib", "num_ooms", "lacks"),
    [
        (UNCLEAR_TEXTS, None, 0, False),
        (UNCLEAR_TEXTS, 255, 0, True),
        (UNCLEAR_TEXTS, 256, 1, False),
        (WORKSPACE_TEXTS, None, 0, True),
        (WORKSPACE_TEXTS, 255, 0, True),
        (WORKSPACE_TEXTS, 8000, 1, True),  # the allocator has refused memory before
        (WORKSPACE_TEXTS, 8000, 0, False),
    ],
)
def test_an_unclear_text_counts_only_where_the_device_lacks_memory(
    texts: tuple[str, ...], free_mib: int | None, num_ooms: int, lacks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same text comes from a library of another version, or from a device that is too old. None: without CUDA."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: free_mib is not None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: ((free_mib or 0) * 2**20, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"num_ooms": num_ooms} if num_ooms else {})
    assert [is_out_of_memory(RuntimeError(text)) for text in texts] == [lacks] * len(texts)


def test_an_error_of_the_operating_system_counts_by_its_number() -> None:
    assert is_out_of_memory(OSError(errno.ENOMEM, "anything"))
    assert not is_out_of_memory(OSError(errno.ENOSPC, "No space left on device"))
    assert not is_out_of_memory(OSError("Cannot allocate memory"))


@pytest.mark.parametrize("text", [*out_of_memory._TEXTS, *out_of_memory._UNCLEAR_TEXTS])
def test_every_text_is_in_an_example(text: str) -> None:
    examples = [*OUT_OF_MEMORY_TEXTS, *WORKSPACE_TEXTS, *UNCLEAR_TEXTS, *COLLECTIVE_TEXTS]
    assert any(re.search(text, example) for example in examples)


def test_a_device_that_does_not_answer_hides_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> NoReturn:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", fail)
    monkeypatch.setattr(torch.cuda, "memory_stats", fail)
    assert not is_out_of_memory(RuntimeError(UNCLEAR_TEXTS[0]))
    assert not is_out_of_memory(RuntimeError(WORKSPACE_TEXTS[0]))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("anything"), torch.cuda.OutOfMemoryError(), MemoryError()])
def test_the_types_for_out_of_memory_count_whatever_their_text(error: BaseException) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_any_out_of_memory_within_a_function_of_torch_that_issues_collectives_is_of_that_kind(error: Exception) -> None:
    within = mock.patch.object(distributed_c10d, "_rank_not_in_group", side_effect=error)
    with within, pytest.raises(type(error)) as raised:
        dist.all_reduce(torch.ones(1), group=dist.GroupMember.NON_GROUP_MEMBER)
    assert is_out_of_memory_in_collective(raised.value)
    assert not comes_from_out_of_memory(raised.value)
    assert not is_out_of_memory_in_collective(type(error)("CUDA out of memory"))


def chain(*errors: BaseException) -> BaseException:
    """The last of ``errors``, each raised while the one before it was being handled."""
    *before, last = errors
    try:
        try:
            if before:
                raise chain(*before)
        finally:
            raise last from None  # as code that hides the error before
    except BaseException as error:
        return error


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ([torch.OutOfMemoryError("alone")], True),
        ([RuntimeError(OUT_OF_MEMORY_TEXTS[0])], True),
        ([torch.OutOfMemoryError("first"), KeyError("second"), RuntimeError("INTERNAL ASSERT FAILED")], True),
        ([ValueError("first"), torch.OutOfMemoryError("second")], True),
        ([ValueError("first"), RuntimeError("INTERNAL ASSERT FAILED")], False),
        ([dist.DistBackendError(COLLECTIVE_TEXTS[0]), RuntimeError("second")], False),
    ],
)
def test_an_error_comes_from_out_of_memory_if_any_behind_it_is(errors: list[BaseException], expected: bool) -> None:
    assert comes_from_out_of_memory(chain(*errors)) is expected


def _raised(raise_error: Callable[[BaseException], NoReturn]) -> BaseException:
    try:
        raise_error(torch.OutOfMemoryError("first"))
    except BaseException as error:
        return error


def _as_cause(error: BaseException) -> NoReturn:
    raise RuntimeError("later") from error


def _as_cause_of_the_one_handled(error: BaseException) -> NoReturn:
    try:
        _as_cause(error)
    except RuntimeError:
        raise KeyError("last")  # noqa: B904


def _in_a_group(error: BaseException) -> NoReturn:
    raise getattr(builtins, "ExceptionGroup")("several", [ValueError("one"), error])  # noqa: B009 - Python 3.10 has none


@pytest.mark.parametrize("raise_error", [_as_cause, _as_cause_of_the_one_handled, _in_a_group])
def test_an_error_that_was_kept_and_raised_later_counts(raise_error: Callable[[BaseException], NoReturn]) -> None:
    if raise_error is _in_a_group and sys.version_info < (3, 11):
        pytest.skip("Python 3.10 has no groups of exceptions")
    error = _raised(raise_error)
    assert comes_from_out_of_memory(error)
    assert not comes_from_out_of_memory(error, handled=error)


def test_an_error_of_the_cpu_allocator_is_out_of_memory() -> None:
    caught: list[BaseException] = []
    try:
        torch.empty(2**62, dtype=torch.int8)
    except RuntimeError as error:
        caught.append(error)
    assert [is_out_of_memory(error) for error in caught] == [True]


# ---- what stays alive


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(values)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise torch.OutOfMemoryError("in backward")


def fail_in_forward(watched: list[weakref.ref[torch.Tensor]]) -> None:
    activations = torch.ones(4, 4, requires_grad=True) * 2
    watched.append(weakref.ref(activations))
    raise torch.OutOfMemoryError("in forward")


def fail_in_backward(watched: list[weakref.ref[torch.Tensor]]) -> None:
    """Two branches meet at the loss. One fails while the task of the other, with its gradient, is in the queue."""
    model = nn.Linear(4, 4)
    left, right = model(torch.ones(3, 4)), model(torch.ones(3, 4)).exp()
    loss = FailsInBackward.apply(left.tanh()).sum() + right.tanh().sum()
    watched += [weakref.ref(tensor) for tensor in (left, right, loss, model.weight)]
    loss.backward()


def fails(work: Callable[[list[weakref.ref[torch.Tensor]]], None]) -> list[weakref.ref[torch.Tensor]]:
    """The tensors of a failed ``work``, as the caller sees them after leaving the ``except`` block."""
    watched: list[weakref.ref[torch.Tensor]] = []
    failed = False
    try:
        work(watched)
    except torch.OutOfMemoryError:
        failed = True
    assert failed
    return watched


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_nothing_of_a_failed_step_is_alive_after_freeing(mode: Callable[[], Any]) -> None:
    with mode():
        before = torch.is_grad_enabled()
        watched = fails(fail_in_forward)
        free_memory(CPU)
        assert torch.is_grad_enabled() == before
    assert [reference() for reference in watched] == [None]


def test_without_a_new_backward_the_queue_of_the_failed_one_keeps_the_graph_alive() -> None:
    """The reason for the backward pass in ``free_memory``, which can be deleted when this test fails."""
    watched = fails(fail_in_backward)
    gc.collect()
    assert any(reference() is not None for reference in watched)
    free_memory(CPU)
    assert all(reference() is None for reference in watched)


def test_memory_is_freed_also_where_at_first_there_is_none_for_a_scalar(monkeypatch: pytest.MonkeyPatch) -> None:
    empty_queue, errors = out_of_memory._empty_queue, [torch.OutOfMemoryError()]

    def full_at_first(device: torch.device) -> None:
        if errors:
            raise errors.pop()
        empty_queue(device)

    monkeypatch.setattr(out_of_memory, "_empty_queue", full_at_first)
    watched = fails(fail_in_backward)
    free_memory(CPU)
    assert [reference() for reference in watched if reference() is not None] == []


@pytest.fixture
def nothing_is_frozen() -> Iterator[None]:
    """As in a process that has not called ``gc.freeze``."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_is_frozen")
def test_only_new_garbage_is_searched_and_all_of_it_is_freed_and_later_all_again() -> None:
    def search_new_garbage() -> None:
        with only_new_garbage():
            assert gc.get_freeze_count() > len(old)
            watched.extend(fails(fail_in_backward))
            free_memory(CPU)
            raise KeyError

    old = [[] for _ in range(1000)]
    watched: list[weakref.ref[torch.Tensor]] = []
    with pytest.raises(KeyError):
        search_new_garbage()
    assert [reference() for reference in watched if reference() is not None] == []
    assert gc.get_freeze_count() == 0


def test_objects_frozen_by_other_code_stay_frozen() -> None:
    kept = [[]]
    gc.freeze()
    with only_new_garbage():
        assert is_frozen(kept)
    assert is_frozen(kept)


def is_frozen(value: object) -> bool:
    """This looks for the object itself, because the number of frozen objects may change at any time."""
    return not any(one is value for one in gc.get_objects())


def test_a_cache_is_emptied_only_after_the_device_has_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """With expandable segments, the allocator itself waits for one stream only."""
    calls: list[str] = []
    module = SimpleNamespace(
        synchronize=lambda device: calls.append(f"waited for {device}"), empty_cache=lambda: calls.append("emptied")
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    out_of_memory.empty_cache(torch.device("cuda", 1))
    assert calls == ["waited for cuda:1", "emptied"]
