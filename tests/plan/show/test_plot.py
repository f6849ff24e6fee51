"""The picture of a step: scales are checked by their values, the rest by its texts and shapes."""

import itertools
import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.step_events import EVENTS, MIB, drawn_events
from torchtune_adaptive.plan.show.page import page
from torchtune_adaptive.plan.show.plot import (
    COLOURS,
    PLOT_WIDTH,
    DrawnDevice,
    StepPlot,
    bands_of,
    highest_of_each_pixel,
)
from torchtune_adaptive.plan.trace.events import StepEvents

properties = settings(derandomize=True, deadline=None, max_examples=80)


def plot_of(
    *, memory_mib: float = 30, usable_mib: float = 28, added_mib: float = 5, title: str = "tiny/full", note: str = ""
) -> StepPlot:
    device = DrawnDevice(memory_bytes=memory_mib * MIB, usable_bytes=usable_mib * MIB, added_bytes=added_mib * MIB)
    return StepPlot(EVENTS, title=title, world_size=2, device=device, note=note)


def texts(svg: str) -> list[str]:
    return [found.text or "" for found in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


@properties
@given(st.lists(st.sampled_from(["forward", "loss", "optimizer"]), min_size=1, max_size=500), st.integers(20, 900))
def test_phases_stand_side_by_side_over_the_whole_width(phases: list[str], width: int) -> None:
    bands = bands_of(phases, width)
    assert [phase for band in bands for phase in [band.phase] * (band.end - band.first)] == phases
    assert (bands[0].left, bands[-1].right) == (0, pytest.approx(width))
    assert all(one.right == other.left and one.left < one.right for one, other in itertools.pairwise(bands))


@properties
@given(drawn_events(), st.sampled_from([1, 3, 10, 60, 200]))
def test_no_pixel_hides_an_operation_that_is_higher_than_what_it_shows(events: StepEvents, width: int) -> None:
    bands = bands_of([operation.phase for operation in events.operations], width)
    shown = highest_of_each_pixel(bands, events.total_bytes, width)
    assert len(shown) == width
    begins = [min(int(band.place(operation)), width - 1) for band in bands for operation in range(band.first, band.end)]
    for pixel, operation in enumerate(shown):
        beginning = [number for number, place in enumerate(begins) if place == pixel]
        going_on = max(number for number, place in enumerate(begins) if place <= pixel)
        assert operation in (beginning or [going_on])
        assert all(events.total_bytes[operation] >= events.total_bytes[number] for number in beginning)
    assert events.peak_at in shown
    assert all(one <= other for one, other in itertools.pairwise(shown))


def test_the_picture_names_the_config_the_batch_the_ranks_the_kinds_and_the_device() -> None:
    svg = plot_of(title="<mine> & yours").svg()
    found = texts(svg)
    assert found[:2] == [
        "<mine> & yours: memory of one train step",
        "A batch of 4 rows of 256 tokens on each of 2 ranks: peak 20.0 MiB, 25.0 MiB with GPU overhead, of 30.0 MiB",
    ]
    assert {"forward", "loss", "backward", "optimizer", "MiB", "peak 20.0 MiB", "device: 30.0 MiB"} <= set(found)
    assert {"parameters", "gradients", "optimizer state", "activations", "GPU overhead"} <= set(found)
    assert "temporaries" not in found
    assert "The peak is in loss" in found
    assert all(COLOURS[kind] in svg for kind in EVENTS.live_bytes)


def test_areas_are_as_high_as_the_bytes_that_they_show() -> None:
    """Each area reaches from the bottom to the live bytes of its kind and of the kinds below it."""
    plot = plot_of()
    paths = re.findall(r'<path d="M52 470(\S*)V470z" fill="(#\w+)"', plot.svg())
    assert [colour for _, colour in paths] == [COLOURS[kind] for kind in reversed(plot.kinds)]
    pixels_of_mib = 370 / (1.08 * 30)
    for (steps, _), kind in zip(paths, reversed(plot.kinds), strict=True):
        below = plot.kinds[: plot.kinds.index(kind) + 1]
        heights = list(itertools.accumulate(-float(rise) for rise in re.findall(r"v(-?[\d.]+)", steps)))
        highest = max(sum(EVENTS.live_bytes[one][operation] for one in below) for operation in range(5)) / MIB
        assert max(heights) == pytest.approx(highest * pixels_of_mib, abs=0.2)
        assert sum(map(int, re.findall(r"h(\d+)", steps))) == PLOT_WIDTH


def test_the_margin_is_a_dashed_line_and_the_gpu_overhead_hangs_from_it() -> None:
    svg = plot_of().svg()
    assert "usable: 28.0 MiB" in texts(svg)
    usable_y = 470 - 370 * 28 / (1.08 * 30)
    (dashed,) = re.findall(r'<path d="M52 ([\d.]+)h660" stroke-dasharray', svg)
    (hatched,) = re.findall(r'<rect fill="url\(#added\)" x="52" y="([\d.]+)"', svg)
    assert float(dashed) == float(hatched) == pytest.approx(usable_y, abs=0.1)
    without_margin = plot_of(usable_mib=30).svg()
    assert "dasharray" not in without_margin
    assert not any("usable" in one for one in texts(without_margin))


def test_the_page_holds_the_picture_and_loads_nothing() -> None:
    events = replace(EVENTS, operations=tuple(one._replace(module="</script>") for one in EVENTS.operations))
    device = DrawnDevice(memory_bytes=30 * MIB, usable_bytes=30 * MIB, added_bytes=0)
    plot = StepPlot(events, title="</script><b>", world_size=1, device=device)
    html = page(plot, events, title="</script><b>")
    assert plot.svg() in html
    assert html.count("</script>") == 2
    assert "<title>&lt;/script&gt;&lt;b&gt;</title>" in html
    assert not re.search(r"(src|href)=", html)
    content = json.loads(html.partition('id="step">')[2].partition("</script>")[0])
    number, name, phase, module, *held = max(content["pixels"], key=lambda pixel: sum(pixel[4:]))
    assert (number, sum(held)) == (2, 20 * MIB)
    assert [content["names"][place] for place in (name, phase, module)] == list(events.operations[2])
    assert [kind for kind, _ in content["kinds"]] == plot.kinds[::-1]
