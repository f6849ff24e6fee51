"""All rows that fill a token budget fit, by a model of memory in the number of rows and their length."""

from dataclasses import dataclass, field

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from torchtune_adaptive.engine.search.token_budget import largest_token_budget

properties = settings(max_examples=60)


@dataclass
class Device:
    """Rows of s tokens take ``c + e * s**2 + rows * (k + a * s + d * s**2)`` bytes; remembers what it was asked."""

    limit_bytes: int
    c: int
    e: int
    k: int
    a: int
    d: int
    asked: list[tuple[int, int]] = field(default_factory=list)

    def fits(self, rows: int, length: int) -> bool:
        per_row = self.k + self.a * length + self.d * length**2
        return self.c + self.e * length**2 + rows * per_row <= self.limit_bytes

    def forecast(self, length: int) -> float:
        per_row = self.k + self.a * length + self.d * length**2
        return (self.limit_bytes - self.c - self.e * length**2) / per_row

    def budget(self, *, seq_len: int, rows: int, forecast_rows: float | None, max_rows: int) -> int:
        """The largest token budget; ``asked`` are the lengths that were tried for it, with the most rows of each."""
        options = {"seq_len": seq_len, "rows": rows, "max_rows": max_rows}
        return largest_token_budget(self._largest_rows_at, forecast_rows=forecast_rows, **options)

    def _largest_rows_at(self, length: int, bound: int) -> int:
        self.asked.append((length, bound))
        return min(bound, int(self.forecast(length)))

    def misfits(self, budget: int, *, lengths: range, max_rows: int) -> list[tuple[int, int]]:
        """Numbers of rows, with their length, that fill ``budget`` but do not fit."""
        whole = ((min(budget // length, max_rows), length) for length in lengths)
        return [(rows, length) for rows, length in whole if not self.fits(rows, length)]


@st.composite
def devices(draw: st.DrawFn, *, dearest_row: int = 0, most_rows: int = 40) -> tuple[Device, int, int, int]:
    """A device, the greatest row length, how many such rows fit, and the most rows of a micro-batch."""
    seq_len = draw(st.integers(1, 300))
    figures = [draw(st.integers(0, most)) for most in (10**6, 5, dearest_row)]
    device = Device(0, *figures, a=draw(st.integers(1, 100)), d=draw(st.integers(0, 3)))
    per_row = device.k + device.a * seq_len + device.d * seq_len**2
    rows = draw(st.integers(1, most_rows))
    device.limit_bytes = device.c + device.e * seq_len**2 + rows * per_row + draw(st.integers(0, per_row - 1))
    return device, seq_len, rows, draw(st.integers(rows, 10_000))


@properties
@given(found=devices())
def test_with_an_exact_forecast_all_rows_fit_and_the_budget_is_that_of_the_longest_rows(
    found: tuple[Device, int, int, int],
) -> None:
    device, seq_len, rows, max_rows = found
    forecast = device.forecast(seq_len)
    budget = device.budget(seq_len=seq_len, rows=rows, forecast_rows=forecast, max_rows=max_rows)
    assert device.misfits(budget, lengths=range(1, seq_len + 1), max_rows=max_rows) == []
    assert budget == int(seq_len * forecast) >= rows * seq_len
    assert len(device.asked) <= 4


@properties
@given(found=devices(), has_forecast=st.booleans())
def test_without_a_forecast_or_with_one_of_whole_rows_the_budget_is_those_rows(
    found: tuple[Device, int, int, int], has_forecast: bool
) -> None:
    device, seq_len, rows, max_rows = found
    assume(has_forecast or rows >= 3)
    forecast = float(rows) if has_forecast else None
    budget = device.budget(seq_len=seq_len, rows=rows, forecast_rows=forecast, max_rows=max_rows)
    assert budget == rows * seq_len


@properties
@given(found=devices(most_rows=2))
def test_without_a_forecast_the_length_of_one_row_more_is_searched_if_few_fit(
    found: tuple[Device, int, int, int],
) -> None:
    device, seq_len, rows, max_rows = found
    budget = device.budget(seq_len=seq_len, rows=rows, forecast_rows=None, max_rows=max_rows)
    assert device.misfits(budget, lengths=range(1, seq_len + 1), max_rows=max_rows) == []
    if rows < max_rows:
        fitting = [length for length in range(1, seq_len + 1) if device.fits(rows + 1, length)]
        longest = max(fitting, default=0)
        assert budget > (rows + 1) * (longest - max(1, seq_len // 32))
        assert len(device.asked) <= 9


@properties
@given(found=devices())
def test_a_forecast_that_a_try_proves_too_high_is_not_used(found: tuple[Device, int, int, int]) -> None:
    device, seq_len, rows, max_rows = found
    budget = device.budget(seq_len=seq_len, rows=rows, forecast_rows=rows + 1.0, max_rows=max_rows)
    assert budget == (rows if rows < max_rows else rows + 1) * seq_len
    assert device.misfits(budget, lengths=range(1, seq_len + 1), max_rows=max_rows) == []


@properties
@given(found=devices(dearest_row=10**4))
def test_where_each_row_has_a_fixed_cost_rows_of_every_length_tried_fit(found: tuple[Device, int, int, int]) -> None:
    device, seq_len, rows, max_rows = found
    budget = device.budget(seq_len=seq_len, rows=rows, forecast_rows=device.forecast(seq_len), max_rows=max_rows)
    tried = [seq_len] + [seq_len // part for part in (2, 4, 8) if seq_len // part >= 16]
    misfits = [device.misfits(budget, lengths=range(length, length + 1), max_rows=max_rows) for length in tried]
    assert not any(misfits)
    assert len(device.asked) <= 4


def test_short_rows_that_cost_more_per_token_lower_the_budget_below_whole_rows() -> None:
    device = Device(limit_bytes=8 * (256 + 64), c=0, e=0, k=64, a=1, d=0)
    budget = device.budget(seq_len=256, rows=8, forecast_rows=8.0, max_rows=1000)
    assert budget == 2560 // (64 + 32) * 32 == 832
    assert device.fits(budget // 32, 32)


def test_rows_are_never_tried_above_what_a_micro_batch_can_have_nor_shorter_than_a_few_tokens() -> None:
    device = Device(limit_bytes=10**6, c=0, e=0, k=0, a=1, d=0)
    device.budget(seq_len=64, rows=10, forecast_rows=10.5, max_rows=12)
    assert device.asked == [(61, 11), (32, 12), (16, 12)]
