"""Markdown: tables, what stands in their cells, and where they are written."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import quantiles


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    return ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows)]


def spread(values: Sequence[float], *, digits: int = 2) -> str:
    """Median [quartiles].

    >>> spread([1.0, 2.0, 4.0], digits=1)
    '2.0 [1.5, 3.0]'
    """
    first, middle, third = quantiles(values, n=4, method="inclusive")
    return f"{middle:.{digits}f} [{first:.{digits}f}, {third:.{digits}f}]"


def publish(lines: Sequence[str], path: Path) -> None:
    """Print a document and write it to ``path``."""
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    print("\n".join(lines), f"\nWritten to {path}", sep="\n")
