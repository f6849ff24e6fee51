"""Does one worst-case train step fit on every rank?"""

import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from torchtune_adaptive.engine.distributed.fsdp_state import KeptSettings, fsdp_states
from torchtune_adaptive.engine.distributed.vote import Outcome, run_with_votes
from torchtune_adaptive.engine.memory.meter import MemoryMeter
from torchtune_adaptive.engine.memory.timeline import Forecast, Timeline
from torchtune_adaptive.engine.search.strategies import FAILURES, SMALL_BATCH_SIZES, Probe
from torchtune_adaptive.engine.search.workload import Workload

log = logging.getLogger(__name__)


class Prober:
    """Tries batch sizes on the real model and optimizer. All ranks must try the same sizes in the same order.

    A size fits under three conditions: its whole train step ran on every rank, no rank's peak was above its limit, and
    no rank's allocator had to free its cache. Probes change the real state: wrap a search in
    ``Workload.restored``.
    Args:
        make_batch: ``make_batch(n)`` returns a worst-case batch of n rows.
        meter: the meter of the workload's device, with the limit of this rank.
        forecasts: record timelines of the small sizes, for ``largest_forecast``.

    Attributes:
        probes: every size that was tried, in order.
    """

    def __init__(
        self,
        workload: Workload,
        make_batch: Callable[[int], Any],
        *,
        meter: MemoryMeter,
        forecasts: bool,
    ) -> None:
        self._workload = workload
        self._make_batch = make_batch
        self._meter = meter
        self._consensus = workload.consensus
        self._timeline_sizes = SMALL_BATCH_SIZES if forecasts else ()
        self._timelines: dict[int, Timeline] = {}
        self._has_traced_again = False
        self._has_explained = False
        self.probes: list[Probe] = []

    def warm_up(self, bound: int, *, after_failure: Callable[[], None]) -> bool:
        """Run one step of two rows, or of one if two do not fit. Returns whether it fits. A collective.

        It creates the optimizer's state, which must be in memory for later probes, and does lazy set-up. Two rows are
        tried first because some models, for example with batch normalisation, do not accept a single row.
        """
        for batch_size in (SMALL_BATCH_SIZES[0], 1):
            if batch_size <= bound:
                if self._attempt(batch_size, timeline=False).fits:
                    return True
                after_failure()
        return False

    def fits(self, batch_size: int) -> bool:
        """Whether a step of ``batch_size`` rows fits on every rank. A collective; all ranks get the same answer."""
        probe = self._attempt(batch_size, timeline=batch_size in self._timeline_sizes)
        self.probes.append(probe)
        return probe.fits

    def largest_forecast(self) -> int | None:
        """Forecast the largest batch size that fits on every rank, from the probes so far. A collective.

        None if a forecast is not possible. The growth of memory comes from the lines of the operations. Probes that
        fitted tell how much more than that the allocator takes. The next size is tried too if this neither stays nor
        grows in proportion.
        """
        if self._consensus.any_rank(self._must_trace_again()):
            self._has_traced_again = True
            for batch_size in self._timeline_sizes:
                self.fits(batch_size)
        mine = self._forecast_here()
        if not self._consensus.any_rank(mine is not None):
            self._explain_missing_forecast()
            return None
        largest = self._consensus.min_over_ranks(-1 if mine is None else mine)
        return None if largest < 0 else largest

    def rows_by_forecast(self, fitted: int) -> float | None:
        """The forecast of the largest batch size, before it is rounded down to ``fitted`` rows. A collective.

        The lowest forecast of all ranks; None if a rank has none.
        """
        forecast, missed_bytes = self._corrected_forecast(fitted)
        crossing = None
        if forecast is not None and self._meter.limit_bytes is not None:
            crossing = forecast.crossing(self._meter.limit_bytes - missed_bytes)
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
        forecast = self._forecast() if self._has_timelines() else None
        peak_bytes = next((probe.peak_bytes for probe in self.probes if probe.batch_size == fitted), None)
        if forecast is None or peak_bytes is None:
            return None, 0.0
        return forecast, peak_bytes - forecast.peak_bytes(fitted)

    def _explain_missing_forecast(self) -> None:
        """Log once why a forecast from the two recorded steps is not possible."""
        if self._has_timelines() and self._forecast() is None and not self._has_explained:
            self._has_explained = True
            if self._consensus.rank == 0:
                sizes = " and ".join(map(str, self._timeline_sizes))
                log.warning(
                    f"Steps of {sizes} rows ran different operations: no forecast, the search doubles and bisects."
                )

    def _must_trace_again(self) -> bool:
        """Whether the small sizes ran different operations, only once: the first step at a size may compile kernels."""
        return self._has_timelines() and not self._has_traced_again and self._forecast() is None

    def _has_timelines(self) -> bool:
        return len(self._timelines) == len(SMALL_BATCH_SIZES)

    def _forecast(self) -> Forecast | None:
        small, large = (self._timelines[batch_size] for batch_size in SMALL_BATCH_SIZES)
        return Forecast.from_timelines(small, large)

    def _forecast_here(self) -> int | None:
        forecast = self._forecast() if self._has_timelines() else None
        if forecast is None or self._meter.limit_bytes is None:
            return None
        missed_bytes = {
            probe.batch_size: probe.peak_bytes - forecast.peak_bytes(probe.batch_size)
            for probe in self.probes
            if probe.fits
        }
        tried, small = max(missed_bytes), SMALL_BATCH_SIZES[-1]
        tried_bytes, small_bytes = forecast.peak_bytes(tried), forecast.peak_bytes(small)
        # What the allocator takes beyond the forecast is on a line: from zero to the small step, or between two steps.
        start = (small_bytes, missed_bytes[small]) if tried_bytes > small_bytes else (0.0, 0.0)
        slope = max((missed_bytes[tried] - start[1]) / (tried_bytes - start[0]), 0.0)
        largest = forecast.largest_batch_size(
            (self._meter.limit_bytes - missed_bytes[tried] + slope * tried_bytes) / (1 + slope)
        )
        expected = (missed_bytes[small] * growth for growth in (1, tried_bytes / small_bytes))
        drift_bytes = min(abs(missed_bytes[tried] - one) for one in expected)
        row_bytes = forecast.peak_bytes(tried + 1) - forecast.peak_bytes(tried)
        if largest is not None and drift_bytes > row_bytes / 2:
            return max(largest, tried + 1)
        return largest

    def _attempt(self, batch_size: int, *, timeline: bool) -> Probe:
        started = time.perf_counter()
        self._meter.reset()
        if timeline:
            self._meter.start_timeline()
        settings = KeptSettings(fsdp_states(self._workload.model))
        outcome = run_with_votes(lambda: self._step(batch_size), self._consensus)
        if self._workload.device.type == "cuda":
            torch.cuda.synchronize(self._workload.device)
        if timeline:
            recorded = self._meter.stop_timeline(batch_size)
            if outcome is Outcome.DONE:
                self._timelines[batch_size] = recorded
        peak_bytes, phase_peak_bytes = self._meter.peak_bytes, self._meter.phase_peak_bytes
        limit_bytes = self._meter.limit_bytes
        signs = (
            self._meter.allocator_retries > 0,
            limit_bytes is not None and peak_bytes > limit_bytes,
            outcome is not Outcome.DONE,
        )
        worst = self._consensus.max_over_ranks(max(number * sign for number, sign in enumerate(signs, start=1)))
        self._workload.clean_up()
        if outcome is not Outcome.DONE:
            settings.restore()
        return Probe(
            batch_size=batch_size,
            fits=worst == 0,
            peak_bytes=peak_bytes,
            phase_peak_bytes=phase_peak_bytes,
            seconds=time.perf_counter() - started,
            failure=FAILURES[worst - 1] if worst else "",
        )

    def _step(self, batch_size: int) -> None:
        batch = self._make_batch(batch_size)
        self._meter.count(batch)
        with self._meter:
            self._workload.train_step(batch)
