"""Tokens per second of train steps of several sizes, and the smallest size that is close to the best."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torchtune_adaptive.engine.loop import Loop
from torchtune_adaptive.engine.progress import Bar

_ROUNDS = 5
_AS_GOOD_AS_BEST = 0.98


def tokens_per_second(
    loop: Loop,
    make_batch: Callable[[int], Any],
    sizes: Sequence[int],
    *,
    num_tokens: Callable[[int], int],
) -> dict[int, float]:
    """Tokens per second of each of ``sizes``, which must fit: ``num_tokens(size)`` divided by the median step time.

    Steps of the sizes alternate. Unlike in probes, there is no meter and no vote, because both cost time. A step of the
    smallest size, which creates the optimizer's state, and a round, in which kernels are selected, are not counted.
    Restores all state. A collective; all ranks get rank 0's figures.
    """
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    with loop.restored():
        # The state must not lie within memory that is cached for a large step: see `MicroBatcher.start_small`.
        loop.step(make_batch(min(sizes)))
        loop.clean_up()
        rounds = Bar(range(1 + _ROUNDS), desc="timing batch sizes", disable=loop.consensus.rank != 0)
        for round_number in rounds:
            for size in sizes:
                taken_s = _time_step(loop, make_batch(size))
                if round_number > 0:
                    seconds[size].append(taken_s)
        loop.clean_up()
    rates = {size: num_tokens(size) / statistics.median(seconds[size]) for size in sizes}
    return loop.consensus.from_rank_zero(rates)


def smallest_near_best(rates: Mapping[int, float]) -> int:
    """The smallest size whose rate is within 2 % of the best.

    >>> smallest_near_best({4: 800.0, 8: 990.0, 16: 1000.0})
    8
    """
    best = max(rates.values())
    return min(size for size, rate in rates.items() if rate >= _AS_GOOD_AS_BEST * best)


def _time_step(loop: Loop, batch: Any) -> float:
    _wait_for(loop.device)
    started = time.perf_counter()
    loop.step(batch)
    _wait_for(loop.device)
    return time.perf_counter() - started


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
