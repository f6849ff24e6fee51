"""Code that torch compiles for each size of a batch is compiled for all of them, not only for eight."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn

from torchtune_adaptive import RecoverableStep

SIZES = range(1, 13)


class Compiler:
    """Notes the sizes for which it compiles."""

    def __init__(self) -> None:
        self.sizes: set[int] = set()

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.sizes.add(len(inputs[0]))
        return graph.forward


class PartlyCompiled(nn.Module):
    """A model with a function that is compiled for each size, as flex attention is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.compiler = Compiler()
        self._doubled = torch.compile(lambda values: 2 * values, dynamic=False, backend=self.compiler)

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        return self.layer(self._doubled(samples))


@pytest.fixture
def model() -> Iterator[PartlyCompiled]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=8):
        yield PartlyCompiled()


def test_a_step_may_have_micro_batches_of_more_than_eight_sizes(model: PartlyCompiled) -> None:
    def micro_step(samples: torch.Tensor) -> torch.Tensor:
        loss_sum = model(samples).square().sum()
        loss_sum.backward()
        return loss_sum.detach()

    step = RecoverableStep(model, micro_step, micro_batch_size=max(SIZES))
    for size in SIZES:
        step(torch.ones(size, 4))
        model.zero_grad()
    assert model.compiler.sizes == set(SIZES)


def test_a_larger_limit_of_the_user_is_kept(model: PartlyCompiled) -> None:
    with torch._dynamo.config.patch(recompile_limit=1000):
        RecoverableStep(model, lambda samples: None, micro_batch_size=1)
        assert torch._dynamo.config.recompile_limit == 1000
