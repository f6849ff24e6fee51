"""Collectives that a model issues itself: counted, noted without communication, waited for after an error, replayed."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from tests.support.ranks import run_on_ranks
from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.engine.distributed.functional_collectives import (
    CannotRecordError,
    DryRecordFunctional,
    FunctionalCollective,
    IssuedCounts,
    RecordFunctional,
    drop_unfinished_masks,
    wait_for_unused_results,
)
from torchtune_adaptive.engine.distributed.vote import Outcome, run_or_abort_together


def _issue(group: dist.ProcessGroup) -> list[torch.Tensor]:
    """One collective of each kind that tensor parallelism has, with other values on each rank."""
    tensor = torch.arange(4.0) + dist.get_rank()
    results: Any = (
        functional.all_reduce(tensor, "sum", group),
        functional.all_gather_tensor(tensor, 0, group),
        functional.reduce_scatter_tensor(tensor, "sum", 0, group),
    )
    return [result + 0 for result in results]


def _unwaited() -> int:
    return torch._C._distributed_c10d._get_work_registry_size()  # pyright: ignore[reportAttributeAccessIssue]


def _fails_before_use(group: dist.ProcessGroup) -> None:
    result = functional.all_reduce(torch.ones(4), "sum", group)
    raise torch.OutOfMemoryError(f"before {type(result)} is used")


def _recorded_and_noted(group: dist.ProcessGroup) -> None:
    """What is noted is what would be issued, without communication. A peer gets zeros from a rank that replays."""
    recorded, noted = list[FunctionalCollective](), list[FunctionalCollective]()
    with RecordFunctional(recorded.append) as recording:
        expected = _issue(group)
    assert recording.issued == 3
    counts = IssuedCounts([recorded[0].group])
    counts.start()
    with DryRecordFunctional(noted.append):
        results = _issue(group)
    assert not counts.since_start()
    assert noted == recorded
    assert [one.shape for one in results] == [one.shape for one in expected]
    assert not any(one.any() for one in results)
    if dist.get_rank() == 0:  # the peer computes; this rank only issues what the peer waits for
        for collective in noted:
            collective.replay(torch.device("cpu"))
    else:
        assert _issue(group)[0].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert counts.since_start()[recorded[0].group] == 3  # by torch, also those replayed


def _refused(group: dist.ProcessGroup) -> None:
    """A collective that is not functional cannot be noted."""
    with pytest.raises(CannotRecordError, match=r"^c10d.allreduce_.default is not known$"), DryRecordFunctional(print):
        dist.all_reduce(torch.ones(1))


def _left_unused(group: dist.ProcessGroup) -> None:
    """A result that an error left unused is waited for."""
    outcome = run_or_abort_together(lambda: _fails_before_use(group), Consensus())
    assert (outcome, _unwaited()) == (Outcome.OUT_OF_MEMORY, 0)
    with pytest.raises(torch.OutOfMemoryError):
        _fails_before_use(group)
    assert _unwaited() == 1
    wait_for_unused_results()
    assert _unwaited() == 0


def _looked_up(embedding: nn.Module, rows: list[int]) -> DTensor:
    """The rows of a sharded embedding, whose sum over ranks is not done yet."""
    weight: Any = embedding.weight
    found: Any = nn.functional.embedding(
        DTensor.from_local(torch.tensor(rows), weight.device_mesh, [Replicate()]), weight
    )
    return found


def _masks(group: dist.ProcessGroup) -> None:
    """After an error another batch can be looked up in a sharded embedding."""
    mesh = init_device_mesh("cpu", (2,))
    embedding = parallelize_module(nn.Embedding(4, 1), mesh, RowwiseParallel(input_layouts=Replicate()))
    _looked_up(embedding, [0, 1])  # an error prevents the sum, so that the mask stays
    with pytest.raises(RuntimeError, match=r"^MaskBuffer has been materialized with conflicting data$"):
        _looked_up(embedding, [3, 2])
    drop_unfinished_masks()
    weight: Any = embedding.weight
    found = _looked_up(embedding, [3, 2]).full_tensor()
    assert torch.equal(found, weight.full_tensor()[[3, 2]])


def _on_two(rank: int) -> None:
    assert dist.group.WORLD is not None
    for scenario in (_recorded_and_noted, _refused, _left_unused, _masks):
        scenario(dist.group.WORLD)


def test_collectives_of_a_model_are_recorded_replayed_waited_for_and_forgotten() -> None:
    run_on_ranks(_on_two, 2)
