"""A plot of a step's live memory by kind, as SVG."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from torchtune_adaptive.plan.show.svg import area_of_steps, element, text, titled
from torchtune_adaptive.plan.trace.events import Operation, StepEvents
from torchtune_adaptive.text import byte_unit, format_bytes

WIDTH, HEIGHT = 960, 520
LEFT, TOP, PLOT_WIDTH, PLOT_HEIGHT = 52, 100, 660, 370
_BOTTOM, _RIGHT = TOP + PLOT_HEIGHT, LEFT + PLOT_WIDTH
_LEGEND_LEFT, _LEGEND_RIGHT = _RIGHT + 26, WIDTH - 16
_CHAR_WIDTH = 7.6  # of bold text in a wide font
# Okabe and Ito's colours, which colour-blind people can tell apart. Bottom to top; memory that stays comes first.
COLOURS = {
    "parameters": "#0072B2",
    "frozen models": "#999999",
    "optimizer state": "#009E73",
    "gradients": "#D55E00",
    "gathered parameters": "#56B4E9",
    "activations": "#E69F00",
    "temporaries": "#CC79A7",
}
_INK, _GREY, _LINE = "#1b1f24", "#57606a", "#d8dee4"
_FONT = "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif"
_HIGHEST_DEVICE = 4  # times the peak; with a larger device's limit drawn, the plot would be flat
_STYLE = (
    f"text{{font:12px {_FONT};fill:{_GREY}}}.head{{font-size:17px;font-weight:600;fill:{_INK}}}"
    f".strong{{font-weight:600;fill:{_INK}}}.sub{{font-size:13px}}"
    ".halo{paint-order:stroke;stroke:#fff;stroke-width:4px;stroke-linejoin:round}"
)


@dataclass(frozen=True, kw_only=True)
class DrawnDevice:
    """A rank's device: its memory, the usable part, and the overhead added to the traced peak (0 on a CPU)."""

    memory_bytes: float
    usable_bytes: float
    added_bytes: float


@dataclass(frozen=True)
class Band:
    """A phase's operations, numbers ``first`` to ``end`` - 1, and its position in pixels."""

    phase: str
    first: int
    end: int
    left: float
    right: float

    def place(self, operation: int) -> float:
        """The pixel at which an operation begins."""
        return self.left + (self.right - self.left) * (operation - self.first) / (self.end - self.first)


def bands_of(phases: Sequence[str], width: float) -> list[Band]:
    """The phases side by side. Each has space for its name; the rest is divided by the number of operations."""
    runs = [(phase, len(list(run))) for phase, run in groupby(phases)]
    needed = [len(phase) * _CHAR_WIDTH + 8 for phase, _ in runs]
    rest = width - sum(needed)
    if rest < 0:
        needed, rest = [0.0] * len(runs), width
    found: list[Band] = []
    first, left = 0, 0.0
    for (phase, length), room in zip(runs, needed, strict=True):
        right = left + room + rest * length / len(phases)
        found.append(Band(phase, first, first + length, left, right))
        first, left = first + length, right
    return found


def highest_of_each_pixel(bands: Sequence[Band], total_bytes: Sequence[int], width: int) -> list[int]:
    """For each pixel, the operation with the most live bytes that begins there, else the one that continues."""
    highest: dict[int, int] = {}
    last: dict[int, int] = {}
    for band in bands:
        for operation in range(band.first, band.end):
            pixel = min(int(band.place(operation)), width - 1)
            highest[pixel] = max(highest.get(pixel, operation), operation, key=total_bytes.__getitem__)
            last[pixel] = operation
    found: list[int] = []
    going_on = 0
    for pixel in range(width):
        found.append(highest.get(pixel, going_on))
        going_on = last.get(pixel, going_on)
    return found


class StepPlot:
    """Draws one step.

    Args:
        title: the config's name.
        device: the device of each of ``world_size`` ranks.
        note: a sentence below the heading.
    """

    def __init__(self, events: StepEvents, *, title: str, world_size: int, device: DrawnDevice, note: str = "") -> None:
        self._events = events
        self._title = title
        self._world_size = world_size
        self._device = device
        self._note = note
        self._shows_device = device.memory_bytes <= _HIGHEST_DEVICE * events.peak_bytes
        highest = max(events.peak_bytes, device.memory_bytes if self._shows_device else 0)
        self._top_bytes = 1.08 * highest
        self._unit, self._unit_bytes = byte_unit(highest)

    @cached_property
    def bands(self) -> list[Band]:
        """The phases, in pixels from the plot's left."""
        return bands_of([operation.phase for operation in self._events.operations], PLOT_WIDTH)

    @cached_property
    def shown(self) -> list[int]:
        """The operation that each pixel of the plot's width shows."""
        return highest_of_each_pixel(self.bands, self._events.total_bytes, PLOT_WIDTH)

    @cached_property
    def kinds(self) -> list[str]:
        """The kinds of bytes that the step has, from the bottom."""
        return [kind for kind in COLOURS if kind in self._events.live_bytes]

    def svg(self) -> str:
        """The plot as SVG."""
        parts = [
            element("style", _STYLE),
            element("defs", _HATCHING),
            element("rect", width=WIDTH, height=HEIGHT, fill="#fff"),
            *self._heading(),
            *self._phases(),
            *self._axes(),
            *self._areas(),
            *(self._limits() if self._shows_device else ()),
            *self._peak(),
            *self._legend(),
        ]
        size = {"width": WIDTH, "height": HEIGHT, "viewBox": f"0 0 {WIDTH} {HEIGHT}"}
        return element("svg", *(f"\n{part}" for part in parts), "\n", xmlns="http://www.w3.org/2000/svg", **size) + "\n"

    def _heading(self) -> Iterator[str]:
        events, device = self._events, self._device
        rows = f"{events.batch_size:,} rows of {events.seq_len:,} tokens"
        ranks = f"each of {self._world_size} ranks" if self._world_size > 1 else "one rank"
        peak, together = format_bytes(events.peak_bytes), format_bytes(events.peak_bytes + device.added_bytes)
        added = f", {together} with GPU overhead" if device.added_bytes else ""
        sentence = f"A batch of {rows} on {ranks}: peak {peak}{added}, of {format_bytes(device.memory_bytes)}"
        yield text(LEFT, 32, f"{_shortened(self._title, 60)}: memory of one train step", class_="head")
        yield text(LEFT, 54, sentence, class_="sub")
        if self._note:
            yield text(LEFT, 73, self._note, class_="sub")

    def _phases(self) -> Iterator[str]:
        for index, band in enumerate(self.bands):
            left, width = LEFT + band.left, band.right - band.left
            room = {"x": left, "y": float(TOP), "width": width, "height": float(PLOT_HEIGHT)}
            yield titled(
                f"{band.phase}: {_count(band.end - band.first)}",
                "rect",
                fill="#fff" if index % 2 else "#f3f5f7",
                **room,
            )
            if width > len(band.phase) * _CHAR_WIDTH:
                yield text(left + width / 2, TOP - 8, band.phase, text_anchor="middle", class_="strong")

    def _axes(self) -> Iterator[str]:
        step = _nice_step(self._top_bytes / self._unit_bytes)
        yield text(LEFT - 8, TOP - 8, self._unit, text_anchor="end")
        for number in range(int(self._top_bytes / self._unit_bytes / step) + 1):
            y = self._y(number * step * self._unit_bytes)
            yield element("path", d=f"M{LEFT} {y:.1f}h{PLOT_WIDTH}", stroke=_LINE, fill="none")
            yield text(LEFT - 8, y + 4, f"{number * step:g}", text_anchor="end")
        for place in (*(band.left for band in self.bands), float(PLOT_WIDTH)):
            yield element("path", d=f"M{LEFT + place:.1f} {_BOTTOM}v5", stroke=_GREY, fill="none")
        operations = _count(len(self._events.operations))
        yield text(
            LEFT + PLOT_WIDTH / 2,
            _BOTTOM + 24,
            f"{operations} in order; short phases are drawn wider",
            text_anchor="middle",
        )

    def _areas(self) -> Iterator[str]:
        live_bytes, held = self._events.live_bytes, [0.0] * PLOT_WIDTH
        areas: list[str] = []
        for kind in self.kinds:
            held = [below + live_bytes[kind][operation] for below, operation in zip(held, self.shown, strict=True)]
            heights = (_BOTTOM - self._y(num_bytes) for num_bytes in held)
            path = area_of_steps(heights, left=LEFT, bottom=_BOTTOM)
            areas.append(titled(kind, "path", d=path, fill=COLOURS[kind]))
        yield from reversed(areas)  # each area covers the lower part of the one above it

    def _limits(self) -> Iterator[str]:
        """Lines for the device's memory and its usable part, and a band for the GPU's overhead."""
        device = self._device
        y, usable_y = self._y(device.memory_bytes), self._y(device.usable_bytes)
        if device.added_bytes:
            height = self._y(device.usable_bytes - device.added_bytes) - usable_y
            band = {"x": LEFT, "y": usable_y, "width": PLOT_WIDTH, "height": height}
            yield titled(f"GPU overhead: {format_bytes(device.added_bytes)}", "rect", fill="url(#added)", **band)
        line = {"stroke": _INK, "stroke_width": 1.5, "fill": "none"}
        at_left = self._peak_place > PLOT_WIDTH / 2
        place, anchor = (LEFT + 8, "start") if at_left else (_RIGHT - 8, "end")
        label = {"text_anchor": anchor, "class_": "strong halo"}
        yield element("path", d=f"M{LEFT} {y:.1f}h{PLOT_WIDTH}", **line)
        yield text(place, y - 6, f"device: {format_bytes(device.memory_bytes)}", **label)
        if device.usable_bytes < device.memory_bytes:
            yield element("path", d=f"M{LEFT} {usable_y:.1f}h{PLOT_WIDTH}", stroke_dasharray="6 4", **line)
            yield text(place, usable_y + 16, f"usable: {format_bytes(device.usable_bytes)}", **label)

    def _peak(self) -> Iterator[str]:
        events, place = self._events, self._peak_place
        x, y = LEFT + place, self._y(events.peak_bytes)
        content = f"peak {format_bytes(events.peak_bytes)}"
        room = math.ceil(len(content) * _CHAR_WIDTH) + 12
        before, after = self.shown[max(0, int(place) - room) : int(place)], self.shown[int(place) : int(place) + room]
        lower_before = sum(map(events.total_bytes.__getitem__, before)) < sum(
            map(events.total_bytes.__getitem__, after)
        )
        is_before = len(before) == room and (lower_before or len(after) < room)
        yield element("circle", cx=x, cy=y, r=4.0, fill="#fff", stroke=_INK, stroke_width=2.0)
        anchor, offset = ("end", -9) if is_before else ("start", 9)
        base = y + 4
        for limit in (self._y(self._device.usable_bytes), self._y(self._device.memory_bytes)):
            if base - 20 < limit < base + 12:
                base = min(y, limit) - 8  # above a line that would cross the text
        yield text(x + offset, base, content, text_anchor=anchor, class_="strong halo")

    def _legend(self) -> Iterator[str]:
        events, y = self._events, TOP + 12
        live = {kind: events.live_bytes[kind][events.peak_at] for kind in reversed(self.kinds)}
        seen_bytes = self._top_bytes / PLOT_HEIGHT / 2  # a line of half a pixel
        elsewhere = [kind for kind in live if not live[kind] and max(events.live_bytes[kind]) > seen_bytes]

        def row(name: str, num_bytes: float | None, fill: str = "none", stroke: str = "none") -> Iterator[str]:
            if fill != "none":
                square = {"x": _LEGEND_LEFT, "y": y - 10, "width": 12, "height": 12, "rx": 2}
                yield element("rect", fill=fill, stroke=stroke, **square)
            yield text(_LEGEND_LEFT + 20, y, name)
            if num_bytes is not None:
                yield text(_LEGEND_RIGHT, y, format_bytes(num_bytes), text_anchor="end", class_="strong")

        yield text(_LEGEND_LEFT, TOP - 8, "At the peak", class_="strong")
        for kind in (kind for kind, num_bytes in live.items() if num_bytes):
            yield from row(kind, live[kind], COLOURS[kind])
            y += 22
        yield element("path", d=f"M{_LEGEND_LEFT} {y - 12}H{_LEGEND_RIGHT}", stroke=_LINE, fill="none")
        y += 6
        yield from row("traced", events.peak_bytes)
        if self._device.added_bytes:
            y += 22
            yield from row("GPU overhead", self._device.added_bytes, "url(#added)", _GREY)
        if not self._shows_device:
            y += 22
            yield from row("device (not drawn)", self._device.memory_bytes)
        if elsewhere:
            y += 36
            yield text(_LEGEND_LEFT, y, "At other times", class_="strong")
        for kind in elsewhere:
            y += 22
            yield from row(kind, None, COLOURS[kind])
        operation = events.operations[events.peak_at]
        y += 36
        yield text(_LEGEND_LEFT, y, f"The peak is in {operation.phase}", class_="strong")
        for line in _where(operation, events.peak_at, len(events.operations)):
            y += 17
            yield text(_LEGEND_LEFT, y, line)

    @property
    def _peak_place(self) -> float:
        """Pixels from the plot's left to the peak."""
        return self.shown.index(self._events.peak_at) + 0.5

    def _y(self, num_bytes: float) -> float:
        return _BOTTOM - PLOT_HEIGHT * num_bytes / self._top_bytes


_HATCHING = element(
    "pattern",
    element("rect", width=6, height=6, fill="#fff", fill_opacity=0.55),
    element("path", d="M0 0V6", stroke="#8c959f", stroke_width=1.5),
    id="added",
    width=6,
    height=6,
    patternUnits="userSpaceOnUse",
    patternTransform="rotate(45)",
)


def _where(operation: Operation, number: int, num_operations: int) -> Iterator[str]:
    yield f"at {_shortened(operation.name.removeprefix('aten.').removesuffix('.default'), 24)}"
    yield f"of {_shortened(operation.module, 24)},"
    yield f"operation {number + 1:,} of {num_operations:,}"


def _count(num_operations: int) -> str:
    return f"{num_operations:,} operation{'s' if num_operations > 1 else ''}"


def _shortened(name: str, num_chars: int) -> str:
    """The last ``num_chars`` characters of the name."""
    return name if len(name) <= num_chars else f"…{name[1 - num_chars :]}"


def _nice_step(top: float) -> float:
    """A round step with which an axis up to ``top`` has four to nine ticks.

    >>> _nice_step(85), _nice_step(43), _nice_step(1.5)
    (10.0, 5.0, 0.2)
    """
    power = 10.0 ** math.floor(math.log10(top))
    return next(power * part for part in (0.1, 0.2, 0.5, 1.0) if top <= 9 * power * part)
