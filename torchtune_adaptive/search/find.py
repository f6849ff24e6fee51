"""Search for the largest batch that fits, for the recipes and for ``find_max_batch_size``."""

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from torchtune_adaptive.distributed.consensus import Consensus
from torchtune_adaptive.errors import NOTHING_FITS_ADVICE, NothingFitsError
from torchtune_adaptive.logs import warn_on_rank_zero
from torchtune_adaptive.memory.devices import check_limit
from torchtune_adaptive.memory.meter import MemoryMeter
from torchtune_adaptive.memory.process_limits import held_back
from torchtune_adaptive.search.found_size import FoundSize
from torchtune_adaptive.search.probe import Prober, ProgressBar
from torchtune_adaptive.search.strategies import (
    SearchResult,
    binary_search,
    decrease_until_oom,
    largest_from_above,
    linear_extrapolation,
    round_down_to_power_of_two,
    usable_bytes,
)
from torchtune_adaptive.search.workload import Workload
from torchtune_adaptive.settings import AdaptiveSettings
from torchtune_adaptive.text import format_bytes

log = logging.getLogger(__name__)

MakeBatch = Callable[[int], Any]

_MORE_MEMORY = 1.01  # times what it was: then a size found before may be smaller than what fits now


def search(
    workload: Workload,
    make_batch: MakeBatch,
    *,
    settings: AdaptiveSettings,
    start: int,
    bound: int,
    known: FoundSize | None = None,
) -> SearchResult:
    """The largest batch size in [1, bound] that fits on every rank, by ``settings.strategy``. A collective.

        Restores models, optimizers, random generators and meter. See ``find_max_batch_size``.
    Args:
        make_batch: ``make_batch(n)`` returns a worst-case batch of n rows.
        start: the first size of a binary search.
        known: an earlier result under the same conditions. If one probe shows that it still fits, it is the result.

    Raises:
        InputError: the memory limit cannot be applied.
        NothingFitsError: one row does not fit.
    """
    check_limit(settings.memory_limit_bytes, workload.device)
    with _system_margin(workload, settings) as is_limited:
        return _search(
            workload, make_batch, settings=settings, start=start, bound=bound, known=known, is_limited=is_limited
        )


def _search(
    workload: Workload,
    make_batch: MakeBatch,
    *,
    settings: AdaptiveSettings,
    start: int,
    bound: int,
    known: FoundSize | None,
    is_limited: bool,
) -> SearchResult:
    meter, forecasts = workload.meter_for_probes(), settings.strategy == "linear_extrapolation"
    prober = Prober(workload, make_batch, meter=meter, forecasts=forecasts, process_is_limited=is_limited)
    progress = ProgressBar(prober, workload.consensus)
    with meter.exactly(), progress, workload.kept_as_it_is() as restore_optimizers:
        if settings.memory_limit_bytes is not None:
            meter.set_limit(usable_bytes(settings.memory_limit_bytes, settings.margin))
        if not workload.create_states(meter):
            restore_optimizers()
        workload.clean_up()
        warm = prober.warm_up(bound, after_failure=restore_optimizers)
        # Context, communicators and optimizer state are allocated now, so that the remaining memory is known.
        limit_bytes = workload.consensus.min_over_ranks(_limit_meter(meter, settings))
        if warm and known is not None and _still_fits(known, progress, limit_bytes):
            exact, batch_size, forecast_rows = known.exact_batch_size, known.batch_size, known.forecast_rows
        else:
            known = None
            exact = _run_strategy(prober, progress, settings=settings, start=start, bound=bound) if warm else 0
            if workload.consensus.any_rank(is_limited):
                # Later probes have left compiled kernels in memory.
                exact = largest_from_above(progress.fits, exact)
            if exact == 0:
                raise _nothing_fits(meter, limit_bytes, settings.margin, workload.consensus)
            forecast_rows = prober.rows_by_forecast(exact) if exact < bound else None
            batch_size = _rounded(exact, progress, prober) if settings.power_of_two else exact
    return SearchResult(
        strategy=settings.strategy,
        exact_batch_size=exact,
        batch_size=batch_size,
        bound=bound,
        memory_limit_bytes=limit_bytes,
        margin=settings.margin,
        world_size=workload.consensus.world_size,
        probes=tuple(prober.probes),
        forecast_rows=forecast_rows,
        forecast=prober.forecast_peaks(exact),
        reused=known is not None,
    )


def _still_fits(known: FoundSize, progress: ProgressBar, limit_bytes: int) -> bool:
    """Whether a size found before fits now, by one probe, and a larger one is not expected to. A collective.

    Args:
        limit_bytes: the lowest of all ranks.
    """
    found = f"batch_size {known.exact_batch_size}, found before,"
    if limit_bytes > known.memory_limit_bytes * _MORE_MEMORY:
        before, now = format_bytes(known.memory_limit_bytes), format_bytes(limit_bytes)
        warn_on_rank_zero(log, f"{found} is not reused, because memory was {before} then and is {now} now: searching.")
        return False
    if progress.fits(known.exact_batch_size):
        return True
    warn_on_rank_zero(log, f"{found} no longer fits: searching.")
    return False


def first_that_fits(
    workload: Workload, make_batch: MakeBatch, sizes: Iterable[int], *, settings: AdaptiveSettings
) -> int | None:
    """The first of ``sizes`` whose whole train step fits on every rank, tried during training; None if none does.

    Restores all state, as ``search`` does. The optimizers must have their state. A collective.
    """
    meter = workload.meter_for_probes()
    prober = Prober(workload, make_batch, meter=meter, forecasts=False)
    with _system_margin(workload, settings), meter.exactly(), workload.kept_as_it_is():
        _limit_meter(meter, settings)
        return next((size for size in sizes if prober.fits(size)), None)


def _system_margin(workload: Workload, settings: AdaptiveSettings) -> AbstractContextManager[bool]:
    """Context: whether the system limits this process below the host's memory limit; if so, reserve the margin."""
    on_host = workload.device.type == "cpu"
    return held_back(settings.margin, enough_bytes=(settings.memory_limit_bytes or 0) if on_host else 0)


def _limit_meter(meter: MemoryMeter, settings: AdaptiveSettings) -> int:
    """Limit the meter to the usable memory minus the margin; return the limit before the margin."""
    available_bytes = meter.available_bytes
    limit_bytes = min(settings.memory_limit_bytes or available_bytes, available_bytes)
    meter.set_limit(usable_bytes(limit_bytes, settings.margin))
    return limit_bytes


def _run_strategy(prober: Prober, progress: ProgressBar, *, settings: AdaptiveSettings, start: int, bound: int) -> int:
    if settings.strategy == "decrease_until_oom":
        return decrease_until_oom(progress.fits, max_batch_size=bound)
    if settings.strategy == "binary_search":
        return binary_search(progress.fits, start=start, max_batch_size=bound)
    return linear_extrapolation(progress.fits, prober.largest_forecast, max_batch_size=bound)


def _rounded(exact: int, progress: ProgressBar, prober: Prober) -> int:
    """The power of two at or below ``exact``, after a probe of it. If the probe fails, a smaller one."""
    batch_size = round_down_to_power_of_two(exact)
    while batch_size > 1 and not _known_to_fit(batch_size, prober) and not progress.fits(batch_size):
        batch_size //= 2
    return batch_size


def _known_to_fit(batch_size: int, prober: Prober) -> bool:
    return any(probe.fits and probe.batch_size == batch_size for probe in prober.probes)


def _nothing_fits(meter: MemoryMeter, limit_bytes: int, margin: float, consensus: Consensus) -> NothingFitsError:
    """The error, with the highest peak of all ranks. A collective.

    Args:
        limit_bytes: the lowest of all ranks.
    """
    peak_bytes = consensus.max_over_ranks(meter.peak_bytes)
    return NothingFitsError(
        f"not even one row fits: its step ran out of memory at {format_bytes(peak_bytes)} on one rank, of"
        f" {format_bytes(usable_bytes(limit_bytes, margin))} usable"
        f" (limit {format_bytes(limit_bytes)}, margin {margin:g}); {NOTHING_FITS_ADVICE}."
    )
