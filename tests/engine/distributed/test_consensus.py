"""All ranks get the same answer, with one process, two and four."""

from typing import Any

import pytest
import torch.distributed as dist

from benchmarks.support.ranks import run_on_ranks
from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.errors import InputError, RunEnded

HUGE = 2**62 + 1  # a float would lose the last bit
WORLD_SIZES = (1, 2, 4)


def answers_of(rank: int) -> dict[str, Any]:
    """The answers of the consensus on this rank. Each rank has its own number."""
    numbers = [7, -3, HUGE, 0]
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
    second = Consensus()
    largest_of_the_second = second.max_over_ranks(rank)
    second.close()
    return {
        "rank": consensus.rank,
        "world_size": consensus.world_size,
        "any of none": consensus.any_rank(False),
        "any of all": consensus.any_rank(True),
        "any of one": [consensus.any_rank(rank == lonely) for lonely in range(world_size)],
        "max": consensus.max_over_ranks(numbers[rank]),
        "min": consensus.min_over_ranks(numbers[rank]),
        "max of huge": consensus.max_over_ranks(HUGE - rank),
        "min of huge": consensus.min_over_ranks(-HUGE + rank),
        "mapping": consensus.from_rank_zero({"rank": rank, "nest": [1, None]}),
        "nothing": consensus.from_rank_zero(None if rank == 0 else "ignored"),
        "from all": consensus.from_all_ranks({"rank": rank, "number": numbers[rank]}),
        "from all of different sizes": consensus.from_all_ranks("x" * 1000 * rank),
        "reason of the first": consensus.first_reason(f"reason of rank {rank}"),
        "reason of the last": consensus.first_reason("only the last" if rank == world_size - 1 else ""),
        "reason of none": consensus.first_reason(""),
        "answered": answered,
        "asked": asked,
        "refusal": refusal,
        "ended": ended,
        "a second consensus": largest_of_the_second,
        "after the second was closed": consensus.any_rank(rank == 0),
    }


@pytest.fixture(scope="module", params=WORLD_SIZES, ids="{} ranks".format)
def answers(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_on_ranks(answers_of, request.param)


def test_every_rank_knows_its_number_and_the_number_of_ranks(answers: list[dict[str, Any]]) -> None:
    assert [answer["rank"] for answer in answers] == list(range(len(answers)))
    assert {answer["world_size"] for answer in answers} == {len(answers)}


def test_all_ranks_have_the_same_answers(answers: list[dict[str, Any]]) -> None:
    own = ("rank", "asked")
    common = [{name: value for name, value in answer.items() if name not in own} for answer in answers]
    assert common == [common[0]] * len(answers)


def test_a_flag_counts_if_any_rank_raises_it(answers: list[dict[str, Any]]) -> None:
    assert not answers[0]["any of none"]
    assert answers[0]["any of all"]
    assert answers[0]["any of one"] == [True] * len(answers)


def test_numbers_are_reduced_over_all_ranks_in_64_bits(answers: list[dict[str, Any]]) -> None:
    numbers = [7, -3, HUGE, 0][: len(answers)]
    assert answers[0]["max"] == max(numbers)
    assert answers[0]["min"] == min(numbers)
    assert answers[0]["max of huge"] == HUGE
    assert answers[0]["min of huge"] == -HUGE
    assert answers[0]["a second consensus"] == len(answers) - 1


def test_anything_that_can_be_pickled_comes_from_rank_zero(answers: list[dict[str, Any]]) -> None:
    assert answers[0]["mapping"] == {"rank": 0, "nest": [1, None]}
    assert answers[0]["nothing"] is None


def test_anything_that_can_be_pickled_comes_from_all_ranks_in_their_order(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        assert [one["rank"] for one in answer["from all"]] == list(range(len(answers)))
        assert [one["number"] for one in answer["from all"]] == [7, -3, HUGE, 0][: len(answers)]
        assert [len(one) for one in answer["from all of different sizes"]] == [1000 * r for r in range(len(answers))]


def test_the_reason_of_the_lowest_rank_that_has_one_counts(answers: list[dict[str, Any]]) -> None:
    assert answers[0]["reason of the first"] == "reason of rank 0"
    assert answers[0]["reason of the last"] == "only the last"
    assert answers[0]["reason of none"] == ""


def test_only_rank_zero_is_asked_and_all_ranks_raise_its_error(answers: list[dict[str, Any]]) -> None:
    assert [answer["asked"] for answer in answers] == [[0]] + [[]] * (len(answers) - 1)
    assert [answer["answered"] for answer in answers] == ["answer of rank 0"] * len(answers)
    assert [answer["refusal"] for answer in answers] == ["`x` is 0."] * len(answers)
    assert [answer["ended"] for answer in answers] == [("All is done on 0.", 3)] * len(answers)


def test_closing_one_consensus_does_not_close_the_others(answers: list[dict[str, Any]]) -> None:
    assert all(answer["after the second was closed"] for answer in answers)


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
