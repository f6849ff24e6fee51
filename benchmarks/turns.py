"""The order in which contestants take turns, so that other load on the machine affects all equally."""

import gc
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch.distributed as dist

Contestant = TypeVar("Contestant")


def turns(contestants: Sequence[Contestant], rounds: int) -> Iterator[tuple[int, Contestant]]:
    """Each of ``contestants`` once in each round, in an order that changes, with the round's number. A collective.

    Before each turn all ranks collect garbage and wait for each other.
    """
    gc.freeze()  # garbage collections then skip all that imports and set-up have made
    for number in range(rounds if contestants else 0):
        start = number % len(contestants)
        order = [*contestants[start:], *contestants[:start]]
        for one in order if number // len(contestants) % 2 else order[::-1]:
            gc.collect()
            dist.barrier()
            yield number, one
