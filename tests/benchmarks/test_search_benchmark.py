"""The benchmark against peers: its card, comparison of states, the RFC's sketches and this package's contestants."""

import gc
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks import search
from benchmarks.peers.card import CpuCard, card_on
from benchmarks.peers.data import Rows
from benchmarks.peers.ours import exhaustive
from benchmarks.peers.rfc import difference
from benchmarks.peers.state import changed, state_of
from benchmarks.peers.task import Task
from benchmarks.peers.watch import Attempts
from torchtune_adaptive.engine.memory.devices import meter_for

CPU = torch.device("cpu")
KIB = 1024
LIMIT_BYTES = 5 << 20
OURS = [name for name in search.CONTESTANTS if name.startswith("ours")]


@pytest.fixture(autouse=True)
def keep_clocks_apart() -> Iterator[None]:
    """Removes the clocks of contestants from the garbage collector, where they stay until their process ends."""
    callbacks = list(gc.callbacks)
    yield
    gc.callbacks[:] = callbacks


def small_task(limit_bytes: int) -> Task:
    return Task(CPU, limit_bytes, Rows([8, 16, 12, 16]))


# ---- the card


def test_the_card_fails_as_cuda_does_and_counts_its_failures() -> None:
    card = CpuCard(64 * KIB)
    with card:
        kept = torch.zeros(4 * KIB)
        for failures in (1, 2):
            with pytest.raises(torch.OutOfMemoryError) as raised:
                torch.zeros(16 * KIB)
            assert len(raised.value.args) == 1
            assert re.match(r"CUDA out of memory\. Tried to allocate 0\.06 MiB\. GPU 0 has", str(raised.value))
            assert card.ooms == failures
        torch.zeros(8 * KIB)
    assert card.live_bytes == kept.nbytes


@pytest.mark.parametrize("rows", [1, 5])
def test_card_and_meter_agree_to_the_byte_on_what_fits(rows: int) -> None:
    task = small_task(1 << 30)
    model = task.new_model()
    optimizer = task.new_optimizer(model)
    batch = task.collate(task.rows.worst(rows))
    task.train_step(model, optimizer, batch)
    meter = meter_for(CPU, model, [optimizer])
    meter.count(batch)
    with meter:
        task.train_step(model, optimizer, batch)

    def fits(limit_bytes: int) -> bool:
        card = card_on(CPU, limit_bytes)
        card.hold(model, optimizer)
        try:
            with card:
                task.train_step(model, optimizer, card.place(batch))
        except torch.OutOfMemoryError:
            optimizer.zero_grad()
        return card.ooms == 0

    assert [fits(meter.peak_bytes), fits(meter.peak_bytes - 1)] == [True, False]


# ---- what is compared


TOUCHES: dict[str, Callable[[Any, Any], object]] = {
    "parameters": lambda model, _: next(model.parameters()).data.add_(1),
    "buffers": lambda model, _: next(model.buffers()).add_(1),
    "optimizer": lambda _, optimizer: next(iter(optimizer.state.values()))["exp_avg"].add_(1),
    "torch RNG": lambda *_: torch.rand(1),
    "Python RNG": lambda *_: random.random(),
    "NumPy RNG": lambda *_: np.random.rand(),
}


@pytest.mark.parametrize("part", TOUCHES)
def test_a_change_is_found_in_its_part_and_in_no_other(part: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(3, 2)).sum().backward()
    optimizer.step()
    before = state_of(model, optimizer)
    assert changed(before, state_of(model, optimizer)) == []
    TOUCHES[part](model, optimizer)
    assert changed(before, state_of(model, optimizer)) == [part]


def test_a_search_by_training_is_over_when_its_last_attempt_begins() -> None:
    task = small_task(1 << 30)
    model = task.new_model()
    optimizer = task.new_optimizer(model)
    attempts = Attempts(task)
    for size in (8, 4, 2):
        attempts.begin(size, model, optimizer)
        task.train_step(model, optimizer, task.take(0, 1)) if size == 4 else torch.rand(1)
    found = attempts.found()
    assert (found.size, found.steps, found.survives) == (2, 1, "yes, started over 1 x in mid-training")
    assert found.changed == ["parameters", "optimizer", "torch RNG"]


# ---- contestants


@pytest.fixture(scope="module")
def exact() -> int:
    """What exhaustive search finds under ``LIMIT_BYTES``."""
    found = exhaustive(small_task(LIMIT_BYTES))
    assert found.steps >= 3 * found.size
    return found.size


@pytest.mark.slow
@pytest.mark.parametrize("name", OURS)
def test_the_packages_contestants_find_the_exact_size_and_the_default_one_row_less(name: str, exact: int) -> None:
    found = search.CONTESTANTS[name](small_task(LIMIT_BYTES))
    if name.startswith(search.DEFAULT):
        assert found.size == exact - 1
    else:
        assert found.size == exact
    assert (found.changed, found.survives, found.error) == ([], "yes", "")
    assert found.steps > 1
    assert (found.ooms > 0) == ("binary" in name or "decrease" in name)
    assert 0 < found.gc_seconds < found.seconds


def test_the_sketch_by_difference_runs_as_a_contestant_and_finds_too_much(exact: int) -> None:
    found = difference(small_task(LIMIT_BYTES))
    assert found.size > exact
    assert (found.changed, found.steps, found.ooms) == (["torch RNG"], 0, 0)
    assert found.survives.startswith("OOM at step")
