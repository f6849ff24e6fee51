"""Markdown: tables, and where they are written."""

from collections.abc import Iterable, Sequence
from pathlib import Path


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    return ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows)]


def publish(lines: Sequence[str], path: Path) -> None:
    """Print a document and write it to ``path``."""
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    print("\n".join(lines), f"\nWritten to {path}", sep="\n")
