"""The three sketches of torchtune RFC 2199, rewritten without its rounding down to a power of two."""

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.peers.data import Batch
from benchmarks.peers.task import STEPS, Model, Task
from benchmarks.peers.watch import Attempts, Found, Search
from torchtune_adaptive.engine.distributed.snapshot import RandomStates
from torchtune_adaptive.engine.memory.out_of_memory import comes_from_out_of_memory, free_memory

WHOLE_BATCH = 128  # which the first sketch cuts into chunks
MOST_ROWS = 100_000  # where the second begins to bisect


def is_out_of_memory(run: Callable[..., object], *args: Any) -> bool:
    """Whether ``run(*args)`` runs out of memory."""
    try:
        run(*args)
    except Exception as error:
        if not comes_from_out_of_memory(error):
            raise
        return True
    return False


# ---- the sketches


def halve_chunks(run: Callable[[int], object], *, chunk_size: int) -> int:
    """The first of ``chunk_size``, its half and so on at which ``run`` does not run out of memory.

    Each attempt begins with the random generators as they were.
    """
    random_states = RandomStates()
    while chunk_size:
        random_states.restore()
        if not is_out_of_memory(run, chunk_size):
            return chunk_size
        chunk_size //= 2
    raise RuntimeError("Not enough memory even for one row.")


def bisect(is_oom: Callable[[int], bool], *, most: int) -> int:
    """The largest size in [0, most] that is not out of memory, if fitting is monotone."""
    least, best = 0, 0
    while least <= most:
        middle = (least + most) // 2
        if is_oom(middle):
            most = middle - 1
        else:
            least, best = middle + 1, middle
    return best


def by_difference(allocated_bytes: Callable[[int], int], *, total_bytes: int) -> int:
    """``total_bytes`` divided by what two rows need more than one."""
    return total_bytes // (allocated_bytes(2) - allocated_bytes(1))


# ---- as contestants


def halving(task: Task) -> Found:
    """Trains with batches of 128 rows; the chunk size at which the first step succeeded is the size found."""
    model = task.new_model()
    optimizer = task.new_optimizer(model)
    task.card.hold(model, optimizer)
    attempts = Attempts(task)
    sizes, ooms = [WHOLE_BATCH], []
    with task.card:
        for step in range(STEPS):
            batch = task.take(step * WHOLE_BATCH, WHOLE_BATCH)

            def accumulate(chunk_size: int, batch: Batch = batch) -> None:
                if not ooms:
                    attempts.begin(chunk_size, model, optimizer)
                optimizer.zero_grad()
                _accumulate(model, batch, chunk_size)

            ooms_before = task.card.ooms
            sizes.append(halve_chunks(accumulate, chunk_size=sizes[-1]))
            ooms.append(task.card.ooms - ooms_before)
            optimizer.step()
    return attempts.found_by_first(sizes[1:], ooms)


def _accumulate(model: Model, batch: Batch, chunk_size: int) -> None:
    chunks = {name: values.split(chunk_size) for name, values in batch.items()}
    for tokens, labels in zip(chunks["tokens"], chunks["labels"], strict=True):
        loss = model(tokens=tokens, labels=labels) * (len(tokens) / WHOLE_BATCH)
        loss.backward()


def bisection(task: Task) -> Found:
    """Takes a whole step at each size asked, on the next rows of the data, and frees what a failed step has left."""
    model = task.new_model()
    optimizer = task.new_optimizer(model)
    next_row = 0

    def is_oom(rows: int) -> bool:
        nonlocal next_row
        start, next_row = next_row, next_row + rows
        failed = is_out_of_memory(lambda: task.train_step(model, optimizer, task.take(start, rows)))
        optimizer.zero_grad()
        free_memory(task.device)
        return failed

    return _searched(task, model, optimizer, lambda: bisect(is_oom, most=MOST_ROWS))


def difference(task: Task) -> Found:
    """Reads what is allocated after the forward pass, while activations are held: the most favourable reading."""
    model = task.new_model()
    optimizer = task.new_optimizer(model)

    def allocated_bytes(rows: int) -> int:
        batch = task.take(0, rows)
        loss = model(**batch)
        allocated = task.card.live_bytes
        del loss
        return allocated

    return _searched(task, model, optimizer, lambda: by_difference(allocated_bytes, total_bytes=task.limit_bytes))


def _searched(task: Task, model: Model, optimizer: torch.optim.Optimizer, find: Callable[[], int]) -> Found:
    """What ``find`` finds, and whether training survives with it."""
    task.card.hold(model, optimizer)
    search = Search(task, model, optimizer)
    with task.card:
        size = find()
    found = search.over(size)
    found.survives = task.trained(size, model, optimizer)
    return found
