"""A measured step has the norms of mean gradients per unit of weight, for any number of ranks and any type."""

import pytest
import torch

from torchtune_adaptive.training.batch.noise_scale import GradientNorms, gradient_norms
from torchtune_adaptive.training.train_step import own_norm_squared

TYPES = (torch.bfloat16, torch.float32, torch.float64)


def model_with_gradients(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Two layers; one bias is frozen and has no gradient."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2)).to(dtype)
    model[0].bias.requires_grad_(False)
    model(torch.randn(4, 3, dtype=dtype)).square().sum().backward()
    return model


def plain_norm_squared(model: torch.nn.Module) -> float:
    return sum(p.grad.double().square().sum().item() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_the_norm_is_that_of_all_existing_gradients_in_float64(dtype: torch.dtype) -> None:
    model = model_with_gradients(dtype)
    norm_squared = own_norm_squared(model)
    assert norm_squared.item() == pytest.approx(plain_norm_squared(model), rel=1e-6)
    assert (norm_squared.dtype, tuple(norm_squared.shape)) == (torch.float64, ())


def test_the_square_of_a_large_float32_norm_does_not_overflow() -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    model.weight.grad = torch.full((1, 1), 2.0**100)
    assert own_norm_squared(model).item() == 2.0**200


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
