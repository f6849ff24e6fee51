"""Built-in schedules grow when they say; the noise scale is estimated without bias, and the batch grows toward it."""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtune_adaptive.errors import InputError
from torchtune_adaptive.schedule import GradientNorms, at_epochs, geometric, gradient_noise_scale, linear

properties = settings(max_examples=100)


def sizes_of(function: Callable[[int, int], int], *, start: int) -> list[int]:
    sizes = [start]
    for epoch in range(5):
        sizes.append(sizes[-1] + function(epoch, sizes[-1]))
    return sizes[1:]


@pytest.mark.parametrize(
    ("function", "sizes"),
    [
        (geometric(), [4, 8, 16, 32, 64]),
        (geometric(factor=3, every_epochs=2), [4, 4, 12, 12, 36]),
        (linear(2), [4, 6, 8, 10, 12]),
        (linear(increment=5, every_epochs=3), [4, 4, 4, 9, 9]),
        (at_epochs({0: 3}), [7, 7, 7, 7, 7]),
        (at_epochs({1: 4, "3": 8}), [4, 8, 8, 16, 16]),  # pyright: ignore[reportArgumentType]  # as YAML may have it
    ],
)
def test_built_in_schedules_grow_when_they_say(function: Callable[[int, int], int], sizes: list[int]) -> None:
    assert sizes_of(function, start=4) == sizes


@pytest.mark.parametrize(
    ("schedule", "arguments", "sentence"),
    [
        (geometric, {"factor": 1}, "`factor` must be at least 2, but is 1 instead."),
        (geometric, {"every_epochs": 0}, "`every_epochs` must be at least 1, but is 0 instead."),
        (linear, {"increment": -8}, "`increment` must be at least 0, but is -8 instead."),
        (linear, {"increment": 8, "every_epochs": 0}, "`every_epochs` must be at least 1, but is 0 instead."),
        (at_epochs, {"increases": [2, 8]}, "`increases` must map epochs to increases, but is [2, 8] instead."),
        (at_epochs, {"increases": {}}, "`increases` must map epochs to increases, but is {} instead."),
        (at_epochs, {"increases": {-1: 8}}, "`epoch of increases` must be at least 0, but is -1 instead."),
        (at_epochs, {"increases": {2: -8}}, "`increases[2]` must be at least 0, but is -8 instead."),
        (at_epochs, {"increases": {2: 8, "2": 4}}, "`increases` names epoch 2 twice: {2: 8, '2': 4}."),
        (gradient_noise_scale, {"max_factor": math.nan}, "`max_factor` must be above 1 and finite, but is nan"),
        (gradient_noise_scale, {"max_factor": 1}, "`max_factor` must be above 1 and finite, but is 1 instead."),
        (gradient_noise_scale, {"smoothing": 1}, "`smoothing` must be in [0, 1), but is 1 instead."),
        (gradient_noise_scale, {"every_steps": 0}, "`every_steps` must be at least 1, but is 0 instead."),
        (gradient_noise_scale, {"min_measurements": 0}, "`min_measurements` must be at least 1, but is 0 instead."),
    ],
)
def test_an_argument_out_of_its_range_is_refused(schedule: Any, arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError) as refused:
        schedule(**arguments)
    assert str(refused.value).startswith(sentence)


# ---- estimates of the noise scale


def norms_of(noise_scale: float, *, samples: int = 8) -> GradientNorms:
    """The exact average norms of windows of ``samples`` if the mean gradient's norm is 1."""
    small = samples // 2
    return GradientNorms(small, 1 + noise_scale / small, samples, 1 + noise_scale / samples)


def having_observed(noise_scale: float, *, samples: int = 8, **arguments: Any) -> gradient_noise_scale:
    schedule = gradient_noise_scale(**({"min_measurements": 1} | arguments))
    schedule.observe(norms_of(noise_scale, samples=samples))
    return schedule


def test_estimates_from_all_pairs_without_replacement_are_those_of_the_unbiased_covariance() -> None:
    """Exact: over every ordered pair of a few samples, the first of which is the small batch."""
    few = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    pairs = [few[[one, other]] for one in range(6) for other in range(6) if one != other]
    measured = [
        GradientNorms(1, pair[0].square().sum().item(), 2, pair.mean(dim=0).square().sum().item()) for pair in pairs
    ]
    trace = few.var(dim=0, correction=1).sum().item()
    squared_mean = few.mean(dim=0).square().sum().item() - trace / 6
    assert sum(norms.trace_of_covariance() for norms in measured) / 30 == pytest.approx(trace)
    assert sum(norms.squared_mean() for norms in measured) / 30 == pytest.approx(squared_mean)


@properties
@given(squared_mean=st.floats(0.01, 100), trace=st.floats(0, 100), small=st.integers(1, 50), more=st.integers(1, 200))
def test_average_norms_yield_the_mean_and_covariance_that_they_were_computed_from(
    squared_mean: float, trace: float, small: int, more: int
) -> None:
    samples = small + more
    norms = GradientNorms(small, squared_mean + trace / small, samples, squared_mean + trace / samples)
    assert norms.squared_mean() == pytest.approx(squared_mean, rel=1e-6, abs=1e-9)
    assert norms.trace_of_covariance() == pytest.approx(trace, rel=1e-6, abs=1e-6 * squared_mean * samples)


def test_weights_fall_by_the_smoothing_from_one_measurement_to_the_one_before_it() -> None:
    schedule = having_observed(40.0, smoothing=0.75)
    schedule.observe(norms_of(10.0))
    assert schedule.noise_scale == pytest.approx((10 + 0.75 * 40) / 1.75)


# ---- growth toward the noise scale


@properties
@given(
    noise_scale=st.floats(0, 5000),
    samples=st.integers(2, 256),
    shares=st.integers(1, 8),
    measured_samples=st.integers(2, 256),
    max_factor=st.floats(1.01, 16),
)
def test_the_batch_grows_as_far_as_it_may_toward_the_noise_scale(
    noise_scale: float, samples: int, shares: int, measured_samples: int, max_factor: float
) -> None:
    """``current_batch_size`` counts the samples of one rank and micro-step, of which a step has several shares.

    The step that was measured may have been of another size.
    """
    schedule = having_observed(noise_scale, samples=measured_samples, max_factor=max_factor)
    schedule.samples_per_unit = shares
    increase = schedule(1, samples)
    most = max(max_factor * samples, samples + 1)
    least, largest = (max(samples, math.floor(min(noise_scale / shares * by, most))) for by in (1 - 1e-6, 1 + 1e-6))
    assert isinstance(increase, int)
    assert least <= samples + increase <= largest


@pytest.mark.parametrize(
    ("norms", "noise_scale", "increase"),
    [
        (GradientNorms(4, 2.0, 8, 1.0), math.inf, 16),  # the mean is not above 0: by the largest factor
        (GradientNorms(4, 1.5, 8, 0.5), math.inf, 16),
        (GradientNorms(4, 1.0, 8, 1.5), 0, 0),  # by chance, the covariance is below 0
        (GradientNorms(4, math.nan, 8, math.nan), None, 0),  # what is not finite is skipped
        (GradientNorms(4, math.inf, 8, math.inf), None, 0),
    ],
)
def test_norms_that_give_no_finite_noise_scale_are_understood(
    norms: GradientNorms, noise_scale: float | None, increase: int
) -> None:
    schedule = gradient_noise_scale(max_factor=3, min_measurements=1)
    schedule.observe(norms)
    assert (schedule.noise_scale, schedule(1, 8)) == (noise_scale, increase)


def test_the_batch_stays_until_enough_measurements_are_made() -> None:
    schedule = gradient_noise_scale(min_measurements=3)
    assert (schedule.noise_scale, schedule.figures()) == (None, {})
    increases = [schedule(0, 8)]
    for _ in range(3):
        schedule.observe(norms_of(1000.0))
        increases.append(schedule(1, 8))
    assert increases == [0, 0, 0, 8]
    assert schedule.figures() == {"gradient_noise_scale": pytest.approx(1000)}


@properties
@given(scales=st.lists(st.floats(0.1, 1000), max_size=12), saved_after=st.integers(0, 12))
def test_a_schedule_resumed_from_json_continues_like_an_uninterrupted_one(
    scales: list[float], saved_after: int
) -> None:
    uninterrupted, interrupted, resumed = gradient_noise_scale(), gradient_noise_scale(), gradient_noise_scale()
    for scale in scales[:saved_after]:
        interrupted.observe(norms_of(scale))
    resumed.load_state_dict(json.loads(json.dumps(interrupted.state_dict())))
    for scale in scales:
        uninterrupted.observe(norms_of(scale))
    for scale in scales[saved_after:]:
        resumed.observe(norms_of(scale))
    assert resumed(3, 64) == uninterrupted(3, 64)
    assert resumed.state_dict() == uninterrupted.state_dict()
