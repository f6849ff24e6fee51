"""Cut the samples of an optimizer step into micro-batches."""

from collections.abc import Sequence
from typing import TypeVar

Sample = TypeVar("Sample")


def cut(window: Sequence[Sequence[Sample]], rows: int) -> list[Sequence[Sample]]:
    """The micro-batches of ``window``, each cut into ones of at most ``rows`` samples; order and samples stay.

    >>> cut([[1, 2, 3], [4, 5, 6]], 2)
    [[1, 2], [3], [4, 5], [6]]
    """
    return [batch[start : start + rows] for batch in window for start in range(0, len(batch), rows)]


def halvings(size: int, *, above: int) -> list[int]:
    """``size`` halved again and again, rounded down, as far as it is above ``above``.

    >>> halvings(12, above=1)
    [12, 6, 3]
    """
    sizes = []
    while size > above:
        sizes.append(size)
        size //= 2
    return sizes
