"""How the samples of an optimizer step are cut into micro-batches."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.engine.recovery.columns import column_lengths, is_column, map_columns, named_values
from torchtune_adaptive.errors import InputError, quote, reason_of, require_integer


@runtime_checkable
class Cutter(Protocol):
    """Cuts samples into micro-batches, and holds their largest number of rows or tokens.

    Attributes:
        is_even: whether ``cut`` returns equally many micro-batches on every rank, for any samples.
        adds_up: whether gradients and results of micro-batches are known to add up to those of a whole step.
        results: what micro-steps return: "any" objects, "losses" alone, or "sums", which are known to add up.
    """

    is_even: bool
    adds_up: bool
    results: str

    @property
    def size(self) -> int:
        """The present size of a micro-batch, equal on every rank."""
        ...

    @property
    def unit(self) -> str:
        """The unit of ``size``, for messages."""
        ...

    def cut(self, samples: Any) -> Sequence[Any]:
        """The micro-batches of ``samples``. All ranks must call it together."""
        ...

    def reduce(self, samples: Any) -> bool:
        """Halve the size, so that the next cut of ``samples`` has smaller micro-batches. A collective.

        Returns whether it could, equal on every rank: not if they are single rows already.
        """
        ...

    def grow(self) -> bool:
        """Double a size that was halved, up to the one before. Returns whether it is whole again."""
        ...

    def trial_batches(
        self, samples: Any, pair: tuple[int, int] | None = (0, 1), *, group: int = 1
    ) -> Iterable[Sequence[Any]]:
        """Small micro-batches for a dry run, of different shapes if possible; then others to try if memory runs out.

        Their number is equal on every rank. Unless ``adds_up``, the first three are those of a trial: the first sample
        of the ``pair``, the second one, and both. Without a pair, none has two samples. They may be views of
        ``samples``.

        Args:
            group: if above 1, two groups of so many samples take the place of the pair: the first ones, and the next.
        """
        ...

    def num_to_try(self, samples: Any) -> int:
        """From how many of this rank's samples a trial can choose two; 0 if micro-batches are single samples."""
        ...

    def is_whole(self, samples: Any) -> bool:
        """Whether ``samples`` are not cut, apart from how the caller has given them."""
        ...

    def scale_by(self, factor: float) -> str:
        """Scale losses for a step of which two samples have ``factor`` times the summed gradients of each.

        Returns why it cannot, as part of a sentence, or "".
        """
        ...


class Slices:
    """Micro-batches of up to ``size`` consecutive samples.

    Samples are a sequence, a tensor or array [samples, ...], or a mapping, named tuple or dataclass of these, at any
    depth, all of one length. Texts, numbers, None and tensors without dimensions in it are for all samples: see
    ``columns``. Micro-batches have the same type. Every rank must have so many samples that it has as many
    micro-batches as the others.

    Args:
        size: samples in a micro-batch.

    Attributes:
        size: samples in a micro-batch.
        whole_size: the size before any reduction.
        consensus: the ranks that reduce the size together; None: this one alone.

    >>> Slices(2).cut([3, 1, 4])
    [[3, 1], [4]]
    >>> Slices(2).cut({"text": {"tokens": [3, 1, 4]}, "task": "abc"})
    [{'text': {'tokens': [3, 1]}, 'task': 'abc'}, {'text': {'tokens': [4]}, 'task': 'abc'}]

    Raises:
        InputError: ``size`` is not an integer of at least 1.
    """

    is_even = False
    adds_up = False
    results = "any"
    unit = "samples"

    def __init__(self, size: int) -> None:
        self.size = self.whole_size = require_integer("micro_batch_size", size, minimum=1)
        self.consensus: Consensus | None = None

    def cut(self, samples: Any) -> list[Any]:
        """The micro-batches of ``samples``, in their order."""
        return [take(samples, rows) for rows in consecutive(num_samples(samples), self.size)]

    def reduce(self, samples: Any) -> bool:
        """Halve the size of the micro-batches into which ``samples`` are cut, rounded down.

        A collective. Returns whether it could: not if they are single samples on all ranks.

        >>> slices = Slices(32)
        >>> slices.reduce([1, 2, 3, 4, 5]), slices.size
        (True, 2)
        """
        largest = self._largest(samples)
        if self.consensus is not None:
            largest = self.consensus.max_over_ranks(largest)
        if largest > 1:
            self.size = largest // 2
        return largest > 1

    def grow(self) -> bool:
        self.size = min(2 * self.size, self.whole_size)
        return self.size == self.whole_size

    def trial_batches(self, samples: Any, pair: tuple[int, int] | None = (0, 1), *, group: int = 1) -> list[list[Any]]:
        """Each sample of the ``pair``, then both; to try next, each. Nothing if there is no sample."""
        if not (number := num_samples(samples)):
            return []
        one, other = (index % number for index in pair or (0, 1))
        alone = [take(samples, [one]), take(samples, [other])]
        if pair is None:
            return [alone]
        first, second = [one], [other]
        if group > 1:
            first, second = ([index % number for index in part] for part in consecutive(2 * group, group))
        return [[take(samples, first), take(samples, second), take(samples, [*first, *second])], alone]

    def num_to_try(self, samples: Any) -> int:
        return num_samples(samples) if self.whole_size > 1 else 0

    def is_whole(self, samples: Any) -> bool:
        return num_samples(samples) <= self.size

    def scale_by(self, factor: float) -> str:
        """Losses must be sums: ``micro_step`` itself calls the backward pass, so they cannot be scaled."""
        return not_a_sum(factor)

    def _largest(self, samples: Any) -> int:
        """The samples of the largest micro-batch."""
        return min(self.size, num_samples(samples))


def not_a_sum(factor: float) -> str:
    """Why a loss of which two samples have ``factor`` times the gradients of each one is not a sum, or ""."""
    if factor == 1:
        return ""
    is_what = "a mean over the samples of a micro-batch" if factor == 0.5 else f"{factor:g} times a sum"
    return f"the loss is {is_what}, but must be a sum, and its gradients be divided once per step"


def consecutive(number: int, size: int) -> list[range]:
    """The numbers of ``number`` samples, in parts of up to ``size``.

    >>> consecutive(3, 2)
    [range(0, 2), range(2, 3)]
    """
    return [range(start, min(start + size, number)) for start in range(0, number, size)]


def take(samples: Any, rows: Sequence[int]) -> Any:
    """The samples with these numbers: of consecutive ones a view, of others a copy.

    >>> take({"tokens": [3, 1, 4], "scale": 2.0}, [0, 2])
    {'tokens': [3, 4], 'scale': 2.0}
    """
    if named_values(samples) is None:
        return chosen(samples, rows)
    return map_columns(samples, lambda column: chosen(column, rows), lengths={num_samples(samples)})


def chosen(column: Any, rows: Sequence[int]) -> Any:
    """The entries of a column with these numbers: of consecutive ones a view, of others a copy.

    Raises:
        InputError: the column has no slices.
    """
    if list(rows) == list(range(rows[0], rows[0] + len(rows))):
        try:
            return column[rows[0] : rows[0] + len(rows)]
        except (TypeError, RuntimeError) as error:  # a deque, a jagged tensor
            raise InputError(
                f"Samples must be cut by slices, but of a {type(column).__name__} that fails: {reason_of(error)}."
            ) from None
    if hasattr(column, "ndim"):
        return column[list(rows)]
    entries = [column[row] for row in rows]
    return tuple(entries) if isinstance(column, tuple) else entries


def num_samples(samples: Any) -> int:
    """The number of samples.

    Raises:
        InputError: it is not known.
    """
    is_list_of_columns = False
    if named_values(samples) is None:
        lengths = {"": len(samples)} if is_column(samples) else {}
        is_list_of_columns = isinstance(samples, list | tuple) and _are_columns(samples)
    else:
        lengths = column_lengths(samples)
    if len({*lengths.values()}) != 1 or is_list_of_columns:
        fault = f"has lengths {quote(lengths)}" if len(lengths) > 1 else f"is {quote(samples)}"
        if is_list_of_columns:
            fault = "is a list of columns: give a dict"
        raise InputError(f"`samples` must be a sequence, tensor or dict of these, of one length, but {fault} instead.")
    return next(iter(lengths.values()))


def _are_columns(samples: Sequence[Any]) -> bool:
    """Whether a sequence has columns, not samples: tensors of one length, but of different dimensions or types."""
    kinds = {(getattr(one, "ndim", 0), str(getattr(one, "dtype", ""))) for one in samples}
    return len(kinds) > 1 and all(kind[0] > 0 for kind in kinds) and len(set(map(len, samples))) == 1
