"""toma's ``toma.batch`` around the train step."""

import importlib
from typing import Any

from benchmarks.peers.task import STEPS, Task
from benchmarks.peers.watch import Attempts, Found

INITIAL_BATCH_SIZE = 512  # as in toma's documentation; it has no default


def toma_finder(task: Task) -> Found:
    """Every step of the training is a call of the decorated function, whose size toma remembers from call to call."""
    toma: Any = importlib.import_module("toma")
    model = task.new_model()
    optimizer = task.new_optimizer(model)
    next_row = 0
    attempts = Attempts(task)
    sizes: list[int] = []
    ooms: list[int] = []

    @toma.toma.batch(initial_batchsize=INITIAL_BATCH_SIZE)
    def train_step(batch_size: int) -> int:
        nonlocal next_row
        if not sizes:
            attempts.begin(batch_size, model, optimizer)
        optimizer.zero_grad()
        task.train_step(model, optimizer, task.take(next_row, batch_size))
        next_row += batch_size
        return batch_size

    task.card.hold(model, optimizer)
    with task.card:
        for _ in range(STEPS):
            ooms_before = task.card.ooms
            sizes.append(train_step())
            ooms.append(task.card.ooms - ooms_before)
    return attempts.found_by_first(sizes, ooms)
