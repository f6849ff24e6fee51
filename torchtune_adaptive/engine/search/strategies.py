"""Largest batch size for which a probe fits: three strategies and the rounding. Plain arithmetic, no torch.

Every strategy takes ``fits``, a function that tries a batch size and returns whether it fits. It assumes that sizes
above a failed one fail too. A strategy returns 0 if one row does not fit. Any other returned size has been tried. In a
distributed run ``fits`` must return the same answer on every rank, so that all ranks try the same sizes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from torchtune_adaptive.text import count_text, format_bytes

Fits = Callable[[int], bool]

# Two small sizes determine every operation's line. Not 1: dimensions of size 1 have other strides and operations.
SMALL_BATCH_SIZES = (2, 3)

# The bound of an unbounded search, far above any batch. It ends a search if memory does not grow with the batch.
NO_BOUND = 2**20


# Why a probe does not fit, from the mildest: CUDA's allocator had to free its cache, which makes every step slow; the
# step ran, but took more than it may; it ended with an out-of-memory error.
FAILURES = ("allocator retried", "above the limit", "out of memory")


@dataclass(frozen=True, kw_only=True)
class Probe:
    """The outcome of trying one batch size.

    Attributes:
        fits: whether the step fits on every rank.
        failure: one of ``FAILURES`` if it does not.
        peak_bytes, phase_peak_bytes: peaks of this rank, up to the point where it stopped.
    """

    batch_size: int
    fits: bool
    peak_bytes: int
    phase_peak_bytes: dict[str, int]
    seconds: float
    failure: str = ""


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The result of a search.

    Attributes:
        exact_batch_size: the largest size that fits with the margin kept free.
        batch_size: the size to use: the exact size, or the power of two at or below it.
        bound: the largest size that the search would try.
        memory_limit_bytes: the lowest limit of all ranks, before the margin is subtracted.
        probes: in the order in which sizes were tried.
        forecast_rows: the forecast size before it is rounded down to whole rows, the lowest of all ranks; None
            without a forecast.
        forecast: batch sizes with the peak that this rank's forecast gives them, in bytes; empty without one.
    """

    strategy: str
    exact_batch_size: int
    batch_size: int
    bound: int
    memory_limit_bytes: int
    margin: float
    world_size: int
    probes: tuple[Probe, ...]
    forecast_rows: float | None = None
    forecast: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        peaks = [probe.peak_bytes for probe in self.probes if probe.batch_size == self.batch_size]
        peak = f"peak {format_bytes(peaks[-1])} of" if peaks else "limit"
        return (
            f"batch size {self.batch_size} (largest that fits: {self.exact_batch_size}),"
            f" {peak} {format_bytes(self.memory_limit_bytes)} with margin {self.margin:g},"
            f" {count_text(len(self.probes), 'probe')} by {self.strategy}"
        )

    @property
    def usable_bytes(self) -> int:
        """The bytes that probes of this rank were allowed to use."""
        return usable_bytes(self.memory_limit_bytes, self.margin)


def usable_bytes(limit_bytes: int, margin: float) -> int:
    """The part of ``limit_bytes`` that may be used if the fraction ``margin`` of it is kept free."""
    return int(limit_bytes * (1 - margin))


def decrease_until_oom(fits: Fits, *, max_batch_size: int) -> int:
    """Largest size in [1, max_batch_size] that fits, from above: halve until a size fits, then bisect."""
    candidate, failed = max_batch_size, max_batch_size + 1
    while candidate and not fits(candidate):
        candidate, failed = candidate // 2, candidate
    return bisect(fits, fitted=candidate, failed=failed)


def binary_search(fits: Fits, *, start: int, max_batch_size: int) -> int:
    """Largest size in [1, max_batch_size] that fits, from below: double from ``start`` up to a failure, then bisect.

    >>> binary_search(lambda size: size <= 37, start=4, max_batch_size=1000)
    37
    """
    fitted, candidate, failed = 0, min(start, max_batch_size), max_batch_size + 1
    while candidate < failed:
        if fits(candidate):
            fitted, candidate = candidate, 2 * candidate
        else:
            failed = candidate
    return bisect(fits, fitted=fitted, failed=failed)


_MOST_CORRECTIONS = 3  # of the forecast along lines, before it is no longer followed
_MOST_MISSES = 2  # of it
_MOST_SLOW_STEPS = 2  # along curves, by one row; and the most steps there, before they are made larger
_MOST_STEPS = 8


def linear_extrapolation(
    fits: Fits,
    forecast: Callable[[], int | None],
    curved: Callable[[], int | None] | None = None,
    *,
    max_batch_size: int,
) -> int:
    """Largest size in [1, max_batch_size] that fits: two small sizes, a forecast, and a probe of the forecast size.

    ``forecast()`` returns the largest size that should fit by all probes so far, or None if a forecast is not possible.
    It is called again after each probe, until it returns no size above the largest one that fitted. After a size that
    does not fit, the size below is tried. If that does not fit either, or there is no forecast, or it was corrected
    often, memory is no line: the search goes on by ``along_curves`` with the forecast ``curved``.
    """
    fitted, failed, num_misses, num_corrections = 0, max_batch_size + 1, 0, 0
    for size in SMALL_BATCH_SIZES:
        if size < failed and fits(size):
            fitted = size
        else:
            failed = min(size, failed)
            break
    if fitted < SMALL_BATCH_SIZES[-1]:
        return bisect(fits, fitted=fitted, failed=failed)
    while failed - fitted > 1 and num_misses < _MOST_MISSES and num_corrections <= _MOST_CORRECTIONS:
        candidate = forecast()
        if candidate is None:
            break
        if candidate <= fitted:
            return fitted
        num_corrections += fitted > SMALL_BATCH_SIZES[-1]
        if fits(candidate := min(candidate, failed - 1)):
            fitted = candidate
        else:
            failed, num_misses = candidate, num_misses + 1
    return along_curves(fits, curved or forecast, fitted=fitted, failed=failed, max_batch_size=max_batch_size)


def along_curves(
    fits: Fits, forecast: Callable[[], int | None], *, fitted: int, failed: int, max_batch_size: int
) -> int:
    """Largest size in [fitted, failed) that fits, where memory grows with a power of the rows.

    ``forecast()`` is as for ``linear_extrapolation``, but should be too low rather than too high until it is right.
    The size above the largest that fits is always tried. If memory is a polynomial of at most third degree, with no
    negative coefficients, the whole search takes at most 8 steps that fit and 3 that do not.
    """
    least, num_steps, num_slow, was_too_high = 1, 0, 0, False
    while failed - fitted > 1:
        candidate = forecast()
        if failed <= max_batch_size and (candidate is None or candidate >= failed):
            candidate = math.isqrt(fitted * failed)
            if not was_too_high:  # perhaps by little, because of the allocator
                candidate, was_too_high = max(candidate, failed - 2), True
        elif candidate is None:
            candidate = 2 * fitted
        elif candidate > 4 * fitted:
            candidate -= (candidate - fitted) // 8  # far from what was measured
        step = min(least, (failed - fitted) // 2)
        candidate = min(max(candidate, fitted + step), failed - 1)
        num_steps, num_slow = num_steps + 1, num_slow + (candidate == fitted + step)
        if fits(candidate):
            fitted = candidate
            if num_slow > _MOST_SLOW_STEPS or num_steps > _MOST_STEPS:
                least *= 4
        else:
            failed = candidate
    return fitted


def round_down_to_power_of_two(batch_size: int) -> int:
    """Largest power of two that is at most ``batch_size`` (at least 1), as torchtune RFC 2199 proposes.

    >>> [round_down_to_power_of_two(size) for size in (1, 2, 3, 37, 64)]
    [1, 2, 2, 32, 64]
    """
    return 1 << (batch_size.bit_length() - 1)


def bisect(fits: Fits, *, fitted: int, failed: int) -> int:
    """Largest size in [fitted, failed) that fits, if ``fitted`` does (0 always does) and ``failed`` does not."""
    while failed - fitted > 1:
        middle = (fitted + failed) // 2
        fitted, failed = (middle, failed) if fits(middle) else (fitted, middle)
    return fitted
