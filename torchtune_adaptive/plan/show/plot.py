"""The picture of a step for `tune-adaptive plan --plot`: its live memory by kind, drawn by matplotlib."""

from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtune_adaptive.errors import InputError, quote
from torchtune_adaptive.files import check_writable, write_atomically, writing
from torchtune_adaptive.plan.decide import Plan
from torchtune_adaptive.plan.replay import WORKSPACES, StepMemory
from torchtune_adaptive.plan.show.text import offload_note
from torchtune_adaptive.plan.trace.events import BEFORE, grouped
from torchtune_adaptive.report.style import BLUE, GREEN, GREY, INK, INSTALL, ORANGE, PINK, RED, SKY, SOFT, svg_of
from torchtune_adaptive.text import byte_unit, format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Bottom to top; memory that stays comes first.
COLOURS = {
    "parameters": BLUE,
    "frozen models": GREY,
    "optimizer state": GREEN,
    "gradients": RED,
    "other tensors": SOFT,
    WORKSPACES: SOFT,
    "gathered parameters": SKY,
    "activations": ORANGE,
    "temporaries": PINK,
}
_INCHES = (9.6, 5.2)
_PLACE = {"left": 0.07, "right": 0.76, "top": 0.83, "bottom": 0.12, "wspace": 0}
_CHARS = 80  # of a phase's name in the width of the plot
_TITLE_CHARS = 60
_PIXELS = 700  # in the width of the plot
_HIGHEST_DEVICE = 4  # times the peak; with a larger device's limit drawn, the plot would be flat


def check_plot(path: Path) -> None:
    """Check that a plot can be written to ``path``.

    Raises:
        InputError: the file's name has a wrong suffix, it cannot be written, or matplotlib is missing.
    """
    if path.suffix != ".svg":
        raise InputError(f"`--plot` must be a file that ends in .svg, but is {quote(str(path))} instead.")
    with writing("--plot", path):
        check_writable(path)
    if find_spec("matplotlib") is None:
        raise InputError(f"`--plot` needs matplotlib, which {INSTALL} adds.")


def write_plot(path: Path, planned: Plan) -> None:
    """Draw the step of the longest rows to the .svg file at ``path``.

    Raises:
        InputError: the file cannot be written.
    """
    plot = svg_of(partial(step_figure, planned))
    with writing("--plot", path):
        write_atomically(path, plot)


def step_figure(planned: Plan) -> "Figure":
    """Draw the step of the longest rows: its phases side by side, in each the bytes of every kind above each other."""
    from matplotlib.figure import Figure

    size = planned.decisive.chosen
    step = planned.memory(size.batch_size)
    peak_bytes = step.allocated_bytes
    memory_bytes = planned.device.memory_bytes or planned.device.limit_bytes
    added_bytes = size.process_bytes - peak_bytes  # 0 on a CPU
    peak_at = step.live_bytes.index(peak_bytes)
    phases = phases_of([event.phase for event in step.events])
    num_drawn = sum(len(inside) for _, inside in phases)
    live_bytes = live_bytes_of_kinds(step)
    # Each phase has room for its name; the rest is divided by the number of events.
    room = [(len(phase) + 2) / _CHARS for phase, _ in phases]
    widths = [
        own + max(0, 1 - sum(room)) * len(inside) / num_drawn for own, (_, inside) in zip(room, phases, strict=True)
    ]
    shows_device = memory_bytes <= _HIGHEST_DEVICE * peak_bytes
    highest_bytes = max(peak_bytes, memory_bytes if shows_device else 0)
    unit, unit_bytes = byte_unit(highest_bytes)
    figure = Figure(figsize=_INCHES)
    grid = {"width_ratios": widths, **_PLACE}
    panels: Any = figure.subplots(1, len(phases), sharey=True, squeeze=False, gridspec_kw=grid)[0]
    for axes, (phase, inside), width in zip(panels, phases, widths, strict=True):
        shown = highest_of_each_pixel(inside, step.live_bytes, int(_PIXELS * width))
        _draw_kinds(axes, live_bytes, shown, end=inside.stop, peak_at=peak_at, unit_bytes=unit_bytes)
        axes.set_title(phase, loc="center")
        axes.set_xlim(inside.start, inside.stop)
        axes.set_xticks([])
        axes.spines.left.set_visible(axes is panels[0])
        axes.tick_params(left=axes is panels[0])
        if shows_device:
            _draw_device(axes, memory_bytes, planned.device.usable_bytes, added_bytes, unit_bytes)
        if peak_at in inside:
            _draw_peak(axes, peak_at, peak_bytes, unit_bytes)
    panels[0].set_ylim(0, 1.08 * highest_bytes / unit_bytes)  # of all panels
    panels[0].set_ylabel(f"memory of a rank [{unit}]")
    title = planned.title if len(planned.title) <= _TITLE_CHARS else f"…{planned.title[1 - _TITLE_CHARS :]}"
    figure.text(0.01, 0.98, f"{title}: memory of one train step", va="top", fontsize="large", fontweight="bold")
    rows = f"A batch of {size.batch_size:,} rows of {size.seq_len:,} tokens"
    ranks = f"each of {planned.world_size} ranks" if planned.world_size > 1 else "one rank"
    together = f", {format_bytes(size.process_bytes)} with GPU overhead" if added_bytes else ""
    peak = f"peak {format_bytes(peak_bytes)}{together}, of {format_bytes(memory_bytes)}"
    figure.text(0.01, 0.93, f"{rows} on {ranks}: {peak}", va="top")
    figure.text(0.01, 0.02, "\n".join(filter(None, [_where(step, peak_at), offload_note([planned])])))
    handles, labels = panels[0].get_legend_handles_labels()
    place = {"loc": "upper left", "bbox_to_anchor": (0.77, 0.84), "alignment": "left"}
    figure.legend(handles[::-1], labels[::-1], title="at the peak", **place)
    return figure


def phases_of(phases: Sequence[str]) -> list[tuple[str, range]]:
    """Each phase of the step with the indices of its events."""
    return [(phase, inside) for phase, inside in grouped(phases) if phase != BEFORE]


def live_bytes_of_kinds(step: StepMemory) -> dict[str, list[int]]:
    """Bytes of each kind after each event, of those that are drawn."""
    found: dict[str, list[int]] = {}
    for kind in COLOURS:
        changes = (change if event.kind == kind else 0 for event, change in zip(step.events, step.changes, strict=True))
        start = step.workspace_bytes if kind == WORKSPACES else 0
        live_bytes = list(accumulate(changes, initial=start))[1:]
        if any(live_bytes):
            found[kind] = live_bytes
    return found


def highest_of_each_pixel(inside: range, total_bytes: Sequence[int], width: int) -> list[int]:
    """Of the events in each of ``width`` equal parts of ``inside``, the one with the most live bytes."""
    together = -(-len(inside) // max(1, width))
    parts = (inside[first : first + together] for first in range(0, len(inside), together))
    return [max(part, key=total_bytes.__getitem__) for part in parts]


def _draw_kinds(
    axes: "Axes", live_bytes: Mapping[str, list[int]], shown: Sequence[int], *, end: int, peak_at: int, unit_bytes: int
) -> None:
    """Areas on top of each other: the live bytes of each kind after the events ``shown``."""
    heights = [[live[one] / unit_bytes for one in (*shown, shown[-1])] for live in live_bytes.values()]
    labels = [f"{kind}: {format_bytes(live[peak_at])}" for kind, live in live_bytes.items()]
    colours = [COLOURS[kind] for kind in live_bytes]
    axes.stackplot([*shown, end], *heights, labels=labels, colors=colours, step="post", linewidth=0, rasterized=True)


def _draw_device(axes: "Axes", memory_bytes: float, usable_bytes: float, added_bytes: float, unit_bytes: int) -> None:
    """Lines for the device's memory and its usable part, and a band for the overhead added to the traced peak."""
    memory, usable, added = (num_bytes / unit_bytes for num_bytes in (memory_bytes, usable_bytes, added_bytes))
    if added:
        label = f"GPU overhead: {format_bytes(added_bytes)}"
        axes.axhspan(usable - added, usable, facecolor="none", edgecolor=SOFT, hatch="///", linewidth=0, label=label)
    if usable < memory:
        axes.axhline(usable, color=INK, linestyle="--", label=f"usable: {format_bytes(usable_bytes)}")
    axes.axhline(memory, color=INK, label=f"device: {format_bytes(memory_bytes)}")


def _draw_peak(axes: "Axes", peak_at: int, peak_bytes: int, unit_bytes: int) -> None:
    axes.set_zorder(1)  # the mark and its text may lie over the neighbours
    axes.patch.set_visible(False)
    first, end = axes.get_xlim()
    height = peak_bytes / unit_bytes
    axes.plot(peak_at, height, marker="o", markerfacecolor="white", markeredgecolor=INK, clip_on=False, zorder=3)
    is_right = peak_at > (first + end) / 2
    axes.annotate(
        f"peak {format_bytes(peak_bytes)}",
        (peak_at, height),
        xytext=(-7 if is_right else 7, 7),
        textcoords="offset points",
        ha="right" if is_right else "left",
        fontweight="bold",
        annotation_clip=False,
        zorder=4,
    )


def _where(step: StepMemory, peak_at: int) -> str:
    event = step.events[peak_at]
    name = event.operation.removeprefix("aten.").removesuffix(".default")
    return f"The peak is in {event.phase}, at {name}. Drawn in order; short phases are drawn wider."
