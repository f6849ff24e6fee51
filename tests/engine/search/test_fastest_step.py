"""The fastest of the train steps that train the same is found, others are left out, and nothing is changed.

Train steps sleep on a fake clock.
"""

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.faults import same_bits
from tests.support.ranks import run_on_ranks
from torchtune_adaptive import FastestStep, InputError, NothingFitsError, find_fastest
from torchtune_adaptive.engine.search import throughput
from torchtune_adaptive.testing import out_of_memory

ROWS, WIDTH = 8, 16
BATCHES = [torch.arange(float(ROWS * WIDTH)).reshape(ROWS, WIDTH).sin(), torch.ones(ROWS, WIDTH)]


class Trained:
    """A model whose steps take as many seconds of a fake clock as they are told."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.now_s = 0.0
        throughput.time = SimpleNamespace(perf_counter=lambda: self.now_s)  # pyright: ignore

    def step(self, batch: torch.Tensor, seconds: float = 1.0, scale: float = 1.0) -> torch.Tensor:
        loss = scale * self.model(batch).square().sum() / len(batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.now_s += seconds
        return loss.detach()

    def evaluate(self, batch: torch.Tensor) -> torch.Tensor:
        self.now_s += 1.0
        return self.model(batch).square().sum() / len(batch)

    def lasting(self, seconds: float) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda batch: self.step(batch, seconds)

    def state(self) -> list[torch.Tensor]:
        """Copies of all that a step changes."""
        moments = [one for state in self.optimizer.state.values() for one in state.values()]
        return [one.detach().clone() for one in (*self.model.parameters(), *moments, torch.get_rng_state())]

    def find(self, train_steps: dict[str, Any], batches: Any = BATCHES, **options: Any) -> FastestStep:
        return find_fastest(train_steps, batches, model=self.model, optimizer=self.optimizer, **options)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Trained:
    monkeypatch.setattr(throughput, "time", throughput.time)  # to be restored
    return Trained()


def test_the_fastest_is_found_and_all_state_is_as_before(trained: Trained) -> None:
    trained.step(BATCHES[0])
    before = trained.state()
    found = trained.find({"slow": trained.lasting(3), "fast": trained.lasting(1), "as fast": trained.lasting(0.99)})
    assert found.name == "fast"
    assert [round(1 / timing.rate, 2) for timing in found.timings.values()] == [6.0, 2.0, 1.98]
    assert [line.split()[-1] for line in str(found).splitlines()[2:]] == ["KiB", "yes", "KiB"]
    assert same_bits(before, trained.state())


def test_what_trains_something_else_is_left_out(trained: Trained) -> None:
    def of_halves(batch: torch.Tensor) -> torch.Tensor:
        return trained.step(batch, scale=2.0)

    steps = {"usual": trained.lasting(2), "no optimizer": trained.evaluate, "sum of means": of_halves}
    found = trained.find(steps)
    assert found.name == "usual"
    assert {name: reason.split(",")[0].split(" is ")[0] for name, reason in found.left_out.items()} == {
        "no optimizer": "its loss in step 2",  # the first one had not yet any effect
        "sum of means": "its loss in step 1",
    }
    assert trained.find(steps, tolerance=10.0).left_out == {}


def test_a_loss_that_is_not_finite_is_no_measure_for_others(trained: Trained) -> None:
    def lost(batch: torch.Tensor) -> torch.Tensor:
        return trained.step(batch, scale=float("nan"))

    found = trained.find({"lost": lost, "usual": trained.lasting(2)})
    assert (found.name, found.left_out) == ("usual", {"lost": "its loss in step 1 is nan"})


def test_one_batch_shows_too_what_a_step_makes_of_the_model(trained: Trained) -> None:
    found = trained.find({"usual": trained.lasting(2), "no optimizer": trained.evaluate}, BATCHES[:1])
    assert list(found.left_out) == ["no optimizer"]


def test_a_limit_leaves_out_what_needs_more_memory(trained: Trained) -> None:
    def hungry(batch: torch.Tensor) -> torch.Tensor:
        ballast = torch.zeros(2**20)
        return trained.step(batch + ballast[:1], seconds=0.5)

    steps = {"hungry": hungry, "usual": trained.lasting(1)}
    assert trained.find(steps).name == "hungry"
    found = trained.find(steps, memory_limit="3MiB")
    assert (found.name, found.left_out) == ("usual", {"hungry": "out of memory"})
    with pytest.raises(NothingFitsError, match=r"^every train step is left out: hungry: out of memory; usual: "):
        trained.find(steps, memory_limit=1000)


def test_what_runs_out_of_memory_when_it_is_timed_is_left_out(trained: Trained) -> None:
    calls = itertools.count()

    def late(batch: torch.Tensor) -> torch.Tensor:
        if next(calls) == 2:  # after the steps whose losses are compared
            out_of_memory()
        return trained.step(batch, seconds=0.5)

    found = trained.find({"usual": trained.lasting(1), "late": late})
    assert (found.name, found.left_out) == ("usual", {"late": "memory ran out when it was timed"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_steps": {}}, "`train_steps` must not be empty"),
        ({"batches": []}, "`batches` must not be empty"),
        ({"tolerance": 0}, "`tolerance` must be a number above 0, but is 0 instead"),
        ({"tolerance": "x"}, "`tolerance` must be a number above 0, but is 'x' instead"),
        ({"train_steps": [print]}, "`train_steps` must be a dict of functions by name, but is "),
        ({"train_steps": {1: print}}, "`train_steps` must be a dict of functions by name, but is "),
        ({"train_steps": {"mine": 3}}, r"`train_steps\['mine'\]` must be a function, but is 3 instead"),
        ({"batches": iter(BATCHES)}, "`batches` must be a list of batches, but is a list_iterator instead"),
        ({"batches": torch.ones(2, 4, 8)}, "`batches` must be a list of batches, but is a Tensor instead"),
        ({"train_steps": {"mine": lambda _: None}}, "The train step 'mine' must return its loss, but returns None"),
        ({"memory_limit": "much"}, "'much'"),
        ({"memory_limit": "9000TiB"}, "`memory_limit` must be at most what the device has"),
    ],
)
def test_bad_arguments_are_one_sentence(trained: Trained, change: dict[str, Any], message: str) -> None:
    usual = {"train_steps": {"usual": trained.lasting(1)}}
    with pytest.raises(InputError, match=message):
        trained.find(**(usual | change))


def find_on_ranks(rank: int) -> tuple[str, dict[str, str]]:
    """The second train step is slow on rank 1, where the third runs out of memory and the fourth has another loss."""
    trained = Trained()
    model = nn.parallel.DistributedDataParallel(trained.model)

    def failing(batch: torch.Tensor) -> torch.Tensor:
        if rank == 1:
            out_of_memory()
        dist.all_reduce(torch.zeros(1))  # in which it must not be waited for
        return trained.step(batch, 0.1)

    steps = {
        "usual": trained.lasting(1),
        "unequal": trained.lasting(0.5 + rank),
        "failing": failing,
        "other": lambda batch: trained.step(batch, scale=1.0 + rank),
    }
    found = find_fastest(steps, BATCHES, model=model, optimizer=trained.optimizer)
    return found.name, {name: reason.split(" is ")[0] for name, reason in found.left_out.items()}


def test_ranks_agree_and_the_slowest_counts() -> None:
    one, other = run_on_ranks(find_on_ranks, 2)
    assert one == other == ("usual", {"failing": "out of memory", "other": "its loss in step 1"})
