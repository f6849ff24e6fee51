"""What CUDA's kernels and libraries take of torch's allocator beside tensors, which no trace on fake tensors sees.

A trace records events where it is taken, and the replay of the allocator makes of them what it is on a card. Where a
kernel sums into few outputs, several blocks of threads work on each of them. They exchange what they found in memory
that they have for that time (aten/src/ATen/native/cuda/Reduce.cuh, torch 2.9 to 2.13). cuBLAS keeps a workspace for
each thread from its first product of matrices on. It needs no torch.
"""

from torchtune_adaptive.engine.search.strategies import round_down_to_power_of_two
from torchtune_adaptive.plan.trace.events import Events

PRODUCT = "first product"  # the name of an event in the forward pass, and in the backward pass
OUTPUTS, INPUTS = "outputs of a sum", "inputs of a sum"  # names of events whose bytes are numbers of elements
_SUM_BYTES = 4  # of float32, in which values of up to 32 bits are summed
VECTOR, _THREADS, _WARP = 4, 512, 32  # outputs of a thread; threads of a block; threads that run together
_FEWEST_VALUES, _MOST_VALUES = 16, 256  # of a thread


def scratch_bytes(outputs: int, inputs: int, threads: int) -> int:
    """The scratch memory of a sum of ``inputs`` elements into ``outputs`` on a card that runs so many threads at once.

    >>> scratch_bytes(2048, 1024 * 2048, threads=108 * 2048) // 2**20
    16
    """
    if not outputs or not inputs:
        return 0
    counts = outputs // VECTOR, inputs // outputs
    width, height = (round_down_to_power_of_two(max(1, count)) for count in counts)
    most = _THREADS // VECTOR
    columns = min(width, most, _WARP)
    rows = min(height, most // columns)
    columns = min(width, most // rows)
    values = -(-(inputs // outputs) // rows)  # of a thread
    blocks = -(-outputs // VECTOR // columns)
    wanted = threads // (columns * rows)  # blocks
    if values < _MOST_VALUES or blocks > wanted:
        return 0
    share = max(min(-(-wanted // blocks), -(-values // _FEWEST_VALUES)), -(-values // _MOST_VALUES))
    return _SUM_BYTES * outputs * share * columns * VECTOR if share > 1 else 0


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
