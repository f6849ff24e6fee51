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
NUMBERS = (7, -3, HUGE, 0)  # of the ranks
RANKS = len(NUMBERS)


def answers_of(rank: int) -> dict[str, Any]:
    """The answers of the consensus on this rank."""
    consensus = Consensus()
    world_size = dist.get_world_size()
    asked: list[int] = []

    def answer() -> str:
        asked.append(rank)
        return f"answer of rank {rank}"

    def refuse() -> str:
        raise InputError(f"`x` is {rank}.")

    def end() -> str:
        raise RunEnded(f"All is done on {rank}.", status=rank + 3)

    refusal, ended = "none", ("none", 0)
    answered = consensus.ask_rank_zero(answer)
    try:
        consensus.ask_rank_zero(refuse)
    except InputError as error:
        refusal = str(error)
    try:
        consensus.ask_rank_zero(end)
    except RunEnded as error:
        ended = str(error), error.status
    new_group, connected = dist.new_group, c10d.PrefixStore("connected", c10d._get_default_store())

    def connect(*args: Any, **options: Any) -> Any:
        group = new_group(*args, **options)
        time.sleep(0.2 * rank)
        connected.set(str(rank), "")
        return group

    with mock.patch.object(dist, "new_group", connect):
        second = Consensus()
    have_connected = connected.check([str(peer) for peer in range(world_size)])
    largest_of_the_second = second.max_over_ranks(rank)
    second.close()
    return {
        "rank": consensus.rank,
        "world_size": consensus.world_size,
        "any of none": consensus.any_rank(False),
        "any of all": consensus.any_rank(True),
        "any of one": [consensus.any_rank(rank == lonely) for lonely in range(world_size)],
        "max": consensus.max_over_ranks(NUMBERS[rank]),
        "min": consensus.min_over_ranks(NUMBERS[rank]),
        "min and max": consensus.min_and_max(NUMBERS[rank]),
        "max of huge": consensus.max_over_ranks(HUGE - rank),
        "min of huge": consensus.min_over_ranks(-HUGE + rank),
        "mapping": consensus.from_rank_zero({"rank": rank, "nest": [1, None]}),
        "nothing": consensus.from_rank_zero(None if rank == 0 else "ignored"),
        "from all": consensus.from_all_ranks({"rank": rank, "number": NUMBERS[rank]}),
        "from all of different sizes": consensus.from_all_ranks("x" * 1000 * rank),
        "reason of the first": consensus.first_reason(f"reason of rank {rank}"),
        "reason of the last": consensus.first_reason("only the last" if rank == world_size - 1 else ""),
        "reason of none": consensus.first_reason(""),
        "answered": answered,
        "asked": asked,
        "refusal": refusal,
        "ended": ended,
        "a second consensus": largest_of_the_second,
        "all ranks had connected": have_connected,
        "after the second was closed": consensus.any_rank(rank == 0),
    }


WAITS = {4.0: 4.0, 0.1: 0.5}  # hours that ranks wait in the default group, and in a consensus: at least half an hour


def waits_of(rank: int) -> list[timedelta]:
    """How long groups of all ranks and of the first two wait, for each default group of ``WAITS``."""
    found, store = [], c10d._get_default_store()
    for hours in WAITS:
        early, own = Consensus(), c10d.PrefixStore(str(hours), store)
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=own, rank=rank, world_size=RANKS, timeout=timedelta(hours=hours))
        early.close()  # its group was destroyed with the default one
        for consensus in (Consensus(), *([Consensus([0, 1])] if rank < 2 else [])):
            group: Any = consensus._group
            found.append(group._get_backend(torch.device("cpu")).options._timeout)
    return found


def found_on(rank: int) -> tuple[dict[str, Any], list[timedelta]]:
    return answers_of(rank), waits_of(rank)


@pytest.fixture(scope="module")
def found() -> list[tuple[dict[str, Any], list[timedelta]]]:
    return run_on_ranks(found_on, RANKS)


def test_all_ranks_get_the_right_answers(found: list[tuple[dict[str, Any], list[timedelta]]]) -> None:
    common = {
        "world_size": RANKS,
        "any of none": False,
        "any of all": True,
        "any of one": [True] * RANKS,
        "max": max(NUMBERS),
        "min": min(NUMBERS),
        "min and max": (min(NUMBERS), max(NUMBERS)),
        "max of huge": HUGE,
        "min of huge": -HUGE,
        "mapping": {"rank": 0, "nest": [1, None]},
        "nothing": None,
        "from all": [{"rank": rank, "number": number} for rank, number in enumerate(NUMBERS)],
        "from all of different sizes": ["x" * 1000 * rank for rank in range(RANKS)],
        "reason of the first": "reason of rank 0",
        "reason of the last": "only the last",
        "reason of none": "",
        "answered": "answer of rank 0",
        "refusal": "`x` is 0.",
        "ended": ("All is done on 0.", 3),
        "a second consensus": RANKS - 1,
        "all ranks had connected": True,
        "after the second was closed": True,
    }
    for rank, (answers, _) in enumerate(found):
        assert answers == common | {"rank": rank, "asked": [0] if rank == 0 else []}


def test_ranks_wait_for_each_other_as_long_as_the_default_group_does(
    found: list[tuple[dict[str, Any], list[timedelta]]],
) -> None:
    assert [waits for _, waits in found] == [
        [timedelta(hours=hours) for hours in WAITS.values() for _ in range(number)] for number in (2, 2, 1, 1)
    ]


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
