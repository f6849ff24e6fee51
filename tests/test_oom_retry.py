"""A step that runs out of memory is run again in smaller micro-batches, and trains the same.

The toy is a linear model. Its inputs are the first token of each row, and the row's number of tokens.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from torchtune_adaptive.batch.limits import MicroBatchLimit, RowLimit, TokenLimit
from torchtune_adaptive.batch.loader import StepSamples
from torchtune_adaptive.batch.micro_batches import MicroBatcher
from torchtune_adaptive.batch.row_format import Row, TokenRows
from torchtune_adaptive.distributed.consensus import Consensus
from torchtune_adaptive.errors import NothingFitsError
from torchtune_adaptive.memory import resident
from torchtune_adaptive.memory.cpu_meter import CpuMeter
from torchtune_adaptive.memory.phases import Phases
from torchtune_adaptive.memory.resident import RankMemory
from torchtune_adaptive.recovery.attempts import MemoryPressure
from torchtune_adaptive.search import workload as workload_module
from torchtune_adaptive.search.workload import Workload
from torchtune_adaptive.testing import Fault
from torchtune_adaptive.training.objectives import Loss
from torchtune_adaptive.training.oom_retry import OomRetry, Run
from torchtune_adaptive.training.optimizers import OptimizerStep
from torchtune_adaptive.training.step_figures import StepSums
from torchtune_adaptive.training.train_step import TrainStep

CPU = torch.device("cpu")
FAULT = "OutOfMemoryError: CUDA out of memory (a fault on purpose)"


def rows_of(*lengths: int) -> list[Row]:
    return [{"tokens": [number + 1] * length, "labels": []} for number, length in enumerate(lengths)]


ROWS = rows_of(1, 3, 2, 1, 3, 2, 1, 1)


class Beside(Consensus):
    """This rank as the second of two, of which the first reports ``other``."""

    def __init__(self, other: Any) -> None:
        super().__init__()
        self._other = other
        self._ranks = (0, 1)

    def from_all_ranks(self, value: Any) -> list[Any]:
        return [self._other, value] if isinstance(value, tuple) else [value]


class CachingMeter(CpuMeter):
    """The meter of a device of 1 KiB, whose allocator has freed its cache ``retries`` times."""

    retries = 0

    @property
    def total_retries(self) -> int:
        return self.retries

    @property
    def available_bytes(self) -> int:
        return 1024

    @property
    def peak_bytes(self) -> int:
        return 512


@dataclass
class Tries:
    """Replaces the probes in the middle of training; sizes up to ``fitting`` fit."""

    fitting: int = 0
    calls: int = 0
    tried: dict[int, list[list[Row]]] = field(default_factory=dict)

    def __call__(self, make_batch: Callable[[int], list[list[Row]]], sizes: Iterable[int]) -> int | None:
        self.calls += 1
        for size in sizes:
            self.tried[size] = make_batch(size)
            if size <= self.fitting:
                return size
        return None


class Toy:
    """A model, its step, and the retry around it; with ``recovers``, a dry run prepares recovery.

    Attributes:
        cuts: the rows of each micro-batch.
        draws: a random number for each micro-batch.
        numbers: the micro-steps' numbers, as ``wrap_micro_steps`` gets them.
        notes: why the micro-batch changed.
    """

    def __init__(
        self,
        limit: MicroBatchLimit,
        *,
        recovers: bool = True,
        meter: CpuMeter | None = None,
        consensus: Consensus | None = None,
        fitting: int = 0,
        momentum: float = 0.0,
        starts_small: bool = False,
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(2, 1)
        self.cuts: list[int] = []
        self.draws: list[float] = []
        self.numbers: list[int] = []
        self.notes: list[str] = []
        phases = Phases([self.model], meter)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=momentum)
        self.optimizers = [optimizer]
        self.step = TrainStep(
            self._objective,
            OptimizerStep(self.model, [optimizer], ranks=1, max_grad_norm=None),
            collate=self._collate,
            device=CPU,
            phases=phases,
            meter=meter,
        )
        self.micro_batches = MicroBatcher(limit, TokenRows(-100), Consensus(), make_silent_row=dict)
        self.tries = Tries(fitting)
        workload = Workload(
            train_step=self.step,
            model=self.model,
            optimizers=[optimizer],
            device=CPU,
            meter=meter,
            consensus=consensus or Consensus(),
        )
        self.retry = OomRetry(
            self.step,
            self.micro_batches,
            workload,
            phases=phases,
            rehearsed_rows=2,
            first_that_fits=self.tries,
            starts_small=starts_small,
        )
        if recovers:
            self.retry.prepare(lambda most: [ROWS[:1], ROWS[:most]])
        else:
            self.retry.disable()
        self.cuts.clear()
        self.draws.clear()

    def _objective(self, batch: torch.Tensor) -> Loss:
        self.draws.append(torch.rand(()).item())
        weight = torch.tensor(len(batch))
        return Loss(self.model(batch).square().sum(), weight, weight)

    def _collate(self, rows: Sequence[Row]) -> torch.Tensor:
        self.cuts.append(len(rows))
        return torch.tensor([[float(row["tokens"][0]), float(len(row["tokens"]))] for row in rows])

    def failing_at(self, *numbers: int, phase: str = "forward", **options: Any) -> "Toy":
        """Return this toy; from now on, micro-steps with these numbers run out of memory in ``phase``."""

        def around(number: int, run: Run) -> StepSums:
            self.numbers.append(number)
            if number not in numbers:
                return run()
            fault = Fault(0, phase=phase, **options)
            fault.watch_phase(lambda: self.step.phase)
            with fault:
                return run()

        self.retry.wrap_micro_steps(around)
        return self

    def sums(self, rows: list[Row] = ROWS, *, number: int = 7, measured: bool = False) -> StepSums:
        samples = StepSamples(rows, len(rows), ranks=1)
        return self.retry.run(samples, number=number, measured=measured, note=self.notes.append)

    def train(self, rows: list[Row] = ROWS, *, number: int = 7) -> list[torch.Tensor]:
        """One optimizer step; the parameters after it."""
        self.retry.finish(self.sums(rows, number=number), number=number)
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def same_bits(ones: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


# ---- out of memory


@pytest.mark.parametrize("number", [0, 1], ids=["in the first", "in the last"])
@pytest.mark.parametrize("phase", ["forward", "loss", "backward"])
def test_a_step_out_of_memory_is_run_again_in_halves_and_trains_the_same(number: int, phase: str) -> None:
    toy = Toy(RowLimit(4)).failing_at(number, phase=phase)
    parameters = toy.train()
    assert toy.micro_batches.limit == RowLimit(2)
    assert toy.cuts == [4] * (number + 1) + [2, 2, 2, 2]
    assert toy.retry.retries == 1
    assert same_bits(parameters, Toy(RowLimit(2)).train())
    torch.testing.assert_close(parameters, Toy(RowLimit(8)).train())


def test_a_step_may_run_out_of_memory_again_and_again() -> None:
    toy = Toy(RowLimit(8)).failing_at(0, 2, 5)
    parameters = toy.train()
    assert toy.retry.retries == 3
    assert toy.cuts[-8:] == [1] * 8
    assert same_bits(parameters, Toy(RowLimit(1)).train())


def test_a_limit_in_tokens_is_halved_too() -> None:
    toy = Toy(TokenLimit(24)).failing_at(0)
    parameters = toy.train()
    assert toy.micro_batches.limit == TokenLimit(12)
    assert same_bits(parameters, Toy(TokenLimit(12)).train())


def test_the_next_step_begins_with_the_micro_batch_that_fitted() -> None:
    toy = Toy(RowLimit(4)).failing_at(0)
    toy.train()
    toy.retry.wrap_micro_steps(None)
    toy.cuts.clear()
    toy.train()
    assert toy.cuts == [2, 2, 2, 2]
    assert len(toy.notes) == toy.retry.retries == 1


def test_a_step_that_is_run_again_draws_the_same_random_numbers() -> None:
    toy = Toy(RowLimit(4)).failing_at(1, phase="backward")
    torch.manual_seed(5)
    toy.train()
    after = torch.rand(())
    torch.manual_seed(5)
    assert toy.draws[2:] == [torch.rand(()).item() for _ in range(4)]
    assert toy.draws[:2] == toy.draws[2:4]
    assert torch.rand(()) == after


def test_padding_is_counted_once_although_the_step_is_cut_twice() -> None:
    toy = Toy(RowLimit(4)).failing_at(0)
    toy.train()
    assert toy.micro_batches.take_padding() == pytest.approx(1 - 14 / (2 * (3 + 2 + 3 + 1)))


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_an_out_of_memory_error_is_noted_with_rank_phase_and_figures(phase: str) -> None:
    toy = Toy(RowLimit(4)).failing_at(1, phase=phase)
    toy.train(number=12)
    assert toy.notes == [
        f"micro-batch 4 -> 2 rows: in step 12 rank 0 ran out of memory in {phase} (not metered: {FAULT})"
    ]


@pytest.mark.parametrize(
    ("other", "cause"),
    [
        (
            (MemoryPressure.NONE, "optimizer", "peak 1, limit 2", None),
            f"rank 1 ran out of memory in forward (not metered: {FAULT})",
        ),
        (
            (MemoryPressure.THRASHING, "optimizer", "peak 1, limit 2", None),
            f"rank 1 ran out of memory in forward (not metered: {FAULT})",
        ),
        (
            (MemoryPressure.OUT_OF_MEMORY, "backward", "peak 1, limit 2", "x " * 150),
            f"ranks 0, 1 ran out of memory in backward (peak 1, limit 2: {'x ' * 97}[...])",
        ),
    ],
)
def test_all_ranks_that_were_out_of_memory_are_noted_with_the_figures_of_the_first(other: Any, cause: str) -> None:
    toy = Toy(RowLimit(4), consensus=Beside(other)).failing_at(0)
    toy.train()
    assert toy.notes == [f"micro-batch 4 -> 2 rows: in step 7 {cause}"]


def test_a_meters_figures_are_noted_and_it_is_not_reset() -> None:
    meter = CachingMeter()
    toy = Toy(RowLimit(4), meter=meter).failing_at(0)
    meter.enter_phase("before")
    with meter:
        toy.train()
    assert toy.notes[0].endswith(f"ran out of memory in forward (peak 512 B, limit 1.0 KiB: {FAULT})")
    assert "before" in meter.phase_peak_bytes


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_where_a_single_row_does_not_fit_the_run_ends_with_one_sentence(phase: str) -> None:
    toy = Toy(RowLimit(2)).failing_at(0, 8, phase=phase)
    with pytest.raises(NothingFitsError) as caught:
        toy.train(number=3)
    assert str(caught.value) == (
        f"a single row per micro-step must fit, but in step 3 rank 0 ran out of memory in {phase}"
        f" (not metered: {FAULT}); shorter rows, activation checkpointing, LoRA or more ranks would need less."
    )
    assert toy.micro_batches.limit == RowLimit(1)
    assert toy.retry.retries == 1
    assert all(parameter.grad is None for parameter in toy.model.parameters())


def test_rows_that_are_alone_in_their_micro_batches_already_cannot_be_cut_smaller() -> None:
    toy = Toy(TokenLimit(3)).failing_at(1)
    with pytest.raises(NothingFitsError):
        toy.train(rows_of(3, 2))
    assert toy.micro_batches.limit == TokenLimit(3)


def test_another_error_is_not_taken_for_out_of_memory() -> None:
    def fail() -> None:
        raise ZeroDivisionError("on purpose")

    toy = Toy(RowLimit(4)).failing_at(1, strike=fail)
    with pytest.raises(ZeroDivisionError):
        toy.train()
    assert (toy.micro_batches.limit, toy.retry.retries, toy.notes) == (RowLimit(4), 0, [])


# ---- without recovery


def test_without_recovery_the_error_passes_and_the_micro_batch_stays() -> None:
    toy = Toy(RowLimit(4), recovers=False).failing_at(1)
    with pytest.raises(torch.OutOfMemoryError, match="on purpose"):
        toy.train()
    assert (toy.micro_batches.limit, toy.retry.retries, toy.notes) == (RowLimit(4), 0, [])


def test_without_recovery_steps_are_the_same_and_their_padding_is_counted() -> None:
    toy, recovering = Toy(RowLimit(4), recovers=False), Toy(RowLimit(4))
    assert (toy.retry.recovers, recovering.retry.recovers) == (False, True)
    assert same_bits(toy.train(), recovering.train())
    assert toy.micro_batches.take_padding() == recovering.micro_batches.take_padding() == pytest.approx(1 - 14 / 24)


# ---- the first step


@pytest.mark.parametrize("recovers", [True, False])
@pytest.mark.parametrize(("limit", "sizes"), [(RowLimit(4), [2, 2, 2, 2]), (TokenLimit(12), [1] * 8)])
def test_a_first_step_that_creates_the_state_has_small_micro_batches(
    limit: MicroBatchLimit, sizes: list[int], recovers: bool
) -> None:
    toy, whole = (Toy(limit, recovers=recovers, momentum=0.9, starts_small=small) for small in (True, False))
    first, expected = toy.train(), whole.train()
    assert toy.cuts == sizes
    assert toy.micro_batches.limit == limit
    assert all(torch.allclose(one, other) for one, other in zip(first, expected, strict=True))
    toy.cuts.clear()
    whole.cuts.clear()
    toy.train()
    whole.train()
    assert toy.cuts == whole.cuts


def test_a_step_whose_optimizer_has_its_state_does_not_start_small() -> None:
    toy = Toy(RowLimit(4), momentum=0.9, starts_small=True)
    (optimizer,) = toy.optimizers
    optimizer.state[next(toy.model.parameters())] = {"momentum_buffer": torch.zeros(1, 2)}
    toy.train()
    assert toy.cuts == [4, 4]


# ---- numbers of micro-steps


@pytest.mark.parametrize(
    ("faults", "numbers"),
    [
        ([], [0, 1]),
        ([1], [0, 1, 2, 3, 4, 5]),
        ([0], [0, 2, 3, 4, 5]),  # number 1 is skipped after the failure, but counted
        ([0, 3], [0, 2, 3, *range(6, 14)]),
    ],
)
def test_numbers_of_micro_steps_keep_rising_when_a_step_is_run_again(faults: list[int], numbers: list[int]) -> None:
    toy = Toy(RowLimit(4)).failing_at(*faults)
    toy.train()
    assert toy.numbers == numbers


def test_numbers_of_micro_steps_restart_in_each_step_and_end_when_nothing_wraps_them() -> None:
    toy = Toy(RowLimit(4)).failing_at()
    toy.train()
    toy.train()
    assert toy.numbers == [0, 1, 0, 1]
    toy.retry.wrap_micro_steps(None)
    toy.train()
    assert toy.numbers == [0, 1, 0, 1]


# ---- slow for lack of memory


def thrashing(toy: Toy, meter: CachingMeter, *retries: int) -> None:
    """Train one step for each of ``retries``, in which the allocator frees its cache that many times."""
    for count in retries:
        meter.retries += count
        toy.train()


def test_after_two_steps_with_allocator_retries_the_next_ones_are_cut_in_halves() -> None:
    meter = CachingMeter()
    toy = Toy(RowLimit(4), meter=meter)
    thrashing(toy, meter, 1, 0, 2, 1)
    assert toy.cuts == [4] * 8
    assert toy.micro_batches.limit == RowLimit(2)
    assert toy.retry.retries == 0
    assert toy.notes == [
        "micro-batch 4 -> 2 rows: in step 7 rank 0 had to free the allocator's cache in two steps in a row"
        " (peak 512 B, limit 1.0 KiB)"
    ]
    thrashing(toy, meter, 1)  # the first step with retries since then
    assert toy.micro_batches.limit == RowLimit(2)
    thrashing(toy, meter, 1)
    assert toy.micro_batches.limit == RowLimit(1)


def test_a_step_with_allocator_retries_is_kept_and_trains_the_same() -> None:
    meter = CachingMeter()
    slow, plain = Toy(RowLimit(4), meter=meter), Toy(RowLimit(4))
    for toy in (slow, plain):
        toy.train()
        meter.retries += 1
    meter.retries += 1
    slow.train()
    meter.retries += 1
    assert same_bits(slow.train(), (plain.train(), plain.train())[1])
    assert slow.micro_batches.limit == RowLimit(2)
    assert slow.micro_batches.take_padding() == plain.micro_batches.take_padding()


def test_single_rows_stay_although_they_are_slow_which_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    meter = CachingMeter()
    toy = Toy(RowLimit(1), meter=meter)
    thrashing(toy, meter, 1, 1, 1, 1, 1)
    assert toy.micro_batches.limit == RowLimit(1)
    assert toy.notes == []
    assert [record.getMessage() for record in caplog.records] == [
        "micro-batch stays at a single row, although rank 0 had to free the allocator's cache in two steps in a row"
        " (peak 512 B, limit 1.0 KiB)"
    ]


# ---- measured steps


@pytest.mark.parametrize("faults", [[], [0], [1], [3]], ids=str)
def test_a_measured_step_is_cut_in_two_halves_of_which_the_first_is_the_small_batch(faults: list[int]) -> None:
    toy = Toy(RowLimit(4)).failing_at(*faults)
    sums = toy.sums(ROWS[:7], measured=True)
    assert sums.weight.item() == 7
    assert sums.small_batch is not None
    norm_squared, weight = sums.small_batch.tolist()
    assert weight == 4
    toy.step.zero_grad()
    toy.step.micro_step(ROWS[:4])
    expected = sum(p.grad.double().square().sum().item() for p in toy.model.parameters() if p.grad is not None)
    assert norm_squared == pytest.approx(expected)


def test_the_halves_of_a_measured_step_are_cut_separately() -> None:
    toy = Toy(RowLimit(3)).failing_at()
    toy.sums(ROWS[:7], measured=True)
    assert toy.cuts == [3, 1, 3]
    assert toy.numbers == [0, 1, 2]
    assert toy.micro_batches.take_padding() == pytest.approx(1 - 13 / (3 * 3 + 1 + 3 * 3))
    toy.cuts.clear()
    toy.step.zero_grad()
    assert toy.sums(ROWS[:7]).small_batch is None
    assert toy.cuts == [3, 3, 1]


def test_a_step_of_a_single_row_is_not_measured() -> None:
    toy = Toy(RowLimit(3), recovers=False)
    assert toy.sums(ROWS[:1], measured=True).small_batch is None
    assert toy.sums(ROWS[:2], measured=True).small_batch is not None


# ---- larger micro-batches again


def test_larger_micro_batches_are_tried_from_the_largest_down_and_taken_if_they_fit() -> None:
    toy = Toy(RowLimit(24), fitting=6)
    toy.micro_batches.resize(2)
    (row,) = rows_of(5)
    assert toy.retry.try_larger(row, 100) == (2, 6)
    assert toy.micro_batches.limit == RowLimit(6)
    assert {size: list(map(len, batches)) for size, batches in toy.tries.tried.items()} == {
        24: [24, 24],
        12: [12, 12],
        6: [6, 6],
    }
    assert all(one is row for batches in toy.tries.tried.values() for rows in batches for one in rows)


@pytest.mark.parametrize(("shared", "needed"), [(True, "2 ranks need 4.0"), (False, "1 rank needs 2.0")])
def test_nothing_larger_is_tried_where_copies_do_not_fit_into_host_memory(
    shared: bool, needed: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of one machine or two. Every rank decides by the figures of all, and training continues."""

    class OnOneMachine(Consensus):
        def from_all_ranks(self, value: Any) -> list[Any]:
            if not isinstance(value, RankMemory):
                return [value]
            return [RankMemory(value.machine if shared else "", 2 * 2**30, 2**30), value]

    monkeypatch.setattr(workload_module, "bytes_of_copies", lambda *_: 2 * 2**30)
    monkeypatch.setattr(resident, "available_bytes", lambda: 2**30)
    toy = Toy(RowLimit(24), fitting=24, consensus=OnOneMachine())
    toy.micro_batches.resize(2)
    caplog.clear()
    assert toy.retry.try_larger(ROWS[0], 100) is None
    assert (toy.tries.calls, toy.micro_batches.limit) == (0, RowLimit(2))
    (message,) = caplog.messages
    assert message == (
        "micro-batch stays at 2 rows: to try a larger one, with copies of weights and optimizer state,"
        f" {needed} GiB of host memory, of which at most 921.6 MiB are usable."
    )
    toy.train()
    assert toy.cuts == [2] * 4


def test_a_try_has_no_more_rows_than_a_step_and_one_micro_step_if_that_is_all() -> None:
    toy = Toy(RowLimit(24))
    toy.micro_batches.resize(2)
    toy.retry.try_larger(ROWS[0], 10)
    assert {size: list(map(len, batches)) for size, batches in toy.tries.tried.items()} == {
        24: [10],
        12: [10],
        6: [6, 6],
        3: [3, 3],
    }


def test_a_try_at_a_limit_in_tokens_has_as_many_rows_as_it_holds() -> None:
    toy = Toy(TokenLimit(40))
    toy.micro_batches.reduce()
    toy.retry.try_larger(*rows_of(3), rows_per_step=100)
    assert {size: list(map(len, batches)) for size, batches in toy.tries.tried.items()} == {40: [13, 13]}


def test_nothing_larger_is_tried_if_the_limit_was_never_reduced() -> None:
    toy = Toy(RowLimit(24), fitting=100)
    assert toy.retry.try_larger(ROWS[0], 100) is None
    assert toy.tries.calls == 0  # each call costs time, whatever sizes it tries


def test_where_nothing_larger_fits_the_limit_stays() -> None:
    toy = Toy(RowLimit(24), fitting=0)
    toy.micro_batches.resize(4)
    assert toy.retry.try_larger(ROWS[0], 100) is None
    assert toy.micro_batches.limit == RowLimit(4)
    assert list(toy.tries.tried) == [24, 12, 6]


@pytest.mark.parametrize("fitting", [0, 4])
def test_allocator_retries_of_tries_and_of_steps_before_them_are_forgotten(fitting: int) -> None:
    meter = CachingMeter()
    toy = Toy(RowLimit(4), meter=meter, fitting=fitting)
    toy.micro_batches.resize(2)
    thrashing(toy, meter, 1)
    meter.retries += 5
    toy.retry.try_larger(ROWS[0], 8)
    limit = toy.micro_batches.limit
    thrashing(toy, meter, 0, 1)
    assert toy.micro_batches.limit == limit
