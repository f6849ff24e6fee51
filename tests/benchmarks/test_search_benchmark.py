"""The benchmark against peers: its card fails where a GPU would, and this package's contestants find what fits."""

import gc
import re
from collections.abc import Iterator

import pytest
import torch

from benchmarks import search
from benchmarks.peers.card import CpuCard, card_on
from benchmarks.peers.data import Rows
from benchmarks.peers.ours import exhaustive
from benchmarks.peers.task import Task
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
