"""How an optimizer step's samples are divided among ranks."""

import math

from torchtune_adaptive.errors import InputError


def rows_of_rank(samples_per_step: int, *, rank: int, ranks: int) -> int:
    """Samples of ``rank`` in an optimizer step. If they cannot be divided evenly, the first ranks have one more.

    >>> [rows_of_rank(10, rank=rank, ranks=4) for rank in range(4)]
    [3, 3, 2, 2]
    """
    return len(range(rank, samples_per_step, ranks))


def largest_share(samples_per_step: int, *, ranks: int) -> int:
    """The largest number of samples of an optimizer step on a rank."""
    return math.ceil(samples_per_step / ranks)


def small_samples(samples_per_step: int, *, ranks: int) -> int:
    """Samples over all ranks in the first half of each rank's share, which has the middle one of an odd number.

    >>> small_samples(10, ranks=4)  # ranks of 3, 3, 2 and 2
    6
    """
    return sum(-(-rows_of_rank(samples_per_step, rank=rank, ranks=ranks) // 2) for rank in range(ranks))


def check_samples_per_step(samples_per_step: int, *, ranks: int) -> None:
    """Check that every rank has a sample in each optimizer step.

    Raises:
        InputError: there are fewer samples than ranks.
    """
    if samples_per_step < ranks:
        raise InputError(
            f"`global_batch_size` must be at least the number of ranks ({ranks}), but is {samples_per_step} instead."
        )
