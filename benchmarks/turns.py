"""The order in which what is compared takes its turns, so that a noisy machine hits all alike."""

import gc
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch.distributed as dist

Contestant = TypeVar("Contestant")


def turns(contestants: Sequence[Contestant], rounds: int) -> Iterator[tuple[int, Contestant]]:
    """Each of ``contestants`` once in each round, in an order that turns, with the round's number. A collective.

    Before each turn all ranks collect garbage and wait for each other.
    """
    gc.freeze()  # a garbage collection need not go through all that imports and set-up have made
    for number in range(rounds if contestants else 0):
        start = number % len(contestants)
        order = [*contestants[start:], *contestants[:start]]
        for one in order if number // len(contestants) % 2 else order[::-1]:
            gc.collect()
            dist.barrier()
            yield number, one
