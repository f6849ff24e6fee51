"""Kernels of compiled code: which ones Inductor fuses, and in which order they run."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Part:
    """Reads and allocates numbered buffers. ``order`` is its position in the code before fusion."""

    order: int
    read: frozenset[int]
    made: frozenset[int]


@dataclass(frozen=True)
class Kernel:
    """One part, or several fused parts in order.

    Attributes:
        elements: how many elements it loops over; None: it cannot be fused with others.
    """

    parts: tuple[Part, ...]
    elements: int | None

    @property
    def order(self) -> int:
        """The position of its first part."""
        return self.parts[0].order

    @cached_property
    def made(self) -> frozenset[int]:
        """Buffers that are computed here."""
        return frozenset().union(*(part.made for part in self.parts))

    @cached_property
    def read(self) -> frozenset[int]:
        """Buffers that exist before it runs."""
        return frozenset().union(*(part.read for part in self.parts)) - self.made

    def merged(self, other: "Kernel") -> "Kernel":
        """This kernel fused with ``other``."""
        return Kernel(tuple(sorted(self.parts + other.parts, key=lambda part: part.order)), self.elements)

    def shared(self, other: "Kernel") -> frozenset[int]:
        """Buffers that the fused kernel would access once instead of twice."""
        return (self.read | self.made) & (other.read | other.made)


def fused(kernels: Iterable[Kernel], nbytes: Sequence[int]) -> list[Kernel]:
    """The fused ``kernels`` in the order in which they run.

    Kernels that loop over equally many elements and share buffers are fused, first those that share the most bytes.

    Args:
        nbytes: bytes of each buffer.
    """
    kernels = list(kernels)
    while True:
        number = len(kernels)
        for first, second in _pairs(kernels, nbytes):
            makers = {number: kernel for kernel in kernels for number in kernel.made}
            is_possible = {first, second} <= {*kernels} and not (
                _depends_through_others(first, second, makers) or _depends_through_others(second, first, makers)
            )
            if is_possible:
                kernels = [one for one in kernels if one not in (first, second)] + [first.merged(second)]
        if len(kernels) == number:
            return _in_order(kernels)


def _pairs(kernels: Sequence[Kernel], nbytes: Sequence[int]) -> list[tuple[Kernel, Kernel]]:
    """Pairs of kernels that could be fused, those that share the most bytes first."""
    fusable = [one for one in kernels if one.elements is not None]
    pairs = [
        (first, second)
        for index, first in enumerate(fusable)
        for second in fusable[:index]
        if first.elements == second.elements and first.shared(second)
    ]
    return sorted(pairs, key=lambda pair: (-sum(nbytes[one] for one in pair[0].shared(pair[1])), pair[1].order))


def _depends_through_others(kernel: Kernel, on: Kernel, makers: dict[int, Kernel]) -> bool:
    """Whether ``kernel`` needs a buffer that other kernels compute from the outputs of ``on``."""
    seen: set[int] = set()
    waiting = [number for number in kernel.read if makers.get(number) is not on]
    while waiting:
        number = waiting.pop()
        maker = makers.get(number)
        if maker is None or number in seen or maker is kernel:
            continue
        seen.add(number)
        if maker is on:
            return True
        waiting += maker.read
    return False


def _in_order(kernels: Iterable[Kernel]) -> list[Kernel]:
    """The kernels by position, but each after the kernels whose buffers it reads."""
    makers = {number: kernel for kernel in kernels for number in kernel.made}
    ordered: dict[int, Kernel] = {}  # by position

    def add(kernel: Kernel) -> None:
        if kernel.order not in ordered:
            for needed in sorted({makers[number].order for number in kernel.read if number in makers} - {kernel.order}):
                add(by_place[needed])
            ordered[kernel.order] = kernel

    by_place = {kernel.order: kernel for kernel in kernels}
    for place in sorted(by_place):
        add(by_place[place])
    return list(ordered.values())
