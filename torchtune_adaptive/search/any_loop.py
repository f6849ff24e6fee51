"""``find_max_batch_size``: the search for any PyTorch training loop."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from torchtune_adaptive.distributed.consensus import Consensus
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.memory.devices import computing_device, meter_for
from torchtune_adaptive.memory.meter import MemoryMeter
from torchtune_adaptive.search.find import search
from torchtune_adaptive.search.strategies import NO_BOUND, SMALL_BATCH_SIZES, SearchResult
from torchtune_adaptive.search.workload import Workload
from torchtune_adaptive.settings import AdaptiveSettings, Strategy, parse_memory


def find_max_batch_size(
    train_step: Callable[[Any], object],
    make_batch: Callable[[int], Any],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    memory_limit: int | str | None = None,
    strategy: Strategy = "linear_extrapolation",
    power_of_two: bool = False,
    margin: float = 0.05,
    max_batch_size: int | None = None,
) -> SearchResult:
    """Finds the largest batch size whose train step fits into memory, for any PyTorch training loop.

    Model, optimizer and random generators are afterwards as they were, bit for bit, and gradients are
    None; anything else that ``train_step`` changes (a learning rate schedule, a gradient scaler) is the
    caller's to protect. With an initialised process group all ranks must call it, with the same
    arguments but for ``memory_limit``; they get the same sizes, the largest that fit on every rank.

    Args:
        train_step: a whole step on a batch: forward, loss, backward, optimizer step. If training accumulates
            gradients, forward and backward twice: the second pass needs more, beside the gradients of the first.
        make_batch: ``make_batch(n)`` gives a worst-case batch of n samples: the longest that training will meet.
        model: on the CPU or on CUDA; plain, FSDP2 or any other whose ranks issue the same collectives.
        optimizer: its state is created by a step of two samples before anything is measured.
        memory_limit: bytes, or text such as "80GiB", that this rank may use; None for what the device has.
            On the CPU it is required.
        strategy: "linear_extrapolation", "binary_search" or "decrease_until_oom"; the last needs ``max_batch_size``.
        power_of_two: round the size down to a power of two.
        margin: fraction of the limit that is held back, in [0, 1).
        max_batch_size: the search does not look above it.

    Raises:
        InputError: an argument is not as described (a ``ValueError``).
        NothingFitsError: not even a batch of one sample fits (an ``InputError``).

    >>> model = torch.nn.Linear(8, 8)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> def train_step(batch):
    ...     model(batch).sum().backward()
    ...     optimizer.step()
    >>> found = find_max_batch_size(
    ...     train_step, lambda n: torch.ones(n, 8), model=model, optimizer=optimizer, memory_limit="64KiB", margin=0.0
    ... )
    >>> found.batch_size
    1019
    """
    settings = AdaptiveSettings(
        strategy=strategy,
        power_of_two=power_of_two,
        max_batch_size=max_batch_size,
        memory_limit_bytes=None if memory_limit is None else parse_memory(memory_limit),
        margin=margin,
    )
    if strategy == "decrease_until_oom" and max_batch_size is None:
        raise InputError("`max_batch_size` must be a number for strategy 'decrease_until_oom', but is None instead.")
    device = computing_device(model)
    meter = meter_for(device, model, [optimizer])
    with _phases_by_hooks(model, optimizer, meter), contextlib.closing(Consensus()) as consensus:
        workload = Workload(
            train_step=train_step,
            model=model,
            optimizers=[optimizer],
            device=device,
            meter=meter,
            consensus=consensus,
        )
        return search(
            workload, make_batch, settings=settings, start=SMALL_BATCH_SIZES[0], bound=max_batch_size or NO_BOUND
        )


@contextmanager
def _phases_by_hooks(model: nn.Module, optimizer: torch.optim.Optimizer, meter: MemoryMeter) -> Iterator[None]:
    """Mark the phases of a train step that is not ours: forward, backward (with the loss), optimizer."""
    handles = [
        model.register_forward_pre_hook(lambda *_: meter.enter_phase("forward")),
        model.register_forward_hook(lambda *_: meter.enter_phase("backward")),
        optimizer.register_step_pre_hook(lambda *_: meter.enter_phase("optimizer")),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
