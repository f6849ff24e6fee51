"""Small stand-ins that several unit tests use."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.engine.loop import Loop
from torchtune_adaptive.engine.memory.cpu_meter import CpuMeter
from torchtune_adaptive.engine.memory.devices import computing_device
from torchtune_adaptive.engine.search.options import SearchOptions
from torchtune_adaptive.engine.search.strategies import SearchResult
from torchtune_adaptive.training.batch.row_format import Row
from torchtune_adaptive.training.run_state import AdaptiveState, RunIdentity

STATE = AdaptiveState(
    run=RunIdentity("1f3a", "full_finetune"),
    epochs_run=2,
    epoch_samples=0,
    schedule_steps=25,
    batch_size=8,
    is_global=False,
    reference_samples=16,
    samples_per_step=32,
    global_step=75,
    micro_batch=None,
    micro_batch_limit=8,
    micro_batch_unit="rows",
    left_over=(96, 100),
    padding=(1000, 1200),
    dataset_samples=400,
    ranks=4,
    memory_limit_bytes=1000,
    rank_states=[{"random": {}}] * 4,
    optimizer={"groups": [[{"lr": 0.1}]], "numbers": {}},
    config={"seed": 1, "optimizer.lr": 0.1},
    backoff={"next_trial": 80, "last_failure": 72, "wait_steps": 8, "largest_fitted": 8},
)


def loop_of(model: nn.Module, consensus: Consensus, *, release: Callable[[], object] = lambda: None) -> Loop:
    """A loop with ``model`` alone, for tests that bring their own micro-steps."""
    return Loop(
        model=model,
        optimizers=[],
        device=computing_device(model),
        micro_step=lambda rows: None,
        release=release,
        consensus=consensus,
    )


class OneOf(Consensus):
    """One rank of several; ``others`` are the values of the other ranks. ``said`` are the numbers that it gave."""

    def __init__(self, rank: int, world_size: int, *others: Any) -> None:
        super().__init__()
        self._place = (rank, world_size)
        self._others = others
        self.said: list[int] = []

    @property
    def rank(self) -> int:
        return self._place[0]

    @property
    def world_size(self) -> int:
        return self._place[1]

    def max_over_ranks(self, number: int) -> int:
        self.said.append(number)
        return max(number, *self._others)

    def from_all_ranks(self, value: Any) -> list[Any]:
        return [*self._others[: self.rank], value, *self._others[self.rank :]]


class Samples:
    """A data set of rows of given lengths; remembers which were read."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Row:
        self.read.append(index)
        return {"tokens": [1] * self.lengths[index], "labels": [1] * self.lengths[index]}


def search_result(**changed: Any) -> SearchResult:
    """What a search may have found: 13 rows fit, 8 are used."""
    found: dict[str, Any] = {
        "strategy": "binary_search",
        "exact_batch_size": 13,
        "batch_size": 8,
        "bound": 100,
        "memory_limit_bytes": 1000,
        "margin": 0.05,
        "world_size": 1,
        "probes": (),
    }
    return SearchResult(**found | changed)


def search_options(**changed: Any) -> SearchOptions:
    """A search for the exact size that fits, without a margin."""
    options: dict[str, Any] = {"strategy": "linear_extrapolation", "power_of_two": False, "margin": 0.0}
    return SearchOptions(**options | changed)


class CachingMeter(CpuMeter):
    """The meter of a device of 1 KiB, whose allocator has freed its cache ``retries`` times, and a clock."""

    retries = 0
    now_ns = 0

    @property
    def total_retries(self) -> int:
        return self.retries

    @property
    def available_bytes(self) -> int:
        return 1024

    @property
    def peak_bytes(self) -> int:
        return 512


class Prepared(torch.optim.Optimizer):
    """As accelerate's: it has called no ``__init__`` of torch, and its inner optimizer does the work."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)
