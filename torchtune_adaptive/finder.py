"""Search for the largest batch that fits: the one road behind the recipes and ``find_max_batch_size``."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchtune_adaptive.consensus import Consensus
from torchtune_adaptive.errors import InputError, NothingFitsError
from torchtune_adaptive.meter import MemoryMeter, meter_for
from torchtune_adaptive.oom import free_memory
from torchtune_adaptive.probe import Prober, ProgressBar
from torchtune_adaptive.refuse import refuse_impossible_limit
from torchtune_adaptive.search import (
    SMALL_BATCH_SIZES,
    SearchResult,
    binary_search,
    decrease_until_oom,
    linear_extrapolation,
    round_down_to_power_of_two,
    usable_bytes,
)
from torchtune_adaptive.settings import AdaptiveSettings, Strategy, parse_memory
from torchtune_adaptive.snapshot import leave_no_trace
from torchtune_adaptive.units import format_bytes

# Where neither the user nor a data set bounds the search: far above any batch, so that a step whose memory
# does not grow with the batch ends the search.
_NO_BOUND = 2**20


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
        train_step: a whole step on a batch: forward, loss, backward, optimizer step.
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
    494
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
    device = _computing_device(model)
    meter = meter_for(device, model, optimizer)
    with _phases_by_hooks(model, optimizer, meter), contextlib.closing(Consensus()) as consensus:
        return search(
            train_step,
            make_batch,
            model=model,
            optimizer=optimizer,
            device=device,
            meter=meter,
            settings=settings,
            consensus=consensus,
            start=SMALL_BATCH_SIZES[0],
            bound=max_batch_size or _NO_BOUND,
        )


def _computing_device(model: nn.Module) -> torch.device:
    """Where ``model`` computes: where its parameters are, or with FSDP2's CPU offload where they are brought to."""
    parameter = next(model.parameters(), None)
    if parameter is None:
        raise InputError("`model` must have parameters, but has none.")
    mesh_type = parameter.device_mesh.device_type if isinstance(parameter, DTensor) else parameter.device.type
    if mesh_type == parameter.device.type:
        return parameter.device
    return torch.device(mesh_type, torch.get_device_module(mesh_type).current_device())


def search(
    train_step: Callable[[Any], object],
    make_batch: Callable[[int], Any],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    meter: MemoryMeter,
    settings: AdaptiveSettings,
    consensus: Consensus,
    start: int,
    bound: int,
) -> SearchResult:
    """Search in [1, bound] by ``settings.strategy`` and leave no trace. A collective; see ``find_max_batch_size``.

    ``device`` is where the model computes, ``start`` where a binary search begins. The meter's limit is set to
    what the search may use, and is None again afterwards.
    """
    refuse_impossible_limit(settings, device)
    prober = Prober(
        train_step,
        make_batch,
        model=model,
        device=device,
        meter=meter,
        consensus=consensus,
        forecasts=settings.strategy == "linear_extrapolation",
    )
    progress = ProgressBar(prober, consensus)
    try:
        with leave_no_trace(model, optimizer) as restore_optimizer:
            if settings.memory_limit_bytes is not None:
                meter.limit_bytes = usable_bytes(settings.memory_limit_bytes, settings.margin)
            free_memory(device)  # what loading the model left in the allocator's cache
            warm = prober.warm_up(bound, after_failure=restore_optimizer)
            # Now that context, communicators and optimizer state are there, the rest is what the device has left.
            limit_bytes = min(settings.memory_limit_bytes or meter.available_bytes, meter.available_bytes)
            meter.limit_bytes = usable_bytes(limit_bytes, settings.margin)
            exact = _by_strategy(settings.strategy, prober, progress, start=start, bound=bound) if warm else 0
            if exact == 0:
                raise _nothing_fits(meter, limit_bytes, settings.margin, consensus)
            batch_size = _rounded(exact, progress, prober) if settings.power_of_two else exact
    finally:
        meter.limit_bytes = None
        progress.close()
    return SearchResult(
        strategy=settings.strategy,
        exact_batch_size=exact,
        batch_size=batch_size,
        bound=bound,
        memory_limit_bytes=limit_bytes,
        margin=settings.margin,
        world_size=consensus.world_size,
        probes=tuple(prober.probes),
    )


def first_that_fits(
    sizes: Iterable[int],
    train_step: Callable[[Any], object],
    make_batch: Callable[[int], Any],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    meter: MemoryMeter,
    settings: AdaptiveSettings,
    consensus: Consensus,
) -> int | None:
    """The first of ``sizes`` whose whole train step fits on every rank, in the midst of training; None if none does.

    Leaves no trace, as ``search`` does. The optimizer must have its state. A collective.
    """
    prober = Prober(
        train_step, make_batch, model=model, device=device, meter=meter, consensus=consensus, forecasts=False
    )
    outside = meter.limit_bytes, meter.exact
    try:
        with leave_no_trace(model, optimizer):
            free_memory(device)
            limit_bytes = min(settings.memory_limit_bytes or meter.available_bytes, meter.available_bytes)
            meter.limit_bytes, meter.exact = usable_bytes(limit_bytes, settings.margin), True
            return next((size for size in sizes if prober.fits(size)), None)
    finally:
        meter.limit_bytes, meter.exact = outside


def _by_strategy(strategy: Strategy, prober: Prober, progress: ProgressBar, *, start: int, bound: int) -> int:
    if strategy == "decrease_until_oom":
        return decrease_until_oom(progress.fits, max_batch_size=bound)
    if strategy == "binary_search":
        return binary_search(progress.fits, start=start, max_batch_size=bound)
    return linear_extrapolation(progress.fits, prober.largest_forecast, max_batch_size=bound)


def _rounded(exact: int, progress: ProgressBar, prober: Prober) -> int:
    """The power of two at or below ``exact``, itself tried; a smaller one should it not fit after all."""
    batch_size = round_down_to_power_of_two(exact)
    while batch_size > 1 and not _known_to_fit(batch_size, prober) and not progress.fits(batch_size):
        batch_size //= 2
    return batch_size


def _known_to_fit(batch_size: int, prober: Prober) -> bool:
    return any(probe.fits and probe.batch_size == batch_size for probe in prober.probes)


def _nothing_fits(meter: MemoryMeter, limit_bytes: int, margin: float, consensus: Consensus) -> NothingFitsError:
    """The error with the greatest need and the least limit of all ranks. A collective."""
    peak_bytes = consensus.max_over_ranks(meter.peak_bytes)
    limit_bytes = consensus.min_over_ranks(limit_bytes)
    return NothingFitsError(
        f"not even one row fits: its step ran out of memory at {format_bytes(peak_bytes)} on one rank, of the"
        f" {format_bytes(usable_bytes(limit_bytes, margin))} that may be used"
        f" (limit {format_bytes(limit_bytes)}, margin {margin:g});"
        " shorter rows, activation checkpointing, LoRA or more ranks would need less."
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
