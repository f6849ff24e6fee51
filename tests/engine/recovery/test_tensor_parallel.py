"""``RecoverableStep`` in a plain loop with tensor parallelism, alone and with FSDP2."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.support.faults import under
from tests.support.ranks import run_on_ranks
from torchtune_adaptive import CannotRecoverError, RecoverableStep
from torchtune_adaptive.testing import Fault, wrap_micro_steps

VOCABULARY = 16
PLAN = {
    "embedding": RowwiseParallel(input_layouts=Replicate()),
    "hidden.0": ColwiseParallel(),
    "hidden.2": RowwiseParallel(),
    "output": ColwiseParallel(output_layouts=Replicate()),
}


class Parts(nn.Module):
    """Its last layer runs on parts of the rows, whose number depends on their length."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)
        self.hidden = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        return [self.output(part) for part in self.hidden(self.embedding(tokens)).split(2, 1)]


def _model(ranks: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model: Any = parallelize_module(Parts(), mesh["tp"], PLAN)
    if ranks > 2:
        fully_shard(model.hidden, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return model


def _micro_step(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    total = torch.stack([part.square().sum() for part in model(tokens)]).sum()
    total.backward()
    return total.detach()


def _padded_rows(tokens: torch.Tensor) -> Any:
    return len(tokens), lambda number: tokens[:1].expand(number, -1)


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    found: list[Any] = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return [(one.to_local() if isinstance(one, DTensor) else one).clone() for one in found]


def _trials(rank: int, ranks: int, stride: int) -> dict[str, Any]:
    model = _model(ranks)
    micro_step = partial(_micro_step, model)
    refused = ""
    try:
        RecoverableStep(model, micro_step, micro_batch_size=4).dry_run(torch.zeros(4, 6, dtype=torch.long))
    except CannotRecoverError as error:
        refused = str(error)
    step = RecoverableStep(model, micro_step, micro_batch_size=4, padded_rows=_padded_rows)
    samples = torch.arange(8 * 7).reshape(8, 7) % VOCABULARY
    step.dry_run(samples[:, :4])
    counting = Fault(None)
    for _ in range(2):  # the first step also derives shardings
        counting = Fault(None)
        wrap_micro_steps(step, partial(under, {1: counting}))
        step(samples)
        _gradients(model)
    halved = RecoverableStep(model, micro_step, micro_batch_size=2)
    halved.disable()
    halved(samples)
    expected = _gradients(model)
    wrong, missed = list[int](), list[int]()
    for place in range(0, counting.count, stride):
        step._cutter.size = 4  # pyright: ignore[reportAttributeAccessIssue]
        wrap_micro_steps(step, partial(under, {1: Fault(place, ranks=[place % ranks])}))
        before = step.retries
        step(samples)
        found = _gradients(model)
        if step.retries == before:
            missed.append(place)
        elif not all(map(torch.equal, found, expected)) or step.micro_batch_size != 2:
            wrong.append(place)
    phases = [event.phase for event in step.events if event.pressure]
    return {"refused": refused, "wrong": wrong, "missed": missed, "retries": step.retries, "phases": phases}


@pytest.mark.parametrize(
    ("ranks", "stride"), [(2, 97), *(pytest.param(ranks, 5, marks=pytest.mark.exhaustive) for ranks in (2, 4))]
)
def test_an_error_at_any_operation_of_a_rank_gives_the_gradients_of_smaller_micro_batches(
    ranks: int, stride: int
) -> None:
    for found in run_on_ranks(_trials, ranks, ranks, stride):
        assert found["wrong"] == []
        assert found["missed"] == []
        assert found["retries"] > 100 // stride
        # As the places. What comes after the backward pass, as `detach` here, counts as the loss.
        assert found["phases"][0] == "forward"
        assert [one for one in found["phases"] if one != "loss"][-1] == "backward"
        assert "the others, for example of tensor or context parallelism" in found["refused"]
