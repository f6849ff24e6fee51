"""A step that runs out of memory is run again in smaller micro-batches, and trains the same.

The toy is a linear model. Its inputs are the first token of each row, and the row's number of tokens.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.faults import same_bits, under
from tests.support.toys import CachingMeter
from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.engine.memory.cpu_meter import CpuMeter
from torchtune_adaptive.engine.memory.phases import Phases
from torchtune_adaptive.engine.recovery import watch
from torchtune_adaptive.engine.recovery.step import RecoverableStep
from torchtune_adaptive.engine.recovery.watch import MemoryEvent, PressureWatch
from torchtune_adaptive.testing import Fault, wrap_micro_steps
from torchtune_adaptive.training.assembly import prepare_recovery
from torchtune_adaptive.training.batch.limits import MicroBatchLimit, RowLimit, TokenLimit
from torchtune_adaptive.training.batch.loader import StepSamples
from torchtune_adaptive.training.batch.micro_batches import MicroBatch, MicroBatcher
from torchtune_adaptive.training.batch.row_format import Row, TokenRows
from torchtune_adaptive.training.objectives import Loss
from torchtune_adaptive.training.optimizers import OptimizerStep
from torchtune_adaptive.training.train_step import TrainStep

CPU = torch.device("cpu")


def rows_of(*lengths: int) -> list[Row]:
    return [{"tokens": [number + 1] * length, "labels": []} for number, length in enumerate(lengths)]


ROWS = rows_of(1, 3, 2, 1, 3, 2, 1, 1)


class Toy:
    """A model, its step, and the recovery around it.

    Attributes:
        cuts: the rows of each micro-batch.
        events: what happened where memory ran short.
    """

    def __init__(
        self,
        limit: MicroBatchLimit,
        *,
        recovers: bool = True,
        why_not: str = "",
        meter: CpuMeter | None = None,
        adam: bool = False,
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(2, 1)
        self.cuts: list[int] = []
        self.events: list[MemoryEvent] = []
        phases, consensus = Phases([self.model], meter), Consensus()
        optimizer: Any = torch.optim.AdamW if adam else partial(torch.optim.SGD, momentum=0.9)
        self.optimizer = optimizer(self.model.parameters(), lr=0.01)
        self.step = TrainStep(
            [self.model],
            self._objective,
            OptimizerStep(self.model, [self.optimizer], ranks=1, max_grad_norm=None),
            collate=self._collate,
            device=CPU,
            phases=phases,
            meter=meter,
        )
        self.micro_batches = MicroBatcher(limit, TokenRows(-100), consensus, ROWS)
        self.watch = PressureWatch(consensus, meter, phases)
        self.recoverable = RecoverableStep(
            self.model,
            self.step.micro_step,
            micro_batch_size=self.micro_batches,
            optimizer=self.optimizer,
            on_event=self.events.append,
            watch=self.watch,
        )
        loop = self.step.loop(consensus)
        prepare_recovery(self.recoverable, loop, self.watch, ROWS, is_wanted=recovers, why_not=why_not)
        self.cuts.clear()

    def _objective(self, batch: torch.Tensor) -> Loss:
        weight = torch.tensor(len(batch))
        return Loss(self.model(batch).square().sum(), weight, weight)

    def _collate(self, rows: Sequence[Row]) -> torch.Tensor:
        self.cuts.append(len(rows))
        return torch.tensor([[float(row["tokens"][0]), float(len(row["tokens"]))] for row in rows])

    def failing_at(self, *numbers: int) -> "Toy":
        """Return this toy; from now on, micro-steps with these numbers run out of memory."""
        wrap_micro_steps(self.recoverable, partial(under, {number: Fault(0) for number in numbers}))
        return self

    def sums(self, rows: list[Row] = ROWS, *, measured: bool = False) -> Loss:
        sums = self.recoverable(StepSamples(rows, len(rows), ranks=1, measured=measured))
        self.micro_batches.end_step()
        return sums

    def train(self, rows: list[Row] = ROWS) -> list[torch.Tensor]:
        """One optimizer step; the parameters after it."""
        self.step.finish(self.sums(rows))
        return [parameter.detach().clone() for parameter in self.model.parameters()]


# ---- without recovery


@pytest.mark.parametrize("options", [{"recovers": False}, {"why_not": "of a reason"}], ids=str)
def test_without_recovery_steps_are_the_same_and_an_error_passes(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    toy, recovering = Toy(RowLimit(4), adam=True, **options), Toy(RowLimit(4), adam=True)
    assert (toy.recoverable.recovers, recovering.recoverable.recovers) == (False, True)
    assert len(toy.optimizer.state) == len(recovering.optimizer.state) == 2  # before the first step
    assert caplog.messages == ["An out-of-memory error in training will end the run: of a reason."] * (
        "why_not" in options
    )
    assert same_bits(toy.train(), recovering.train())
    assert toy.micro_batches.take_padding() == recovering.micro_batches.take_padding() == pytest.approx(1 - 14 / 24)
    with pytest.raises(torch.OutOfMemoryError, match="on purpose"):
        toy.failing_at(1).train()
    assert (toy.micro_batches.limit, toy.recoverable.retries, toy.events) == (RowLimit(4), 0, [])


# ---- the first step


@pytest.mark.parametrize(
    ("limit", "sizes", "recovers"), [(RowLimit(4), [2, 2, 2, 2], True), (TokenLimit(12), [1] * 8, False)]
)
def test_a_first_step_may_have_small_micro_batches(limit: MicroBatchLimit, sizes: list[int], recovers: bool) -> None:
    toy, whole = Toy(limit, recovers=recovers), Toy(limit, recovers=recovers)
    toy.micro_batches.start_small()
    assert toy.micro_batches.limit == limit
    torch.testing.assert_close(toy.train(), whole.train())
    assert toy.cuts == sizes
    toy.train()
    assert toy.cuts[len(sizes) :] == whole.cuts


def test_a_small_first_step_that_runs_out_of_memory_does_not_reduce_later_ones() -> None:
    toy = Toy(RowLimit(4))
    toy.micro_batches.start_small()
    toy.failing_at(0).train()
    assert toy.cuts == [2, *[1] * 8]
    assert (toy.events[0].before, toy.events[0].after) == (2, 1)
    wrap_micro_steps(toy.recoverable, None)
    toy.train()
    assert toy.cuts[9:] == [4, 4]


# ---- slow for lack of memory


def test_single_rows_stay_although_they_are_slow_which_is_an_event_once(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = CachingMeter()
    monkeypatch.setattr(watch, "perf_counter_ns", lambda: meter.now_ns)
    toy = Toy(RowLimit(1), meter=meter)
    for step in range(25):
        toy.train()
        frees_cache = step >= 5
        meter.retries += frees_cache
        meter.now_ns += 10**9 * (1 + frees_cache)
    assert toy.micro_batches.limit == RowLimit(1)
    (event,) = toy.events
    assert str(event).startswith("micro-batch stays at 1 row, although rank 0 had to free")


# ---- measured steps


@pytest.mark.parametrize("faults", [[], [0], [1]], ids=str)
def test_a_measured_step_has_the_gradient_norm_of_its_first_half(faults: list[int]) -> None:
    toy = Toy(RowLimit(4)).failing_at(*faults)
    sums = toy.sums(ROWS[:7], measured=True)
    assert sums.weight.item() == 7
    assert sums.small_batch is not None
    norm_squared, weight = sums.small_batch.tolist()
    assert weight == 4
    toy.step.policy.zero_grad()
    toy.step.micro_step(MicroBatch(ROWS[:4]))
    expected = sum(p.grad.double().square().sum().item() for p in toy.model.parameters() if p.grad is not None)
    assert norm_squared == pytest.approx(expected)
