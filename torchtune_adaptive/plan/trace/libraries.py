"""What CUDA's kernels and libraries take of torch's allocator beside tensors, which no trace on fake tensors sees.

A trace records events where it is taken, and the replay of the allocator makes of them what it is on a card. Where a
kernel sums into few outputs, several blocks of threads work on each of them. They exchange what they found in memory
that they have for that time (aten/src/ATen/native/cuda/Reduce.cuh, torch 2.9 to 2.13). cuBLAS keeps a workspace for
each thread from its first product of matrices on.
"""

import math
from typing import Any

import torch

from torchtune_adaptive.plan.trace.events import Events

PRODUCT = "first product"  # the name of an event in the forward pass, and in the backward pass
OUTPUTS, INPUTS = "outputs of a sum", "inputs of a sum"  # names of events whose bytes are numbers of elements
# Operations that sum, by which of their arguments names the dimensions.
_DIMENSIONS = {
    torch.ops.aten.sum.dim_IntList: 1,
    torch.ops.aten.mean.dim: 1,
    torch.ops.aten.linalg_vector_norm.default: 2,
}
_SUM_BYTES = 4  # of float32, in which values of up to 32 bits are summed
_VECTOR, _THREADS, _WARP = 4, 512, 32  # outputs of a thread; threads of a block; threads that run together
_FEWEST_VALUES, _MOST_VALUES = 16, 256  # of a thread


def size_of_sum(func: Any, args: Any) -> tuple[int, int] | None:
    """The numbers of outputs and of inputs of a sum that may need scratch memory; None for any other operation.

    Whether it is one depends on nothing that grows with the rows of a batch. Sums over the dimension whose elements are
    neighbours take next to none.
    """
    place = _DIMENSIONS.get(func)
    if place is None or len(args) <= place or not args[place] or not args[0].is_floating_point() or not args[0].dim():
        return None
    tensor = args[0]
    summed = {dim % tensor.dim() for dim in args[place]}
    *others, fastest = sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride(dim), dim))
    if fastest in summed or tensor.stride(fastest) != 1:
        return None
    if tensor.shape[fastest] % _VECTOR or any(tensor.stride(dim) % _VECTOR for dim in others):
        return None
    return math.prod(size for dim, size in enumerate(tensor.shape) if dim not in summed), tensor.numel()


def scratch_bytes(outputs: int, inputs: int, threads: int) -> int:
    """The scratch memory of a sum of ``inputs`` elements into ``outputs`` on a card that runs so many threads at once.

    >>> scratch_bytes(2048, 1024 * 2048, threads=108 * 2048) // 2**20
    16
    """
    if not outputs or not inputs:
        return 0
    width, height = _last_power_of_two(outputs // _VECTOR), _last_power_of_two(inputs // outputs)
    most = _THREADS // _VECTOR
    columns = min(width, most, _WARP)
    rows = min(height, most // columns)
    columns = min(width, most // rows)
    values = -(-(inputs // outputs) // rows)  # of a thread
    blocks = -(-outputs // _VECTOR // columns)
    wanted = threads // (columns * rows)  # blocks
    if values < _MOST_VALUES or blocks > wanted:
        return 0
    share = max(min(-(-wanted // blocks), -(-values // _FEWEST_VALUES)), -(-values // _MOST_VALUES))
    return _SUM_BYTES * outputs * share * columns * _VECTOR if share > 1 else 0


def with_scratch(events: Events, threads: int) -> Events:
    """The events with the scratch memory of sums in the place of their sizes; 0 threads: without it.

    Those of first products take nothing.
    """
    found = list(events)
    for index, event in enumerate(events):
        if event.taken >= 0:
            continue
        if event.operation == PRODUCT:
            found[index] = event._replace(num_bytes=0)
        elif event.operation == INPUTS:
            outputs = events[index - 2]  # which is given back in between
            num_bytes = scratch_bytes(outputs.num_bytes, event.num_bytes, threads) if threads else 0
            found[index - 2] = outputs._replace(num_bytes=0)
            found[index] = event._replace(num_bytes=num_bytes)
    return tuple(found)


def _last_power_of_two(number: int) -> int:
    return 1 << max(0, number.bit_length() - 1)
