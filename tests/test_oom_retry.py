"""A step that runs out of memory is run again in smaller micro-batches, and trains the same.

The toy: a row has 1 to 3 tokens, the model is linear, and the loss of a row has noise in it that is drawn anew.
"""

import functools
import operator
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
from torchtune_adaptive.distributed.dry_run import dry_run
from torchtune_adaptive.distributed.recovery import Recovery
from torchtune_adaptive.errors import NothingFitsError
from torchtune_adaptive.memory.cpu_meter import CpuMeter
from torchtune_adaptive.memory.phases import Phases
from torchtune_adaptive.testing import Fault
from torchtune_adaptive.training.objectives import Loss
from torchtune_adaptive.training.oom_retry import OomRetry, Run
from torchtune_adaptive.training.optimizers import OptimizerStep
from torchtune_adaptive.training.train_step import StepSums, TrainStep

CPU = torch.device("cpu")
FAULT = "OutOfMemoryError: CUDA out of memory (a fault on purpose)"
ADVICE = "shorter rows, activation checkpointing, LoRA or more ranks would need less"


def rows_of(*lengths: int) -> list[Row]:
    return [{"tokens": [number + 1] * length, "labels": []} for number, length in enumerate(lengths)]


ROWS = rows_of(1, 3, 2, 1, 3, 2, 1, 1)


class Sharing(Consensus):
    """This rank, and another one that has reported ``other`` wherever ranks report."""

    def __init__(self, other: Any) -> None:
        super().__init__()
        self._other = other

    def from_all_ranks(self, value: Any) -> list[Any]:
        return [self._other, value]


class Thrashing(CpuMeter):
    """A device whose allocator has freed its cache ``retries`` times."""

    retries = 0

    @property
    def total_retries(self) -> int:
        return self.retries

    @property
    def available_bytes(self) -> int:
        return 2**30


@dataclass
class Tries:
    """Takes the place of a search in the middle of training: ``fitting`` sizes fit."""

    fitting: Callable[[int], bool]
    batches: list[tuple[int, list[list[Row]]]] = field(default_factory=list)

    def __call__(self, make_batch: Callable[[int], list[list[Row]]], sizes: Iterable[int]) -> int | None:
        for size in sizes:
            self.batches.append((size, make_batch(size)))
            if self.fitting(size):
                return size
        return None


class Toy:
    """A model, its step, and the retry around it; with ``recovers`` a recovery that a dry run has made."""

    def __init__(
        self,
        limit: MicroBatchLimit,
        *,
        recovers: bool = True,
        meter: CpuMeter | None = None,
        consensus: Consensus | None = None,
        fitting: Callable[[int], bool] = lambda size: False,
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.draws: list[float] = []
        self.cuts: list[int] = []
        phases = Phases([self.model], meter)
        stepping = OptimizerStep(self.model, [self.optimizer], ranks=1, max_grad_norm=None)
        self.step = TrainStep(
            self._objective, stepping, collate=self._collate, device=CPU, phases=phases, meter=meter
        )
        self.micro_batches = MicroBatcher(limit, TokenRows(-100), Consensus(), make_silent_row=dict)
        self.tries = Tries(fitting)
        self.retry = OomRetry(
            self.step,
            self.micro_batches,
            recovery=self._recovery() if recovers else None,
            phases=phases,
            meter=meter,
            consensus=consensus or Consensus(),
            first_that_fits=self.tries,
        )
        self.notes: list[str] = []
        self.numbers: list[int] = []
        self.draws.clear()
        self.cuts.clear()

    def _objective(self, batch: torch.Tensor) -> Loss:
        noise = torch.rand(())
        self.draws.append(noise.item())
        weight = torch.tensor(len(batch))
        total = (self.model(batch).squeeze(1) - noise.detach() * 0).square().sum()
        return Loss(total, weight, weight, {"x": batch[:, 0].sum()})

    def _collate(self, rows: Sequence[Row]) -> torch.Tensor:
        self.cuts.append(len(rows))
        return torch.tensor([[float(row["tokens"][0]), float(len(row["tokens"]))] for row in rows])

    def _recovery(self) -> Recovery:
        micro_steps = [functools.partial(self.step.micro_step, ROWS[:count]) for count in (1, 2)]
        found = dry_run(micro_steps, model=self.model, device=CPU, consensus=Consensus())
        assert found.recovery is not None
        return found.recovery

    def with_faults(self, *numbers: int, place: int = 3, strike: Callable[[], object] | None = None) -> "Toy":
        """From now on micro-steps of these numbers run out of memory, or whatever ``strike`` does."""

        def around(number: int, run: Run) -> StepSums:
            self.numbers.append(number)
            if number not in numbers:
                return run()
            with Fault(place) if strike is None else Fault(place, strike=strike):
                return run()

        self.retry.wrap_micro_steps(around)
        return self

    def sums(self, rows: list[Row] = ROWS, *, number: int = 7, measured: bool = False) -> StepSums:
        samples = StepSamples(rows, len(rows), len(rows))
        return self.retry.run(samples, number=number, measured=measured, note=self.notes.append)

    def train(self, rows: list[Row] = ROWS, *, number: int = 7) -> list[torch.Tensor]:
        """One optimizer step; the parameters after it."""
        self.step.finish(self.sums(rows, number=number))
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def same_bits(ones: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


# ---- out of memory


@pytest.mark.parametrize("number", [0, 1], ids=["in the first", "in the last"])
@pytest.mark.parametrize("place", [0, 3, 12], ids=["in forward", "in loss", "in backward"])
def test_a_step_out_of_memory_is_run_again_in_halves_and_is_the_same(number: int, place: int) -> None:
    toy = Toy(RowLimit(4)).with_faults(number, place=place)
    parameters = toy.train()
    assert toy.micro_batches.limit == RowLimit(2)
    assert toy.cuts == [4] * (number + 1) + [2, 2, 2, 2]
    assert toy.retry.retries == 1
    assert same_bits(parameters, Toy(RowLimit(2)).train())
    torch.testing.assert_close(parameters, Toy(RowLimit(8)).train())


def test_a_step_may_run_out_of_memory_again_and_again() -> None:
    toy = Toy(RowLimit(8)).with_faults(0, 2, 5)
    parameters = toy.train()
    assert toy.retry.retries == 3
    assert toy.cuts[-8:] == [1] * 8
    assert same_bits(parameters, Toy(RowLimit(1)).train())


def test_the_next_step_begins_with_what_has_fitted() -> None:
    toy = Toy(RowLimit(4)).with_faults(0)
    toy.train()
    toy.retry.wrap_micro_steps(None)
    toy.cuts.clear()
    toy.train()
    assert toy.cuts == [2, 2, 2, 2]
    assert len(toy.notes) == toy.retry.retries == 1


def test_a_step_that_is_run_again_draws_the_same_random_numbers() -> None:
    toy = Toy(RowLimit(4)).with_faults(1)
    torch.manual_seed(5)
    toy.train()
    after = torch.rand(())
    torch.manual_seed(5)
    assert toy.draws[2:] == [torch.rand(()).item() for _ in range(4)]
    assert toy.draws[:2] == toy.draws[2:4]
    assert after == torch.rand(())


def test_what_happened_is_noted_with_rank_phase_and_figures() -> None:
    toy = Toy(RowLimit(4)).with_faults(1, place=3)
    toy.train(number=12)
    assert toy.notes == [
        f"micro-batch 4 -> 2 rows: in step 12 rank 0 ran out of memory in loss (not metered: {FAULT})"
    ]


def test_the_figures_noted_are_those_of_the_first_rank_that_was_short_of_memory() -> None:
    mine = Toy(RowLimit(4))
    attempt: dict[str, Any] = {}
    recovery: Any = mine.retry

    def run(other: Any) -> str:
        toy = Toy(RowLimit(4), consensus=Sharing(other)).with_faults(0, place=0)
        toy.train()
        return toy.notes[0].partition(": in step 7 ")[2]

    pressure = type(recovery) and __import__(
        "torchtune_adaptive.distributed.recovery", fromlist=["MemoryPressure"]
    ).MemoryPressure
    assert attempt == {}
    assert run((pressure.NONE, "optimizer", "peak 1, limit 2", None)) == (
        f"rank 1 ran out of memory in forward (not metered: {FAULT})"
    )
    assert run((pressure.OUT_OF_MEMORY, "backward", "peak 1, limit 2", "Error: of the other")) == (
        "ranks 0, 1 ran out of memory in backward (peak 1, limit 2: Error: of the other)"
    )
