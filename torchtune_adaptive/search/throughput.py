"""How many tokens a second train steps of several sizes take, and the smallest size that is as good as the best."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from torchtune_adaptive.distributed.consensus import Consensus
from torchtune_adaptive.distributed.snapshot import leave_no_trace

_ROUNDS = 5
_AS_GOOD_AS_BEST = 0.98


def tokens_per_second(
    sizes: Sequence[int],
    train_step: Callable[[Any], object],
    make_batch: Callable[[int], Any],
    num_tokens: Callable[[int], int],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    consensus: Consensus,
) -> dict[int, float]:
    """Of each of ``sizes``, which are known to fit: ``num_tokens(size)`` over the median of interleaved steps.

    Unlike in probes nothing is metered and nobody votes, because both cost time: what is timed is a step of training.
    Leaves no trace. A collective; all ranks get rank 0's figures.
    """
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    with leave_no_trace(model, optimizer):
        for round_number in tqdm(range(1 + _ROUNDS), desc="timing batch sizes", disable=consensus.rank != 0):
            for size in sizes:
                batch = make_batch(size)
                _wait_for(device)
                started = time.perf_counter()
                train_step(batch)
                _wait_for(device)
                if round_number > 0:  # in the first one kernels are chosen and the optimizer's state is made
                    seconds[size].append(time.perf_counter() - started)
    return consensus.from_rank_zero({size: num_tokens(size) / statistics.median(seconds[size]) for size in sizes})


def smallest_near_best(rates: Mapping[int, float]) -> int:
    """The smallest size whose rate is within 2 % of the best.

    >>> smallest_near_best({4: 800.0, 8: 990.0, 16: 1000.0})
    8
    """
    best = max(rates.values())
    return min(size for size, rate in rates.items() if rate >= _AS_GOOD_AS_BEST * best)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
