"""Micro-steps add up in any order, and what a measured step tells are the norms of mean gradients per token."""

import functools
import operator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtune_adaptive.batch.noise_scale import GradientNorms
from torchtune_adaptive.batch.sampler import rows_of_rank
from torchtune_adaptive.micro_step import MicroStep, gradient_norms, in_small_batch, own_norm_squared, small_samples

TYPES = (torch.bfloat16, torch.float32, torch.float64)


def micro_step(loss_sum: float, num_tokens: int, *small_batch: float) -> MicroStep:
    small = torch.tensor(small_batch, dtype=torch.float64) if small_batch else None
    return MicroStep(torch.tensor(loss_sum), torch.tensor(num_tokens), small)


def model_with_gradients(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Two layers, one of whose biases is frozen and has none."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2)).to(dtype)
    model[0].bias.requires_grad_(False)
    model(torch.randn(4, 3, dtype=dtype)).square().sum().backward()
    return model


def plain_norm_squared(model: torch.nn.Module) -> float:
    return sum(p.grad.double().square().sum().item() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_micro_steps_add_up_whichever_of_them_are_of_the_small_batch(order: tuple[int, ...]) -> None:
    steps = [micro_step(2.0, 3, 0.0, 3.0), micro_step(4.0, 5, 0.5, 5.0), micro_step(8.0, 7)]
    total = functools.reduce(operator.add, (steps[place] for place in order))
    assert (total.loss_sum.item(), total.num_tokens.item()) == (14.0, 15)
    assert total.small_batch is not None
    assert total.small_batch.tolist() == [0.5, 8.0]


def test_unmeasured_micro_steps_add_up_to_an_unmeasured_one() -> None:
    total = micro_step(2.0, 3) + micro_step(4.0, 5)
    assert (total.loss_sum.item(), total.num_tokens.item(), total.small_batch) == (6.0, 8, None)


def test_micro_steps_of_the_small_batch_count_its_tokens_and_the_last_one_measures_the_gradient() -> None:
    model = model_with_gradients()
    model.zero_grad(set_to_none=True)

    def run(scale: float, num_tokens: int) -> MicroStep:
        loss_sum = scale * model(torch.ones(1, 3)).sum()
        loss_sum.backward()
        return MicroStep(loss_sum.detach(), torch.tensor(num_tokens))

    first = in_small_batch(lambda: run(1.0, 3))
    last = in_small_batch(lambda: run(2.0, 4), last_of=model)
    total = first + last + run(5.0, 9)
    assert first.small_batch is not None
    assert first.small_batch.tolist() == [0.0, 3.0]
    assert total.small_batch is not None
    # The last one's own backward is in it, what follows is not: 1 + 2 of the 1 + 2 + 5 parts of the gradient.
    assert total.small_batch.tolist() == pytest.approx([plain_norm_squared(model) * (3 / 8) ** 2, 7.0])
    assert total.small_batch.dtype == torch.float64
    assert total.num_tokens.item() == 16


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_the_norm_is_that_of_all_gradients_that_are_there_in_float64(dtype: torch.dtype) -> None:
    model = model_with_gradients(dtype)
    norm_squared = own_norm_squared(model)
    assert norm_squared.item() == pytest.approx(plain_norm_squared(model), rel=1e-6)
    assert (norm_squared.dtype, tuple(norm_squared.shape)) == (torch.float64, ())


def test_the_square_of_a_norm_that_float32_holds_is_held_too() -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    model.weight.grad = torch.full((1, 1), 2.0**100)
    assert own_norm_squared(model).item() == 2.0**200


@settings(derandomize=True, deadline=None, max_examples=100)
@given(ranks=st.integers(1, 16), more=st.integers(0, 200))
def test_the_small_batch_is_the_larger_half_of_every_ranks_rows(ranks: int, more: int) -> None:
    samples = ranks + more
    small = small_samples(samples, ranks=ranks)
    assert small == sum((rows_of_rank(samples, rank=rank, ranks=ranks) + 1) // 2 for rank in range(ranks))
    assert samples / 2 <= small <= (samples + ranks) / 2
    assert small < samples or samples == ranks  # a step of one row per rank cannot be measured


@pytest.mark.parametrize("ranks", [1, 4])
def test_norms_are_those_of_the_mean_gradient_over_the_tokens_of_all_ranks(ranks: int) -> None:
    """Gradients are sums over tokens, divided by the ranks; parameters are in shards."""
    small_shards, shards = (torch.randn(ranks, 6, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    squares = [(part / ranks).square().sum().item() for part in (small_shards, shards)]
    norms = gradient_norms([squares[0], 20.0, squares[1]], num_tokens=50, samples=8, ranks=ranks)
    assert norms == GradientNorms(
        small_samples=4,
        small_norm_squared=pytest.approx((small_shards / 20).square().sum().item()),  # pyright: ignore[reportArgumentType]
        samples=8,
        norm_squared=pytest.approx((shards / 50).square().sum().item()),  # pyright: ignore[reportArgumentType]
    )


def test_a_small_batch_without_a_token_that_counts_tells_nothing() -> None:
    assert gradient_norms([0.0, 0.0, 3.0], num_tokens=50, samples=8, ranks=2) is None
