"""How the samples of an optimizer step are cut into micro-batches."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.engine.recovery.size_range import Cuts, SizeRange, num_tokens
from torchtune_adaptive.errors import InputError, quote, require_integer

_REHEARSED_SAMPLES = (2, 1)  # sizes for the second micro-batch of a rehearsal, if they fit


@runtime_checkable
class Cutter(Protocol):
    """Cuts samples into micro-batches, and holds their largest number of rows or tokens."""

    @property
    def is_even(self) -> bool:
        """Whether ``cut`` returns equally many micro-batches on every rank, for any samples."""
        ...

    @property
    def size(self) -> int:
        """The present size of a micro-batch, equal on every rank."""
        ...

    @property
    def unit(self) -> str:
        """The unit of ``size``, for messages."""
        ...

    def cut(self, samples: Any, sizes: SizeRange) -> Sequence[Any]:
        """The micro-batches of ``samples``, cut further by ``sizes``. All ranks must call it together."""
        ...

    def num_rows(self, micro_batch: Any) -> int:
        """The rows of a micro-batch, which it can be cut into."""
        ...

    def size_of(self, micro_batch: Any) -> int:
        """A number that the memory of a micro-batch follows."""
        ...

    def can_reduce(self, samples: Any) -> bool:
        """Whether ``samples`` can be cut into smaller micro-batches; equal on every rank. A collective."""
        ...

    def reduce(self, samples: Any) -> None:
        """Halve the size, so that the next cut of ``samples`` has smaller micro-batches."""
        ...

    def grow(self) -> bool:
        """Double a size that was halved, up to the one before. Returns whether it is whole again."""
        ...

    def rehearsals(self, samples: Any) -> Iterable[Sequence[Any]]:
        """Small micro-batches for a rehearsal, of different shapes if possible; then others to try if memory runs out.

        Their number is equal on every rank.
        """
        ...


class Slices:
    """Micro-batches of up to ``size`` consecutive samples.

    Samples are a sequence, a tensor [samples, ...], or a dict of these, all of one length. Micro-batches have the same
    type. Every rank must have so many samples that it has as many micro-batches as the others.

    Args:
        size: samples in a micro-batch.
        size_of: a number that the memory of a micro-batch follows; None: ``num_tokens``.

    Attributes:
        size: samples in a micro-batch.
        whole_size: the size before any reduction.
        consensus: the ranks that reduce the size together; None: this one alone.

    >>> Slices(2).cut([3, 1, 4])
    [[3, 1], [4]]
    >>> Slices(2).cut({"tokens": [3, 1, 4], "name": "abc"})
    [{'tokens': [3, 1], 'name': 'ab'}, {'tokens': [4], 'name': 'c'}]

    Raises:
        InputError: ``size`` is not an integer of at least 1.
    """

    is_even = False
    unit = "samples"

    def __init__(self, size: int, size_of: Callable[[Any], int] | None = None) -> None:
        self.size = self.whole_size = require_integer("micro_batch_size", size, minimum=1)
        self.consensus: Consensus | None = None
        self._size_of = size_of or num_tokens

    def cut(self, samples: Any, sizes: SizeRange | None = None) -> list[Any]:
        """The micro-batches of ``samples``, in their order."""
        cuts, take = self._consecutive(samples)
        if sizes is not None:
            cuts = sizes.cut(cuts, lambda rows: self.size_of(take(rows)))
        return [take(rows) for rows in cuts if rows]

    def num_rows(self, micro_batch: Any) -> int:
        """The samples of a micro-batch."""
        return _length(micro_batch)

    def size_of(self, micro_batch: Any) -> int:
        """A number that the memory of a micro-batch follows."""
        return self._size_of(micro_batch)

    def can_reduce(self, samples: Any) -> bool:
        """Whether a micro-batch has more than one sample. A collective, as ``reduce``."""
        return self._largest_anywhere(samples) > 1

    def reduce(self, samples: Any) -> None:
        """Halve the size of the micro-batches into which ``samples`` are cut, rounded down.

        >>> slices = Slices(32)
        >>> slices.reduce([1, 2, 3, 4, 5])
        >>> slices.size
        2
        """
        self.size = self._largest_anywhere(samples) // 2

    def grow(self) -> bool:
        """Double a size that was halved, up to the one before. Returns whether it is whole again."""
        self.size = min(2 * self.size, self.whole_size)
        return self.size == self.whole_size

    def rehearsals(self, samples: Any) -> list[list[Any]]:
        """The first sample, then the first two; to try next, the first one twice. Nothing if there is no sample."""
        most = self._largest(samples)
        if not most:
            return []
        return [[_part(samples, 0, 1), _part(samples, 0, min(number, most))] for number in _REHEARSED_SAMPLES]

    def _largest(self, samples: Any) -> int:
        """The samples of the largest micro-batch."""
        return min(self.size, _length(samples))

    def _largest_anywhere(self, samples: Any) -> int:
        own = self._largest(samples)
        return own if self.consensus is None else self.consensus.max_over_ranks(own)

    def _consecutive(self, samples: Any) -> tuple[Cuts, Callable[[list[int]], Any]]:
        """The numbers of each micro-batch's samples, and a function from consecutive numbers to a micro-batch."""
        numbers = list(range(_length(samples)))
        cuts = [numbers[start : start + self.size] for start in range(0, len(numbers), self.size)]
        return cuts, lambda rows: _part(samples, rows[0], rows[-1] + 1)


def _part(samples: Any, start: int, stop: int) -> Any:
    if isinstance(samples, Mapping):
        return {name: values[start:stop] for name, values in samples.items()}
    return samples[start:stop]


def _length(samples: Any) -> int:
    """The number of samples."""
    columns = samples.values() if isinstance(samples, Mapping) else [samples]
    lengths = set(map(_length_of_column, columns))
    if len(lengths) != 1 or None in lengths:
        raise InputError(
            f"`samples` must be a sequence, tensor or dict of these, of one length, but is {quote(samples)} instead."
        )
    return lengths.pop() or 0


def _length_of_column(values: Any) -> int | None:
    """The number of samples in a column; None if it cannot be cut, as a tensor without dimensions."""
    if isinstance(values, Mapping) or not hasattr(values, "__getitem__"):
        return None
    try:
        return len(values)
    except TypeError:
        return None
