"""The results of a search as text tables for the log."""

from collections import Counter
from collections.abc import Mapping, Sequence

from torchtune_adaptive.engine.search.strategies import FAILURES, Probe, SearchResult
from torchtune_adaptive.engine.search.timing import Key, Timing
from torchtune_adaptive.text import count_text, format_bytes, text_table


def probe_table(result: SearchResult) -> str:
    """The probes as a table with the figures of this rank. A phase that a failed probe did not reach is blank."""
    phases = list(dict.fromkeys(phase for probe in result.probes for phase in probe.phase_peak_bytes if phase))
    rows = [["batch_size", *phases, "peak", "usable", "fits", "seconds"]]
    for probe in result.probes:
        peaks = [format_bytes(probe.phase_peak_bytes[one]) if one in probe.phase_peak_bytes else "" for one in phases]
        peak, usable = format_bytes(probe.peak_bytes), format_bytes(result.usable_bytes)
        figures = [peak, usable, _verdict(probe), f"{probe.seconds:.2f}"]
        rows.append([str(probe.batch_size), *peaks, *figures])
    return text_table(rows)


def length_table(tried: Sequence[tuple[int, Probe]]) -> str:
    """The probes of several row lengths as a table with the figures of this rank."""
    rows = [["rows of", "rows", "tokens", "peak", "fits", "seconds"]]
    for length, probe in tried:
        figures = [format_bytes(probe.peak_bytes), _verdict(probe), f"{probe.seconds:.2f}"]
        rows.append([str(length), str(probe.batch_size), str(length * probe.batch_size), *figures])
    return text_table(rows)


def rate_table(timings: Mapping[Key, Timing], *, chosen: Key) -> str:
    """Tokens per second of each micro-batch as a table that marks the chosen one.

    >>> print(rate_table({"8 rows": Timing((1.0,), 990), "16 rows": Timing((1.0,), 1000)}, chosen="8 rows"))
    micro-batch  tokens/s  of best  chosen
    -----------  --------  -------  ------
         8 rows       990    99.0%     yes
        16 rows      1000   100.0%       -
    """
    best = max(one.rate for one in timings.values())
    rows = [["micro-batch", "tokens/s", "of best", "chosen"]]
    for size, one in timings.items():
        rows.append([str(size), f"{one.rate:.0f}", f"{one.rate / best:.1%}", "yes" if size == chosen else "-"])
    return text_table(rows)


def summary(result: SearchResult, seq_len: int) -> str:
    """The sizes found and the conditions of the search, in one line."""
    bounded = ", the largest size allowed" if result.exact_batch_size == result.bound else ""
    return (
        f"{result.strategy}: largest batch_size that fits: {result.exact_batch_size}{bounded}{rounding_text(result)}"
        f" (rows of {seq_len} tokens, limit {format_bytes(result.memory_limit_bytes)} per rank,"
        f" margin {result.margin:g}, {count_text(result.world_size, 'rank')},"
        f" {count_text(len(result.probes), 'probe')}, {failures_text(result.probes)})"
    )


def rounding_text(result: SearchResult) -> str:
    """What follows the largest size that fits: ", rounded down to 4", or nothing."""
    return "" if result.batch_size == result.exact_batch_size else f", rounded down to {result.batch_size}"


def failures_text(probes: Sequence[Probe]) -> str:
    """How many probes did not fit, and why: "0 out of memory", or "1 out of memory, 2 allocator retried"."""
    counts = Counter(probe.failure or FAILURES[-1] for probe in probes if not probe.fits)
    return ", ".join(f"{counts[failure]} {failure}" for failure in reversed(FAILURES) if counts[failure]) or (
        f"0 {FAILURES[-1]}"
    )


def _verdict(probe: Probe) -> str:
    """Whether it fits; if it ran nevertheless, what was too much."""
    return "yes" if probe.fits else "no" if probe.failure in ("", FAILURES[-1]) else f"no, {probe.failure}"
