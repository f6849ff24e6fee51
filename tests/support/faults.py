"""Faults at any operation of a train step, and a small FSDP2 model to test them on."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from tests.support.ranks import DEVICE
from torchtune_adaptive.engine.distributed.fsdp_state import fsdp_states, param_groups
from torchtune_adaptive.engine.memory.operations import plain_parts
from torchtune_adaptive.testing import Fault

WIDTH = 8
Result = TypeVar("Result")


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The plain tensors of this rank that the parameters and the optimizer's state consist of."""
    states = [value for values in optimizer.state.values() for value in values.values()]
    return [part for tensor in [*model.parameters(), *states] for part in plain_parts(tensor.detach())]


class ShardedTrainee:
    """A small model under FSDP2, sharded per layer and at its root, with AdamW. Always starts from the same state."""

    def __init__(self, *, warm_steps: int = 1) -> None:
        torch.manual_seed(0)
        self.rank = dist.get_rank()
        group = dist.new_group(timeout=timedelta(seconds=60))  # its own group: a hang times out sooner than by default
        assert isinstance(group, dist.ProcessGroup)
        mesh = DeviceMesh.from_group(group, DEVICE)
        layers = [nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(2)]
        self.model = nn.Sequential(*layers, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3))
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        for seed in range(warm_steps):
            self.step(seed=seed)

    def batch(self, batch_size: int, *, seed: int = 100) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, different on every rank."""
        generator = torch.Generator().manual_seed(1000 * self.rank + seed)
        inputs = torch.randn(batch_size, WIDTH, generator=generator)
        return inputs.to(DEVICE), torch.randint(0, 3, (batch_size,), generator=generator).to(DEVICE)

    def train(self, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
        """One train step on ``batch``; the loss."""
        inputs, targets = batch
        loss = F.cross_entropy(self.model(inputs), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def step(self, *, seed: int = 100) -> float:
        """One train step on four samples; the loss."""
        return self.train(self.batch(4, seed=seed))

    def state(self) -> list[torch.Tensor]:
        """Copies of this rank's parameters and optimizer state."""
        return [tensor.clone() for tensor in tensors_of(self.model, self.optimizer)]


def fsdp_settings(model: Any) -> list[tuple[bool, ...]]:
    """The settings of each FSDP2 module that ``change_fsdp_settings`` changes."""
    states = fsdp_states(model)
    return [
        (
            group.post_forward_mesh_info is not None,
            group.reshard_after_backward,
            group.reduce_grads,
            group.all_reduce_grads,
            state._state_ctx.is_last_backward,
        )
        for state in states
        for group in param_groups([state])
    ]


def change_fsdp_settings(model: Any) -> None:
    """Change what FSDP2 frees and reduces, as for micro-steps without communication."""
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(False)
    model.set_requires_gradient_sync(False)
    model.set_is_last_backward(False)


def under(faults: Mapping[int, Fault], number: int, run: Callable[[], Result]) -> Result:
    """What ``run`` returns, under the fault of that ``number``: for ``wrap_micro_steps``."""
    with faults.get(number, nullcontext()):
        return run()


Tensors: TypeAlias = list[torch.Tensor] | dict[str, torch.Tensor]


def same_bits(ones: Tensors, others: Tensors) -> bool:
    """Whether all tensors of both lists, or dictionaries, are equal, bit for bit."""
    one, other = (dict[Any, torch.Tensor](v if isinstance(v, dict) else enumerate(v)) for v in (ones, others))
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())
