"""All ranks get the same answer; a process without peers gets its own."""

import time
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tests.support.ranks import run_on_ranks
from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.errors import InputError, RunEnded

HUGE = 2**62 + 1  # a float would lose the last bit
NUMBERS = (7, -3, HUGE)  # of the ranks
RANKS = len(NUMBERS)


def all_ranks_get_the_right_answers(rank: int) -> None:
    consensus, ranks = Consensus(), range(RANKS)
    assert (consensus.rank, consensus.world_size) == (rank, RANKS)
    assert not consensus.any_rank(False)
    assert consensus.any_rank(True)
    assert all(consensus.any_rank(rank == lonely) for lonely in ranks)
    assert consensus.max_over_ranks(NUMBERS[rank]) == max(NUMBERS)
    assert consensus.min_over_ranks(NUMBERS[rank]) == min(NUMBERS)
    assert consensus.min_and_max(NUMBERS[rank]) == (min(NUMBERS), max(NUMBERS))
    assert consensus.max_over_ranks(HUGE - rank) == HUGE
    assert consensus.min_over_ranks(-HUGE + rank) == -HUGE
    assert consensus.from_rank_zero({"rank": rank, "nest": [1, None]}) == {"rank": 0, "nest": [1, None]}
    assert consensus.from_rank_zero(None if rank == 0 else "ignored") is None
    numbers = consensus.from_all_ranks({"rank": rank, "number": NUMBERS[rank]})
    assert numbers == [{"rank": one, "number": NUMBERS[one]} for one in ranks]
    assert consensus.from_all_ranks("x" * 1000 * rank) == ["x" * 1000 * one for one in ranks]  # of different sizes
    assert consensus.first_reason(f"reason of rank {rank}") == "reason of rank 0"
    assert consensus.first_reason("only the last" if rank == RANKS - 1 else "") == "only the last"
    assert consensus.first_reason("") == ""


def rank_zero_alone_is_asked_and_all_get_its_answer_or_its_error(rank: int) -> None:
    consensus, asked = Consensus(), list[int]()

    def answer() -> str:
        asked.append(rank)
        return f"answer of rank {rank}"

    def refuse() -> str:
        raise InputError(f"`x` is {rank}.")

    def end() -> str:
        raise RunEnded(f"All is done on {rank}.", status=rank + 3)

    assert consensus.ask_rank_zero(answer) == "answer of rank 0"
    assert asked == [0] * (rank == 0)
    with pytest.raises(InputError, match=r"^`x` is 0\.$"):
        consensus.ask_rank_zero(refuse)
    with pytest.raises(RunEnded, match=r"^All is done on 0\.$") as raised:
        consensus.ask_rank_zero(end)
    assert raised.value.status == 3


def a_second_consensus_is_there_when_all_ranks_have_connected_and_closes_alone(rank: int) -> None:
    consensus = Consensus()
    new_group, connected = dist.new_group, c10d.PrefixStore("connected", c10d._get_default_store())

    def connect(*args: Any, **options: Any) -> Any:
        group = new_group(*args, **options)
        time.sleep(0.2 * rank)
        connected.set(str(rank), "")
        return group

    with mock.patch.object(dist, "new_group", connect):
        second = Consensus()
    assert connected.check([str(peer) for peer in range(RANKS)])
    assert second.max_over_ranks(rank) == RANKS - 1
    second.close()
    assert consensus.any_rank(rank == 0)


WAITS = {4.0: 4.0, 0.1: 0.5}  # hours that ranks wait in the default group, and in a consensus: at least half an hour


def ranks_wait_for_each_other_as_long_as_the_default_group_does(rank: int) -> None:
    store = c10d._get_default_store()
    for hours, expected_hours in WAITS.items():
        early, own = Consensus(), c10d.PrefixStore(str(hours), store)
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=own, rank=rank, world_size=RANKS, timeout=timedelta(hours=hours))
        early.close()  # its group was destroyed with the default one
        for consensus in (Consensus(), *([Consensus([0, 1])] if rank < 2 else [])):
            group: Any = consensus._group
            waits = group._get_backend(torch.device("cpu")).options._timeout
            assert waits == timedelta(hours=expected_hours)


def on_ranks(rank: int) -> None:
    all_ranks_get_the_right_answers(rank)
    rank_zero_alone_is_asked_and_all_get_its_answer_or_its_error(rank)
    a_second_consensus_is_there_when_all_ranks_have_connected_and_closes_alone(rank)
    ranks_wait_for_each_other_as_long_as_the_default_group_does(rank)


def test_all_ranks_get_the_same_answers() -> None:
    run_on_ranks(on_ranks, RANKS)


def test_without_a_process_group_a_process_gets_its_own_answers() -> None:
    consensus = Consensus()
    assert not dist.is_initialized()
    assert (consensus.rank, consensus.world_size) == (0, 1)
    assert [consensus.any_rank(flag) for flag in (True, False)] == [True, False]
    assert consensus.max_over_ranks(HUGE) == consensus.min_over_ranks(HUGE) == HUGE
    value = object()
    assert consensus.from_rank_zero(value) is consensus.ask_rank_zero(lambda: value) is value
    (own,) = consensus.from_all_ranks(value)
    assert own is value
    consensus.close()
    assert consensus.any_rank(True)
