"""``find_max_batch_size``, and the exhaustive search that all are compared with."""

import torch

from benchmarks.peers.card import card_on
from benchmarks.peers.data import Batch
from benchmarks.peers.rfc import is_out_of_memory
from benchmarks.peers.task import Task
from benchmarks.peers.watch import Clock, Found, Search
from torchtune_adaptive import find_max_batch_size
from torchtune_adaptive.settings import Strategy

STEPS_OF_A_TRIAL = 3  # the first makes the optimizer's state, the others begin with it
BEYOND = 3  # sizes tried above the largest that fits, to see that none of them fits again


def ours(
    task: Task,
    *,
    strategy: Strategy = "linear_extrapolation",
    margin: float = 0.05,
    max_batch_size: int | None = None,
) -> Found:
    """``find_max_batch_size`` with rows of the greatest length, as its documentation asks for."""
    model = task.new_model()
    optimizer = task.new_optimizer(model)
    ooms = 0

    def train_step(batch: Batch) -> None:
        nonlocal ooms
        try:
            task.train_step(model, optimizer, batch)
        except torch.OutOfMemoryError:
            ooms += 1
            raise

    def make_batch(rows: int) -> Batch:
        return {name: values.to(task.device) for name, values in task.collate(task.rows.worst(rows)).items()}

    search = Search(task, model, optimizer)
    result = find_max_batch_size(
        train_step,
        make_batch,
        model=model,
        optimizer=optimizer,
        memory_limit=task.limit_bytes,
        strategy=strategy,
        margin=margin,
        max_batch_size=max_batch_size,
    )
    found = search.over(result.batch_size, ooms)
    found.survives = task.trained(found.size, model, optimizer)
    return found


def exhaustive(task: Task) -> Found:
    """The largest number of rows of the greatest length with which three steps in a row fit, by trying all numbers."""
    clock = Clock()
    largest, rows = 0, 1
    while rows <= largest + BEYOND:
        if _fits(task, rows):
            assert largest == rows - 1, f"{rows} rows fit, {rows - 1} do not"
            largest = rows
        rows += 1
    return Found(size=largest, steps=task.steps, seconds=clock.seconds, survives="yes")


def _fits(task: Task, rows: int) -> bool:
    model = task.new_model()
    optimizer = task.new_optimizer(model)
    task.card = card_on(task.device, task.limit_bytes)
    task.card.hold(model)
    batch = task.collate(task.rows.worst(rows))

    def train() -> None:
        with task.card:
            for _ in range(STEPS_OF_A_TRIAL):
                task.train_step(model, optimizer, task.card.place(batch))

    return not is_out_of_memory(train)
