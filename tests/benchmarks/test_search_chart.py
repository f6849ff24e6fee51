"""The README's chart shows the measured table."""

import re

import pytest

from benchmarks.search import CPU
from benchmarks.search_chart import OTHERS, OURS, PICTURE, TOO_LARGE, description_of, rows_of

# A bar is a rectangle, drawn from its lower left corner, in the colour of one of the searches.
COLOURS = "|".join([OURS, OTHERS, TOO_LARGE]).lower()
BAR = re.compile(rf'<path d="M (\S+) (\S+)\s+L (\S+) \2\s[^"]*"[^>]* style="fill: ({COLOURS})"')


def test_the_committed_chart_shows_the_committed_results() -> None:
    rows, picture = rows_of(CPU.results.read_text()), PICTURE.read_text()
    assert description_of(rows) in picture
    bars = [(float(right) - float(left), colour) for left, _, right, colour in BAR.findall(picture)]
    panels = [[row.size for row in rows], [row.out_of_memory_errors for row in rows], [row.seconds for row in rows]]
    assert len(bars) == sum(map(len, panels))
    for number, values in enumerate(panels):
        widths = [width for width, _ in bars[number * len(rows) :][: len(rows)]]
        assert widths == pytest.approx([value / max(values) * max(widths) for value in values], rel=1e-3, abs=1e-3)
    too_large = [colour == TOO_LARGE.lower() for _, colour in bars[: len(rows)]]
    assert too_large == [row.size > row.largest for row in rows]
