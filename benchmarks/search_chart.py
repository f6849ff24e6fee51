"""Draw the README's chart from the table of ``benchmarks.search``.

    python -m benchmarks.search_chart

Reads the case of ``results/search_cpu.md`` with rows of different lengths, and writes ``docs/images/searches.svg``.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.search import CPU

PICTURE = Path(__file__).parent.parent / "docs" / "images" / "searches.svg"
NAMES = {  # in the table, and in the chart
    "ours (defaults)": "torchtune_adaptive",
    "Lightning BatchSizeFinder, power": "Lightning, power",
    "Lightning BatchSizeFinder, binsearch": "Lightning, binsearch",
    "accelerate find_executable_batch_size": "accelerate",
    "HF Trainer auto_find_batch_size": "Hugging Face Trainer",
    "toma.batch from 512": "toma",
}
OURS, OTHERS, TOO_LARGE, LIMIT = "#0072B2", "#8C8C8C", "#D55E00", "#000000"  # colour-blind readers can distinguish them


@dataclass(frozen=True)
class Row:
    """A search in the chart; ``survives``: whether 20 steps of training with the size found fit."""

    name: str
    size: int
    largest: int
    out_of_memory_errors: int
    seconds: float
    survives: bool


def main() -> None:
    """Draw and write."""
    rows = rows_of(CPU.results.read_text())
    draw(rows, PICTURE)
    print(f"Written to {PICTURE}")


def rows_of(document: str) -> list[Row]:
    """The searches that the chart shows, from the document's table of rows of different lengths."""
    rows = []
    for line in document.partition(f"\n## {CPU.cases[-1].name}")[2].partition("\n## ")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] in NAMES:
            name, size, largest, _, errors, seconds, *_, survives = cells
            rows.append(
                Row(NAMES[name], int(size), int(largest), int(errors), float(seconds.split()[0]), survives[:3] == "yes")
            )
    return rows


def draw(rows: list[Row], path: Path) -> None:
    """Write the chart as SVG, with ``rows`` in its description."""
    with mpl.rc_context({"svg.hashsalt": "searches", "svg.fonttype": "path", "font.size": 10}):
        figure = Figure(figsize=(10, 3), layout="constrained")
        sizes, errors, seconds = figure.subplots(1, 3, sharey=True)
        names = [row.name for row in rows]
        for axes, values, title in (
            (sizes, [row.size for row in rows], "batch size found"),
            (errors, [row.out_of_memory_errors for row in rows], "out-of-memory errors"),
            (seconds, [row.seconds for row in rows], "seconds"),
        ):
            bars = axes.barh(names, values, color=[_colour(row, axes is sizes) for row in rows], height=0.7)
            inside = axes is sizes  # beside the bars the line of the largest size would cross the numbers
            axes.bar_label(
                bars,
                labels=[f"{value:g}" for value in values],
                padding=-20 if inside else 3,
                color="white" if inside else "black",
            )
            axes.set_title(title, loc="left", fontsize=11)
            axes.set_xlim(0, max(values) * 1.18)
            axes.xaxis.set_visible(False)
            axes.spines[["top", "right", "bottom"]].set_visible(False)
            axes.tick_params(axis="y", length=0)
        sizes.invert_yaxis()
        largest = rows[0].largest
        sizes.axvline(largest, color=LIMIT, linewidth=1, linestyle="--")
        sizes.set_title(
            f"batch size found (dashed: the largest\nthat fits, {largest}; orange: too large)", loc="left", fontsize=11
        )
        figure.savefig(path, metadata={"Date": None, "Description": description_of(rows)})
    # matplotlib leaves spaces at the ends of lines
    path.write_text(re.sub(r" +\n", "\n", path.read_text()))


def description_of(rows: list[Row]) -> str:
    """``rows`` in words."""
    return "; ".join(
        f"{row.name}: batch size {row.size} of {row.largest}, {row.out_of_memory_errors} errors, {row.seconds:g} s"
        + ("" if row.survives else ", training runs out of memory")
        for row in rows
    )


def _colour(row: Row, is_size: bool) -> str:
    if is_size and row.size > row.largest:
        return TOO_LARGE
    return OURS if row.name == NAMES["ours (defaults)"] else OTHERS


if __name__ == "__main__":
    main()
