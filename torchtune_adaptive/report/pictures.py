"""The pictures of a run, drawn by matplotlib."""

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from torchtune_adaptive.errors import InputError
from torchtune_adaptive.report.read import Run, Search
from torchtune_adaptive.text import byte_unit, format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INCHES = 8.0  # wide
# On a paper of its own, a picture is legible on a light page and on a dark one.
_INK, _SOFT, _LINE, _PAPER = "#1b1f24", "#57606a", "#d8dee4", "#ffffff"
# Okabe and Ito's colours, which the colour-blind can tell apart.
_BLUE, _ORANGE, _GREEN, _RED, _PINK, _GREY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#999999"
_PHASES = {
    "": ("before forward", _GREY, "v"),
    "forward": ("forward", _BLUE, "o"),
    "loss": ("loss", _ORANGE, "s"),
    "backward": ("backward", _RED, "^"),
    "clip": ("clip", _PINK, "D"),
    "optimizer": ("optimizer", _GREEN, "P"),
}
_FONT = "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif"
_STYLE: Any = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, and is wide: what has room in it has room in other fonts
    "font.size": 9,
    "axes.edgecolor": _SOFT,
    "axes.labelcolor": _INK,
    "axes.titlecolor": _INK,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.useoffset": False,
    "axes.formatter.limits": (-3, 6),
    "grid.color": _LINE,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.labelcolor": _INK,
    "legend.handlelength": 1.7,
    "legend.columnspacing": 1.4,
    "text.color": _INK,
    "xtick.color": _SOFT,
    "ytick.color": _SOFT,
    "svg.fonttype": "none",
    "svg.hashsalt": "torchtune_adaptive",
}
_PEAK = "peak_memory_bytes"
_MOST_POINTS = 1000  # of a line
_LEAST_GAP = 0.2  # between ticks, as part of the axis


@dataclass(frozen=True)
class Picture:
    """A picture.

    Attributes:
        name: of its file, without the ending.
        title: a heading.
        draw: makes the figure.
    """

    name: str
    title: str
    draw: Callable[[], "Figure"]

    def svg(self) -> str:
        """As SVG, with text that stays text."""
        import matplotlib as mpl

        content = io.StringIO()
        with mpl.rc_context(_STYLE):
            self.draw().savefig(content, facecolor=_PAPER, format="svg", metadata={"Date": None, "Creator": None})
        return content.getvalue().replace("'DejaVu Sans'", _FONT)


def pictures(run: Run) -> list[Picture]:
    """The pictures that there are figures for: of each search, and of the optimizer steps.

    Raises:
        InputError: matplotlib is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401  # an extra
    except ImportError as error:
        raise InputError(
            "matplotlib must be installed for the pictures and the page, as by"
            ' `pip install "torchtune-adaptive[plot]"`, but is not.'
        ) from error
    found = []
    for search in run.searches:
        if search.result.probes:
            name = f"report_search_{search.of}" if search.of else "report_search"
            title = f"Peak memory of each probe{f' ({search.of})' if search.of else ''}"
            found.append(Picture(name, title, _Search(search).figure))
    if run.steps:
        found.append(Picture("report_steps", "Optimizer steps", _Steps(run).figure))
    return found


def _figure(height: float) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(_INCHES, height), layout="constrained")


class _Search:
    """Peak memory by phase over batch size."""

    def __init__(self, search: Search) -> None:
        self._result = search.result
        self._seq_len = search.seq_len
        highest = max([self._result.memory_limit_bytes, *(probe.peak_bytes for probe in self._result.probes)])
        self._unit, self._unit_bytes = byte_unit(highest)
        self._probes = sorted(self._result.probes, key=lambda probe: probe.batch_size)

    def figure(self) -> "Figure":
        figure = _figure(4.6)
        axes = figure.add_subplot()
        self._draw_phases(axes)
        self._draw_peaks(axes)
        self._draw_limits(axes)
        self._draw_forecast(axes)
        rows = "" if self._seq_len is None else f", rows of {self._seq_len:,} tokens"
        axes.set_xlabel(f"batch size of the probe{rows}")
        axes.set_ylabel(f"peak memory on rank 0 [{self._unit}]")
        axes.set_ylim(bottom=0, top=1.12 * self._result.memory_limit_bytes / self._unit_bytes)
        sizes = [probe.batch_size for probe in self._probes]
        if sizes[-1] > 24 * max(1, self._result.exact_batch_size):
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:g}")
        else:
            axes.set_xlim(left=0, right=1.08 * max(sizes[-1], self._result.exact_batch_size + 1))
            _tick_integers(axes)
        result = self._result
        axes.set_title(f"{result.strategy}: {result.exact_batch_size} fits, {result.batch_size} is used")
        figure.legend(loc="outside upper left", ncols=4)
        return figure

    def _draw_phases(self, axes: "Axes") -> None:
        phases = dict.fromkeys(phase for probe in self._probes for phase in probe.phase_peak_bytes)
        for place, phase in enumerate(phases):
            label, colour, marker = _PHASES.get(phase, (phase, _SOFT, "."))
            there = [probe for probe in self._probes if phase in probe.phase_peak_bytes]
            points = [(probe.batch_size, probe.phase_peak_bytes[phase] / self._unit_bytes) for probe in there]
            fitting = [point for point, probe in zip(points, there, strict=True) if probe.fits]
            axes.plot(*_columns(fitting), color=colour, linewidth=0.8, alpha=0.6)
            axes.plot(
                *_columns(points),
                color=colour,
                marker=marker,
                markersize=max(4, 8 - place),
                linestyle="none",
                label=label,
            )

    def _draw_peaks(self, axes: "Axes") -> None:
        styles: dict[bool, dict[str, Any]] = {
            True: {"marker": "o", "markersize": 10, "markerfacecolor": "none", "label": "peak, fits"},
            False: {"marker": "x", "markersize": 10, "markeredgewidth": 2, "label": "did not fit"},
        }
        for fits, style in styles.items():
            points = [
                (probe.batch_size, probe.peak_bytes / self._unit_bytes) for probe in self._probes if probe.fits is fits
            ]
            if points:
                axes.plot(*_columns(points), color=_INK, linestyle="none", **style)

    def _draw_limits(self, axes: "Axes") -> None:
        result = self._result
        limits = {"limit": (result.memory_limit_bytes, "-"), "usable": (result.usable_bytes, "--")}
        for label, (num_bytes, style) in limits.items():
            label = f"{label} ({format_bytes(num_bytes)})"
            axes.axhline(num_bytes / self._unit_bytes, color=_INK, linestyle=style, linewidth=1.2, label=label)

    def _draw_forecast(self, axes: "Axes") -> None:
        points = [(size, num_bytes / self._unit_bytes) for size, num_bytes in self._result.forecast]
        if points:
            axes.plot(*_columns(points), color=_SOFT, linestyle=":", linewidth=1.8, label="forecast of the peak")


@dataclass(frozen=True)
class _Panel:
    """A figure of optimizer steps.

    Attributes:
        title: with its unit.
        column: name of the figure.
        per_unit: what is one of its unit.
        is_held: it holds from one step to the next, and is drawn as steps.
        from_zero: the axis begins at 0.
    """

    title: str
    column: str
    per_unit: float = 1.0
    is_held: bool = False
    from_zero: bool = True


class _Steps:
    """Figures over optimizer steps, one below the other, with what happened as vertical lines."""

    def __init__(self, run: Run) -> None:
        self._run = run
        limit = run.last_value("memory_limit_bytes")
        self._limit_bytes = limit if isinstance(limit, int) else None
        peaks = [peak for _, peak in run.column(_PEAK)]
        unit, unit_bytes = byte_unit(max([1, *peaks, self._limit_bytes or 0]))
        wanted = (
            _Panel("batch [samples per optimizer step]", "global_batch_size", is_held=True),
            _Panel("micro-batch [rows per rank]", "micro_batch_size", is_held=True),
            _Panel("micro-batch [tokens per rank]", "max_tokens_per_micro_batch", is_held=True),
            _Panel("learning rate", "lr"),
            _Panel("loss", "loss", from_zero=False),
            _Panel("tokens per second, per rank", "tokens_per_second_per_gpu"),
            _Panel("padding [% of tokens]", "padding", per_unit=0.01),
            _Panel(f"peak memory, rank 0 [{unit}]", _PEAK, per_unit=unit_bytes),
        )
        self._panels = [panel for panel in wanted if run.column(panel.column)]

    def figure(self) -> "Figure":
        figure = _figure(0.7 + 1.25 * len(self._panels))
        panels: Any = figure.subplots(len(self._panels), sharex=True, squeeze=False)[:, 0]
        for panel, axes in zip(self._panels, panels, strict=True):
            self._draw(panel, axes)
        panels[-1].set_xlabel("optimizer step")
        _tick_integers(panels[-1])
        figure.align_ylabels(panels)
        handles = self._draw_events(panels)
        if handles:
            figure.legend(handles=handles, loc="outside upper left", ncols=4)
        return figure

    def _draw(self, panel: _Panel, axes: "Axes") -> None:
        axes.set_title(panel.title)
        points = [(step, value / panel.per_unit) for step, value in self._run.column(panel.column)]
        points = _thinned(points, keep=max if panel.column == _PEAK else None)
        marker = "." if len(points) < 3 else ""
        style: Any = "steps-post" if panel.is_held else "default"
        axes.plot(*_columns(points), color=_BLUE, linewidth=1.3, marker=marker, drawstyle=style)
        if panel.column == _PEAK and self._limit_bytes is not None:
            axes.axhline(self._limit_bytes / panel.per_unit, color=_INK, linewidth=1.2)
            axes.set_ylim(top=max(axes.get_ylim()[1], 1.15 * self._limit_bytes / panel.per_unit))
        if panel.from_zero:
            axes.set_ylim(bottom=0)
        if panel.is_held:
            values = sorted({round(value) for _, value in self._run.column(panel.column)})
            axes.set_ylim(top=1.2 * values[-1])
            axes.set_yticks(_ticks(values))

    def _draw_events(self, panels: Sequence["Axes"]) -> list[Any]:
        """Draw them, and return the legend's entries."""
        from matplotlib.lines import Line2D

        handles: list[Any] = []
        style: Any
        for label, steps, colour, style in self._vertical_lines():
            for axes in panels:
                for step in steps:
                    axes.axvline(step, color=colour, linestyle=style, linewidth=1.2, alpha=0.9, zorder=1.5)
            handles.append(Line2D([], [], color=colour, linestyle=style, linewidth=1.6, label=label))
        saved = [event.step for event in self._run.of_kind("checkpoint")]
        if saved:
            at_the_bottom = panels[-1].get_xaxis_transform()
            options: dict[str, Any] = {"color": _SOFT, "marker": "^", "markersize": 6, "linestyle": "none"}
            panels[-1].plot(saved, [0.04] * len(saved), transform=at_the_bottom, clip_on=False, zorder=3, **options)
            handles.append(Line2D([], [], label="checkpoint", **options))
        if self._limit_bytes is not None and any(panel.column == _PEAK for panel in self._panels):
            label = f"memory limit ({format_bytes(self._limit_bytes)})"
            handles.append(Line2D([], [], color=_INK, linewidth=1.2, label=label))
        return handles

    def _vertical_lines(self) -> Iterator[tuple[str, list[int], str, str]]:
        """What each kind is called, the steps it is in, its colour and its style."""
        run = self._run
        yield from (
            one
            for one in (
                ("first step of an epoch", self._first_steps(), _GREY, "-"),
                ("out of memory", [one.step for one in run.shortages if one.is_out], _RED, "--"),
                ("allocator thrashing", [one.step for one in run.shortages if not one.is_out], _ORANGE, ":"),
                ("resumed", [event.step for event in run.of_kind("resumed")], _GREEN, "-."),
            )
            if one[1]
        )

    def _first_steps(self) -> list[int]:
        """Of each epoch but the first that is logged."""
        steps = self._run.steps
        return [one["step"] for before, one in pairwise(steps) if one["epoch"] > before["epoch"]]


def _tick_integers(axes: "Axes") -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))


def _ticks(values: Sequence[int]) -> list[int]:
    """0 and those of the sorted ``values`` that are not too near to one above.

    >>> _ticks([16, 32, 64]), _ticks([62, 64])
    ([0, 16, 32, 64], [0, 64])
    """
    ticks: list[int] = []
    for value in reversed([0, *values]):
        if not ticks or ticks[-1] - value >= _LEAST_GAP * values[-1] or not value:
            ticks.append(value)
    return ticks[::-1]


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
