"""Search for the largest batch that fits: the one road behind the recipes and ``find_max_batch_size``."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from torchtune_adaptive.distributed.consensus import Consensus
from torchtune_adaptive.distributed.snapshot import leave_no_trace
from torchtune_adaptive.errors import NothingFitsError
from torchtune_adaptive.memory.meter import MemoryMeter
from torchtune_adaptive.memory.out_of_memory import free_memory, only_new_garbage
from torchtune_adaptive.refuse import refuse_impossible_limit
from torchtune_adaptive.search.probe import Prober, ProgressBar
from torchtune_adaptive.search.strategies import (
    SearchResult,
    binary_search,
    decrease_until_oom,
    linear_extrapolation,
    round_down_to_power_of_two,
    usable_bytes,
    within,
)
from torchtune_adaptive.settings import AdaptiveSettings, Strategy
from torchtune_adaptive.text import format_bytes


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
    expected: int | None = None,
) -> SearchResult:
    """Search in [1, bound] by ``settings.strategy`` and leave no trace. A collective; see ``find_max_batch_size``.

    ``device`` is where the model computes, ``start`` where a binary search begins, ``expected`` the size that a plan
    names: the search looks no further unless it fits, and the size above it too. The meter's limit is
    afterwards as before.
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
        with meter.exactly(), leave_no_trace(model, optimizer) as restore_optimizer, only_new_garbage():
            if settings.memory_limit_bytes is not None:
                meter.set_limit(usable_bytes(settings.memory_limit_bytes, settings.margin))
            free_memory(device)  # what loading the model left in the allocator's cache
            warm = prober.warm_up(bound, after_failure=restore_optimizer)
            # Now that context, communicators and optimizer state are there, the rest is what the device has left.
            limit_bytes = min(settings.memory_limit_bytes or meter.available_bytes, meter.available_bytes)
            meter.set_limit(usable_bytes(limit_bytes, settings.margin))

            def by_strategy(bound: int) -> int:
                return _by_strategy(settings.strategy, prober, progress, start=start, bound=bound)

            exact = within(by_strategy, progress.fits, expected=expected, max_batch_size=bound) if warm else 0
            if exact == 0:
                raise _nothing_fits(meter, limit_bytes, settings.margin, consensus)
            forecast_rows = prober.rows_by_forecast(exact) if exact < bound else None
            batch_size = _rounded(exact, progress, prober) if settings.power_of_two else exact
    finally:
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
        forecast_rows=forecast_rows,
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
    with meter.exactly(), leave_no_trace(model, optimizer), only_new_garbage():
        free_memory(device)
        limit_bytes = min(settings.memory_limit_bytes or meter.available_bytes, meter.available_bytes)
        meter.set_limit(usable_bytes(limit_bytes, settings.margin))
        return next((size for size in sizes if prober.fits(size)), None)


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
