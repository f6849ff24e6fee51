"""Peak and largest batch size by forecast, compared with brute force."""

from collections.abc import Callable

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from torchtune_adaptive.engine.memory.timeline import Forecast, Timeline

Line = tuple[int, int]  # bytes without a row, and per row

MOST_ROWS = 150
SIZES = range(MOST_ROWS + 1)
properties = settings(max_examples=60)

# Few different values, so that equal slopes, equal intercepts and lines through one point do occur.
any_lines = st.lists(
    st.tuples(st.integers(-20, 20) | st.integers(-(10**9), 10**9), st.integers(-6, 6) | st.integers(0, 10**7)),
    min_size=1,
    max_size=12,
)
growing_or_constant = st.tuples(st.integers(0, 60) | st.integers(0, 10**9), st.integers(0, 6) | st.integers(0, 10**7))


def bytes_of(line: Line, batch_size: int) -> int:
    return line[0] + line[1] * batch_size


def timeline(batch_size: int, lines: list[Line]) -> Timeline:
    """The timeline that a meter would record, with one operation per line."""
    operations = tuple(f"operation {index}" for index in range(len(lines)))
    return Timeline(batch_size, operations, tuple(bytes_of(line, batch_size) for line in lines))


def forecast_of(lines: list[Line], sizes: tuple[int, int] = (2, 3)) -> Forecast:
    forecast = Forecast.along_lines(timeline(sizes[0], lines), timeline(sizes[1], lines))
    assert forecast is not None
    return forecast


def highest(lines: list[Line], batch_size: int) -> int:
    return max(bytes_of(line, batch_size) for line in lines)


@properties
@given(any_lines, st.sampled_from([(2, 3), (2, 4), (1, 9)]))
def test_two_timelines_give_the_peak_at_every_other_size(lines: list[Line], sizes: tuple[int, int]) -> None:
    forecast = forecast_of(lines, sizes)
    assert [forecast.peak_bytes(size) for size in SIZES] == [highest(lines, size) for size in SIZES]


@properties
@given(any_lines, st.sampled_from(SIZES), st.integers(0, 2000) | st.integers(0, 4 * 10**9))
def test_the_largest_size_is_that_of_exhaustive_search(lines: list[Line], fitted: int, more_bytes: int) -> None:
    """Also where the memory of an operation falls: a kernel may pick a larger workspace for a smaller size."""
    limit_bytes = highest(lines, fitted) + more_bytes
    found = forecast_of(lines).largest_batch_size(limit_bytes, fitted=fitted)
    fitting = [size for size in SIZES if highest(lines, size) <= limit_bytes]
    if found is None:
        assert fitting[-1] == MOST_ROWS
        assert all(per_row <= 0 for _, per_row in lines)
    else:
        assert min(found, MOST_ROWS) == fitting[-1]


@st.composite
def steps_with_loops(draw: st.DrawFn) -> Callable[[int], Timeline]:
    """A function from a batch size to the timeline of a step that loops over the rows, perhaps twice.

    Bytes after an operation of a loop are linear in the pass and in the batch size. As in a backward pass, all passes
    but the first may accumulate gradients, and the last may let go of them.
    """
    at_end = draw(st.sampled_from([(), ("aten.add.Tensor", "aten.detach.default")]))
    loops = [[*draw(st.permutations(("mm", "add", "view"))), *at_end] for _ in range(draw(st.integers(1, 2)))]
    parts = [["in"]]
    for number, loop in enumerate(loops):
        parts += [loop, [f"after loop {number}: {place}" for place in range(8)]]
    memory = [[(draw(growing_or_constant), draw(st.integers(-3, 9))) for _ in part] for part in parts]

    def step(batch_size: int) -> Timeline:
        recorded: list[tuple[str, int]] = []
        for part, of_part in zip(parts, memory, strict=True):
            last_pass = batch_size - 1 if part in loops else 0
            for one_pass in range(last_pass + 1):
                for name, (line, per_pass) in zip(part, of_part, strict=True):
                    skipped = {"aten.add.Tensor": one_pass == 0, "aten.detach.default": one_pass < last_pass}
                    if not skipped.get(name):
                        recorded.append((name, bytes_of(line, batch_size) + per_pass * one_pass))
        return Timeline(batch_size, tuple(name for name, _ in recorded), tuple(live for _, live in recorded))

    return step


@pytest.mark.slow
@properties
@given(steps_with_loops(), st.sampled_from([(2, 3), (2, 4), (3, 7)]))
def test_a_step_that_loops_over_rows_has_the_forecast_peak_at_every_size(
    step: Callable[[int], Timeline], sizes: tuple[int, int]
) -> None:
    forecast = Forecast.along_lines(*map(step, sizes))
    assert forecast is not None
    for size in range(max(sizes), 30):
        assert forecast.peak_bytes(size) == max(step(size).live_bytes)


@pytest.mark.parametrize(
    "large",
    [
        (),
        ("in", "row", "row", "row", "other"),
        ("in", "row", "row", "new", "out"),
        ("in", "row", "row", "in", "out"),
        ("in", "row", "out"),
    ],
    ids=["none", "other end", "other pass", "pass that was not before", "fewer passes"],
)
def test_a_step_that_differs_by_more_than_passes_of_loops_gives_no_forecast(large: tuple[str, ...]) -> None:
    small = Timeline(2, ("in", "row", "row", "out"), (0, 0, 0, 0))
    assert Forecast.along_lines(small, Timeline(3, large, (0,) * len(large))) is None


@properties
@given(any_lines, st.sampled_from(SIZES), st.floats(0, 0.99))
def test_the_crossing_is_a_fraction_of_a_row_above_the_largest_size(
    lines: list[Line], rows: int, fraction: float
) -> None:
    low, high = highest(lines, rows), highest(lines, rows + 1)
    assume(high - low > 100)
    crossing = forecast_of(lines).crossing(low + fraction * (high - low), fitted=rows)
    assert crossing == pytest.approx(rows + fraction, abs=1e-2)


# ---- memory that is no line

Factors = tuple[int, int, int, int]
polynomials = st.lists(st.tuples(*[st.integers(0, 10**6)] * 4), min_size=1, max_size=6)
four_sizes = st.lists(st.integers(1, 99), min_size=4, max_size=4, unique=True)


def at_size(batch_size: int, operations: list[Factors]) -> Timeline:
    """The timeline of operations whose bytes are polynomials of the batch size."""
    live_bytes = [sum(factor * batch_size**power for power, factor in enumerate(one)) for one in operations]
    return Timeline(batch_size, tuple(map(str, range(len(operations)))), tuple(live_bytes))


def curves_of(operations: list[Factors], sizes: list[int]) -> Forecast:
    forecast = Forecast.along_curves(at_size(size, operations) for size in sizes)
    assert forecast is not None
    return forecast


@properties
@given(polynomials, four_sizes, st.integers(200, 3000))
def test_steps_of_four_sizes_give_the_peak_of_polynomials_at_any_other(
    operations: list[Factors], sizes: list[int], wanted: int
) -> None:
    peak_bytes = max(at_size(wanted, operations).live_bytes)
    assert curves_of(operations, sizes).peak_bytes(wanted) == pytest.approx(peak_bytes, rel=1e-6)


@properties
@given(polynomials, four_sizes, st.integers(200, 3000))
def test_steps_of_fewer_sizes_give_a_peak_that_is_not_too_low(
    operations: list[Factors], sizes: list[int], wanted: int
) -> None:
    peak_bytes = max(at_size(wanted, operations).live_bytes)
    for number in (2, 3):
        assert curves_of(operations, sizes[:number]).peak_bytes(wanted) >= peak_bytes * (1 - 1e-6)


@properties
@given(st.floats(1, 3), st.integers(100, 10**6), st.integers(0, 10**9), four_sizes, st.integers(200, 3000))
def test_nor_is_it_where_memory_grows_with_a_power_between_whole_ones(
    power: float, factor: int, constant: int, sizes: list[int], wanted: int
) -> None:
    steps = [Timeline(size, ("one",), (round(constant + factor * size**power),)) for size in sizes]
    for number in (2, 3, 4):
        forecast = Forecast.along_curves(steps[:number])
        assert forecast is not None
        noise_bytes = wanted**3  # of rounding to a byte, at sizes that may be next to each other
        assert forecast.peak_bytes(wanted) >= (constant + factor * wanted**power) * (1 - 1e-6) - noise_bytes


@properties
@given(polynomials, four_sizes, st.integers(200, 3000), st.floats(0.01, 0.99))
def test_the_largest_size_and_the_crossing_are_those_of_the_peak(
    operations: list[Factors], sizes: list[int], rows: int, fraction: float
) -> None:
    forecast = curves_of(operations, sizes)
    low, high = (forecast.peak_bytes(size) for size in (rows, rows + 1))
    crossing = forecast.crossing(low + fraction * (high - low), fitted=max(sizes))
    if high - low > 100:
        assert forecast.largest_batch_size(low + fraction * (high - low), fitted=max(sizes)) == rows
        assert crossing == pytest.approx(rows + fraction, abs=1e-3)


def test_curves_that_do_not_grow_have_no_largest_size() -> None:
    forecast = curves_of([(10, 0, 0, 0), (7, 0, 0, 0)], [2, 3, 9])
    assert forecast.largest_batch_size(100, fitted=9) is None
    assert forecast.crossing(100, fitted=9) is None
    assert forecast.peak_bytes(50) == 10


def test_curves_go_through_the_largest_sizes_and_not_through_two_that_are_next_to_each_other() -> None:
    live_bytes = {2: 1, 3: 500, 10: 1000, 500: 50_000, 1000: 100_000, 1001: 100_512}
    steps = [Timeline(size, ("one",), (live,)) for size, live in live_bytes.items()]
    forecast = Forecast.along_curves(steps)
    assert forecast is not None
    assert forecast.sizes == (1001, 500, 10)
    assert forecast.peak_bytes(2000) == pytest.approx(200_000, rel=0.02)
