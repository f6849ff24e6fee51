"""Markdown tables, figures for their cells, and the writing of documents."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median, quantiles


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    return ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows)]


def spread(values: Sequence[float], *, digits: int = 2) -> str:
    """Median [quartiles].

    >>> spread([1.0, 2.0, 4.0], digits=1)
    '2.0 [1.5, 3.0]'
    """
    first, second, third = quantiles(values, n=4, method="inclusive")
    return f"{second:.{digits}f} [{first:.{digits}f}, {third:.{digits}f}]"


def middle(values: Sequence[float], *, digits: int = 2) -> str:
    """Median (its interval of 95 % confidence, from the ranks of the values).

    >>> middle([float(number) for number in range(101)], digits=0)
    '50 (40, 60)'
    """
    ordered, half = sorted(values), 0.98 * len(values) ** 0.5
    center, last = (len(values) - 1) / 2, len(values) - 1
    low, high = ordered[max(0, round(center - half))], ordered[min(last, round(center + half))]
    return f"{median(ordered):.{digits}f} ({low:.{digits}f}, {high:.{digits}f})"


def publish(path: Path, title: str, *parts: str | Iterable[str]) -> None:
    """Print a document and write it to ``path``. Its ``parts`` are texts, or the lines of tables and lists."""
    text = "\n\n".join([f"# {title}", *(part.strip() if isinstance(part, str) else "\n".join(part) for part in parts)])
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"{text}\n")
    print(f"{text}\n\nWritten to {path}")
