"""A picture of a step's live memory by kind, drawn by matplotlib."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from torchtune_adaptive.plan.trace.events import StepEvents
from torchtune_adaptive.report.style import BLUE, GREEN, GREY, INK, ORANGE, PINK, RED, SKY, SOFT
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


@dataclass(frozen=True, kw_only=True)
class DrawnDevice:
    """A rank's device: its memory, the usable part, and the overhead added to the traced peak (0 on a CPU)."""

    memory_bytes: float
    usable_bytes: float
    added_bytes: float


def step_figure(events: StepEvents, *, title: str, world_size: int, device: DrawnDevice, note: str = "") -> "Figure":
    """Draw a step: its phases side by side, in each the bytes of every kind on top of each other.

    Args:
        title: the config's name.
        device: the device of each of ``world_size`` ranks.
        note: a sentence below the heading.
    """
    from matplotlib.figure import Figure

    phases = phases_of([operation.phase for operation in events.operations])
    # Each phase has room for its name; the rest is divided by the number of operations.
    room = [(len(phase) + 2) / _CHARS for phase, _ in phases]
    widths = [
        own + max(0, 1 - sum(room)) * len(inside) / len(events.operations)
        for own, (_, inside) in zip(room, phases, strict=True)
    ]
    shows_device = device.memory_bytes <= _HIGHEST_DEVICE * events.peak_bytes
    highest_bytes = max(events.peak_bytes, device.memory_bytes if shows_device else 0)
    unit, unit_bytes = byte_unit(highest_bytes)
    figure = Figure(figsize=_INCHES)
    grid = {"width_ratios": widths, **_PLACE}
    panels: Any = figure.subplots(1, len(phases), sharey=True, squeeze=False, gridspec_kw=grid)[0]
    for axes, (phase, inside), width in zip(panels, phases, widths, strict=True):
        shown = highest_of_each_pixel(inside, events.total_bytes, int(_PIXELS * width))
        _draw_kinds(axes, events, shown, end=inside.stop, unit_bytes=unit_bytes)
        axes.set_title(phase, loc="center")
        axes.set_xlim(inside.start, inside.stop)
        axes.set_xticks([])
        axes.spines.left.set_visible(axes is panels[0])
        axes.tick_params(left=axes is panels[0])
        if shows_device:
            _draw_device(axes, device, unit_bytes)
        if events.peak_at in inside:
            _draw_peak(axes, events, unit_bytes)
    panels[0].set_ylim(0, 1.08 * highest_bytes / unit_bytes)  # of all panels
    panels[0].set_ylabel(f"memory of a rank [{unit}]")
    title = title if len(title) <= _TITLE_CHARS else f"…{title[1 - _TITLE_CHARS :]}"
    figure.text(0.01, 0.98, f"{title}: memory of one train step", va="top", fontsize="large", fontweight="bold")
    figure.text(0.01, 0.93, _sentence(events, world_size, device), va="top")
    figure.text(0.01, 0.02, "\n".join(filter(None, [_where(events), note])))
    handles, labels = panels[0].get_legend_handles_labels()
    place = {"loc": "upper left", "bbox_to_anchor": (0.77, 0.84), "alignment": "left"}
    figure.legend(handles[::-1], labels[::-1], title="at the peak", **place)
    return figure


def phases_of(phases: Sequence[str]) -> list[tuple[str, range]]:
    """Each phase with the numbers of its operations."""
    found: list[tuple[str, range]] = []
    for phase, run in groupby(phases):
        first = found[-1][1].stop if found else 0
        found.append((phase, range(first, first + len(list(run)))))
    return found


def highest_of_each_pixel(inside: range, total_bytes: Sequence[int], width: int) -> list[int]:
    """Of the operations in each of ``width`` equal parts of ``inside``, the one with the most live bytes."""
    together = -(-len(inside) // max(1, width))
    parts = (inside[first : first + together] for first in range(0, len(inside), together))
    return [max(part, key=total_bytes.__getitem__) for part in parts]


def _draw_kinds(axes: "Axes", events: StepEvents, shown: Sequence[int], *, end: int, unit_bytes: int) -> None:
    """Areas on top of each other: the live bytes of each kind after the operations ``shown``."""
    kinds = [kind for kind in COLOURS if kind in events.live_bytes]
    heights = [[events.live_bytes[kind][one] / unit_bytes for one in (*shown, shown[-1])] for kind in kinds]
    labels = [f"{kind}: {format_bytes(events.live_bytes[kind][events.peak_at])}" for kind in kinds]
    colours = [COLOURS[kind] for kind in kinds]
    axes.stackplot([*shown, end], *heights, labels=labels, colors=colours, step="post", linewidth=0, rasterized=True)


def _draw_device(axes: "Axes", device: DrawnDevice, unit_bytes: int) -> None:
    """Lines for the device's memory and its usable part, and a band for the GPU's overhead."""
    memory, usable, added = (
        num_bytes / unit_bytes for num_bytes in (device.memory_bytes, device.usable_bytes, device.added_bytes)
    )
    if added:
        label = f"GPU overhead: {format_bytes(device.added_bytes)}"
        axes.axhspan(usable - added, usable, facecolor="none", edgecolor=SOFT, hatch="///", linewidth=0, label=label)
    if usable < memory:
        axes.axhline(usable, color=INK, linestyle="--", label=f"usable: {format_bytes(device.usable_bytes)}")
    axes.axhline(memory, color=INK, label=f"device: {format_bytes(device.memory_bytes)}")


def _draw_peak(axes: "Axes", events: StepEvents, unit_bytes: int) -> None:
    axes.set_zorder(1)  # the mark and its text may lie over the neighbours
    axes.patch.set_visible(False)
    first, end = axes.get_xlim()
    height = events.peak_bytes / unit_bytes
    axes.plot(events.peak_at, height, marker="o", markerfacecolor="white", markeredgecolor=INK, clip_on=False, zorder=3)
    is_right = events.peak_at > (first + end) / 2
    axes.annotate(
        f"peak {format_bytes(events.peak_bytes)}",
        (events.peak_at, height),
        xytext=(-7 if is_right else 7, 7),
        textcoords="offset points",
        ha="right" if is_right else "left",
        fontweight="bold",
        annotation_clip=False,
        zorder=4,
    )


def _sentence(events: StepEvents, world_size: int, device: DrawnDevice) -> str:
    ranks = f"each of {world_size} ranks" if world_size > 1 else "one rank"
    peak, together = format_bytes(events.peak_bytes), format_bytes(events.peak_bytes + device.added_bytes)
    added = f", {together} with GPU overhead" if device.added_bytes else ""
    return (
        f"A batch of {events.batch_size:,} rows of {events.seq_len:,} tokens on {ranks}: peak {peak}{added}, of"
        f" {format_bytes(device.memory_bytes)}"
    )


def _where(events: StepEvents) -> str:
    operation = events.operations[events.peak_at]
    name = operation.name.removeprefix("aten.").removesuffix(".default")
    return (
        f"The peak is in {operation.phase}, at {name} of {operation.module}: operation {events.peak_at + 1:,} of"
        f" {len(events.operations):,}, drawn in order. Short phases are drawn wider."
    )
