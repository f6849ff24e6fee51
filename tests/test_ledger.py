"""A micro-step's collectives are known one by one, and a rank that failed alone can issue those that it left out."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from faults import WIDTH, ShardedTrainee, same_bits
from ranks import run_on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, _fully_shard, fully_shard
from torch.distributed.tensor import Shard
from torch.profiler import ProfilerActivity, profile

from torchtune_adaptive.consensus import Consensus
from torchtune_adaptive.fsdp_state import reset_after_failure
from torchtune_adaptive.ledger import CollectiveInDoubtError, Ledger
from torchtune_adaptive.oom import free_memory
from torchtune_adaptive.recovery import Recovery
from torchtune_adaptive.rehearsal import rehearse
from torchtune_adaptive.testing import Fault
from torchtune_adaptive.vote import Outcome

CPU = torch.device("cpu")
POINTS = 12  # how many operations of a micro-step are made to fail, evenly spread
KINDS = {
    "c10d::_allgather_base_": "all-gather",
    "c10d::_reduce_scatter_base_": "reduce-scatter",
    "c10d::allreduce_": "all-reduce",
}
_common = _fully_shard._fsdp_common


def micro_step(model: nn.Module, rows: int = 4) -> float:
    """Forward and backward on this rank's own samples; the loss."""
    inputs = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    loss = model(inputs).square().mean()
    loss.backward()
    return loss.item()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """Copies of this rank's gradients, which are then None."""
    found: list[Any] = [parameter.grad for parameter in model.parameters()]
    copies = [gradient.to_local().clone() for gradient in found]
    model.zero_grad(set_to_none=True)
    return copies


def prepared(model: nn.Module) -> Ledger:
    """A ledger that knows the micro-steps of ``model``."""
    ledger = Ledger(model, CPU)
    micro_step(model)  # a first one sets up
    ledger.begin()
    micro_step(model)
    ledger.template = ledger.issued
    model.zero_grad(set_to_none=True)
    return ledger


def fails(model: nn.Module, fault: Fault) -> float | None:
    """The loss of a micro-step with ``fault``; None if it failed, the model then stands between steps."""
    loss: float | None = None
    try:
        with fault:
            loss = micro_step(model)
    except torch.OutOfMemoryError:
        pass
    if loss is None:
        reset_after_failure(model)
        free_memory(CPU)
    return loss


def refusal(ledger: Ledger) -> str:
    """Why the rest is not made up for."""
    try:
        ledger.replay_rest()
    except CollectiveInDoubtError as error:
        return str(error)
    return "none"


# ---- what a ledger does, for models sharded in several ways; every function is a collective


def recorded_and_issued(model: nn.Module) -> list[list[tuple[str, int | None]]]:
    """A micro-step's collectives by the ledger, and by the profiler, which sees into operations, as no mode does.

    Each with this rank's elements, but that the profiler does not tell those of an all-reduce.
    """
    ledger = prepared(model)
    ledger.begin()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        micro_step(model)
    model.zero_grad(set_to_none=True)
    events = [event for event in profiler.events() or [] if event.name.startswith("c10d::")]
    events.sort(key=lambda event: event.time_range.start)
    issued = [
        (KINDS[event.name], min((size for (size,) in event.input_shapes[:2] if size), default=None))
        if event.input_shapes[0]
        else (KINDS[event.name], None)
        for event in events
    ]
    recorded = [(one.kind, None if one.kind == "all-reduce" else one.numel) for one in ledger.issued]
    return [recorded, issued]


@dataclass(frozen=True)
class Trial:
    """A micro-step in which one rank failed at an operation and made up for the rest."""

    place: int
    agrees: bool
    loss_right: bool
    next_right: bool


def one_rank_fails(model: nn.Module) -> list[Trial]:
    ledger = prepared(model)
    loss = micro_step(model)
    expected = gradients(model)
    with Fault(None) as operations:
        micro_step(model)
    model.zero_grad(set_to_none=True)
    trials = []
    for index, place in enumerate(range(0, operations.count, operations.count // POINTS)):
        failing = index % dist.get_world_size()
        ledger.begin()
        loss_here = fails(model, Fault(place, ranks=[failing]))
        if loss_here is None:
            ledger.replay_rest()
        agrees, loss_right = ledger.agrees, loss_here == (None if dist.get_rank() == failing else loss)
        model.zero_grad(set_to_none=True)
        micro_step(model)
        trials.append(Trial(place, agrees, loss_right, same_bits(gradients(model), expected)))
    return trials


def sharded(mesh: DeviceMesh, *, reshard_after_forward: bool | int = True) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, 4))
    for layer in model[:2]:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh)
    return model


def hsdp(mesh_shape: tuple[int, int]) -> nn.Module:
    return sharded(init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard")))


def partly_freed_after_forward() -> nn.Module:
    return sharded(init_device_mesh("cpu", (4,)), reshard_after_forward=2)


def play_on_four(rank: int) -> dict[str, Any]:
    models = {"HSDP": lambda: hsdp((2, 2)), "partly freed after forward": partly_freed_after_forward}
    return {
        name: {"recorded and issued": recorded_and_issued(make()), "one rank fails": one_rank_fails(make())}
        for name, make in models.items()
    }
