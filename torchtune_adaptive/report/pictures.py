"""The pictures of a run, drawn by matplotlib."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from torchtune_adaptive.engine.search.strategies import Probe
from torchtune_adaptive.engine.search.tables import rounding_text
from torchtune_adaptive.report.read import OUT_OF_MEMORY, THRASHING, Run, Search
from torchtune_adaptive.report.style import BLUE, GREEN, GREY, INK, ORANGE, PINK, RED, SOFT
from torchtune_adaptive.text import byte_unit, format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

_INCHES = 8.0  # wide
_PHASES = {
    "": ("before forward", GREY, "v"),
    "forward": ("forward", BLUE, "o"),
    "loss": ("loss", ORANGE, "s"),
    "backward": ("backward", RED, "^"),
    "clip": ("clip", PINK, "D"),
    "optimizer": ("optimizer", GREEN, "P"),
}
_PEAK = "peak_memory_bytes"
_MOST_POINTS = 1000  # of a line
_HELD = ("global_batch_size", "micro_batch_size", "max_tokens_per_micro_batch")
_TITLES = {
    "global_batch_size": "batch [samples per optimizer step]",
    "micro_batch_size": "micro-batch [rows per rank]",
    "max_tokens_per_micro_batch": "micro-batch [tokens per rank]",
    "lr": "learning rate",
    "loss": "loss",
    "tokens_per_second_per_gpu": "tokens per second, per rank",
    "padding": "padding [% of tokens]",
}


def pictures(run: Run) -> dict[str, Callable[[], "Figure"]]:
    """By its name what draws each picture for which there are figures: of searches, and of the optimizer steps.

    They need matplotlib.
    """
    found: dict[str, Callable[[], Figure]] = {}
    for search in run.searches:
        if search.result.probes:
            name = f"report_search_{search.of}" if search.of else "report_search"
            found[name] = partial(_search_figure, search)
    if run.steps:
        found["report_steps"] = partial(_steps_figure, run)
    return found


def _figure(height: float) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(_INCHES, height), layout="constrained")


def _search_figure(search: Search) -> "Figure":
    """Peak memory by phase over batch size."""
    result = search.result
    probes = sorted(result.probes, key=lambda probe: probe.batch_size)
    unit, unit_bytes = byte_unit(max([result.memory_limit_bytes, *(probe.peak_bytes for probe in probes)]))
    figure = _figure(4.6)
    axes = figure.add_subplot()
    _draw_phases(axes, probes, unit_bytes)
    styles: dict[bool, dict[str, Any]] = {
        True: {"marker": "o", "markersize": 10, "markerfacecolor": "none", "label": "peak, fits"},
        False: {"marker": "x", "markersize": 10, "markeredgewidth": 2, "label": "did not fit"},
    }
    for fits, style in styles.items():
        points = [(probe.batch_size, probe.peak_bytes / unit_bytes) for probe in probes if probe.fits is fits]
        if points:
            axes.plot(*_columns(points), color=INK, linestyle="none", **style)
    for name, num_bytes, line in (("limit", result.memory_limit_bytes, "-"), ("usable", result.usable_bytes, "--")):
        label = f"{name} ({format_bytes(num_bytes)})"
        axes.axhline(num_bytes / unit_bytes, color=INK, linestyle=line, linewidth=1.2, label=label)
    if points := [(size, num_bytes / unit_bytes) for size, num_bytes in result.forecast]:
        axes.plot(*_columns(points), color=SOFT, linestyle=":", linewidth=1.8, label="forecast of the peak")
    rows = "" if search.seq_len is None else f", rows of {search.seq_len:,} tokens"
    axes.set_xlabel(f"batch size of the probe{rows}")
    axes.set_ylabel(f"peak memory on rank 0 [{unit}]")
    axes.set_ylim(bottom=0, top=1.12 * result.memory_limit_bytes / unit_bytes)
    largest = probes[-1].batch_size
    if largest > 24 * max(1, result.exact_batch_size):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
    else:
        axes.set_xlim(left=0, right=1.08 * max(largest, result.exact_batch_size + 1))
        axes.xaxis.set_major_locator(_integer_ticks())
    axes.set_title(f"{result.strategy}: {result.exact_batch_size} fits{rounding_text(result)}")
    figure.legend(loc="outside upper left", ncols=4)
    return figure


def _draw_phases(axes: "Axes", probes: Sequence[Probe], unit_bytes: int) -> None:
    phases = dict.fromkeys(phase for probe in probes for phase in probe.phase_peak_bytes)
    for place, phase in enumerate(phases):
        label, colour, marker = _PHASES.get(phase, (phase, SOFT, "."))
        there = [probe for probe in probes if phase in probe.phase_peak_bytes]
        points = [(probe.batch_size, probe.phase_peak_bytes[phase] / unit_bytes) for probe in there]
        fitting = [point for point, probe in zip(points, there, strict=True) if probe.fits]
        size = max(4, 8 - place)  # a later phase does not hide an earlier one
        axes.plot(*_columns(fitting), color=colour, linewidth=0.8, alpha=0.6)
        axes.plot(*_columns(points), color=colour, marker=marker, markersize=size, linestyle="none", label=label)


def _steps_figure(run: Run) -> "Figure":
    """Figures over optimizer steps, one below the other, with what happened as vertical lines."""
    limit = run.last_value("memory_limit_bytes")
    limit_bytes = limit if isinstance(limit, int) else None
    unit, unit_bytes = byte_unit(max([1, limit_bytes or 0, *(peak for _, peak in run.column(_PEAK))]))
    titles = _TITLES | {_PEAK: f"peak memory, rank 0 [{unit}]"}
    per_unit = {"padding": 0.01, _PEAK: unit_bytes}
    columns = [name for name in titles if run.column(name)]
    figure = _figure(0.7 + 1.25 * len(columns))
    panels: Any = figure.subplots(len(columns), sharex=True, squeeze=False)[:, 0]
    for name, axes in zip(columns, panels, strict=True):
        points = [(step, value / per_unit.get(name, 1)) for step, value in run.column(name)]
        points = _thinned(points, keep=max if name == _PEAK else None)
        style: Any = "steps-post" if name in _HELD else "default"  # which hold from one step to the next
        marker = "." if len(points) < 3 else ""
        axes.plot(*_columns(points), color=BLUE, linewidth=1.3, marker=marker, drawstyle=style)
        axes.set_title(titles[name])
        if name == _PEAK and limit_bytes is not None:
            label = f"memory limit ({format_bytes(limit_bytes)})"
            axes.axhline(limit_bytes / unit_bytes, color=INK, linewidth=1.2, label=label)
        if name in _HELD:
            axes.yaxis.set_major_locator(_integer_ticks())
        if name != "loss":
            axes.set_ylim(bottom=0, top=1.1 * axes.get_ylim()[1])
    panels[-1].set_xlabel("optimizer step")
    panels[-1].xaxis.set_major_locator(_integer_ticks())
    figure.align_ylabels(panels)
    _draw_events(run, panels)
    if any(axes.get_legend_handles_labels()[1] for axes in panels):
        figure.legend(loc="outside upper left", ncols=4)
    return figure


def _draw_events(run: Run, panels: Sequence["Axes"]) -> None:
    """Vertical lines through all panels, and a mark at the bottom of the last one for each checkpoint."""
    epochs = [one["step"] for before, one in pairwise(run.steps) if one["epoch"] > before["epoch"]]
    for label, steps, colour, style in (
        ("first step of an epoch", epochs, GREY, "-"),
        ("out of memory", _steps_of(run, OUT_OF_MEMORY), RED, "--"),
        ("allocator thrashing", _steps_of(run, THRASHING), ORANGE, ":"),
        ("resumed", _steps_of(run, "resumed"), GREEN, "-."),
    ):
        for axes in panels:
            for step in steps:
                named = label if axes is panels[0] and step == steps[0] else None  # once in the legend
                axes.axvline(step, color=colour, linestyle=style, linewidth=1.2, alpha=0.9, zorder=1.5, label=named)
    if saved := _steps_of(run, "checkpoint"):
        at_the_bottom = panels[-1].get_xaxis_transform()
        mark: dict[str, Any] = {"color": SOFT, "marker": "^", "linestyle": "none", "label": "checkpoint"}
        panels[-1].plot(saved, [0.04] * len(saved), transform=at_the_bottom, clip_on=False, zorder=3, **mark)


def _steps_of(run: Run, event: str) -> list[int]:
    return [one["step"] for one in run.of_kind(event)]


def _integer_ticks() -> "MaxNLocator":
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10])


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _thinned(
    points: list[tuple[int, float]], *, keep: Callable[[list[float]], float] | None, most: int = _MOST_POINTS
) -> list[tuple[int, float]]:
    """At most ``most`` points: of neighbours one takes the place, with the last value, or what ``keep`` gives of them.

    >>> _thinned([(1, 5.0), (2, 4.0), (3, 1.0), (4, 2.0)], keep=max, most=2)
    [(2, 5.0), (4, 2.0)]
    """
    together = -(-len(points) // most)
    if together <= 1:
        return points
    groups = [points[first : first + together] for first in range(0, len(points), together)]
    return [(group[-1][0], group[-1][1] if keep is None else keep([value for _, value in group])) for group in groups]
