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


def _trials(rank: int) -> dict[str, Any]:
    group = dist.group.WORLD
    assert group is not None
    recorded: list[FunctionalCollective] = []
    with RecordFunctional(recorded.append) as recording:
        expected = _issue(group)
    noted: list[FunctionalCollective] = []
    counts = IssuedCounts([recorded[0].group])
    counts.start()
    with DryRecordFunctional(noted.append):
        results = _issue(group)
    counted_while_noting = counts.since_start()
    if rank == 0:  # the peer computes; this rank only issues what the peer waits for
        for collective in noted:
            collective.replay(torch.device("cpu"))
        reduced = torch.zeros(4)
    else:
        reduced = _issue(group)[0]
    counted = counts.since_start()[recorded[0].group]
    refused = ""
    try:
        with DryRecordFunctional(noted.append):
            dist.all_reduce(torch.ones(1))
    except CannotRecordError as error:
        refused = str(error)
    consensus = Consensus()
    outcome = run_or_abort_together(lambda: _fails_before_use(group), consensus)
    after_vote = _unwaited()
    before, unused = 0, None
    try:
        _fails_before_use(group)
    except torch.OutOfMemoryError:
        before, unused = _unwaited(), wait_for_unused_results()
    return {
        "issued": recording.issued,
        "noted": noted == recorded,
        "shapes": [one.shape for one in results] == [one.shape for one in expected],
        "zeros": not any(one.any() for one in results),
        "counts": (counted_while_noting, counted),
        "reduced": reduced.tolist(),
        "refused": refused,
        "vote": (outcome, after_vote),
        "unwaited": (before, unused, _unwaited()),
        "masks": _masks(),
    }


@pytest.fixture(scope="module")
def on_ranks() -> list[dict[str, Any]]:
    return run_on_ranks(_trials, 2)


def test_what_is_noted_is_what_would_be_issued_and_nothing_is_communicated(on_ranks: Any) -> None:
    for rank in on_ranks:
        assert rank["issued"] == 3
        assert rank["noted"]
        assert rank["shapes"]
        assert rank["zeros"]
        assert not rank["counts"][0]


def test_a_peer_gets_zeros_from_a_rank_that_replays(on_ranks: Any) -> None:
    assert on_ranks[1]["reduced"] == [1.0, 2.0, 3.0, 4.0]


def test_torch_counts_each_collective_of_a_group_also_those_replayed(on_ranks: Any) -> None:
    assert [rank["counts"][1] for rank in on_ranks] == [3, 3]


def test_a_collective_that_is_not_functional_cannot_be_noted(on_ranks: Any) -> None:
    for rank in on_ranks:
        assert rank["refused"] == "c10d.allreduce_.default is not known"


def test_a_result_that_an_error_left_unused_is_waited_for(on_ranks: Any) -> None:
    for rank in on_ranks:
        assert rank["vote"] == (Outcome.OUT_OF_MEMORY, 0)
        assert rank["unwaited"] == (1, None, 0)


def _looked_up(embedding: nn.Module, rows: list[int]) -> DTensor:
    """The rows of a sharded embedding, whose sum over ranks is not done yet."""
    weight: Any = embedding.weight
    found: Any = nn.functional.embedding(
        DTensor.from_local(torch.tensor(rows), weight.device_mesh, [Replicate()]), weight
    )
    return found


def _masks() -> tuple[str, bool]:
    mesh = init_device_mesh("cpu", (2,))
    embedding = parallelize_module(nn.Embedding(4, 1), mesh, RowwiseParallel(input_layouts=Replicate()))
    _looked_up(embedding, [0, 1])  # an error prevents the sum, so that the mask stays
    conflict = ""
    try:
        _looked_up(embedding, [3, 2])
    except RuntimeError as error:
        conflict = str(error)
    drop_unfinished_masks()
    weight: Any = embedding.weight
    found = _looked_up(embedding, [3, 2]).full_tensor()
    return conflict, torch.equal(found, weight.full_tensor()[[3, 2]])


def test_after_an_error_another_batch_can_be_looked_up(on_ranks: Any) -> None:
    for conflict, is_right in (rank["masks"] for rank in on_ranks):
        assert conflict == "MaskBuffer has been materialized with conflicting data"
        assert is_right
