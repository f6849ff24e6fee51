"""Which sizes of micro-batches fit, as far as training has shown, and how larger ones are cut."""

import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.engine.recovery.columns import columns, leaves, named_values
from torchtune_adaptive.errors import InputError, as_integer, quote, reason_of

Cuts = list[list[int]]


class SizeRange:
    """What is known of the sizes that fit: the largest one that did, and the smallest one that did not.

    The size of a micro-batch is a number that its memory follows, such as its tokens with padding.

    Args:
        consensus: the ranks that train the model.

    Attributes:
        largest_fitted: the largest size that has fitted on this rank.
        smallest_failed: the smallest size that was larger than any before, and did not fit; equal on every rank. None
            if there was none.
        is_tried: whether sizes from ``smallest_failed`` on are tried until one fails again.
        made_even: whether the last ``cut`` has given every rank the same number of micro-batches, none of them empty.
    """

    def __init__(self, consensus: Consensus) -> None:
        self._consensus = consensus
        self.largest_fitted = 0
        self.smallest_failed: int | None = None
        self.is_tried = False
        self.made_even = False

    @property
    def limit(self) -> int | None:
        """Micro-batches of more than one row must be smaller than this; None: they may have any size."""
        return None if self.is_tried else self.smallest_failed

    def fitted(self, size: int) -> None:
        """A micro-batch of ``size`` has fitted on this rank."""
        self.largest_fitted = max(size, self.largest_fitted)

    def failed(self, size: int, *, most_fitted: int = 0) -> None:
        """``size`` has not fitted on some rank, and was larger than any that had. Every rank must call it.

        Args:
            most_fitted: the largest ``largest_fitted`` of all ranks. What has fitted when it was tried has not failed.
        """
        known = self.smallest_failed
        if known is None or (self.is_tried and most_fitted >= known):
            known = size
        self.smallest_failed = min(size, known)
        self.is_tried = False

    def try_again(self) -> None:
        """Try sizes from ``smallest_failed`` on, until one fails again."""
        self.is_tried = self.smallest_failed is not None

    def forget(self) -> None:
        """Forget all sizes, for example because there is more memory now. Every rank must call it."""
        self.largest_fitted, self.smallest_failed, self.is_tried = 0, None, False

    def cut(self, cuts: Cuts, size_of: Callable[[list[int]], int]) -> Cuts:
        """Halve micro-batches that are too large, and then others until every rank has the same number.

        A collective if there is a limit, else nothing changes.

        >>> sizes = SizeRange(Consensus())
        >>> sizes.failed(30)
        >>> lengths = [10, 1, 1, 1, 7, 7]
        >>> sizes.cut([[0, 1, 2, 3], [4, 5]], lambda rows: len(rows) * max(lengths[row] for row in rows))
        [[0, 1], [2, 3], [4, 5]]
        """
        self.made_even = False
        if self.limit is None:
            return cuts
        small = _smaller_than(self.limit, cuts, size_of)
        most, negated_fewest_rows = self._consensus.begin_max(len(small), -sum(map(len, small)))()
        self.made_even = most <= -negated_fewest_rows
        return spread(small, most)

    def state_dict(self) -> dict[str, Any]:
        """The state for a resumed run, equal on every rank; ``largest_fitted`` is not."""
        return {"smallest_failed_size": self.smallest_failed, "tries_failed_size": self.is_tried}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state."""
        self.smallest_failed, self.is_tried = state["smallest_failed_size"], state["tries_failed_size"]


def spread(cuts: Cuts, count: int) -> Cuts:
    """Cut micro-batches further into ``count``, so that every rank has the same number.

    The largest ones are halved. If only single rows are left, empty micro-batches are added. ``count`` must be at least
    the present number.

    >>> spread([[0, 1, 2], [3]], 3), spread([[0]], 2)
    ([[0, 1], [2], [3]], [[0], []])
    """
    cuts = list(cuts)
    while len(cuts) < count and any(len(cut) > 1 for cut in cuts):
        largest = max(range(len(cuts)), key=lambda index: len(cuts[index]))
        cuts[largest : largest + 1] = _halves(cuts[largest])
    return cuts + [[] for _ in range(count - len(cuts))]


def _smaller_than(limit: int, cuts: Cuts, size_of: Callable[[list[int]], int]) -> Cuts:
    small: Cuts = []
    for one in cuts:
        is_large = len(one) > 1 and size_of(one) >= limit
        small += _smaller_than(limit, _halves(one), size_of) if is_large else [one]
    return small


def _halves(rows: list[int]) -> Cuts:
    """Both halves; the first one is larger if the number is odd."""
    middle = -(-len(rows) // 2)
    return [rows[:middle], rows[middle:]]


def num_tokens(micro_batch: Any) -> int:
    """Elements of the first tensor of integers, such as token ids; samples if there is none.

    In a list of samples, all count as much as the longest one, to which they are padded.

    >>> num_tokens({"mask": torch.ones(2, 8), "tokens": torch.zeros(2, 8, dtype=torch.long)})
    16
    >>> num_tokens([torch.tensor([1, 2, 3]), torch.tensor([4])])
    6
    """
    if not isinstance(micro_batch, torch.Tensor) and named_values(micro_batch) is None:
        return len(micro_batch) * max((_first_integers(sample) or 1 for sample in micro_batch), default=0)
    return _first_integers(micro_batch) or _num_samples(micro_batch)


def _num_samples(micro_batch: Any) -> int:
    """The largest number of entries in a column."""
    if isinstance(micro_batch, torch.Tensor):
        return len(micro_batch) if micro_batch.ndim else 0
    return max((len(column) for _, column in columns(micro_batch)), default=0)


def _first_integers(values: Any) -> int:
    """The number of elements of the first tensor of integers; 0 if there is none."""
    tensors = (one for one in leaves(values) if isinstance(one, torch.Tensor) and one.ndim)
    return next((one.numel() for one in tensors if _is_integer(one.dtype)), 0)


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def check_size_of(size_of: Callable[[Any], Any], micro_batch: Any, consensus: Consensus) -> None:
    """Check that a size is valid on every rank, and that rank 0's micro-batch has the same on all. A collective.

    A micro-batch that cannot be sent to the other ranks is not compared.
    Raises:
        InputError: a size is not an integer of at least 1, or differs. Raised on every rank.
    """
    if wrong := consensus.first_reason(_invalid_size(size_of, micro_batch)):
        raise InputError(f"`size_of` must return an integer of at least 1, but {wrong} instead.")
    try:
        content = pickle.dumps(tree_map_only(torch.Tensor, torch.Tensor.cpu, micro_batch))
    except Exception:  # any error of the user's own classes
        content = b""
    if content := consensus.from_rank_zero(content):
        smallest, largest = consensus.min_and_max(size_of(pickle.loads(content)))
        if smallest != largest:
            raise InputError(
                "`size_of` must return the same size on every rank for the same micro-batch, but returned"
                f" {smallest} on one and {largest} on another."
            )


def _invalid_size(size_of: Callable[[Any], Any], micro_batch: Any) -> str:
    """What is wrong with a size, as part of a sentence; "" if it is valid."""
    try:
        size = size_of(micro_batch)
    except Exception as error:  # the user's own code can raise any error
        return f"raised {reason_of(error)}"
    return "" if (as_integer(size) or 0) >= 1 else f"returned {quote(size)}"
