"""The size chosen by speed is as good as the best, steps are timed fairly, and timing restores all state.

The clock is a fake one, which train steps and the making of batches advance.
"""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from torchtune_adaptive.engine import loop
from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.engine.loop import Loop
from torchtune_adaptive.engine.search import throughput
from torchtune_adaptive.engine.search.throughput import time_in_turns
from torchtune_adaptive.engine.search.timing import Timing, simplest_near_best
from torchtune_adaptive.errors import NothingFitsError
from torchtune_adaptive.testing import out_of_memory


@settings(max_examples=80)
@given(rates=st.lists(st.integers(9000, 11000), min_size=1, max_size=8))
def test_what_is_chosen_is_within_two_percent_of_the_best_and_nothing_simpler_is(rates: list[int]) -> None:
    chosen = simplest_near_best({place: Timing((10.0, 10.0), rate) for place, rate in enumerate(rates)})
    assert rates[chosen] >= 0.98 * max(rates)
    assert [rate for rate in rates[:chosen] if rate >= 0.98 * max(rates)] == []


def test_something_simpler_is_chosen_unless_the_best_leads_by_more_than_their_spread() -> None:
    unsteady, steady = Timing((1.0, 1.2, 1.4), 100), Timing((1.2,) * 3, 100)
    assert unsteady.spread == pytest.approx(1 / 6)
    faster, much_faster = Timing((1.1,) * 3, 100), Timing((0.9,) * 3, 100)
    assert simplest_near_best({"simple": unsteady, "other": faster}) == "simple"
    assert simplest_near_best({"simple": steady, "other": faster}) == "other"
    assert simplest_near_best({"simple": unsteady, "other": much_faster}) == "other"
    slower = Timing((11.0, 22.0), 1000)  # than the simplest, which is not as good as the best
    assert simplest_near_best({"simple": steady, "slower": slower, "other": faster}) == "other"


# ---- timing


class Timed:
    """A loop whose steps of a size take, one after the other, the seconds in ``seconds`` for that size."""

    def __init__(self, seconds: dict[int, list[float]], consensus: Consensus | None = None) -> None:
        torch.manual_seed(0)
        self.now_s = 0.0
        self.taken: list[int] = []
        self.fails_at: dict[int, int] = {}  # by size, which of its steps runs out of memory
        self.forgotten = 0
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        first = next(iter(seconds))  # has one step before all others, which is not counted
        self._seconds = {size: iter([50.0] * (size == first) + ones) for size, ones in seconds.items()}
        self.loop = Loop(
            micro_step=self._train_step,
            model=self.model,
            optimizers=[self.optimizer],
            device=torch.device("cpu"),
            meter=None,
            consensus=consensus or Consensus(),
            release=self._release,
        )

    def _train_step(self, batch: torch.Tensor) -> None:
        self.taken.append(len(batch))
        self.model(batch * torch.rand_like(batch)).square().sum().backward()
        if self.fails_at.get(len(batch)) == self.taken.count(len(batch)):
            out_of_memory()
        self.optimizer.step()  # its gradients stay, for the timing to remove
        self.now_s += next(self._seconds[len(batch)])

    def _release(self) -> None:
        self.forgotten += 1

    def make_batch(self, size: int) -> list[torch.Tensor]:
        self.now_s += 1000.0  # making a batch is not training
        return [torch.ones(size, 2)]

    def rates(self, sizes: list[int]) -> dict[int, float]:
        steps = {size: [self.make_batch(size)] for size in sizes}
        with mock.patch.object(throughput, "time", SimpleNamespace(perf_counter=lambda: self.now_s)):
            timings = time_in_turns(self.loop, steps, num_tokens={size: 60 * size for size in sizes})
        return {size: one.rate for size, one in timings.items()}

    def state(self) -> list[Any]:
        """Copies of all that a step may change."""
        parameters = [parameter.detach().clone() for parameter in self.model.parameters()]
        return [*parameters, torch.get_rng_state(), torch.tensor(len(self.optimizer.state))]


# The first is a warm-up. The others have median 0.3, mean 0.4, minimum 0.1 and maximum 0.9.
SECONDS = [10.0, 0.9, 0.1, 0.3, 0.2, 0.5]


def test_rates_are_tokens_by_the_median_of_steps_after_a_warm_up_which_take_turns() -> None:
    made = Timed({2: [0.7 * one for one in SECONDS], 4: SECONDS})
    assert made.rates([2, 4]) == pytest.approx({2: 2 * 60 / 0.21, 4: 4 * 60 / 0.3})
    assert made.taken == [2] + [2, 4] * 6


def test_what_is_clearly_slower_is_timed_once() -> None:
    made = Timed({2: SECONDS, 4: SECONDS, 5: SECONDS})
    assert made.rates([2, 4, 5]) == pytest.approx({2: 2 * 60 / 0.9, 4: 4 * 60 / 0.3, 5: 5 * 60 / 0.3})
    assert made.taken == [2] + [2, 4, 5] * 2 + [4, 5] * 4


def test_long_steps_are_timed_in_fewer_rounds() -> None:
    made = Timed({2: [10.0] * 6})
    assert made.rates([2]) == {2: 12}
    assert made.taken == [2] + [2] * 4


def test_what_runs_out_of_memory_after_all_is_left_out() -> None:
    made = Timed({2: SECONDS, 4: SECONDS, 5: SECONDS})
    made.fails_at = {4: 1, 5: 3}  # in the round that is not counted, and in a later one
    before = made.state()
    assert made.rates([2, 4, 5]).keys() == {2}
    assert made.taken == [2, 2, 4, 5, 2, 5, 5]  # two rows are clearly slower, and so timed once
    assert all(torch.equal(one, other) for one, other in zip(made.state(), before, strict=True))
    made = Timed({2: SECONDS})
    made.fails_at = {2: 2}
    with pytest.raises(NothingFitsError, match="although it had fitted"):
        made.rates([2])


def test_timing_restores_all_state() -> None:
    """Each step changes parameters, random generators and optimizers; timing restores them."""
    made = Timed({4: SECONDS})
    before = made.state()
    made.rates([4])
    assert len(made.taken) == 7
    assert all(torch.equal(one, other) for one, other in zip(made.state(), before, strict=True))
    assert [parameter.grad for parameter in made.model.parameters()] == [None, None]
    assert made.forgotten == 2


def test_all_ranks_get_the_figures_of_the_slowest_rank() -> None:
    class SecondRank(Consensus):
        @property
        def rank(self) -> int:
            return 1

        def from_all_ranks(self, value: Any) -> list[Any]:
            return [[6.0], value] if isinstance(value, list) else [value]

    assert Timed({4: SECONDS}, SecondRank()).rates([4]) == {4: 4 * 60 / 6}


def test_a_step_is_timed_from_an_idle_device_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA work is queued: the clock is read when the device has done all of it."""
    made = Timed({4: SECONDS})
    events: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: events.append(f"waited for {device}"))

    def clock() -> float:
        events.append("clock")
        return float(len(events))

    monkeypatch.setattr(throughput, "time", SimpleNamespace(perf_counter=clock))
    monkeypatch.setattr(loop, "free_memory", lambda device: None)
    on_cuda = Loop(
        micro_step=lambda batch: events.append(batch),
        model=made.model,
        optimizers=[],
        device=torch.device("cuda"),
        meter=None,
        consensus=Consensus(),
    )
    time_in_turns(on_cuda, {1: [["step"]]}, num_tokens={1: 1})
    assert events == ["waited for cuda", "clock", "step", "waited for cuda", "clock"] * 7
