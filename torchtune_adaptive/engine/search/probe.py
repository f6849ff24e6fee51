"""Does one worst-case train step fit on every rank?"""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch

from torchtune_adaptive.engine.loop import Loop
from torchtune_adaptive.engine.memory.devices import wait_for
from torchtune_adaptive.engine.memory.meter import MemoryMeter
from torchtune_adaptive.engine.memory.timeline import Forecast, Timeline
from torchtune_adaptive.engine.recovery.columns import copied, leaves, named_values, was_changed
from torchtune_adaptive.engine.search.strategies import FAILURES, NO_BOUND, SMALL_BATCH_SIZES, Probe
from torchtune_adaptive.errors import InputError

log = logging.getLogger(__name__)

_MOST_ITEMS = 8  # of a list in a batch are looked into


def _has_parts(batch: Any) -> bool:
    """Whether a tensor in ``batch`` is part of a larger one, such as a data set, which would count as a whole."""
    return any(
        isinstance(one, torch.Tensor) and one.layout is torch.strided and one.untyped_storage().nbytes() > one.nbytes
        for one in leaves(batch)
    )


class NoMoreRows(Exception):
    """A batch has fewer rows than it was asked for. All ranks raise it together.

    Attributes:
        rows: as many as the rank with the fewest has.
    """

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.rows = rows


class BatchRows:
    """Counts the rows of batches: dimensions and lengths that were 2 in a batch of 2 rows, and 3 in one of 3.

    Where there are none, as in an object of an unknown class, every batch has the rows that it was asked for.
    """

    def __init__(self, make_batch: Callable[[int], Any]) -> None:
        few, more = SMALL_BATCH_SIZES
        self._few, in_more = (dict(_lengths(make_batch(rows))) for rows in (few, more))
        self._places = [place for place, length in self._few.items() if (length, in_more.get(place)) == (few, more)]
        self._is_the_same = self._few == in_more

    def count(self, batch: Any, asked: int) -> int:
        """The rows of ``batch``, which has ``asked`` or fewer."""
        lengths = dict(_lengths(batch))
        return min(max((lengths[place] for place in self._places if place in lengths), default=asked), asked)

    def is_the_same(self, batch: Any) -> bool:
        """Whether ``batch`` and those of 2 and 3 rows all have the same lengths."""
        return self._is_the_same and dict(_lengths(batch)) == self._few


def _lengths(value: Any, *place: object) -> Iterator[tuple[tuple[object, ...], Any]]:
    """Yield each dimension, length and plain value in a batch, with its place. Other objects equal nothing."""
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple):
        yield from (((*place, "dimension", number), size) for number, size in enumerate(shape))
    elif (named := named_values(value)) is not None:
        for name, one in named:
            yield from _lengths(one, *place, name)
    elif isinstance(value, list | tuple):
        yield (*place, "length"), len(value)
        for index, one in enumerate(value[:_MOST_ITEMS]):
            yield from _lengths(one, *place, index)
    else:
        yield (*place, "value"), repr(value) if isinstance(value, str | bytes | int | float | None) else object()


@dataclass(eq=False)
class Prober:
    """Tries batch sizes on the real model and optimizer. All ranks must try the same sizes in the same order.

    A size fits under three conditions: its whole train step ran on every rank, no rank's peak was above its limit, and
    no rank's allocator had to free its cache. Probes change the real state: wrap a search in
    ``Loop.restored``.

    Attributes:
        make_batch: ``make_batch(n)`` returns the micro-batches of a worst-case step, of n rows each.
        meter: the meter of the loop's device, with the limit of this rank.
        forecasts: record timelines of the small sizes, for ``largest_forecast``; ``largest_along_curves`` has those of
            later sizes recorded too.
        probes: every size that was tried, in order.
    """

    loop: Loop
    make_batch: Callable[[int], Any]
    _: KW_ONLY
    meter: MemoryMeter
    forecasts: bool
    probes: list[Probe] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._consensus = self.loop.consensus
        self._timelines: dict[int, Timeline] = {}
        self._rows: BatchRows | None = None
        self._made_rows, self._made_the_same = 0, False
        self._is_curved = False
        self._has_traced_again = False
        self._has_explained = False
        self._gives_copies = True  # until a step has left its batch as it was: it may be a view of the user's data

    def warm_up(self, bound: int, *, after_failure: Callable[[], None]) -> bool:
        """Run one step of two rows, or of one if two do not fit. Returns whether it fits. A collective.

        It creates the optimizer's state, which must be in memory for later probes, and does lazy set-up. Two rows are
        tried first because some models, for example with batch normalisation, do not accept a single row.
        """
        for batch_size in (SMALL_BATCH_SIZES[0], 1):
            if batch_size <= bound:
                if self._attempt(batch_size, timeline=False).fits:
                    if bound >= SMALL_BATCH_SIZES[-1]:
                        self._look_for_rows()
                    return True
                after_failure()
        return False

    def _look_for_rows(self) -> None:
        found: list[BatchRows] = []
        is_done = self.loop.run_together(lambda: found.append(BatchRows(self.make_batch)))
        self._rows = found[0] if is_done else None

    def fits(self, batch_size: int) -> bool:
        """Whether a step of ``batch_size`` rows fits on every rank. A collective; all ranks get the same answer."""
        is_small = self.forecasts and batch_size in SMALL_BATCH_SIZES
        probe = self._attempt(batch_size, timeline=self._is_curved or is_small)
        self.probes.append(probe)
        return probe.fits

    def largest_forecast(self) -> int | None:
        """Forecast the largest batch size that fits on every rank, from the probes so far. A collective.

        None if a forecast is not possible. The growth of memory comes from the lines of the operations. Probes that
        fitted tell how much more than that the allocator takes. The next size is tried too if this neither stays nor
        grows in proportion.
        """
        # The first step at a size may compile kernels.
        if self._consensus.any_rank(not self._has_traced_again and self._operations_differ()):
            self._has_traced_again = True
            for batch_size in SMALL_BATCH_SIZES:
                self.fits(batch_size)
        mine = self._forecast_here()
        if not self._consensus.any_rank(mine is not None):
            self._explain_missing_forecast()
            return None
        largest = self._consensus.min_over_ranks(-1 if mine is None else mine)
        return None if largest < 0 else largest

    def largest_along_curves(self) -> int | None:
        """Forecast as ``largest_forecast`` does, where memory does not grow along lines. A collective.

        None if memory has not grown yet on any rank. From the first call on, all steps are recorded.
        """
        self._is_curved = True
        forecast, limit_bytes = self._forecast(), self.meter.limit_bytes
        mine = None
        if forecast is not None and limit_bytes is not None:
            tried, peak_bytes = max(self._fitted_bytes().items())
            forecast_bytes = forecast.peak_bytes(tried)
            # What the allocator takes beyond the forecast grows in proportion.
            mine = forecast.largest_batch_size(
                limit_bytes * forecast_bytes / max(peak_bytes, forecast_bytes), fitted=tried
            )
        largest = self._consensus.min_over_ranks(NO_BOUND if mine is None else mine)
        return largest if largest < NO_BOUND else None

    def rows_by_forecast(self, fitted: int) -> float | None:
        """The forecast of the largest batch size, before it is rounded down to ``fitted`` rows. A collective.

        The lowest forecast of all ranks; None if a rank has none.
        """
        forecast, missed_bytes = self._corrected_forecast(fitted)
        crossing = None
        if forecast is not None and self.meter.limit_bytes is not None:
            crossing = forecast.crossing(self.meter.limit_bytes - missed_bytes, fitted=fitted)
        crossings = [one for one in self._consensus.from_all_ranks(crossing) if one is not None]
        if len(crossings) < self._consensus.world_size:
            return None
        return min(max(min(crossings), fitted), fitted + 1)

    def forecast_peaks(self, fitted: int) -> tuple[tuple[int, int], ...]:
        """The sizes tried, and the one above ``fitted``, each with its forecast peak; empty without a forecast."""
        forecast, missed_bytes = self._corrected_forecast(fitted)
        if forecast is None:
            return ()
        sizes = sorted({fitted + 1, *(probe.batch_size for probe in self.probes)})
        return tuple((size, round(forecast.peak_bytes(size) + missed_bytes)) for size in sizes)

    def _corrected_forecast(self, fitted: int) -> tuple[Forecast | None, float]:
        """This rank's forecast, and how many bytes the probe of ``fitted`` rows took more than it says."""
        forecast = self._forecast()
        peak_bytes = next((probe.peak_bytes for probe in self.probes if probe.batch_size == fitted), None)
        if forecast is None or peak_bytes is None:
            return None, 0.0
        return forecast, peak_bytes - forecast.peak_bytes(fitted)

    def _explain_missing_forecast(self) -> None:
        """Log once why a forecast from the two recorded steps is not possible."""
        if self._operations_differ() and not self._has_explained:
            self._has_explained = True
            if self._consensus.rank == 0:
                sizes = " and ".join(map(str, SMALL_BATCH_SIZES))
                log.warning(f"Steps of {sizes} rows ran different operations: the forecast goes by their peaks alone.")

    def _operations_differ(self) -> bool:
        """Whether the small sizes have run different operations."""
        return self._timelines.keys() >= set(SMALL_BATCH_SIZES) and self._lines() is None

    def _forecast(self) -> Forecast | None:
        """The forecast that the search goes by; None without one."""
        return self._curves() if self._is_curved else self._lines()

    def _lines(self) -> Forecast | None:
        recorded = [self._timelines[size] for size in SMALL_BATCH_SIZES if size in self._timelines]
        return Forecast.along_lines(*recorded) if len(recorded) == len(SMALL_BATCH_SIZES) else None

    def _curves(self) -> Forecast | None:
        """The forecast by all steps that fitted: by their operations, or if these differ, by their peaks alone."""
        fitted = self._fitted_bytes()
        forecast = None
        if fitted.keys() <= self._timelines.keys():
            forecast = Forecast.along_curves(self._timelines[size] for size in fitted)
        return forecast or Forecast.along_curves(
            Timeline(size, ("step",), (peak_bytes,)) for size, peak_bytes in fitted.items()
        )

    def _fitted_bytes(self) -> dict[int, int]:
        """The peaks of this rank at the sizes that fitted."""
        return {probe.batch_size: probe.peak_bytes for probe in self.probes if probe.fits}

    def _forecast_here(self) -> int | None:
        forecast = self._lines()
        if forecast is None or self.meter.limit_bytes is None:
            return None
        missed_bytes = {size: peak - forecast.peak_bytes(size) for size, peak in self._fitted_bytes().items()}
        tried, small = max(missed_bytes), SMALL_BATCH_SIZES[-1]
        tried_bytes, small_bytes = forecast.peak_bytes(tried), forecast.peak_bytes(small)
        # What the allocator takes beyond the forecast is on a line: from zero to the small step, or between two steps.
        start = (small_bytes, missed_bytes[small]) if tried_bytes > small_bytes else (0.0, 0.0)
        slope = max((missed_bytes[tried] - start[1]) / (tried_bytes - start[0]), 0.0)
        largest = forecast.largest_batch_size(
            (self.meter.limit_bytes - missed_bytes[tried] + slope * tried_bytes) / (1 + slope), fitted=tried
        )
        expected = (missed_bytes[small] * growth for growth in (1, tried_bytes / small_bytes))
        drift_bytes = min(abs(missed_bytes[tried] - one) for one in expected)
        row_bytes = forecast.peak_bytes(tried + 1) - forecast.peak_bytes(tried)
        if largest is not None and drift_bytes > row_bytes / 2:
            return max(largest, tried + 1)
        return largest

    def _attempt(self, batch_size: int, *, timeline: bool) -> Probe:
        started = time.perf_counter()
        self.meter.reset()
        if timeline:
            self.meter.start_timeline()
        is_done = self.loop.run_together(lambda: self._step(batch_size))
        wait_for(self.loop.device)
        if timeline:
            recorded = self.meter.stop_timeline(batch_size)
            if is_done:
                self._timelines[batch_size] = recorded
        peak_bytes, phase_peak_bytes = self.meter.peak_bytes, self.meter.phase_peak_bytes
        limit_bytes = self.meter.limit_bytes
        is_above = limit_bytes is not None and peak_bytes > limit_bytes
        signs = self.meter.allocator_retries > 0, is_above, not is_done
        worst = self._consensus.max_over_ranks(max(number * sign for number, sign in enumerate(signs, start=1)))
        self.loop.clean_up()
        probe = Probe(
            batch_size=batch_size,
            fits=worst == 0,
            peak_bytes=peak_bytes,
            phase_peak_bytes=phase_peak_bytes,
            seconds=time.perf_counter() - started,
            failure=FAILURES[worst - 1] if worst else "",
        )
        if self._rows is not None:
            self._check_rows(probe)
        return probe

    def _check_rows(self, probe: Probe) -> None:
        """Check that the last batch had as many rows as it should. A collective.

        Raises:
            NoMoreRows: it had fewer on some rank.
            InputError: on every rank it was the same as for other sizes, and so was the memory; or on some rank it had
                no rows.
        """
        peaks_bytes = [earlier.peak_bytes for earlier in self.probes] or [probe.peak_bytes]
        is_the_same = self._made_the_same and probe.fits and probe.peak_bytes in peaks_bytes
        negated_rows, differs = self._consensus.max_of_each(-self._made_rows, not is_the_same)
        if not differs and probe.batch_size > SMALL_BATCH_SIZES[0]:
            *others, last = sorted({*SMALL_BATCH_SIZES, probe.batch_size})
            raise InputError(
                f"`make_batch` returns the same batch for {', '.join(map(str, others))} and {last} rows; if there are"
                " no more rows, give their number as the largest to try."
            )
        rows = -negated_rows
        if not rows:
            raise InputError(
                f"`make_batch` must return at least one row, but returns none for {probe.batch_size}: the search asks"
                " for the same rows again."
            )
        if rows < probe.batch_size:
            raise NoMoreRows(rows)

    def _step(self, batch_size: int) -> None:
        self._made_rows, self._made_the_same = batch_size, False
        batch = self.make_batch(batch_size)
        if self._rows is not None:
            self._made_rows = self._rows.count(batch, batch_size)
            self._made_the_same = self._rows.is_the_same(batch)
        given = copied(batch) if self._gives_copies else batch
        self.meter.count([given, *leaves(given)])  # also tensors in dataclasses
        with self.meter:
            self.loop.step(given)
        self._gives_copies = self._gives_copies and (was_changed(given, batch) or _has_parts(batch))
