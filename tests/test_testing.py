"""A fault strikes once, at the operation, in the phase and on the ranks given, and is removed afterwards."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.ranks import RanksFailedError, run_alone
from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.engine.distributed.fsdp_ledger import FsdpLedger, RecordedAllGather
from torchtune_adaptive.engine.distributed.fsdp_state import AllGather
from torchtune_adaptive.engine.distributed.ledger import Ledger
from torchtune_adaptive.engine.memory.phases import Phases
from torchtune_adaptive.engine.recovery.attempts import Recovery
from torchtune_adaptive.engine.recovery.step import RecoverableStep
from torchtune_adaptive.engine.recovery.watch import PressureWatch
from torchtune_adaptive.testing import Fault, faults_in, kill_process

CPU = torch.device("cpu")
PATCHED = [
    (torch.UntypedStorage, "resize_"),
    (RecordedAllGather, "__call__"),
    (RecordedAllGather, "allocate"),
    (Ledger, "issuing"),
    (Ledger, "record"),
    (Ledger, "begin"),
    (Recovery, "attempt"),
    (Phases, "enter"),
]


def patched() -> list[Any]:
    """The present values of the attributes that a fault patches."""
    return [vars(owner).get(name) for owner, name in PATCHED]


def doubled(times: int) -> torch.Tensor:
    """The result of ``times`` operations and one more."""
    values = torch.ones(1)
    for _ in range(times):
        values = values * 2
    return values


# ---- where it strikes


@pytest.mark.parametrize("place", [0, 3])
def test_a_fault_strikes_in_place_of_its_operation_and_all_is_restored(place: int) -> None:
    before, values = patched(), torch.zeros(2)

    def add_four() -> None:
        for _ in range(4):
            values.add_(1)

    with pytest.raises(torch.OutOfMemoryError, match="on purpose"), Fault(place) as fault:
        add_four()
    assert values.tolist() == [place] * 2
    assert fault.has_struck
    assert fault.count == place + 1
    assert patched() == before


def test_a_fault_strikes_once_and_keeps_counting_when_it_is_used_again() -> None:
    struck: list[int] = []
    fault = Fault(7, strike=lambda: struck.append(fault.count))
    for _ in range(3):
        with fault:
            doubled(4)
    assert fault.count == 15
    assert struck == [8]


def test_the_growth_of_a_storage_counts_and_its_shrinking_does_not() -> None:
    values = torch.ones(2)
    with Fault(None, kind="storage growth") as growths, Fault(None) as operations:
        for nbytes in (40, 40, 0, 8):
            values.untyped_storage().resize_(nbytes)
        doubled(3)
    assert growths.count == 2
    assert operations.count == 2 + 4


def test_a_fault_of_storage_growth_leaves_the_storage_as_it_is() -> None:
    storages = [torch.ones(2).untyped_storage() for _ in range(2)]

    def grow() -> None:
        for storage in storages:
            storage.resize_(80)

    with pytest.raises(torch.OutOfMemoryError, match="on purpose"), Fault(1, kind="storage growth"):
        grow()
    assert [storage.nbytes() for storage in storages] == [80, 8]


class AllGatherAlone(AllGather):
    """An all-gather of one rank, by operations on plain tensors."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> None:
        output_tensor.copy_(input_tensor)


@pytest.mark.parametrize(("kind", "expected"), [("operation", 2), ("all-gather allocation", 1), ("collective", 0)])
def test_a_buffers_allocation_counts_and_what_happens_within_a_collective_does_not(kind: Any, expected: int) -> None:
    all_gather: Any = RecordedAllGather(FsdpLedger(nn.Linear(1, 1), CPU, reduces_once=False), 0, AllGatherAlone())
    values = torch.ones(3)
    with Fault(None, kind=kind) as fault:
        gathered = all_gather.allocate((3,), dtype=torch.float32, device=CPU)
        all_gather(gathered, values, group=None)
        gathered += 1
    assert fault.count == expected
    assert gathered.tolist() == [2, 2, 2]


# ---- on which ranks, and when


@pytest.mark.parametrize(("ranks", "strikes"), [({0, 3}, True), ([1], False)])
def test_a_process_without_peers_is_rank_zero(ranks: Any, strikes: bool) -> None:
    struck: list[str] = []
    with Fault(1, ranks=ranks, strike=lambda: struck.append("here")) as fault:
        doubled(2)
    assert struck == ["here"] * strikes
    assert fault.has_struck is strikes
    assert fault.count == 3  # counted on every rank


def test_only_what_happens_in_its_phase_counts() -> None:
    phases, fault = Phases([], None), Fault(1, phase="backward")
    with fault:
        doubled(5)
        phases.enter("forward")
        doubled(5)
        assert fault.count == 0
        phases.enter("backward")
        with pytest.raises(torch.OutOfMemoryError, match="on purpose"):
            doubled(5)
    assert fault.count == 2


# ---- how it strikes


def _is_killed() -> None:
    with Fault(1, strike=kill_process):
        doubled(1)


def test_a_process_that_is_killed_does_not_clean_up() -> None:
    with pytest.raises(RanksFailedError, match="died with exit status -9"):
        run_alone(_is_killed)


# ---- afterwards


def test_nested_faults_count_separately() -> None:
    before = patched()
    struck: list[str] = []
    values = torch.ones(2)
    with Fault(3, strike=lambda: struck.append("outer")) as outer:
        doubled(1)
        with Fault(1, strike=lambda: struck.append("inner")) as inner:
            values.untyped_storage().resize_(80)
            doubled(1)
        values.untyped_storage().resize_(160)
    assert (outer.count, inner.count) == (6, 3)
    assert struck == ["inner", "outer"]
    assert patched() == before


def test_a_fault_within_itself_is_refused_and_the_outer_one_keeps_counting() -> None:
    before = patched()
    with Fault(None) as fault:
        with pytest.raises(RuntimeError, match="while it is active"), fault:
            doubled(1)
        doubled(1)
    assert fault.count == 2
    assert patched() == before


# ---- in a recipe


class NumbersTrainer:
    """Trains as a recipe's trainer does, on the numbers of each optimizer step, of which it sums twice each."""

    def __init__(self, rows_per_micro_step: int) -> None:
        self.global_step = 0
        self.totals: list[float] = []
        self.phases = Phases([], None)
        self.model = nn.Linear(1, 1)
        self.recoverable = RecoverableStep(
            self.model,
            self.micro_step,
            micro_batch_size=rows_per_micro_step,
            watch=PressureWatch(Consensus(), None, self.phases),
        )
        self.recoverable.dry_run([1, 2])

    def micro_step(self, numbers: Sequence[int]) -> float:
        self.phases.enter("forward")
        doubled = torch.tensor(numbers) * 2
        loss = self.model(doubled[:, None].float()).sum()
        self.phases.enter("backward")
        loss.backward()
        return doubled.sum().item()

    def train(self) -> None:
        for numbers in NUMBERS:
            self.model.zero_grad()
            self.totals.append(self.recoverable(numbers))
            self.global_step += 1


class Base:
    def __init__(self, rows_per_micro_step: int = 2) -> None:
        self.trainer = NumbersTrainer(rows_per_micro_step)

    def train(self) -> None:
        self.trainer.train()


class Recipe(Base):
    """A user's recipe, which inherits the training."""


NUMBERS: Any = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
TOTALS = [20, 52, 84]


@pytest.mark.parametrize(
    ("rows_per_micro_step", "failing", "run"),
    [
        (4, [0, 2], [0, 1, 2, 3, 4, 5, 6]),  # 0 fails; then 1 and 2 run, and 2 fails; then 3 to 6
        (2, [0], [0, 2, 3, 4, 5]),  # 0 fails, 1 is skipped; peers run it, so it has a number on every rank
    ],
)
def test_micro_steps_of_a_step_that_is_run_again_keep_counting(
    rows_per_micro_step: int, failing: list[int], run: list[int]
) -> None:
    recipe = Recipe(rows_per_micro_step)
    faults = {(0, number): Fault(0 if number in failing else None) for number in range(9)}
    with faults_in(Recipe, faults):
        recipe.train()
    assert recipe.trainer.totals == TOTALS
    assert recipe.trainer.recoverable.retries == len(failing)
    assert [number for (_, number), fault in faults.items() if fault.count > 0] == run


def test_micro_steps_outside_of_training_have_no_faults() -> None:
    recipe, fault = Recipe(), Fault(0)
    with faults_in(Recipe, {(1, 1): fault}):
        assert recipe.trainer.micro_step([1, 2]) == 6
        recipe.train()
        assert recipe.trainer.micro_step([1, 2]) == 6
    assert recipe.trainer.totals == TOTALS
    assert recipe.trainer.recoverable.retries == fault.count == 1


def test_the_recipes_class_is_restored_after_a_failure() -> None:
    before = dict(vars(Recipe)), dict(vars(Base)), patched()
    with pytest.raises(IndexError), faults_in(Recipe, {(1, 0): Fault(0, strike=[].pop)}):
        Recipe().train()
    assert (dict(vars(Recipe)), dict(vars(Base)), patched()) == before
