"""Estimates agree with the exact mean and covariance; the batch grows toward it and never above it."""

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtune_adaptive.errors import InputError
from torchtune_adaptive.training.batch.increase_function import next_batch_size
from torchtune_adaptive.training.batch.noise_scale import GradientNorms, gradient_noise_scale, gradient_norms

properties = settings(max_examples=100)


def norms_of(noise_scale: float, *, samples: int = 8) -> GradientNorms:
    """The exact average norms of windows of ``samples`` if the mean gradient's norm is 1."""
    small = samples // 2
    return GradientNorms(small, 1 + noise_scale / small, samples, 1 + noise_scale / samples)


def having_observed(noise_scale: float, *, samples: int = 8, **arguments: Any) -> gradient_noise_scale:
    schedule = gradient_noise_scale(**({"min_measurements": 1} | arguments))
    schedule.observe(norms_of(noise_scale, samples=samples))
    return schedule


# ---- the estimates


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


# ---- the norms of a measured step


@pytest.mark.parametrize("ranks", [1, 4])
def test_norms_are_those_of_the_mean_gradient_over_the_weight_of_all_ranks(ranks: int) -> None:
    """Gradients are sums over tokens, divided by the ranks; parameters are in shards."""
    small_shards, shards = (torch.randn(ranks, 6, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    squares = [(part / ranks).square().sum().item() for part in (small_shards, shards)]
    norms = gradient_norms([squares[0], 20.0, squares[1]], weight=50, samples=8, ranks=ranks)
    assert norms == GradientNorms(
        small_samples=4,
        small_norm_squared=pytest.approx((small_shards / 20).square().sum().item()),  # pyright: ignore[reportArgumentType]
        samples=8,
        norm_squared=pytest.approx((shards / 50).square().sum().item()),  # pyright: ignore[reportArgumentType]
    )


def test_a_small_batch_without_weight_gives_no_norms() -> None:
    assert gradient_norms([0.0, 0.0, 3.0], weight=50, samples=8, ranks=2) is None


# ---- growth


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
    target = min(noise_scale / shares, max(max_factor * samples, samples + 1))
    assert isinstance(increase, int)
    assert samples + increase <= max(target, samples) * (1 + 1e-6)
    assert samples + increase > target * (1 - 1e-6) - 1


@pytest.mark.parametrize("squared_mean", [0.0, -0.5])
def test_noise_that_hides_the_mean_grows_the_batch_by_the_largest_factor(squared_mean: float) -> None:
    schedule = gradient_noise_scale(max_factor=3, min_measurements=1)
    schedule.observe(GradientNorms(4, squared_mean + 2, 8, squared_mean + 1))
    assert schedule.noise_scale == math.inf
    assert schedule(1, 8) == 16


def test_no_noise_at_all_keeps_the_batch() -> None:
    schedule = gradient_noise_scale(min_measurements=1)
    schedule.observe(GradientNorms(4, 1.0, 8, 1.5))  # by chance: the covariance would be below 0
    assert schedule.noise_scale == 0
    assert schedule(1, 8) == 0


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
@given(noise_scale=st.floats(0, 500), maximum=st.integers(1, 60))
def test_the_increase_of_a_measured_schedule_is_cut_to_the_maximum_where_that_of_a_function_is_refused(
    noise_scale: float, maximum: int
) -> None:
    schedule = having_observed(noise_scale, max_factor=4)
    wanted = 16 + schedule(1, 16)
    growth = next_batch_size(schedule, epoch=1, batch_size=16, maximum=maximum)
    assert growth.batch_size == max(16, min(wanted, maximum))
    plain = next_batch_size(lambda *asked: schedule(*asked), epoch=1, batch_size=16, maximum=maximum)
    assert plain.batch_size == (wanted if wanted <= maximum else 16)


# ---- a schedule like others, with a state


@properties
@given(scales=st.lists(st.floats(0.1, 1000), max_size=12), saved_after=st.integers(0, 12))
def test_a_schedule_resumed_from_json_continues_like_an_uninterrupted_one(
    scales: list[float], saved_after: int
) -> None:
    uninterrupted, interrupted = gradient_noise_scale(), gradient_noise_scale()
    for scale in scales[:saved_after]:
        interrupted.observe(norms_of(scale))
    resumed = gradient_noise_scale()
    resumed.load_state_dict(json.loads(json.dumps(interrupted.state_dict())))
    for index, scale in enumerate(scales):
        uninterrupted.observe(norms_of(scale))
        if index >= saved_after:
            resumed.observe(norms_of(scale))
    assert resumed.noise_scale == uninterrupted.noise_scale
    assert resumed(3, 64) == uninterrupted(3, 64)
    assert resumed.state_dict() == uninterrupted.state_dict()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"smoothing": "2"}, "`smoothing` must be in [0, 1), but is '2' instead."),
        ({"max_factor": math.nan}, "`max_factor` must be above 1 and finite, but is nan instead."),
        ({"max_factor": 1}, "`max_factor` must be above 1 and finite, but is 1 instead."),
        ({"smoothing": 1}, "`smoothing` must be in [0, 1), but is 1 instead."),
        ({"every_steps": 0}, "`every_steps` must be at least 1, but is 0 instead."),
        ({"every_steps": 2.0}, "`every_steps` must be an integer, but is 2.0 instead."),
        ({"min_measurements": 0}, "`min_measurements` must be at least 1, but is 0 instead."),
    ],
)
def test_an_argument_out_of_its_range_is_refused_with_the_bound(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError) as refusal:
        gradient_noise_scale(**arguments)
    assert str(refusal.value) == sentence


def test_arguments_on_the_edge_of_their_range_are_accepted_and_shown() -> None:
    schedule = gradient_noise_scale(max_factor=1.5, every_steps=1, smoothing=0, min_measurements=1)
    assert repr(schedule) == "gradient_noise_scale(max_factor=1.5, every_steps=1, smoothing=0, min_measurements=1)"


def test_a_measurement_that_is_not_finite_is_skipped() -> None:
    schedule = gradient_noise_scale(min_measurements=1)
    for norm_squared in (math.nan, math.inf):
        schedule.observe(GradientNorms(4, norm_squared, 8, norm_squared))
    assert schedule.noise_scale is None
    assert schedule(1, 8) == 0
