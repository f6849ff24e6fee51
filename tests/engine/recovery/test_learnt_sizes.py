"""After an error only micro-batches as large as the one that failed are cut, and training stays the same."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.rnn import pad_sequence

from tests.support.faults import same_bits, under
from tests.support.ranks import run_on_ranks
from tests.support.recovery_trials import every, left_behind
from torchtune_adaptive import MemoryEvent, RecoverableStep
from torchtune_adaptive.engine.recovery.attempts import MemoryPressure
from torchtune_adaptive.engine.recovery.backoff import Backoff
from torchtune_adaptive.engine.recovery.size_range import SizeRange, num_tokens
from torchtune_adaptive.errors import InputError, NothingFitsError
from torchtune_adaptive.testing import Fault, out_of_memory, wrap_micro_steps

CAPACITY = 40  # tokens
SHORT, LONG = [8, 9, 8, 7], [7, 15, 8, 8]  # in micro-batches of four rows: 36 and 60 tokens


def rows_of(*lengths: int) -> list[torch.Tensor]:
    return [torch.arange(length) % 7 for length in lengths]


class Ragged:
    """A model on rows of different lengths, of which ``capacity`` tokens with padding fit in a micro-batch.

    Attributes:
        seen: sizes of the micro-batches of the last step, also of those that failed.
        left: what errors have left behind in the model.
    """

    def __init__(self, size: int = 4, *, capacity: int = CAPACITY, sharded: bool = False, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Embedding(7, 4), nn.Dropout(0.2), nn.Linear(4, 1))
        if sharded:
            for module in (self.model[0], self.model[2], self.model):
                fully_shard(module)
        self.capacity = capacity
        self.seen: list[int] = []
        self.events: list[MemoryEvent] = []
        self.left: list[str] = []
        options = {"on_event": self._note} | options
        self.step = RecoverableStep(self.model, self.micro_step, micro_batch_size=size, **options)
        self.cutter: Any = self.step._cutter

    def micro_step(self, rows: Sequence[torch.Tensor]) -> tuple[torch.Tensor, int]:
        self.seen.append(num_tokens(rows))
        hidden = self.model(pad_sequence(list(rows), batch_first=True))
        if self.seen[-1] > self.capacity:
            out_of_memory()
        is_token = pad_sequence([torch.ones(len(row)) for row in rows], batch_first=True)
        loss_sum = (hidden.squeeze(2) * is_token).square().sum()
        loss_sum.backward()
        return loss_sum.detach(), len(rows)

    def _note(self, event: MemoryEvent) -> None:
        self.events.append(event)
        if event.pressure is MemoryPressure.OUT_OF_MEMORY:
            self.left += left_behind(self.model)

    def train(self, *lengths: int) -> list[torch.Tensor]:
        """Run a step. Returns this rank's gradients."""
        if not self.step.recovers:
            self.step.dry_run(rows_of(3, 4))
        self.seen.clear()
        torch.manual_seed(1)
        self.step(rows_of(*lengths))
        found: list[Any] = [parameter.grad for parameter in self.model.parameters()]
        self.model.zero_grad()
        return [gradient.to_local() if hasattr(gradient, "to_local") else gradient for gradient in found]


# ---- one process


def test_after_a_micro_batch_larger_than_any_before_only_such_ones_are_cut() -> None:
    toy, told = Ragged(), Ragged(capacity=100)
    toy.train(*SHORT)
    gradients = toy.train(*LONG, *SHORT)
    assert toy.seen == [60, 30, 16, 36]
    for _ in range(3):
        toy.train(*SHORT)
        assert toy.seen == [36]
    toy.train(*LONG)
    assert toy.seen == [30, 16]
    assert toy.step.micro_batch_size == 4
    told.step.sizes.failed(60)
    assert same_bits(gradients, told.train(*LONG, *SHORT))


def test_it_is_learnt_in_the_first_step_too_if_another_micro_batch_fits() -> None:
    toy = Ragged()
    toy.train(*SHORT, *LONG)
    assert toy.seen == [36, 60, 36, 30, 16]
    assert [event.too_large for event in toy.events] == [60]
    alone = Ragged()
    alone.train(*LONG)
    assert [(event.before, event.after, event.too_large) for event in alone.events] == [(4, 2, None)]


def test_the_event_and_its_line_say_from_which_size_on_micro_batches_are_cut() -> None:
    toy = Ragged()
    toy.train(*SHORT)
    toy.train(*LONG)
    (event,) = toy.events
    assert (event.step, event.before, event.after, event.too_large, event.size_unit) == (2, 4, 4, 60, "tokens")
    assert str(event).startswith("micro-batches of 60 tokens or more are cut from now on: in step 2 rank 0 ran out of")
    assert toy.step.retries == 1


def test_the_range_narrows_with_each_error_and_every_other_size_is_kept() -> None:
    toy = Ragged()
    toy.train(*SHORT)
    for longest in (20, 16, 12, 11, 10, 14, 13):
        toy.train(longest, 7, 7, 7)
    assert [event.too_large for event in toy.events] == [80, 64, 48, 44]
    assert (toy.step.sizes.largest_fitted, toy.step.sizes.smallest_failed) == (40, 44)


def test_an_error_that_the_sizes_do_not_explain_halves_the_micro_batch_and_is_tried_again() -> None:
    toy = Ragged()
    toy.train(*SHORT)
    wrap_micro_steps(toy.step, partial(under, {0: Fault(0)}))
    toy.train(*SHORT)
    toy.train(*SHORT)
    assert [(event.before, event.after, event.too_large) for event in toy.events] == [(4, 2, None), (2, 4, None)]
    assert toy.step.sizes.limit is None


def test_a_single_row_that_does_not_fit_ends_the_training() -> None:
    toy = Ragged()
    toy.train(*SHORT)
    with pytest.raises(NothingFitsError, match="a single row per micro-step must fit, but in step 2 rank 0 ran out"):
        toy.train(41, 3, 3, 3)
    assert toy.events[0].too_large == 164


def test_sizes_are_tried_again_when_it_is_asked_for() -> None:
    toy = Ragged()
    toy.train(*SHORT)
    toy.train(*LONG)
    toy.step.try_larger()
    toy.train(*LONG)
    assert toy.seen == [60, 30, 16]
    toy.capacity = 100
    toy.train(*LONG)
    assert toy.seen == [30, 16]
    toy.step.try_larger()
    for _ in range(2):
        toy.train(*LONG)
        assert toy.seen == [60]
    assert len(toy.events) == 2


def test_thrashing_that_the_sizes_explain_cuts_the_next_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Ragged(capacity=100)
    toy.train(*SHORT)
    monkeypatch.setattr(toy.step._watch, "is_thrashing", lambda: True)
    toy.train(*LONG, *SHORT)
    assert toy.seen == [60, 36]
    monkeypatch.undo()
    toy.train(*LONG)
    assert toy.seen == [30, 16]
    assert [(event.pressure, event.too_large) for event in toy.events] == [(MemoryPressure.THRASHING, 60)]


def test_the_size_may_be_what_a_function_says() -> None:
    toy = Ragged(size_of=lambda rows: sum(map(len, rows)))
    toy.train(*SHORT)
    toy.train(*LONG)
    assert str(toy.events[0]).startswith("micro-batches of 38 or more are cut from now on")
    assert toy.seen == [60, 30, 16]


def test_without_integers_the_size_is_the_number_of_samples() -> None:
    model, events = nn.Linear(4, 1), list[MemoryEvent]()

    def micro_step(rows: torch.Tensor) -> None:
        model(rows).sum().backward()

    step = RecoverableStep(model, micro_step, micro_batch_size=4, on_event=events.append)
    step.sizes.fitted(1)
    step.backoff.fitted(4)
    step.dry_run(torch.ones(4, 4))
    wrap_micro_steps(step, partial(under, {0: Fault(0)}))
    step(torch.ones(4, 4))
    assert str(events[0]).startswith("micro-batches of 4 samples or more are cut from now on")


def _raises(rows: Any) -> int:
    raise KeyError("pixels")


@pytest.mark.parametrize(
    ("size_of", "said"),
    [
        (_raises, "raised KeyError: 'pixels'"),
        (lambda rows: 0, "returned 0"),
        (lambda rows: 2.5, "returned 2.5"),
        (lambda rows: None, "returned None"),
    ],
)
def test_a_bad_size_is_refused_in_the_first_step(size_of: Any, said: str) -> None:
    with pytest.raises(InputError, match=f"`size_of` must return an integer of at least 1, but {said} instead"):
        Ragged(size_of=size_of).train(*SHORT)


def test_only_every_tenth_line_of_many_equal_ones_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    toy = Ragged(on_event=None)
    caplog.set_level("INFO")
    toy.train(*SHORT)
    wrap_micro_steps(toy.step, partial(under, {0: Fault(0)}))
    for _ in range(25):
        toy.step.backoff.next_trial = 0
        toy.train(*SHORT)
        wrap_micro_steps(toy.step, partial(under, {0: Fault(0)}))
    lines = [record.getMessage() for record in caplog.records if "ran out of memory" in record.getMessage()]
    assert toy.step.retries == 25
    assert len(lines) == 10 + 1
    assert lines[-1].endswith("(20 times so far)")


# ---- two ranks


def _on_ranks(rank: int) -> list[Any]:
    """A long row on one rank only: sizes of each step, events, and whether it equals a run told the same cuts."""
    lengths = [(SHORT, SHORT), (SHORT + SHORT, LONG + SHORT), (SHORT, LONG), (LONG, SHORT), (SHORT, [15, 15, 15, 15])]
    toy, told = Ragged(sharded=True), Ragged(sharded=True, capacity=1000)
    found = []
    for number, of_ranks in enumerate(lengths):
        if number == 1:
            told.step.sizes.failed(60)
        gradients = toy.train(*of_ranks[rank])
        found.append((list(toy.seen), same_bits(gradients, told.train(*of_ranks[rank]))))
    return [*found, [(event.step, event.ranks, event.too_large) for event in toy.events], len(told.events)]


def test_every_rank_cuts_as_many_micro_batches_as_the_one_with_the_long_row() -> None:
    first, second = run_on_ranks(_on_ranks, 2)
    assert first[:5] == [
        ([36], True),
        ([36, 36, 18, 16, 36], True),  # the first two in the attempt that failed on the other rank
        ([18, 16], True),
        ([30, 16], True),
        ([18, 16], True),
    ]
    assert [one[0] for one in second[:5]] == [[36], [60, 30, 16, 36], [30, 16], [18, 16], [30, 30]]
    assert all(one[1] for one in second[:5])
    assert first[5:] == second[5:] == [[(2, (1,), 60)], 0]


def _narrowed(rank: int) -> list[int | None]:
    """Limits after steps in which both ranks fail, larger sizes are tried again and fit, and one rank fails."""
    toy = Ragged(sharded=True)
    toy.train(*SHORT)
    toy.train(*((7, 15, 8, 8), (7, 13, 8, 8))[rank])
    limits = [toy.step.sizes.limit]
    toy.step.try_larger()
    toy.capacity = 65
    toy.train(*(LONG, SHORT)[rank])
    limits.append(toy.step.sizes.limit)
    toy.train(*(SHORT, (7, 17, 8, 8))[rank])
    return [*limits, toy.step.sizes.limit]


def test_the_smallest_size_of_all_ranks_counts_until_a_larger_one_fits() -> None:
    assert run_on_ranks(_narrowed, 2) == [[52, None, 68]] * 2


def _sizes_that_differ(rank: int) -> str:
    toy = Ragged(sharded=True, size_of=lambda rows: num_tokens(rows) + rank)
    with pytest.raises(InputError) as failure:
        toy.train(*SHORT)
    return str(failure.value)


def test_sizes_that_differ_between_ranks_for_the_same_samples_are_refused_on_every_rank() -> None:
    first, second = run_on_ranks(_sizes_that_differ, 2)
    assert first == second
    assert "`size_of` must return the same size on every rank for the same micro-batch, but returned" in first


def _faults(rank: int, stride: int) -> dict[str, Any]:
    """Faults at every ``stride``-th operation before a size is learnt, in the step that does, and after it.

    A fault strikes one rank or both. Each run is compared with one that is told the micro-batches of each step.
    """
    toy, told = Ragged(sharded=True), Ragged(sharded=True, capacity=1000)
    steps = [(SHORT, SHORT), (SHORT + SHORT, LONG + SHORT), (SHORT, LONG)]
    consensus = toy.step.sizes._consensus
    for one in (toy, told):
        one.train(*SHORT)

    def run(faults: dict[tuple[int, int], Fault]) -> bool:
        """Whether the gradients of all steps are those of the other run."""
        toy.step.backoff, toy.step.sizes = Backoff(largest_fitted=4), SizeRange(consensus)
        toy.step.sizes.fitted(36)
        toy.cutter.size = 4
        toy.events.clear()
        is_right = []
        for number, of_ranks in enumerate(steps):
            wrap_micro_steps(
                toy.step, partial(under, {place: faults[at, place] for at, place in faults if at == number})
            )
            found = toy.train(*of_ranks[rank])
            told.cutter.size, told.step.sizes.smallest_failed = toy.cutter.size, toy.step.sizes.limit
            is_right.append(same_bits(found, told.train(*of_ranks[rank])))
        return all(is_right)

    counted = {place: Fault(None) for place in ((0, 0), (1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (2, 1))}
    assert run(counted)
    struck, wrong, learnt = 0, [], 0
    for place, counter in counted.items():
        for point in every(consensus.min_over_ranks(counter.count), "turns", stride):
            if not run({place: Fault(point.get(rank))}):
                wrong.append((place, point))
            struck += any(event.too_large is None and event.pressure for event in toy.events)
            learnt += any(event.too_large == 60 for event in toy.events)
    return {"struck": struck, "wrong": wrong, "learnt": learnt, "told": told.events, "left": toy.left}


@pytest.mark.parametrize("stride", [29, pytest.param(7, marks=pytest.mark.exhaustive)])
def test_a_fault_may_strike_anywhere_before_while_and_after_a_size_is_learnt(stride: int) -> None:
    first, second = run_on_ranks(_faults, 2, stride)
    assert first == second
    assert first["wrong"] == first["left"] == first["told"] == []
    assert first["struck"] > 300 / stride
    assert first["learnt"] > 300 / stride
