"""The picture of a step: what is drawn is read from the figure."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.plans import MIB, STEP, step_of
from torchtune_adaptive.plan.decide import BatchSizes, Device, Plan
from torchtune_adaptive.plan.gpu import Overhead
from torchtune_adaptive.plan.host_memory import HostFigures
from torchtune_adaptive.plan.show.plot import (
    COLOURS,
    highest_of_each_pixel,
    live_bytes_of_kinds,
    phases_of,
    step_figure,
)
from torchtune_adaptive.plan.trace.step_events import StepEvents
from torchtune_adaptive.report.style import svg_of

properties = settings(max_examples=80)


def figure_of(
    *,
    memory_mib: int = 30,
    outside_mib: int = 5,
    margin: float = 0.08,
    title: str = "tiny/full",
    offloaded_bytes: int = 0,
) -> Any:
    overhead = Overhead(least_outside_bytes=outside_mib * MIB, most_outside_bytes=outside_mib * MIB)
    device = Device(name="any", memory_bytes=memory_mib * MIB, margin=margin, overhead=overhead)
    step = StepEvents(256, dict.fromkeys((2, 3, 4), (STEP.events,)))
    traced = step_of(step, host=HostFigures(offloaded_weights=offloaded_bytes))
    length = BatchSizes(step, device).plan(used=4, tokens_per_step=None)
    plan = Plan(title=title, world_size=2, device=device, step=traced, lengths=(length,))
    return step_figure(plan)


def legend_of(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


@properties
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 6) | st.integers(0, 10**6)), min_size=1, max_size=30),
    st.sampled_from([1, 3, 10, 60, 200]),
)
def test_no_pixel_hides_an_operation_that_is_higher_than_what_it_shows(step: list[tuple[str, int]], width: int) -> None:
    names, live_bytes = [name for name, _ in sorted(step)], [live for _, live in sorted(step)]
    phases = phases_of(names)
    assert [name for name, inside in phases for _ in inside] == names
    assert [number for _, inside in phases for number in inside] == list(range(len(names)))
    for _, inside in phases:
        shown = highest_of_each_pixel(inside, live_bytes, width)
        assert len(shown) <= width
        assert shown == sorted(set(shown))
        assert set(shown) <= set(inside)
        assert max(live_bytes[one] for one in shown) == max(live_bytes[one] for one in inside)


def test_the_picture_names_the_config_the_batch_the_ranks_and_the_place_of_the_peak() -> None:
    figure = figure_of(title="<mine> & yours", offloaded_bytes=1)
    assert [text.get_text() for text in figure.texts] == [
        "<mine> & yours: memory of one train step",
        "A batch of 4 rows of 256 tokens on each of 2 ranks: peak 20.0 MiB, 25.0 MiB with GPU overhead, of 30.0 MiB",
        "The peak is in loss, at nll_loss_forward. Drawn in order; short phases are drawn wider.\n"
        "Parameters, gradients and optimizer state are in host memory.",
    ]
    assert [axes.get_title("center") for axes in figure.axes] == ["forward", "loss", "backward", "optimizer"]
    assert [text.get_text() for axes in figure.axes for text in axes.texts] == ["peak 20.0 MiB"]
    assert "&lt;mine&gt; &amp; yours" in svg_of(lambda: figure_of(title="<mine> & yours"))


def test_areas_are_as_high_as_the_bytes_that_they_show() -> None:
    """Each area lies on the live bytes of the kinds below it."""
    live_bytes = live_bytes_of_kinds(STEP)
    kinds = [kind for kind in COLOURS if kind in live_bytes]
    assert [sum(live) for live in zip(*live_bytes.values(), strict=True)] == STEP.live_bytes
    events = iter(range(2, len(STEP.events)))  # after those from before the step
    for axes in figure_of().axes:
        shown = [next(events) for _ in range(2 if axes.get_title("center") in ("forward", "backward") else 1)]
        below = dict.fromkeys(shown, 0.0)
        areas = axes.collections[: len(kinds)]
        for area, kind in zip(areas, kinds, strict=True):
            drawn = {y for _, y in area.get_paths()[0].vertices}
            above = {one: below[one] + live_bytes[kind][one] / MIB for one in shown}
            assert drawn == {*above.values(), *below.values()}
            below = above


def test_lines_show_the_device_and_what_is_usable_of_it() -> None:
    figure = figure_of()
    lines = {line.get_label(): line.get_ydata()[0] for line in figure.axes[0].lines}
    assert lines == {"usable: 28.0 MiB": 28, "device: 30.0 MiB": 30}
    (overhead,) = figure.axes[0].patches
    assert (overhead.get_y(), overhead.get_height()) == (23, 5)
    assert legend_of(figure) == [
        "device: 30.0 MiB",
        "usable: 28.0 MiB",
        "GPU overhead: 5.0 MiB",
        "activations: 14.0 MiB",
        "gradients: 0 B",
        "optimizer state: 4.0 MiB",
        "parameters: 2.0 MiB",
    ]


def test_a_cpu_without_a_margin_has_one_line_and_a_device_far_above_the_peak_is_not_drawn() -> None:
    of_cpu = legend_of(figure_of(outside_mib=0, margin=0))
    assert not any("usable" in label or "GPU overhead" in label for label in of_cpu)
    figure = figure_of(memory_mib=200)
    assert not any("device" in label for label in legend_of(figure))
    assert figure.texts[1].get_text().endswith("of 200.0 MiB")
    assert figure.axes[0].get_ylim()[1] == pytest.approx(1.08 * 20)


def test_of_a_long_name_the_end_is_shown() -> None:
    heading = figure_of(title="/folder" * 20 + "/mine.yaml").texts[0].get_text()
    assert heading.startswith("…")
    assert heading.endswith("/mine.yaml: memory of one train step")
