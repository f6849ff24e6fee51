"""The size chosen by speed is as good as the best, steps are timed fairly, and timing restores all state.

The clock is a fake one, which train steps and the making of batches advance.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from torchtune_adaptive.engine import loop
from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.engine.loop import Loop
from torchtune_adaptive.engine.search import throughput
from torchtune_adaptive.engine.search.throughput import smallest_near_best, tokens_per_second


@settings(max_examples=200)
@given(rates=st.dictionaries(st.integers(1, 64), st.floats(900, 1100), min_size=1, max_size=8))
def test_the_size_chosen_is_within_two_percent_of_the_best_and_no_smaller_one_is(rates: dict[int, float]) -> None:
    chosen = smallest_near_best(rates)
    best = max(rates.values())
    assert rates[chosen] >= 0.98 * best
    assert [size for size in rates if size < chosen and rates[size] >= 0.98 * best] == []


# ---- timing


class Timed:
    """A loop whose steps of a size take, one after the other, the seconds in ``seconds`` for that size."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, seconds: dict[int, list[float]], consensus: Consensus | None = None
    ) -> None:
        torch.manual_seed(0)
        self.now_s = 0.0
        monkeypatch.setattr(throughput, "time", SimpleNamespace(perf_counter=lambda: self.now_s))
        self.taken: list[int] = []
        self.forgotten = 0
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        first = min(seconds)  # has one step before all others, which is not counted
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
        self.optimizer.step()  # its gradients stay, for the timing to remove
        self.now_s += next(self._seconds[len(batch)])

    def _release(self) -> None:
        self.forgotten += 1

    def make_batch(self, size: int) -> list[torch.Tensor]:
        self.now_s += 1000.0  # making a batch is not training
        return [torch.ones(size, 2)]

    def rates(self, sizes: list[int], *, num_tokens: int = 60) -> dict[int, float]:
        return tokens_per_second(self.loop, self.make_batch, sizes, num_tokens=lambda size: num_tokens * size)

    def state(self) -> list[Any]:
        """Copies of all that a step may change."""
        parameters = [parameter.detach().clone() for parameter in self.model.parameters()]
        return [*parameters, torch.get_rng_state(), torch.tensor(len(self.optimizer.state))]


# The first is a warm-up. The others have median 3, mean 4, minimum 1 and maximum 9.
SECONDS = [100.0, 9.0, 1.0, 3.0, 2.0, 5.0]


def test_rates_are_tokens_by_the_median_of_steps_after_a_warm_up_which_take_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Timed(monkeypatch, {4: SECONDS, 2: [6 * one for one in SECONDS]})
    assert made.rates([4, 2]) == {4: 4 * 60 / 3, 2: 2 * 60 / 18}
    assert made.taken == [2] + [4, 2] * 6


def test_timing_restores_all_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step changes parameters, random generators and optimizers; timing restores them."""
    made = Timed(monkeypatch, {4: SECONDS})
    before = made.state()
    made.rates([4])
    assert len(made.taken) == 7
    assert all(torch.equal(one, other) for one, other in zip(made.state(), before, strict=True))
    assert [parameter.grad for parameter in made.model.parameters()] == [None, None]
    assert made.forgotten == 2


def test_all_ranks_get_the_figures_of_rank_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    class SecondRank(Consensus):
        @property
        def rank(self) -> int:
            return 1

        def from_rank_zero(self, value: Any) -> Any:
            assert value == {4: 80.0}
            return {4: 7.0}

    assert Timed(monkeypatch, {4: SECONDS}, SecondRank()).rates([4]) == {4: 7.0}


def test_a_step_is_timed_from_an_idle_device_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA work is queued: the clock is read when the device has done all of it."""
    made = Timed(monkeypatch, {4: SECONDS})
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
    tokens_per_second(on_cuda, lambda size: ["step"], [1], num_tokens=lambda size: 0)
    assert events == ["step"] + ["waited for cuda", "clock", "step", "waited for cuda", "clock"] * 6
