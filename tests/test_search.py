"""The three strategies against every limit up to 200: exact, within bounds, frugal, and safe with any forecast."""

import random
from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtune_adaptive.search.strategies import (
    Fits,
    binary_search,
    decrease_until_oom,
    linear_extrapolation,
    round_down_to_power_of_two,
    within,
)

LIMITS = range(201)
BOUNDS = (1, 2, 3, 4, 7, 64, 100, 199, 200, 201, 1000)
STARTS = (1, 2, 3, 5, 8, 50, 200, 5000)


class FitsUpTo:
    """A device on which ``limit`` rows fit; remembers the sizes it was asked for."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.asked: list[int] = []

    def __call__(self, size: int) -> bool:
        self.asked.append(size)
        return size <= self.limit

    @property
    def fitted(self) -> int:
        """Largest size asked for that fits."""
        return max((size for size in self.asked if size <= self.limit), default=0)

    @property
    def failures(self) -> int:
        return sum(size > self.limit for size in self.asked)


Search = Callable[[Fits, int], int]
Forecast = Callable[[FitsUpTo, int], int | None]


def linear_with(forecast: Forecast) -> Search:
    """Linear extrapolation with a forecast that may look at the device itself and at the bound."""

    def search(fits: Fits, bound: int) -> int:
        assert isinstance(fits, FitsUpTo)
        return linear_extrapolation(fits, lambda: forecast(fits, bound), max_batch_size=bound)

    return search


def binary_from(start: int) -> Search:
    return lambda fits, bound: binary_search(fits, start=start, max_batch_size=bound)


# Forecasts that never name a size at or below one that fitted while a larger one fits.
FORECASTS: dict[str, Forecast] = {
    "perfect": lambda fits, bound: fits.limit,
    "none": lambda fits, bound: None,
    "one too high": lambda fits, bound: fits.limit + 1,
    "far too high": lambda fits, bound: 10 * fits.limit + 10,
    "always the bound": lambda fits, bound: bound,
    "absurdly high": lambda fits, bound: 2**62,
    "too low, better with every probe": lambda fits, bound: fits.fitted + -(-(fits.limit - fits.fitted) // 2),
    "none at first": lambda fits, bound: None if len(fits.asked) < 5 else fits.limit,
    "too high, then none": lambda fits, bound: None if fits.failures else 3 * fits.limit + 3,
}
STRATEGIES: dict[str, Search] = (
    {"decrease": lambda fits, bound: decrease_until_oom(fits, max_batch_size=bound)}
    | {f"binary from {start}": binary_from(start) for start in STARTS}
    | {f"linear, forecast {name}": linear_with(forecast) for name, forecast in FORECASTS.items()}
)


class Run(NamedTuple):
    limit: int
    bound: int
    answer: int
    device: FitsUpTo


def runs_of(strategy: Search) -> list[Run]:
    """The strategy on every limit and bound."""
    devices = [(bound, FitsUpTo(limit)) for limit in LIMITS for bound in BOUNDS]
    return [Run(device.limit, bound, strategy(device, bound), device) for bound, device in devices]


@pytest.fixture(scope="module", params=STRATEGIES.values(), ids=list(STRATEGIES))
def runs(request: pytest.FixtureRequest) -> list[Run]:
    return runs_of(request.param)


def test_every_strategy_is_exact_and_says_zero_if_nothing_fits(runs: list[Run]) -> None:
    assert [run for run in runs if run.answer != min(run.limit, run.bound)] == []


def test_a_size_returned_has_itself_been_tried(runs: list[Run]) -> None:
    assert [run for run in runs if run.answer and run.answer not in run.device.asked] == []


def test_no_size_is_asked_twice_or_outside_the_bounds(runs: list[Run]) -> None:
    assert [run for run in runs if len(set(run.device.asked)) < len(run.device.asked)] == []
    assert [run for run in runs if not all(1 <= size <= run.bound for size in run.device.asked)] == []


def test_probes_grow_with_the_logarithm_of_the_bound(runs: list[Run]) -> None:
    assert [run for run in runs if len(run.device.asked) > 2 * run.bound.bit_length() + 2] == []


def test_a_perfect_forecast_takes_three_probes_none_of_which_fails() -> None:
    perfect = [run for run in runs_of(linear_with(FORECASTS["perfect"])) if run.limit >= 4]
    assert [run for run in perfect if len(run.device.asked) > 3 or run.device.failures] == []


@pytest.mark.parametrize("excess", [1, 2, 3, 5])
def test_a_forecast_slightly_too_high_takes_few_failing_probes(excess: int) -> None:
    runs = runs_of(linear_with(lambda fits, bound: fits.limit + excess))
    assert [run for run in runs if run.device.failures > 1 + excess.bit_length()] == []


def test_zero_is_only_said_after_one_row_was_tried() -> None:
    device = FitsUpTo(1)
    assert linear_extrapolation(device, lambda: 0, max_batch_size=1) == 1
    device = FitsUpTo(1)
    assert linear_extrapolation(device, lambda: 0, max_batch_size=100) == 1


@settings(derandomize=True, deadline=None, max_examples=200)
@given(limit=st.integers(0, 300), bound=st.integers(1, 300), seed=st.integers(0, 2**32 - 1))
def test_linear_extrapolation_is_exact_whatever_is_forecast_above_the_sizes_that_fitted(
    limit: int, bound: int, seed: int
) -> None:
    generator = random.Random(seed)
    device = FitsUpTo(limit)

    def forecast() -> int | None:
        return generator.choice([None, device.fitted + 1, device.fitted + generator.randint(1, 400)])

    answer = linear_extrapolation(device, forecast, max_batch_size=bound)
    assert answer == min(limit, bound)
    assert len(set(device.asked)) == len(device.asked)
    assert all(1 <= size <= bound for size in device.asked)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(limit=st.integers(0, 300), bound=st.integers(1, 300), seed=st.integers(0, 2**32 - 1))
def test_linear_extrapolation_is_safe_with_any_forecast(limit: int, bound: int, seed: int) -> None:
    generator = random.Random(seed)
    device = FitsUpTo(limit)

    def forecast() -> int | None:
        return generator.choice([None, -(2**40), -1, 0, generator.randint(-50, 400), 2**62])

    answer = linear_extrapolation(device, forecast, max_batch_size=bound)
    assert answer == device.fitted  # the largest that was tried and fits: never above the limit
    assert len(set(device.asked)) == len(device.asked)
    assert all(1 <= size <= bound for size in device.asked)


def test_a_forecast_with_nothing_above_the_size_that_fitted_is_believed() -> None:
    """The price of three probes without a failure: the size above the answer is not tried."""
    device = FitsUpTo(100)
    assert linear_extrapolation(device, lambda: 90, max_batch_size=1000) == 90
    assert device.asked == [2, 3, 90]


def test_binary_search_starts_at_its_start_and_doubles() -> None:
    device = FitsUpTo(37)
    binary_search(device, start=4, max_batch_size=1000)
    assert device.asked[:5] == [4, 8, 16, 32, 64]


def test_decrease_until_oom_starts_at_the_top_and_halves() -> None:
    device = FitsUpTo(37)
    decrease_until_oom(device, max_batch_size=1000)
    assert device.asked[:6] == [1000, 500, 250, 125, 62, 31]


# ---- with an expectation

EXPECTATIONS = (None, 0, 1, 2, 3, 7, 36, 37, 38, 60, 100, 101, 5000)


def run_within(strategy: Search, limit: int, bound: int, expected: int | None) -> Run:
    device = FitsUpTo(limit)
    answer = within(lambda most: strategy(device, most), device, expected=expected, max_batch_size=bound)
    return Run(limit, bound, answer, device)


@pytest.fixture(scope="module", params=STRATEGIES.values(), ids=list(STRATEGIES))
def expectant(request: pytest.FixtureRequest) -> list[tuple[int | None, Run]]:
    """The strategy with every expectation, right or wrong."""
    return [
        (expected, run_within(request.param, limit, bound, expected))
        for limit in (*range(40), 59, 60, 99, 100, 101, 200)
        for bound in (1, 2, 3, 37, 100)
        for expected in EXPECTATIONS
    ]


def test_any_expectation_leaves_the_answer_exact_and_tried(expectant: list[tuple[int | None, Run]]) -> None:
    assert [run for _, run in expectant if run.answer != min(run.limit, run.bound)] == []
    assert [run for _, run in expectant if run.answer and run.answer not in run.device.asked] == []
    assert [run for _, run in expectant if not all(1 <= size <= run.bound for size in run.device.asked)] == []
    assert [run for _, run in expectant if len(set(run.device.asked)) < len(run.device.asked)] == []


def test_no_size_beyond_the_next_above_what_is_expected_is_asked_unless_that_fits(
    expectant: list[tuple[int | None, Run]],
) -> None:
    bounded = [(expected, run) for expected, run in expectant if expected and expected < run.bound]
    assert [run for expected, run in bounded if run.limit <= expected < max(run.device.asked) - 1] == []
    assert [run for expected, run in bounded if run.limit < expected < max(run.device.asked)] == []


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=list(STRATEGIES))
@pytest.mark.parametrize("expected", [None, 0, -1, 100, 101, 5000])
def test_an_expectation_that_bounds_nothing_changes_nothing(strategy: Search, expected: int | None) -> None:
    for limit in (0, 1, 2, 37, 99, 100, 101):
        device = FitsUpTo(limit)
        strategy(device, 100)
        assert run_within(strategy, limit, 100, expected).device.asked == device.asked


def test_from_above_a_right_expectation_takes_one_try_and_one_above_it_that_fails() -> None:
    for limit in range(1, 1000):
        assert run_within(STRATEGIES["decrease"], limit, 1000, limit).device.asked == [limit, limit + 1]


def test_an_expectation_too_low_costs_no_more_than_doubling_from_it() -> None:
    for limit in range(38, 1000):
        run = run_within(STRATEGIES["decrease"], limit, 1000, 37)
        assert len(run.device.asked) <= 2 + 2 * (limit // 37).bit_length() + (37).bit_length()


def test_rounding_goes_to_a_power_of_two_and_never_up() -> None:
    for size in range(1, 2000):
        rounded = round_down_to_power_of_two(size)
        assert rounded in {2**exponent for exponent in range(12)}
        assert rounded <= size < 2 * rounded
