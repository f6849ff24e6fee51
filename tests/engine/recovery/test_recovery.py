"""When any rank runs out of memory at any operation of a step, no rank hangs, and the result is still right."""

import logging
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.support.ranks import DEVICE, run_on_ranks
from tests.support.recovery_trials import ROWS, Case, Tally, Trials, every
from tests.support.toys import loop_of
from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.engine.distributed.ledger import CollectiveStateUnknownError
from torchtune_adaptive.engine.recovery.attempts import Attempt, Recovery
from torchtune_adaptive.engine.recovery.dry_run import dry_run
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
    Case(reshard_after_forward=2, checkpointing=True),
]
exhaustive_on_cpus: Any = pytest.mark.exhaustive if DEVICE == "cpu" else lambda test: test
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


def _tallies(case: Case, patterns: str, strides: dict[Any, int]) -> dict[str, Tally]:
    """Faults of each kind at every so many places, for each of ``patterns``, in alternating micro-steps."""
    trials = Trials(case)
    tallies = {}
    for (kind, stride), micro_step, pattern in product(strides.items(), range(case.accumulation), patterns.split()):
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
    first, *others = CASES
    tallies = _tallies(first, "turns", {"operation": 409, "storage growth": 26, "all-gather allocation": 2})
    return tallies | _everywhere(rank, others, "turns", 409)


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


# ---- memory pressure


def _pressures(rank: int) -> list[Attempt]:
    """Two attempts with a number each; in the second one, rank 0 runs out of memory."""
    recovery = _alone(nn.Linear(4, 4))
    micro_step = _fail(torch.OutOfMemoryError("too much")) if rank == 0 else lambda: 1
    return [
        recovery.attempt([lambda: 1], numbers=(rank, 7 - rank)),
        recovery.attempt([micro_step], numbers=(rank, 7 - rank)),
    ]


def _on_two(rank: int) -> tuple[dict[str, Tally], list[str], list[Attempt]]:
    return _a_few_faults(rank), _drifted(rank), _pressures(rank)


@pytest.fixture(scope="module")
def on_two() -> list[tuple[dict[str, Tally], list[str], list[Attempt]]]:
    return run_on_ranks(_on_two, 2)


def test_whichever_operation_fails_the_result_is_that_of_a_run_with_the_smaller_micro_batches(on_two: Any) -> None:
    _assert_clean([tallies for tallies, _, _ in on_two], points=18)


def test_a_change_of_collectives_is_logged_once_and_an_error_then_ends_the_run(on_two: Any) -> None:
    for _, (warning, error), _ in on_two:
        assert warning == (
            "Micro-steps no longer issue the collectives of the dry run: an out-of-memory error will now end"
            ' the run. Pass `reduce="last"` instead of calling `set_requires_gradient_sync(False)`, and issue'
            " your own collectives between the steps."
        )
        assert "micro-steps no longer issue the collectives of the dry run" in error
        assert "a fault on purpose" in error


def test_all_ranks_know_if_one_ran_out_of_memory_and_the_largest_numbers(on_two: Any) -> None:
    fitted = Attempt(1, has_fitted=True, largest=[1, 7])
    assert [attempts for _, _, attempts in on_two] == [
        [fitted, Attempt(None, ran_out=True, error="OutOfMemoryError: too much", has_fitted=True, largest=[1, 7])],
        [fitted, Attempt(None, ran_out=True, has_fitted=True, largest=[1, 7])],
    ]


# ---- every operation


def _everywhere(rank: int, cases: list[Case], patterns: str, stride: int) -> dict[str, Tally]:
    tallies = {}
    for case in cases:
        tallies |= _tallies(case, patterns, {"operation": stride})
    return tallies


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("case", "pattern"),
    [
        *((case, "turns") for case in GRID),
        *((case, pattern) for case in ON_EITHER_RANK for pattern in ("0", "1", "both")),
    ],
    ids=str,
)
def test_every_operation_of_every_configuration_may_fail_on_either_rank_and_on_both(case: Case, pattern: str) -> None:
    _assert_clean(run_on_ranks(_everywhere, 2, [case], pattern, 1, timeout_s=1200), points=200 if case.ddp else 400)


@exhaustive_on_cpus
@pytest.mark.parametrize("case", ON_FOUR_RANKS, ids=str)
def test_four_ranks_recover_at_many_operations(case: Case) -> None:
    stride, points = (13, 100) if DEVICE == "cpu" else (199, 6)
    _assert_clean(run_on_ranks(_everywhere, 4, [case], "0 all", stride, timeout_s=1200), points=points)


# ---- one process


def _alone(model: nn.Module, consensus: Consensus | None = None) -> Recovery:
    micro_steps = [lambda rows=rows: model(torch.ones(rows, 4)).sum().backward() for rows in (1, 2)]
    return dry_run(loop_of(model, consensus or Consensus()), [micro_steps]).recovery


def _fail(error: Exception) -> Any:
    def micro_step() -> Any:
        raise error

    return micro_step


def test_out_of_memory_in_the_collective_library_is_named_and_ends_the_run() -> None:
    error = RuntimeError("NCCL error in: ProcessGroupNCCL.cpp, Cuda failure 2 'out of memory'")
    with pytest.raises(CollectiveStateUnknownError, match="out of memory inside a collective") as raised:
        _alone(nn.Linear(4, 4)).attempt([_fail(error)])
    assert "Cuda failure 2" in str(raised.value)
