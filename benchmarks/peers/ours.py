"""``find_max_batch_size``, and the exhaustive search that all are compared with."""

import torch

from benchmarks.peers.card import card_on
from benchmarks.peers.data import Batch
from benchmarks.peers.rfc import bisect, is_out_of_memory
from benchmarks.peers.task import STEPS, Model, Task
from benchmarks.peers.watch import Clock, Found, Search
from torchtune_adaptive import find_max_batch_size
from torchtune_adaptive.engine.memory.out_of_memory import free_memory
from torchtune_adaptive.engine.recovery.micro_batches import Slices
from torchtune_adaptive.engine.recovery.step import RecoverableStep
from torchtune_adaptive.settings import Strategy

STEPS_OF_A_TRIAL = 3  # the first makes the optimizer's state, the others begin with it
MOST_ROWS = 256  # where the bisection begins
BEYOND = 3  # sizes tried above the largest that fits, to see that none of them fits again


def ours(
    task: Task,
    *,
    strategy: Strategy = "linear_extrapolation",
    margin: float = 0.05,
    max_batch_size: int | None = None,
    recovers: bool = False,
) -> Found:
    """``find_max_batch_size`` with rows of the greatest length, as its documentation asks for.

    Args:
        recovers: train with ``RecoverableStep``.
    """
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
    found.survives = (
        _recovered(task, found.size, model, optimizer) if recovers else task.trained(found.size, model, optimizer)
    )
    return found


def _recovered(task: Task, size: int, model: Model, optimizer: torch.optim.Optimizer) -> str:
    """As ``task.trained``, with ``RecoverableStep``."""

    def micro_step(batch: Batch) -> None:
        (model(**batch) * (len(batch["tokens"]) / size)).backward()

    task.card.hold(model, optimizer)
    sizes = Slices(size)
    with task.card:
        step: RecoverableStep[None] = RecoverableStep(model, micro_step, micro_batch_size=sizes, optimizer=optimizer)
        for number in range(STEPS):
            step(task.take(number * size, size))
            optimizer.step()
            optimizer.zero_grad()
    return f"yes, with {len(step.events)} OOMs, down to {sizes.size}" if step.events else "yes"


def exhaustive(task: Task, *, first: int = 1) -> Found:
    """The largest number of rows of the greatest length with which three steps in a row fit.

    All numbers from ``first`` on are tried, until three in a row do not fit.
    """
    clock = Clock()
    largest, rows = first - 1, first
    while rows <= largest + BEYOND:
        if _fits(task, rows):
            largest = rows
        rows += 1
    return Found(size=largest, steps=task.steps, seconds=clock.seconds, survives="yes")


def bisected(task: Task) -> Found:
    """As ``exhaustive``, from the number that a bisection finds."""
    return exhaustive(task, first=max(1, bisect(lambda rows: not _fits(task, rows), most=MOST_ROWS)))


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

    fits = not is_out_of_memory(train)
    free_memory(task.device)
    return fits
