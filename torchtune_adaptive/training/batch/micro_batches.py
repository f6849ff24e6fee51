"""Cut an optimizer step's samples into equally many micro-batches on every rank, by a limit that can be lowered."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.engine.recovery.micro_batches import not_a_sum
from torchtune_adaptive.training.batch.limits import MicroBatchLimit, RowLimit, spread
from torchtune_adaptive.training.batch.loader import StepSamples
from torchtune_adaptive.training.batch.row_format import Row, RowFormat

_FEWEST = {"rows": 2, "tokens": 1}  # with a limit of one token, every row is a micro-batch of its own


@dataclass(frozen=True)
class MicroBatch:
    """The rows of one micro-step. In measured steps, the first ones form the small batch, which ends with the last.

    Attributes:
        share: of the targets of torchtune's micro-step; below 1 where that is cut, 0 for a row that does not count.
    """

    rows: Sequence[Row]
    share: float = 1.0
    is_small: bool = False
    ends_small: bool = False


@dataclass(eq=False)
class MicroBatcher:
    """Cuts the samples of optimizer steps, as ``RecoverableStep`` asks, and owns the limit of a micro-batch.

    Attributes:
        largest: the limit before memory runs out. If it is set anew, a reduced limit stays reduced.
        dataset: its first sample, without weight in the loss, serves a rank with fewer rows than micro-steps.
        adds_up: whether the loss of a micro-batch is known to be the sum of those of its rows. Otherwise it is tried.
        may_cut: whether micro-batches may be others than torchtune's keys say, also without out-of-memory errors.
    """

    is_even = True
    results = "sums"

    largest: MicroBatchLimit
    row_format: RowFormat
    consensus: Consensus
    dataset: Sequence[Row]
    adds_up: bool = True
    may_cut: bool = True

    def __post_init__(self) -> None:
        self._reduced_size: int | None = None  # set once memory ran out
        self._first_size: int | None = None  # in the first step of ``start_small``
        self.step_tokens = (0, 0)  # of the last cut, without and with padding
        self._num_tokens = self._num_padded_tokens = 0

    @property
    def limit(self) -> MicroBatchLimit:
        """The current limit, without regard to a small first step."""
        return replace(self.largest, size=min(self.largest.size, self._reduced_size or self.largest.size))

    @property
    def size(self) -> int:
        """The size of the limit for this step."""
        return self._step_limit.size

    @property
    def unit(self) -> str:
        """The unit of ``size``."""
        return self.largest.unit

    def resize(self, size: int) -> None:
        """Set the current limit to ``size``, which must be at most the largest limit."""
        self._reduced_size = None if size >= self.largest.size else size

    def start_small(self) -> None:
        """Cut the next step into the smallest micro-batches that a search tries.

        For a step that creates the optimizers' state. It would otherwise lie within memory that an allocator has cached
        for the activations of a large micro-batch, and could not be freed as a whole: later steps would find less
        memory than a search did.
        """
        self._first_size = min(self.limit.size, _FEWEST[self.unit])

    def end_step(self) -> None:
        """Count the padding of the step's last cut, with which it succeeded. Later steps do not start small."""
        self._num_tokens += self.step_tokens[0]
        self._num_padded_tokens += self.step_tokens[1]
        self._first_size = None

    def cut(self, samples: StepSamples) -> list[MicroBatch]:
        """The micro-batches of ``samples`` by the current limit, equally many on every rank.

        With a token limit this is a collective, in which the ranks agree on the number. Otherwise every rank computes
        it.
        """
        self.step_tokens = (0, 0)
        samples = replace(samples, shares=self._shares(samples))
        if not _is_halved(samples):
            return self._micro_batches(samples)
        small, rest = map(self._micro_batches, samples.halves())
        small = [replace(one, is_small=True, ends_small=one is small[-1]) for one in small]
        return small + rest

    def reduce(self, samples: StepSamples) -> bool:
        """Halve the current limit, unless micro-batches are single rows on all ranks. Returns whether it could.

        A collective. A step of ``start_small`` has a limit of its own.
        """
        parts = samples.halves() if _is_halved(samples) else [samples]
        cuts = (rows for part in parts for rows in self._step_limit.cut(self._lengths(part.rows)))
        if not self.consensus.any_rank(any(len(rows) > 1 for rows in cuts)):
            return False
        half = self.size // 2
        if self._first_size is None:
            self._reduced_size = half
        else:
            self._first_size = half
        return True

    def grow(self) -> bool:
        """Double a limit that was halved, up to the largest one. Returns whether it is the largest again."""
        self.resize(2 * self.limit.size)
        return self._reduced_size is None

    def num_to_try(self, samples: Sequence[Row] | StepSamples) -> int:
        """From how many samples a trial can choose two."""
        return 0 if self.adds_up else len(_rows_of(samples))

    def is_whole(self, samples: Sequence[Row] | StepSamples) -> bool:
        """Whether a rank's samples are in torchtune's micro-batches, or in one."""
        return not self.may_cut or len(_rows_of(samples)) <= 1

    def scale_by(self, factor: float) -> str:
        """Losses must be sums."""
        return not_a_sum(factor)

    def trial_batches(
        self, samples: Sequence[Row] | StepSamples, pair: tuple[int, int] | None = None, *, group: int = 1
    ) -> Iterator[list[MicroBatch]]:
        """Micro-batches of the first of ``samples``, of one row and of two; to try next, of one row each.

        First those of a trial, if there is a ``pair``.
        """
        samples = _rows_of(samples)
        if pair is not None:
            numbers = [range(group), range(group, 2 * group)] if group > 1 else [[number] for number in pair]
            one, other = ([samples[number % len(samples)] for number in part] for part in numbers)
            yield [MicroBatch(one), MicroBatch(other), MicroBatch([*one, *other])]
        for rows in range(min(2, self.largest.size), 0, -1):
            yield list(map(MicroBatch, self.row_format.small_batches(samples, rows)))

    def padded_rows(self, micro_batch: MicroBatch) -> tuple[int, Callable[[int], MicroBatch]]:
        """The number of its rows, and a function from a number to a micro-batch of so many rows of the same length."""
        rows = micro_batch.rows
        return len(rows), lambda number: MicroBatch([max(rows, key=self.row_format.padded_tokens)] * number)

    def padded_tokens(self, micro_batch: MicroBatch) -> int:
        """The tokens of a micro-batch, padding included: at least one per row."""
        return len(micro_batch.rows) * max(1, *self._lengths(micro_batch.rows))

    def take_padding(self) -> float:
        """The share of padding in this rank's micro-batches since the last call."""
        share = 1 - self._num_tokens / max(self._num_padded_tokens, 1)
        self._num_tokens = self._num_padded_tokens = 0
        return share

    def state_dict(self) -> dict[str, Any]:
        """The state for a resumed run: the reduced size (None if memory never ran out), limit, unit and padding."""
        return {
            "micro_batch": self._reduced_size,
            "micro_batch_limit": self.largest.size,
            "micro_batch_unit": self.unit,
            "padding": (self._num_tokens, self._num_padded_tokens),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state. A size in another unit is ignored. A limit of None leaves the limit as it is."""
        self._num_tokens, self._num_padded_tokens = state["padding"]
        if state["micro_batch_unit"] == self.unit:
            self._reduced_size = state["micro_batch"]
            self.largest = replace(self.largest, size=state["micro_batch_limit"] or self.largest.size)

    @property
    def _step_limit(self) -> MicroBatchLimit:
        return self.limit if self._first_size is None else replace(self.largest, size=self._first_size)

    def _shares(self, samples: StepSamples) -> list[float] | None:
        """The share of each row in the mean loss of torchtune's micro-step; None where that is not cut or not known."""
        whole, rows = samples.rows_per_micro_step, samples.rows
        if whole is None or (self.size >= whole and self.unit == RowLimit.unit and not _is_halved(samples)):
            return None
        shares: list[float] = []
        for start in range(0, len(rows), whole):
            counts = [self.row_format.num_targets(row) for row in rows[start : start + whole]]
            shares += [len(counts) / whole * count / max(sum(counts), 1) for count in counts]
        return shares

    def _micro_batches(self, samples: StepSamples) -> list[MicroBatch]:
        return [
            MicroBatch([samples.rows[index] for index in cut], _share(cut, samples))
            if cut
            else MicroBatch([self.row_format.masked(self.dataset[0])], share=0.0)
            for cut in self._cut(samples)
        ]

    def _cut(self, samples: StepSamples) -> list[list[int]]:
        limit, rows = self._step_limit, samples.rows
        lengths = self._lengths(rows)
        cuts = limit.cut(lengths)
        if isinstance(limit, RowLimit):
            count = math.ceil(samples.largest_share / limit.size)
        else:
            count = self.consensus.max_over_ranks(len(cuts))
        cuts = spread(cuts, count)
        own = sum(map(self.row_format.own_tokens, rows))
        padded = sum(len(one) * max(lengths[index] for index in one) for one in cuts if one)
        self.step_tokens = (self.step_tokens[0] + own, self.step_tokens[1] + padded)
        return cuts

    def _lengths(self, rows: Sequence[Row]) -> list[int]:
        return [self.row_format.padded_tokens(row) for row in rows]


def _rows_of(samples: Sequence[Row] | StepSamples) -> Sequence[Row]:
    return samples.rows if isinstance(samples, StepSamples) else samples


def _share(cut: Sequence[int], samples: StepSamples) -> float:
    """The share of the rows of ``cut``. Without a target it is that of rows: a `collate_fn` may make other labels."""
    share = 0.0 if samples.shares is None else sum(samples.shares[index] for index in cut)
    return share or (1.0 if samples.rows_per_micro_step is None else len(cut) / samples.rows_per_micro_step)


def _is_halved(samples: StepSamples) -> bool:
    """Whether the step is measured, and so has at least two micro-batches."""
    return samples.measured and samples.largest_share >= 2
