"""Where memory is no line in the rows, the search is exact too, in few steps and with few errors."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.engine.search.test_find_max_batch_size import CPU
from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.engine.loop import Loop
from torchtune_adaptive.engine.memory.meter import MemoryMeter
from torchtune_adaptive.engine.search.probe import Prober
from torchtune_adaptive.engine.search.strategies import linear_extrapolation

MOST_FITS, MOST_FAILURES = 8, 3
NO_BOUND = 2**20
MIB = 2**20

Law = Callable[[int], float]


class Card(MemoryMeter):
    """A device where the bytes after each operation of a step follow a law.

    Args:
        block_bytes: allocated bytes are rounded up to a multiple of this, for each operation.
        reserved_bytes: what is reserved is a multiple of this.
    """

    def __init__(self, *laws: Law, block_bytes: int = 1, reserved_bytes: int = 1) -> None:
        super().__init__()
        self._laws = laws
        self._blocks = block_bytes, reserved_bytes

    def live_bytes(self, rows: int) -> list[int]:
        return [_rounded_up(int(law(rows)), self._blocks[0]) for law in self._laws]

    def needs(self, rows: int) -> int:
        return _rounded_up(max(self.live_bytes(rows)), self._blocks[1])

    def step(self, rows: int) -> None:
        assert self.limit_bytes is not None
        self._peak_bytes = min(self.needs(rows), self.limit_bytes)
        if self.needs(rows) > self.limit_bytes:
            raise torch.OutOfMemoryError("on purpose")
        if self._recording is not None:
            self._recording += [(f"operation {place}", live) for place, live in enumerate(self.live_bytes(rows))]

    def search(self, *, limit_bytes: int, bound: int = NO_BOUND) -> "Found":
        """What linear extrapolation finds, with the prober of a real search."""
        self.limit_bytes = limit_bytes
        loop = Loop(
            model=nn.Identity(), optimizers=[], device=CPU, micro_step=self.step, consensus=Consensus(), meter=self
        )
        prober = Prober(loop, lambda rows: [rows], meter=self, forecasts=True)
        rows = linear_extrapolation(
            prober.fits, prober.largest_forecast, prober.largest_along_curves, max_batch_size=bound
        )
        return Found(rows, [(probe.batch_size, probe.fits) for probe in prober.probes])

    @property
    def available_bytes(self) -> int:
        return 2**60

    def count(self, values: Any) -> None: ...

    def __enter__(self) -> "Card":
        return self

    def __exit__(self, *error: Any) -> None: ...


class Found:
    """What a search has found, and the sizes that it tried."""

    def __init__(self, rows: int, tried: Sequence[tuple[int, bool]]) -> None:
        self.rows = rows
        self.tried = tried

    @property
    def counts(self) -> tuple[int, int]:
        """Whole steps, and steps that ran out of memory."""
        num_fits = sum(fits for _, fits in self.tried)
        return num_fits, len(self.tried) - num_fits

    def is_cheap(self) -> bool:
        return self.counts[0] <= MOST_FITS and self.counts[1] <= MOST_FAILURES


def _rounded_up(size: int, block: int) -> int:
    return -(-size // block) * block


def polynomial(*coefficients: float) -> Law:
    return lambda rows: sum(factor * rows**power for power, factor in enumerate(coefficients))


coefficients = st.tuples(st.integers(0, 10**9), *(st.just(0) | st.integers(1, 10**6) for _ in range(3)))


@pytest.mark.slow
@settings(max_examples=40)
@given(st.lists(coefficients, min_size=1, max_size=5), st.integers(1, 20_000), st.floats(0, 0.999))
def test_operations_that_follow_different_polynomials_take_few_steps_and_few_errors(
    operations: list[tuple[int, int, int, int]], rows: int, fraction: float
) -> None:
    card = Card(*(polynomial(*factors) for factors in operations))
    assume(card.needs(rows + 1) > card.needs(rows))
    limit_bytes = card.needs(rows) + int(fraction * (card.needs(rows + 1) - card.needs(rows)))
    found = card.search(limit_bytes=limit_bytes)
    assert found.rows == rows
    assert found.is_cheap(), found.tried


@pytest.mark.slow
@settings(max_examples=40)
@given(
    st.sampled_from([1.5, 2.0, 2.5, 3.0]),
    st.floats(2000, 10**6),
    st.integers(0, 10**9),
    st.integers(10, 2000),
    st.floats(0, 0.999),
    st.sampled_from([(1, 1), (512, 1), (512, 2 * MIB)]),
)
def test_so_does_a_power_where_the_allocator_rounds_up(
    power: float, factor: float, constant: int, rows: int, fraction: float, blocks: tuple[int, int]
) -> None:
    card = Card(lambda n: constant + factor * n**power, block_bytes=blocks[0], reserved_bytes=blocks[1])
    row_bytes = factor * ((rows + 1) ** power - rows**power)
    assume(row_bytes > 2 * blocks[1])  # otherwise several sizes reserve the same
    assume(power >= 2 or rows <= 500)  # above, a power below 2 takes a step or two more
    limit_bytes = card.needs(rows) + int(fraction * (card.needs(rows + 1) - card.needs(rows)))
    found = card.search(limit_bytes=limit_bytes)
    assert found.rows == rows
    assert found.is_cheap(), found.tried


@pytest.mark.parametrize("limit_bytes", [5_000, 10_000, 14_000])
def test_a_step_that_rounds_its_rows_up_is_searched_exactly(limit_bytes: int) -> None:
    """Memory is a staircase: two small steps make it look twice as steep as it is."""
    card = Card(lambda n: 400 + 160 * _rounded_up(n, 2))
    found = card.search(limit_bytes=limit_bytes)
    assert card.needs(found.rows) <= limit_bytes < card.needs(found.rows + 1)


def test_growth_that_blocks_hide_in_the_small_steps_is_found() -> None:
    """Similarities of 2 and of 3 rows both take one block; so do the rows."""
    card = Card(lambda n: 10**6 + 64 * n + 8 * n**2, block_bytes=512)
    for limit_bytes in (2 * MIB, 10 * MIB, 1000 * MIB):
        found = card.search(limit_bytes=limit_bytes)
        assert card.needs(found.rows) <= limit_bytes < card.needs(found.rows + 1)
        assert found.is_cheap(), found.tried
