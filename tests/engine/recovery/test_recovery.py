"""When any rank runs out of memory at any operation of a step, no rank hangs, and the result is still right."""

import logging
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from tests.support.ranks import DEVICE, run_on_ranks
from tests.support.recovery_trials import ROWS, Case, Tally, Trials, every
from tests.support.toys import loop_of
from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.engine.distributed.ledger import CollectiveStateUnknownError, Ledger
from torchtune_adaptive.engine.memory.phases import Phases
from torchtune_adaptive.engine.recovery.attempts import Attempt, MemoryPressure, Recovery
from torchtune_adaptive.engine.recovery.dry_run import dry_run
from torchtune_adaptive.engine.recovery.watch import PressureWatch
from torchtune_adaptive.testing import Fault

CASES = [
    Case(),
    Case(reshard_after_forward=False, lora=True),
    Case(checkpointing=True, bf16=True, lora=True, accumulation=2),
    Case(reduce="last", accumulation=2),
    Case(hsdp=True, sums=True, accumulation=2),
]
ON_EITHER_RANK = [Case(), Case(ddp=True, accumulation=2), Case(reduce="last", accumulation=2)]
ON_FOUR_RANKS = [
    *ON_EITHER_RANK,
    *(Case(hsdp=True, sums=sums, bf16=not sums, accumulation=2) for sums in (False, True)),
]
exhaustive_on_cpus: Any = pytest.mark.exhaustive if DEVICE == "cpu" else lambda test: test
RESETS_ITSELF = hasattr(FSDPModule, "reset_iter_state")
KINDS: list[dict[str, Any]] = [
    {},
    {"reshard_after_forward": False},
    {"ddp": True},
    {"reduce": "last"},
]
GRID = [
    Case(checkpointing=checkpointing, accumulation=accumulation, lora=lora, bf16=bf16, layers=1, **kind)
    for kind, checkpointing, accumulation, lora, bf16 in product(
        KINDS, (False, True), (1, 2), (False, True), (False, True)
    )
]


def _tallies(case: Case, patterns: str, stride: int, *kinds: Any) -> dict[str, Tally]:
    """A fault at every ``stride``-th place, for each of ``patterns`` and ``kinds``, in alternating micro-steps."""
    trials = Trials(case)
    tallies = {}
    for kind, micro_step, pattern in product(kinds or ["operation"], range(case.accumulation), patterns.split()):
        points = every(trials.operations(micro_step, kind=kind), pattern, stride)[micro_step :: case.accumulation]
        tallies[f"{case}, {kind}, micro-step {micro_step}, {pattern}"] = trials.tally(points, micro_step, kind=kind)
    return tallies


def _assert_clean(ranks: list[dict[str, Tally]], *, points: int) -> None:
    print("\n".join(f"{name}: {tally.points} points, {tally.struck} struck" for name, tally in ranks[0].items()))
    for tallies in ranks:
        assert {name: tally for name, tally in tallies.items() if not tally.is_clean} == {}
        assert all(tally.struck == tally.points for tally in tallies.values())
    assert sum(tally.points for tally in ranks[0].values()) >= points


# ---- two ranks


def _a_few_faults(rank: int) -> dict[str, Tally]:
    of_allocations = _tallies(CASES[0], "turns", 26, "storage growth") | _tallies(
        CASES[0], "turns", 2, "all-gather allocation"
    )
    return _everywhere(rank, CASES, "turns", 409) | of_allocations


def _without_parts(rank: int) -> dict[str, Any]:
    """The same faults with a part of recovery disabled. The faults that break the process group come last."""
    trials = Trials(Case())
    points = every(trials.operations(0), "0", 29)

    def as_documented(model: Any) -> None:
        model.reset_iter_state()
        trials.optimizer.zero_grad(set_to_none=True)

    tally = Tally()
    if RESETS_ITSELF:
        with mock.patch("torchtune_adaptive.engine.recovery.attempts.reset_after_failure", as_documented):
            tally = trials.tally(points)
    hung = [_hangs(place) for place in (5, 400, 700)]  # in forward, in the loss, in backward
    return {"hung": hung, "by reset_iter_state alone": tally}


def _hangs(place: int) -> bool:
    """Whether this rank hangs waiting for rank 0, which has failed and issues no more collectives."""
    trials = Trials(Case(timeout_s=2.0))
    assert trials.recovery  # after the dry run, so that only the step below may time out
    with mock.patch.object(Ledger, "replay_rest"):
        try:
            trials.attempt(trials.windows[0], ROWS, {0: Fault(place, ranks=[0])})
        except RuntimeError as error:
            trials.consensus.begin_max(0, 0, 0)()  # the failed rank waits for this
            return "imed out" in str(error)
    return False


def _drifted(rank: int) -> list[str]:
    """A model whose collectives change after the dry run, and then an error at the same place on both ranks."""
    trials = Trials(Case())
    assert trials.recovery
    trials.model.set_reshard_after_forward(False)
    logged = []
    with mock.patch.object(logging.Logger, "warning", lambda logger, text: logged.append(text)):
        for _ in range(2):
            trials.attempt(trials.windows[0], ROWS, {})
        try:
            trials.attempt(trials.windows[0], ROWS, {0: Fault(5)})
        except CollectiveStateUnknownError as error:
            logged.append(str(error))
    return logged


@pytest.fixture(scope="module")
def without_parts() -> list[dict[str, Any]]:
    return run_on_ranks(_without_parts, 2)


@pytest.mark.exhaustive
def test_without_the_replay_the_peers_hang(without_parts: list[dict[str, Any]]) -> None:
    assert without_parts[1]["hung"] == [True, True, True]


@pytest.mark.exhaustive
@pytest.mark.skipif(not RESETS_ITSELF, reason="FSDP2 has no `reset_iter_state` before torch 2.13")
def test_reset_iter_state_alone_is_not_enough(
    without_parts: list[dict[str, Any]],
) -> None:
    tallies = [parts["by reset_iter_state alone"] for parts in without_parts]
    for tally in tallies:
        print(f"{tally.struck} faults, {len(tally.wrong)} results wrong, {len(tally.left_behind)} states left behind")
    assert all(tally.struck > 20 for tally in tallies)
    if torch.__version__.startswith("2.13."):  # later ones reset parameters and gradients
        assert all(len(tally.wrong) >= 5 for tally in tallies)
    assert any(tally.left_behind for tally in tallies)


# ---- four ranks


def _on_four_ranks(rank: int) -> tuple[dict[str, Tally], str]:
    tallies = (
        _tallies(Case(), "all", 199)
        | _tallies(Case(hsdp=True, bf16=True), "turns", 199)
        | _tallies(Case(hsdp=True, sums=True), "all", 399)
        | _tallies(Case(reshard_after_forward=2, checkpointing=True), "turns", 399)
    )
    return tallies, _fails_after_an_all_reduce(Trials(Case(hsdp=True, layers=1)))


def _fails_after_an_all_reduce(trials: Trials) -> str:
    """The error on this rank when all ranks run out of memory in HSDP's all-reduce, after it was issued."""
    all_reduce = dist.all_reduce

    def failing(*args: Any, **kwargs: Any) -> Any:
        all_reduce(*args, **kwargs)
        raise torch.OutOfMemoryError("within the all-reduce")

    micro_steps, recovery = [partial(trials.micro_step, trials.windows[0][0])], trials.recovery
    with mock.patch.object(dist, "all_reduce", failing), pytest.raises(CollectiveStateUnknownError) as raised:
        recovery.attempt(micro_steps)
    return str(raised.value)


@pytest.fixture(scope="module")
def four_ranks() -> list[tuple[dict[str, Tally], str]]:
    return run_on_ranks(_on_four_ranks, 4)


@exhaustive_on_cpus
def test_four_ranks_and_hsdp_recover_too(four_ranks: list[tuple[dict[str, Tally], str]]) -> None:
    _assert_clean([tallies for tallies, _ in four_ranks], points=16 if DEVICE == "cpu" else 14)


@exhaustive_on_cpus
def test_an_error_within_an_all_reduce_of_hsdp_is_in_doubt(four_ranks: list[tuple[dict[str, Tally], str]]) -> None:
    for _, sentence in four_ranks:
        assert "it is unknown whether it was issued" in sentence
        assert "within the all-reduce" in sentence


# ---- memory pressure


def _pressures(rank: int) -> list[Attempt[int]]:
    """Two attempts with a number each; in the second one, rank 0 runs out of memory."""
    recovery = _alone(nn.Linear(4, 4))
    micro_step = _fail(torch.OutOfMemoryError("too much")) if rank == 0 else lambda: 1
    return [
        recovery.attempt([lambda: 1], numbers=(rank, 7 - rank)),
        recovery.attempt([micro_step], numbers=(rank, 7 - rank)),
    ]


def _on_two(rank: int) -> tuple[dict[str, Tally], list[str], list[Attempt[int]]]:
    return _a_few_faults(rank), _drifted(rank), _pressures(rank)


@pytest.fixture(scope="module")
def on_two() -> list[tuple[dict[str, Tally], list[str], list[Attempt[int]]]]:
    return run_on_ranks(_on_two, 2)


def test_whichever_operation_fails_the_result_is_that_of_a_run_with_the_smaller_micro_batches(on_two: Any) -> None:
    _assert_clean([tallies for tallies, _, _ in on_two], points=18)


def test_a_change_of_collectives_is_logged_once_and_an_error_then_ends_the_run(on_two: Any) -> None:
    for _, (warning, error), _ in on_two:
        assert warning == (
            "Micro-steps no longer issue the collectives of the dry run: an out-of-memory error will now end"
            ' the run. Pass `reduce="last"` instead of calling `set_requires_gradient_sync(False)`.'
        )
        assert "micro-steps no longer issue the collectives of the dry run" in error
        assert "a fault on purpose" in error


def test_all_ranks_know_if_one_ran_out_of_memory_and_the_largest_numbers(on_two: Any) -> None:
    none, _, out_of_memory = MemoryPressure
    fitted = Attempt(1, none, None, has_fitted=True, largest=[1, 7])
    assert [attempts for _, _, attempts in on_two] == [
        [fitted, Attempt(None, out_of_memory, "OutOfMemoryError: too much", has_fitted=True, largest=[1, 7])],
        [fitted, Attempt(None, out_of_memory, None, has_fitted=True, largest=[1, 7])],
    ]


# ---- every operation


def _everywhere(rank: int, cases: list[Case], patterns: str, stride: int) -> dict[str, Tally]:
    tallies = {}
    for case in cases:
        tallies |= _tallies(case, patterns, stride)
    return tallies


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", GRID, ids=str)
def test_every_operation_of_every_configuration_may_fail(case: Case) -> None:
    _assert_clean(run_on_ranks(_everywhere, 2, [case], "turns", 1, timeout_s=1200), points=200 if case.ddp else 400)


@pytest.mark.exhaustive
@pytest.mark.parametrize("pattern", ["0", "1", "both"])
@pytest.mark.parametrize("case", ON_EITHER_RANK, ids=str)
def test_every_operation_may_fail_on_either_rank_and_on_both(case: Case, pattern: str) -> None:
    _assert_clean(run_on_ranks(_everywhere, 2, [case], pattern, 1, timeout_s=1200), points=400)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ON_FOUR_RANKS, ids=str)
def test_four_ranks_recover_at_many_operations(case: Case) -> None:
    _assert_clean(run_on_ranks(_everywhere, 4, [case], "0 all", 13, timeout_s=1200), points=100)


# ---- one process


def _alone(model: nn.Module, consensus: Consensus | None = None) -> Recovery:
    micro_steps = [lambda rows=rows: model(torch.ones(rows, 4)).sum().backward() for rows in (1, 2)]
    watch = PressureWatch(consensus or Consensus(), None, Phases([], None))
    return dry_run(loop_of(model, watch.consensus), [micro_steps], watch=watch).recovery


def _fail(error: Exception) -> Any:
    def micro_step() -> Any:
        raise error

    return micro_step


@pytest.mark.parametrize(("is_even", "exchanges"), [(True, 1), (False, 2)])
@pytest.mark.parametrize("micro_steps", [1, 3])
def test_ranks_exchange_once_in_a_step_and_twice_if_their_numbers_may_differ(
    is_even: bool, exchanges: int, micro_steps: int
) -> None:
    with mock.patch.object(consensus := Consensus(), "begin_max", wraps=consensus.begin_max) as begin_max:
        recovery = _alone(nn.Linear(4, 4), consensus)
        begin_max.reset_mock()
        attempt = recovery.attempt([lambda: 1] * micro_steps, numbers=(3,), is_even=is_even)
    assert attempt == Attempt(micro_steps, has_fitted=True, largest=[3])
    assert begin_max.call_count == exchanges


def test_out_of_memory_in_the_collective_library_is_named_and_ends_the_run() -> None:
    error = RuntimeError("NCCL error in: ProcessGroupNCCL.cpp, Cuda failure 2 'out of memory'")
    with pytest.raises(CollectiveStateUnknownError, match="out of memory inside a collective") as raised:
        _alone(nn.Linear(4, 4)).attempt([_fail(error)])
    assert "Cuda failure 2" in str(raised.value)
