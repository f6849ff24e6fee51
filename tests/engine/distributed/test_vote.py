"""When any rank runs out of memory at any operation, all ranks know, none hangs, and the next step is right."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.profiler import ProfilerActivity, profile

from tests.support.faults import ShardedTrainee, same_bits
from tests.support.ranks import run_on_ranks
from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.engine.distributed.snapshot import restore_on_exit
from torchtune_adaptive.engine.distributed.vote import Outcome, run_or_abort_together
from torchtune_adaptive.engine.memory.out_of_memory import free_memory
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.testing import Fault, out_of_memory

CPU = torch.device("cpu")
POINTS = 12  # how many operations of a step are made to fail, evenly spread


@dataclass(frozen=True)
class Trial:
    """A train step in which each rank of ``points`` fails at its operation."""

    points: dict[int, int]
    outcome: str
    is_right: bool  # whether it has left no trace, neither at once nor in the next step


class Scenarios:
    """Faults in train steps of a model sharded over all ranks. Every method is a collective."""

    def __init__(self, rank: int, *, warm_steps: int = 1) -> None:
        self.rank = rank
        self.world_size = dist.get_world_size()
        self.consensus = Consensus()
        self.trainee = ShardedTrainee(warm_steps=warm_steps)
        self.before = self.trainee.state()
        with restore_on_exit(self.trainee.model, [self.trainee.optimizer]):
            self.trainee.step()
            self.after_a_step = self.trainee.state()

    def places(self, kind: Any = "operation") -> int:
        """How many places for a fault a step has."""
        counting = Fault(None, kind=kind)
        with restore_on_exit(self.trainee.model, [self.trainee.optimizer]), counting:
            self.trainee.step()
        return counting.count

    def trial(self, points: dict[int, int], **fault: Any) -> Trial:
        """A step with faults, then one without, which must be as if nothing had happened."""
        model, optimizer = self.trainee.model, self.trainee.optimizer

        def work() -> None:
            with Fault(points.get(self.rank), **fault):
                self.trainee.step()

        with restore_on_exit(model, [optimizer]):
            try:
                outcome = run_or_abort_together(work, self.consensus).name
            except Exception as failure:
                outcome = f"{type(failure).__name__}: {failure}"
        free_memory(CPU)
        graded = [parameter for parameter in model.parameters() if parameter.grad is not None]
        as_before = same_bits(self.trainee.state(), self.before) and not graded
        with restore_on_exit(model, [optimizer]):
            self.trainee.step()
            next_step_right = same_bits(self.trainee.state(), self.after_a_step)
        return Trial(points, outcome, as_before and next_step_right)

    def one_rank_fails(self, *, points: int = POINTS, kind: Any = "operation") -> list[Trial]:
        places = self.places(kind)
        spread = range(0, places, max(places // points, 1))
        return [self.trial({index % self.world_size: point}, kind=kind) for index, point in enumerate(spread)]

    def two_ranks_fail(self) -> list[Trial]:
        places = self.places()
        spread = [places * index // 4 for index in range(1, 4)]
        return [self.trial({0: one, self.world_size - 1: other}) for one in spread for other in spread]

    def other_errors(self) -> list[Trial]:
        def fail() -> None:
            raise ValueError("not of memory")

        places, failing = self.places(), self.world_size - 1
        return [self.trial({failing: point}, strike=fail) for point in range(0, places, places // 5)]

    def votes_and_collectives(self) -> tuple[int, int]:
        """How often the ranks voted during a step, and how many collectives such a step issues."""
        votes: list[int] = []

        class Counting(Consensus):
            def max_of_each(self, *numbers: int) -> list[int]:
                votes.append(numbers[0])
                return super().max_of_each(*numbers)

        consensus = Counting()
        with restore_on_exit(self.trainee.model, [self.trainee.optimizer]):
            run_or_abort_together(self.trainee.step, consensus)
            # The profiler sees collectives inside operations, unlike any torch mode.
            with profile(activities=[ProfilerActivity.CPU]) as recorded:
                self.trainee.step()
        issued = [event.name for event in recorded.events() or [] if event.name.startswith("c10d::")]
        return len(votes) - 1, len(issued)  # without the vote at the end

    def a_failure_before_clipping(self) -> str:
        """Rank 1 fails after backward; the others' next collective is inside an operation on DTensors."""
        trainee = ShardedTrainee()

        def work() -> None:
            trainee.model(torch.ones(2, 8)).sum().backward()
            if self.rank == 1:
                raise torch.OutOfMemoryError("before clipping")
            torch.nn.utils.clip_grad_norm_(trainee.model.parameters(), 1.0)

        return run_or_abort_together(work, self.consensus).name

    def different_collectives(self) -> list[str]:
        """Rank 0 sums another number of elements, another tensor than the others, or nothing."""

        def sizes() -> None:
            dist.all_reduce(torch.ones(2 if self.rank else 3))

        def kinds() -> None:
            dist.all_reduce(torch.ones(2)) if self.rank else dist.broadcast(torch.ones(2), src=0)

        def none() -> None:
            if self.rank:
                dist.all_reduce(torch.ones(2))

        sentences = []
        for work in (sizes, kinds, none):
            with pytest.raises(InputError) as refused:
                run_or_abort_together(work, self.consensus)
            sentences.append(str(refused.value))
        return sentences


def play(rank: int) -> dict[str, Any]:
    """All scenarios on this rank."""
    scenarios = Scenarios(rank)
    played: dict[str, Any] = {
        "one rank fails": scenarios.one_rank_fails(),
        "one rank fails instead of a collective": scenarios.one_rank_fails(kind="collective"),
        "one rank fails at its first step": Scenarios(rank, warm_steps=0).one_rank_fails(points=POINTS // 2),
        "two ranks fail": scenarios.two_ranks_fail(),
        "other errors": scenarios.other_errors(),
        "votes and collectives": scenarios.votes_and_collectives(),
    }
    played["before clipping"] = scenarios.a_failure_before_clipping()
    played["different collectives"] = scenarios.different_collectives()
    if hasattr(FSDPModule, "reset_iter_state"):  # FSDP as in torch before 2.13
        del FSDPModule.reset_iter_state
    played["without reset_iter_state"] = scenarios.one_rank_fails(points=POINTS // 2)
    return played


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.exhaustive)], ids="{} ranks".format)
def played(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_on_ranks(play, request.param)


@pytest.mark.parametrize(
    "scenario",
    [
        "one rank fails",
        "one rank fails instead of a collective",
        "one rank fails at its first step",
        "two ranks fail",
        "without reset_iter_state",
    ],
)
def test_all_ranks_learn_of_out_of_memory_anywhere_and_the_next_step_is_right(
    played: list[dict[str, Any]], scenario: str
) -> None:
    for ranks in played:
        assert len(ranks["one rank fails"]) >= POINTS
        assert len(ranks[scenario]) >= POINTS // 2
        assert {trial.outcome for trial in ranks[scenario]} == {"OUT_OF_MEMORY"}
        assert [trial for trial in ranks[scenario] if not trial.is_right] == []


def test_another_error_is_raised_unchanged_and_stops_the_peers(played: list[dict[str, Any]]) -> None:
    stopped = "PeerFailedError: another rank failed during a probe; see its own error message"
    for ranks, outcome in zip(played, [stopped] * (len(played) - 1) + ["ValueError: not of memory"], strict=True):
        assert {trial.outcome for trial in ranks["other errors"]} == {outcome}
        assert [trial for trial in ranks["other errors"] if not trial.is_right] == []


def test_there_is_a_vote_before_every_collective(played: list[dict[str, Any]]) -> None:
    for ranks in played:
        votes, collectives = ranks["votes and collectives"]
        assert collectives > 6
        assert votes >= collectives


def test_no_rank_waits_in_a_collective_inside_an_operation_on_dtensors(played: list[dict[str, Any]]) -> None:
    assert [ranks["before clipping"] for ranks in played] == ["OUT_OF_MEMORY"] * len(played)


def test_ranks_before_different_collectives_are_refused_on_each(played: list[dict[str, Any]]) -> None:
    for ranks in played:
        assert all(one.startswith("Ranks issue different collectives") for one in ranks["different collectives"])
        assert len(ranks["different collectives"]) == 3


def play_everywhere(rank: int) -> list[Trial]:
    scenarios = Scenarios(rank)
    return [trial for kind in ("operation", "collective") for trial in scenarios.one_rank_fails(points=1000, kind=kind)]


@pytest.mark.exhaustive
def test_whichever_operation_fails_all_ranks_learn_of_it_and_continue() -> None:
    for trials in run_on_ranks(play_everywhere, 2):
        assert len(trials) > 300
        assert {(trial.outcome, trial.is_right) for trial in trials} == {("OUT_OF_MEMORY", True)}


# ---- one process


def behind_another_error() -> None:
    """As torchtune's activation offloading, which raises its own error when an exception leaves it."""
    try:
        out_of_memory()
    finally:
        raise RuntimeError("INTERNAL ASSERT FAILED")


@pytest.mark.parametrize(
    ("work", "outcome"),
    [
        (lambda: None, Outcome.DONE),
        (out_of_memory, Outcome.OUT_OF_MEMORY),
        (behind_another_error, Outcome.OUT_OF_MEMORY),
    ],
)
def test_without_peers_the_outcome_is_that_of_this_process(work: Callable[[], None], outcome: Outcome) -> None:
    assert run_or_abort_together(work, Consensus()) is outcome


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_without_peers_another_error_is_raised(error: type[BaseException]) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(error):
        run_or_abort_together(fail, Consensus())


def test_an_error_that_the_caller_is_handling_is_no_reason() -> None:
    """A search may be called in ``except torch.OutOfMemoryError:``."""

    def fail() -> None:
        raise ValueError("a bug")

    try:
        out_of_memory()
    except torch.OutOfMemoryError:
        with pytest.raises(ValueError, match="a bug"):
            run_or_abort_together(fail, Consensus())
        assert run_or_abort_together(out_of_memory, Consensus()) is Outcome.OUT_OF_MEMORY
