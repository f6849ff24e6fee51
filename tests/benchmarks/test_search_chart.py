"""The README's chart shows the measured table."""

from benchmarks.search import CPU
from benchmarks.search_chart import PICTURE, description_of, rows_of


def test_the_committed_chart_shows_the_committed_results() -> None:
    assert description_of(rows_of(CPU.results.read_text())) in PICTURE.read_text()
