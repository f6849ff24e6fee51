"""Reads documents: their blocks and headings.

The language of a block says what it holds. Commands are ``bash``, and what they print is ``text`` or has no language.
The ``python`` blocks of a document run in turn and share their names. Those of ``document_names.py`` are defined
beforehand. A ``yaml`` block is a config or a part of one, from its top level on.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.checkout import REPOSITORY

DOCUMENTS = sorted(
    {
        *REPOSITORY.glob("*.md"),
        *(REPOSITORY / "docs").rglob("*.md"),
        *(REPOSITORY / "examples").rglob("*.md"),
        *(REPOSITORY / "configs").rglob("*.md"),
    }
)
OUTPUT = ("", "text")
_FENCE = re.compile(r" *(`{3,})(\w*)")
_HEADING = re.compile(r"#{1,6} +(.+?)[ #]*")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, text and line, and the heading it stands under."""

    document: Path
    line: int
    language: str
    text: str
    heading: str

    def __str__(self) -> str:
        return f"{name_of(self.document)}:{self.line}"


def name_of(document: Path) -> str:
    """The path of a document in the repository."""
    return document.relative_to(REPOSITORY).as_posix()


def blocks(document: Path, *languages: str) -> list[Block]:
    """The blocks of a document in these languages; all blocks if no language is named."""
    return [one for one in _parts(document) if isinstance(one, Block) and (not languages or one.language in languages)]


def anchors(document: Path) -> set[str]:
    """What a link may name after ``#``: the headings as code hosts name them."""
    counts: dict[str, int] = {}
    found = set()
    for line in _parts(document):
        if isinstance(line, str) and (heading := _HEADING.fullmatch(line)):
            text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading[1])
            slug = re.sub(r"[^\w\- ]", "", text).lower().replace(" ", "-")
            found.add(slug if slug not in counts else f"{slug}-{counts[slug]}")
            counts[slug] = counts.get(slug, 0) + 1
    return found


def _parts(document: Path) -> Iterator[Block | str]:
    """Blocks, and the lines between them."""
    lines = enumerate(document.read_text().splitlines(), start=1)
    heading = ""
    for number, line in lines:
        fence = _FENCE.match(line)
        if fence is None:
            heading = line if _HEADING.fullmatch(line) else heading
            yield line
            continue
        inner = []
        for _, content in lines:
            if content.strip() == fence[1]:
                break
            inner.append(content)
        indent = min((len(text) - len(text.lstrip()) for text in inner if text.strip()), default=0)
        indent = min(indent, len(line) - len(line.lstrip()))
        text = "\n".join(content[indent:] for content in inner)
        yield Block(document, number, fence[2], text, heading)
