"""Search for the largest batch that fits, for the recipes and for ``find_max_batch_size``."""

from collections.abc import Callable
from typing import Any

from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.engine.loop import Loop
from torchtune_adaptive.engine.memory.devices import check_limit
from torchtune_adaptive.engine.memory.meter import MemoryMeter
from torchtune_adaptive.engine.progress import Bar
from torchtune_adaptive.engine.search.options import SearchOptions, Strategy
from torchtune_adaptive.engine.search.probe import NoMoreRows, Prober
from torchtune_adaptive.engine.search.strategies import (
    Fits,
    SearchResult,
    binary_search,
    decrease_until_oom,
    linear_extrapolation,
    round_down_to_power_of_two,
    usable_bytes,
)
from torchtune_adaptive.errors import NOTHING_FITS_ADVICE, NothingFitsError
from torchtune_adaptive.text import format_bytes


def search(
    loop: Loop, make_batch: Callable[[int], Any], options: SearchOptions, *, start: int, bound: int
) -> SearchResult:
    """The largest batch size up to ``bound`` and ``options.max_batch_size`` that fits on every rank. A collective.

    If ``make_batch`` returns fewer rows than it is asked for, their number is the bound. Restores models, optimizers,
    random generators and meter. See ``find_max_batch_size``.

    Args:
        make_batch: ``make_batch(n)`` returns the micro-batches of a worst-case step, of n rows each.
        start: the first size of a binary search.

    Raises:
        InputError: the memory limit cannot be applied, or ``make_batch`` always returns the same batch.
        NothingFitsError: one row does not fit.
    """
    check_limit(options.memory_limit_bytes, loop.device)
    bound = min(bound, options.max_batch_size or bound)
    meter, forecasts = loop.meter_for_probes(), options.strategy == "linear_extrapolation"
    prober = Prober(loop, make_batch, meter=meter, forecasts=forecasts)
    bar = Bar(desc="searching batch size", unit=" probes", disable=loop.consensus.rank != 0)

    def fits(batch_size: int) -> bool:
        for probe in prober.probes:  # the search may have begun again
            if probe.batch_size == batch_size:
                return probe.fits
        bar.set_postfix_str(f"trying {batch_size}")
        fits = prober.fits(batch_size)
        bar.update()
        bar.set_postfix_str(f"{batch_size} {'fits' if fits else 'does not fit'}")
        return fits

    with meter.exactly(), bar, loop.restored() as restore_optimizers:
        if options.memory_limit_bytes is not None:
            limit_meter(meter, options)
        if loop.state_comes_first and not loop.create_states(meter):
            restore_optimizers()
        loop.clean_up()
        warm = prober.warm_up(bound, after_failure=restore_optimizers)
        warm = warm and loop.create_states(meter)  # a gradient scaler may have skipped the optimizer's step
        # Context, communicators and optimizer state are allocated now, so that the remaining memory is known.
        limit_bytes = loop.consensus.min_over_ranks(limit_meter(meter, options))
        exact = 0
        while warm:
            try:
                exact = _run_strategy(options.strategy, fits, prober, start=start, bound=bound)
                break
            except NoMoreRows as end:
                bound = end.rows
        if exact == 0:
            raise _nothing_fits(meter, limit_bytes, options.margin, loop.consensus)
        forecast_rows = prober.rows_by_forecast(exact) if exact < bound else None
        batch_size = _rounded(exact, fits, prober) if options.power_of_two else exact
    return SearchResult(
        strategy=options.strategy,
        exact_batch_size=exact,
        batch_size=batch_size,
        bound=bound,
        memory_limit_bytes=limit_bytes,
        margin=options.margin,
        world_size=loop.consensus.world_size,
        probes=tuple(prober.probes),
        forecast_rows=forecast_rows,
        forecast=prober.forecast_peaks(exact),
    )


def limit_meter(meter: MemoryMeter, options: SearchOptions) -> int:
    """Limit the meter to the memory of this rank less the margin, which applies only here; return that memory."""
    available_bytes = meter.available_bytes
    limit_bytes = min(options.memory_limit_bytes or available_bytes, available_bytes)
    meter.limit_bytes = usable_bytes(limit_bytes, options.margin)
    return limit_bytes


def _run_strategy(strategy: Strategy, fits: Fits, prober: Prober, *, start: int, bound: int) -> int:
    if strategy == "decrease_until_oom":
        return decrease_until_oom(fits, max_batch_size=bound)
    if strategy == "binary_search":
        return binary_search(fits, start=start, max_batch_size=bound)
    return linear_extrapolation(fits, prober.largest_forecast, prober.largest_along_curves, max_batch_size=bound)


def _rounded(exact: int, fits: Fits, prober: Prober) -> int:
    """The power of two at or below ``exact``, after a probe of it. If the probe fails, a smaller one."""
    batch_size = round_down_to_power_of_two(exact)
    fitted = {probe.batch_size for probe in prober.probes if probe.fits}
    while batch_size > 1 and batch_size not in fitted and not fits(batch_size):
        batch_size //= 2
    return batch_size


def _nothing_fits(meter: MemoryMeter, limit_bytes: int, margin: float, consensus: Consensus) -> NothingFitsError:
    """The error, with the highest peak and the lowest limit of all ranks. A collective."""
    peak_bytes = consensus.max_over_ranks(meter.peak_bytes)
    return NothingFitsError(
        f"not even one row fits: its step ran out of memory at {format_bytes(peak_bytes)} on one rank, of"
        f" {format_bytes(usable_bytes(limit_bytes, margin))} usable"
        f" (limit {format_bytes(limit_bytes)}, margin {margin:g}); {NOTHING_FITS_ADVICE}."
    )
