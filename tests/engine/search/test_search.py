"""The three strategies under every limit up to 200: exact, within bounds, with few probes, safe with any forecast.

A search leaves model and meter unchanged, whether something fits or not.
"""

import random
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support.toys import search_options, search_result
from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.engine.loop import Loop
from torchtune_adaptive.engine.memory.cpu_meter import CpuMeter
from torchtune_adaptive.engine.memory.devices import meter_for
from torchtune_adaptive.engine.search.find import search
from torchtune_adaptive.engine.search.options import Strategy
from torchtune_adaptive.engine.search.strategies import (
    Fits,
    Probe,
    SearchResult,
    binary_search,
    decrease_until_oom,
    linear_extrapolation,
)
from torchtune_adaptive.errors import NothingFitsError

LIMITS = range(201)
BOUNDS = (1, 2, 3, 64, 100, 199, 201, 1000)
STARTS = (1, 2, 3, 50, 5000)


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
    """Linear extrapolation with a forecast that knows the device and the bound."""

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
    """Runs of the strategy with every limit and bound."""
    devices = [(bound, FitsUpTo(limit)) for limit in LIMITS for bound in BOUNDS]
    return [Run(device.limit, bound, strategy(device, bound), device) for bound, device in devices]


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=list(STRATEGIES))
def test_every_strategy_is_exact_and_tries_few_sizes_each_once_and_within_the_bounds(strategy: Search) -> None:
    for run in runs_of(strategy):
        asked = run.device.asked
        assert run.answer == min(run.limit, run.bound), run
        assert run.answer == 0 or run.answer in asked, run
        assert len(set(asked)) == len(asked) <= 2 * run.bound.bit_length() + 2, run
        assert all(1 <= size <= run.bound for size in asked), run


def test_a_perfect_forecast_takes_three_probes_none_of_which_fails() -> None:
    perfect = [run for run in runs_of(linear_with(FORECASTS["perfect"])) if run.limit >= 4]
    assert [run for run in perfect if len(run.device.asked) > 3 or run.device.failures] == []


@pytest.mark.parametrize("excess", [1, 2, 3, 5])
def test_a_forecast_slightly_too_high_takes_few_failing_probes(excess: int) -> None:
    runs = runs_of(linear_with(lambda fits, bound: fits.limit + excess))
    assert [run for run in runs if run.device.failures > 1 + excess.bit_length()] == []


@settings(max_examples=150)
@given(
    limit=st.integers(0, 300),
    bound=st.integers(1, 300),
    seed=st.integers(0, 2**32 - 1),
    is_above=st.booleans(),
    has_curves=st.booleans(),
)
def test_linear_extrapolation_is_safe_with_any_forecast_and_exact_with_one_above_the_sizes_that_fitted(
    limit: int, bound: int, seed: int, is_above: bool, has_curves: bool
) -> None:
    generator = random.Random(seed)
    device = FitsUpTo(limit)

    def forecast() -> int | None:
        above = [None, device.fitted + 1, device.fitted + generator.randint(1, 400)]
        return generator.choice(above if is_above else [None, -(2**40), -1, 0, generator.randint(-50, 400), 2**62])

    def curved() -> int | None:
        return generator.choice([None, -1, 0, generator.randint(-50, 400), 2**62])

    answer = linear_extrapolation(device, forecast, curved if has_curves else None, max_batch_size=bound)
    assert answer == device.fitted  # the largest size that was tried and fits, so never above the limit
    assert answer == min(limit, bound) or not is_above
    assert answer or 1 in device.asked
    assert len(set(device.asked)) == len(device.asked)
    assert all(1 <= size <= bound for size in device.asked)


def test_linear_extrapolation_ends_at_a_size_that_fits_and_equals_the_forecast() -> None:
    """Three probes without a failure have a price: the size above the answer is not tried."""
    device = FitsUpTo(100)
    assert linear_extrapolation(device, lambda: 90, max_batch_size=1000) == 90
    assert device.asked == [2, 3, 90]


@pytest.mark.parametrize("limit", [40, 1000, 100_000])
def test_forecasts_that_stay_too_low_are_not_followed_row_by_row(limit: int) -> None:
    """As where part of the memory grows with the first rows only, such as that of a loss in chunks."""
    device = FitsUpTo(limit)
    assert linear_extrapolation(device, lambda: device.fitted + 1, max_batch_size=10**6) == limit
    assert len(device.asked) < 8 + 2 * limit.bit_length()


def test_binary_search_starts_at_its_start_and_doubles() -> None:
    device = FitsUpTo(37)
    binary_search(device, start=4, max_batch_size=1000)
    assert device.asked[:5] == [4, 8, 16, 32, 64]


def test_decrease_until_oom_starts_at_the_top_and_halves() -> None:
    device = FitsUpTo(37)
    decrease_until_oom(device, max_batch_size=1000)
    assert device.asked[:6] == [1000, 500, 250, 125, 62, 31]


def test_a_result_prints_as_one_line() -> None:
    probes = tuple(
        Probe(batch_size=size, fits=size < 14, peak_bytes=size * 64, phase_peak_bytes={}, seconds=1.0)
        for size in (8, 14)
    )
    assert str(search_result(probes=probes)) == (
        "batch size 8 (largest that fits: 13), peak 512 B of 1000 B with margin 0.05, 2 probes by binary_search"
    )
    assert "(largest that fits: 13), limit 1000 B with margin" in str(search_result())


# ---- the search around a strategy

ROW_BYTES = 1000
NAMES: tuple[Strategy, ...] = get_args(Strategy)


class SmallCard(CpuMeter):
    """A meter as in training, with its own limit; records the limit and the exactness of each step."""

    def __init__(self, *, limit_bytes: int | None = 777, available_bytes: int = 2**40) -> None:
        super().__init__(exact=False)
        self.limit_bytes = limit_bytes
        self.seen: list[tuple[int | None, bool]] = []
        self._available_bytes = available_bytes

    @property
    def available_bytes(self) -> int:
        return self._available_bytes

    @property
    def figures(self) -> tuple[int | None, bool]:
        return self.limit_bytes, self._exact


class Rows:
    """A model whose step takes 1000 bytes per row, changes a weight and draws a random number.

    Args:
        never: sizes that do not fit, however much memory there is.
    """

    def __init__(self, meter: SmallCard, *, never: Collection[int] = (), consensus: Consensus | None = None) -> None:
        self.meter = meter
        self.taken: list[int] = []
        self.began_with_gradients = False
        self._never = never
        self._gradient = torch.ones(1, 1)  # each step leaves it behind
        self._model = nn.Linear(1, 1)
        self._weight = self._model.weight.detach().numpy()  # the meter does not see its changes
        self.loop = Loop(
            micro_step=self._train_step,
            model=self._model,
            optimizers=[],
            device=torch.device("cpu"),
            meter=meter,
            consensus=consensus or Consensus(),
        )

    def _train_step(self, rows: int) -> None:
        self.taken.append(rows)
        self.began_with_gradients |= self._model.weight.grad is not None
        self._model.weight.grad = self._gradient
        self.meter.seen.append(self.meter.figures)
        kept = torch.empty(rows * ROW_BYTES, dtype=torch.uint8)
        self._weight += random.random()
        if rows in self._never:
            raise torch.OutOfMemoryError(f"never for {rows} rows, not even {kept.nbytes} bytes")

    def search(self, *, start: int = 1, bound: int = 100, **settings: Any) -> SearchResult:
        return search(self.loop, lambda rows: [rows], search_options(**settings), start=start, bound=bound)

    def state(self) -> tuple[Any, ...]:
        return self._weight.item(), random.getstate()


@pytest.mark.parametrize("strategy", NAMES)
def test_a_search_finds_what_fits_within_the_margin_and_restores_all_state_and_the_meter(strategy: Strategy) -> None:
    device = Rows(SmallCard())
    before = device.state()
    found = device.search(strategy=strategy, memory_limit_bytes=17_000, margin=0.2)  # 13 600 bytes are usable
    assert (found.exact_batch_size, found.batch_size, found.bound) == (13, 13, 100)
    assert (found.strategy, found.memory_limit_bytes, found.margin, found.world_size) == (strategy, 17_000, 0.2, 1)
    assert (found.usable_bytes, [probe.batch_size for probe in found.probes]) == (13_600, device.taken[1:])
    assert all(probe.fits == (probe.batch_size <= 13) for probe in found.probes)
    assert not device.began_with_gradients
    assert device.state() == before
    assert set(device.meter.seen) == {(13_600, True)}
    assert device.meter.figures == (777, False)
    with device.meter.exactly():
        device.search(strategy=strategy, memory_limit_bytes=13_000)
        assert device.meter.figures == (777, True)


@pytest.mark.parametrize("strategy", NAMES)
def test_where_nothing_fits_all_state_is_restored_and_one_sentence_says_why(strategy: Strategy) -> None:
    device = Rows(SmallCard())
    before = device.state()
    with pytest.raises(NothingFitsError) as caught:
        device.search(strategy=strategy, memory_limit_bytes=990, margin=0.1)
    assert str(caught.value) == (
        "not even one row fits: its step ran out of memory at 1000 B on one rank, of 891 B usable"
        " (limit 990 B, margin 0.1); shorter rows, activation checkpointing, LoRA or more ranks would need less."
    )
    assert device.taken == [2, 1]
    assert device.meter.figures == (777, False)
    assert device.state() == before


def test_the_sentence_has_the_highest_need_and_the_lowest_limit_of_all_ranks() -> None:
    class Ranks(Consensus):
        def max_over_ranks(self, number: int) -> int:
            return max(number, 5120) if number >= ROW_BYTES else number  # smaller numbers are votes

        def min_over_ranks(self, number: int) -> int:
            return min(number, 512)

    with pytest.raises(NothingFitsError, match=r"at 5.0 KiB on one rank, of 512 B usable \(limit 512 B, margin 0\)"):
        Rows(SmallCard(), consensus=Ranks()).search(memory_limit_bytes=990)


class Reserving(SmallCard):
    """A card whose allocator reserves ``reserved(allocated bytes)``, which the limit is on.

    It frees its cache ``retries`` times in a step of 4 rows and more.
    """

    def __init__(self, reserved: Callable[[int], int], *, retries: int = 0) -> None:
        super().__init__()
        self._reserved = reserved
        self._retries = retries

    @property
    def allocator_retries(self) -> int:
        return self._retries if super().peak_bytes >= 4 * ROW_BYTES else 0

    @property
    def peak_bytes(self) -> int:
        return self._reserved(super().peak_bytes)


@pytest.mark.parametrize(
    ("retries", "more_bytes", "failure", "largest"),
    [(0, 0, "out of memory", 20), (3, 0, "allocator retried", 3), (0, 10**6, "above the limit", 3)],
)
def test_a_probe_that_does_not_fit_says_why(retries: int, more_bytes: int, failure: str, largest: int) -> None:
    card = Reserving(lambda allocated: allocated + more_bytes * (allocated >= 4 * ROW_BYTES), retries=retries)
    found = Rows(card).search(strategy="binary_search", memory_limit_bytes=20_500, margin=0.0)
    assert found.exact_batch_size == largest
    assert {probe.failure for probe in found.probes if not probe.fits} == {failure}
    assert {probe.failure for probe in found.probes if probe.fits} == {""}


def test_memory_that_others_have_taken_cannot_be_used() -> None:
    found = Rows(SmallCard(available_bytes=9_500)).search(memory_limit_bytes=20_000)
    assert (found.exact_batch_size, found.memory_limit_bytes) == (9, 9_500)


@pytest.mark.parametrize(("limit_rows", "rounded"), [(1, 1), (2, 2), (3, 2), (13, 8), (16, 16), (100, 64)])
def test_a_size_is_rounded_down_to_a_power_of_two_that_has_itself_been_tried(limit_rows: int, rounded: int) -> None:
    device = Rows(SmallCard())
    found = device.search(memory_limit_bytes=ROW_BYTES * limit_rows, power_of_two=True)
    assert (found.exact_batch_size, found.batch_size) == (limit_rows, rounded)
    assert any(probe.fits and probe.batch_size == rounded for probe in found.probes)
    tried = [probe.batch_size for probe in found.probes]
    assert len(set(tried)) == len(tried)


@pytest.mark.parametrize(
    ("never", "settings", "found", "last_taken"),
    [([8], {"memory_limit_bytes": 13_000}, (13, 4), [8, 4]), ([2, 4], {"memory_limit_bytes": 7_000}, (7, 1), [4, 2])],
)
def test_a_power_of_two_that_does_not_fit_after_all_is_halved_again_down_to_a_single_row(
    never: list[int], settings: dict[str, int], found: tuple[int, int], last_taken: list[int]
) -> None:
    device = Rows(SmallCard(), never=never)
    result = device.search(power_of_two=True, strategy="binary_search", start=5, **settings)
    assert (result.exact_batch_size, result.batch_size) == found
    assert device.taken[-2:] == last_taken


def test_forecasts_are_kept_and_that_of_fractional_rows_unless_the_bound_stopped_the_search() -> None:
    device = Rows(SmallCard())
    found = device.search(memory_limit_bytes=13_250)
    assert found.forecast_rows == 13.25
    assert found.forecast == tuple((size, 1000 * size) for size in (2, 3, 13, 14))
    without = device.search(memory_limit_bytes=13_250, strategy="binary_search")
    assert (without.forecast_rows, without.forecast) == (None, ())
    assert device.search(memory_limit_bytes=13_250, bound=13).forecast_rows is None


# ---- an allocator that reserves more than is allocated


@pytest.mark.parametrize("rows", [9, 24, 100])
@pytest.mark.parametrize(
    "reserved",
    [
        pytest.param(lambda allocated: allocated + allocated // 20, id="in proportion"),
        pytest.param(lambda allocated: allocated + 700, id="always the same"),
        pytest.param(lambda allocated: -(-allocated // 300) * 300, id="in segments"),
    ],
)
def test_a_forecast_allows_for_what_is_reserved(rows: int, reserved: Callable[[int], int]) -> None:
    limit_bytes = reserved(ROW_BYTES * rows)
    largest = max(size for size in range(200) if reserved(ROW_BYTES * size) <= limit_bytes)
    found = Rows(Reserving(reserved)).search(memory_limit_bytes=limit_bytes, bound=200)
    assert found.exact_batch_size == largest
    assert [probe.batch_size for probe in found.probes if not probe.fits] in ([], [largest + 1])
    assert len(found.probes) <= 5


class Stepped:
    """A model with AdamW whose steps record whether the optimizer had its state before, and change it."""

    def __init__(self, *, limit_bytes: int, state_comes_first: bool = True) -> None:
        self.had_state: list[bool] = []
        self.limit_bytes = limit_bytes
        self.optimizer = torch.optim.AdamW(nn.Linear(100, 100, bias=False).parameters(), lr=0.1)
        (self._weight,) = self.optimizer.param_groups[0]["params"]
        model = nn.ParameterList([self._weight])
        self.loop = Loop(
            micro_step=self._train_step,
            model=model,
            optimizers=[self.optimizer],
            device=torch.device("cpu"),
            meter=meter_for(torch.device("cpu"), model, [self.optimizer]),
            consensus=Consensus(),
            state_comes_first=state_comes_first,
        )

    def search(self) -> SearchResult:
        options = search_options(memory_limit_bytes=self.limit_bytes)
        return search(self.loop, lambda rows: [rows], options, start=1, bound=4)

    def _train_step(self, rows: int) -> None:
        self.had_state.append(bool(self.optimizer.state))
        self._weight.grad = torch.ones(rows, *self._weight.shape).sum(0)
        self.optimizer.step()


@pytest.mark.parametrize("state_comes_first", [True, False])
def test_the_optimizers_state_is_created_before_the_first_step_as_in_training(state_comes_first: bool) -> None:
    stepped = Stepped(limit_bytes=10_000_000, state_comes_first=state_comes_first)
    assert stepped.search().exact_batch_size == 4
    assert stepped.had_state[0] == state_comes_first
    assert all(stepped.had_state[1:])
    assert not stepped.optimizer.state


def test_optimizer_state_that_does_not_fit_is_removed_and_nothing_fits() -> None:
    stepped = Stepped(limit_bytes=100_000)  # enough for parameters and gradients
    with pytest.raises(NothingFitsError):
        stepped.search()
    assert stepped.had_state == [False, False]  # two rows, then one
    assert not stepped.optimizer.state
