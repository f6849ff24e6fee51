"""Every measured figure of a page is in the result that it links to, or names the test or the source that has it.

    python -m tests.test_figures

prints how many figures are checked by what. A figure is a number with a unit of time, memory or share, or with a
decimal point; beside a link to ``benchmarks/results`` every number is one. Code, versions, and pages that a program
writes are left out.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

import pytest

from tests.documents import DOCUMENTS, REPOSITORY, name_of

RESULTS = REPOSITORY / "benchmarks" / "results"
# Written by a program, or of earlier versions.
NOT_READ = ("CHANGELOG.md", "docs/command_line.md", "docs/configuration.md", "docs/stock_configs.md")
PAGES = [page for page in DOCUMENTS if name_of(page) not in NOT_READ]
Reason = Literal["setting", "definition", "example", "pending"]
# Numbers that nobody measured: the page, its text with the number, and what the number is.
NOT_MEASURED: list[tuple[str, str, Reason]] = []

# ---- reading numbers

_UNITS = {
    "millisecond": ("time", 1e-3),
    **{"ms": ("time", 1e-3), "s": ("time", 1.0), "second": ("time", 1.0), "minute": ("time", 60.0)},
    **{"hour": ("time", 3600.0), "%": ("share", 0.01), "times": ("share", 1.0), "byte": ("memory", 1.0)},
    **{"KiB": ("memory", 2.0**10), "MiB": ("memory", 2.0**20), "GiB": ("memory", 2.0**30)},
    **{"KB": ("memory", 1e3), "MB": ("memory", 1e6), "GB": ("memory", 1e9)},
}
_WORDS = dict(enumerate("two three four five six seven eight nine ten eleven twelve".split(), 2))
_WORDS |= {0.5: "half an?", 1: "an?", 20: "twenty", 30: "thirty", 40: "forty", 50: "fifty"}
_UNIT = r" *(?P<unit>%|(?:ms|s|[KMG]i?B)\b|(?:millisecond|second|minute|hour|byte)s?\b|times\b)"
_DIGITS = r"(?:\d{1,3}(?:[ ,]\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:e-?\d+)?(?![\w.]*[A-Za-z_]\w*\d|[A-Z]\b|\.?\d)"
_NUMBER = re.compile(rf"(?<![\w./#-])(?P<number>[+-]?{_DIGITS})(?:{_UNIT})?")
_IN_WORDS = re.compile(rf"\b(?P<word>{'|'.join(_WORDS.values())})(?= (?:milli)?(?:second|minute|hour)s?\b)", re.IGNORECASE)
_SAME_UNIT = re.compile(r"(?:,| and| to| or| /) (?:\d+ of )?")
_VERSION = re.compile(
    r"\b(?:2\.(?:9|1[0-3])|3\.1[0-2])\b|\b(?:Llama|Qwen|Gemma|Phi|Mistral|appendix [A-Z])[ .][\d.]+(?:(?:,| and) \d[\d.]*)*"
)
_CODE = re.compile(r"(`+).+?\1")
_LINK = re.compile(r"!?\[((?:[^][]|\[[^]]*\])*)\]\(([^()\s]*)\)")


@dataclass(frozen=True)
class Figure:
    """A number as it is written: ``step`` is that of its last digit, ``kind`` and ``scale`` are of its unit."""

    text: str
    value: float
    step: float
    kind: str = ""
    scale: float = 1.0
    start: int = 0

    @property
    def looks_measured(self) -> bool:
        return self.kind != "" or self.step < 1

    def agrees_with(self, result: "Figure") -> bool:
        """Whether this is ``result``, rounded to the digits that are written; a share may be written as a change."""
        found = [abs(result.value) * result.scale]
        if self.kind == "share" and (result.kind == "share" or result.step < 1):
            found += [abs(1 - found[0])]
        elif self.kind != result.kind and (self.kind, result.kind, self.step < 1) != ("", "share", True):
            return False
        return any(abs(abs(self.value) - one / self.scale) <= self.step * 0.5 + 1e-9 for one in found)


def figures(text: str, heading: str = "") -> list[Figure]:
    """The numbers in a text; those of a table's cell without a unit have that of the column's ``heading``."""
    hidden = [found.span() for pattern in (_CODE, _VERSION) for found in pattern.finditer(text)]
    text = _IN_WORDS.sub(_in_digits, text)
    found: list[Figure] = []
    for match in reversed(list(_NUMBER.finditer(text))):
        if any(start <= match.start() < end for start, end in hidden):
            continue
        digits = re.sub("[ ,]", "", match["number"])
        decimals = len(digits.partition("e")[0].partition(".")[2])
        kind, scale = _unit_in(match["unit"] or heading)
        if not kind and found and _SAME_UNIT.fullmatch(text[match.end() : found[-1].start]):
            kind, scale = found[-1].kind, found[-1].scale
        found.append(Figure(match[0].strip(), float(digits), 10.0**-decimals, kind, scale, match.start()))
    return found[::-1]


def _in_digits(word: re.Match[str]) -> str:
    (number,) = [number for number, pattern in _WORDS.items() if re.fullmatch(pattern, word[0], re.IGNORECASE)]
    return str(number).ljust(len(word[0]))


def _unit_in(text: str) -> tuple[str, float]:
    """The unit in a heading or behind a number; a heading with a quotient is of a share."""
    if found := re.search(rf"(?<!/)\b(?:{'|'.join(_UNITS)})s?\b|%", text):
        return _UNITS.get(found[0], _UNITS.get(found[0].removesuffix("s"), ("", 1.0)))
    return ("share", 1.0) if re.search(r" / |^/ |\b(?:ratio|share|times)\b", text) else ("", 1.0)


# ---- reading pages and results


@dataclass(frozen=True)
class Passage:
    """A paragraph, an item of a list, or a row of a table, with the paragraphs beside its table or above its list."""

    page: str
    line: int
    text: str
    headings: tuple[str, ...] = ()  # of a table's columns
    beside: tuple[str, ...] = ()

    @property
    def figures(self) -> list[Figure]:
        if not self.headings:
            return figures(_LINK.sub(r"\1", self.text))
        found, start = [], 0
        for heading, cell in zip(self.headings, self.cells, strict=False):
            found += [replace(one, start=one.start + start) for one in figures(cell, heading)]
            start += len(cell) + 1
        return found

    @property
    def cells(self) -> list[str]:
        """Of a row of a table."""
        return _LINK.sub(r"\1", self.text).strip("| ").split("|")

    @property
    def plain(self) -> str:
        """The text in which the figures have their places."""
        return "|".join(self.cells) if self.headings else _LINK.sub(r"\1", self.text)

    def named(self, pattern: str) -> list[str]:
        """What a pattern finds in it; if there is nothing, in the text beside it."""
        return re.findall(pattern, self.text) or [one for text in self.beside for one in re.findall(pattern, text)]


def passages(page: str, text: str) -> list[Passage]:
    """The passages of a page, without blocks of code."""
    found: list[Passage] = []
    inside, new = False, True
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(r" *```", line):
            inside, new = not inside, True
            continue
        starts = re.match(r"\s*([-*] |\d+\. |\||#|<!--)", line)
        if inside or not line.strip():
            new = True
        elif new or starts:
            found.append(Passage(page, number, line.strip()))
            new = line.startswith("#")
        else:
            found[-1] = replace(found[-1], text=f"{found[-1].text} {line.strip()}")
    return list(_beside(found))


def _beside(found: list[Passage]) -> Iterator[Passage]:
    """Rows with the headings of their columns and the paragraphs beside their table; items with that above."""
    for place, passage in enumerate(found):
        mark = passage.text[0] if passage.text[0] in "|-*" else ""
        first = last = place
        while mark and first > 0 and found[first - 1].text.startswith(mark):
            first -= 1
        while mark and last + 1 < len(found) and found[last + 1].text.startswith(mark):
            last += 1
        around = [found[one].text for one in (first - 1, last + 1) if 0 <= one < len(found)]
        if mark == "|":
            if place > first + 1:
                yield replace(passage, headings=tuple(found[first].text.strip("| ").split("|")), beside=tuple(around))
        elif mark and around and around[0].endswith(":"):
            yield replace(passage, beside=tuple(around[:1]))
        else:
            yield passage


@cache
def result_figures(name: str) -> list[Figure]:
    return [one for passage in passages(name, (RESULTS / name).read_text()) for one in passage.figures]


# ---- what has a figure

Verdict = Literal["result", "test", "source", "setting", "definition", "example", "pending", "unsupported"]


def verdicts(passage: Passage) -> Iterator[tuple[Figure, Verdict]]:
    """Each figure of a passage, and what has it."""
    spans = [
        (start, start + len(text), reason)
        for page, text, reason in NOT_MEASURED
        if page == passage.page and (start := passage.plain.find(text)) >= 0
    ]
    results = passage.named(r"benchmarks/results/([\w.]+\.md)")
    has_test, has_source = passage.named(r"`tests/\w+\.py`"), passage.named(r"\]\(https?://")
    for figure in passage.figures:
        reasons = [reason for start, end, reason in spans if start <= figure.start < end]
        if reasons:
            yield figure, reasons[0]
        elif results and any(figure.agrees_with(one) for name in results for one in result_figures(name)):
            yield figure, "result"
        elif results or figure.looks_measured:
            yield figure, "test" if has_test else "source" if has_source else "unsupported"


@cache
def all_verdicts() -> list[tuple[Passage, Figure, Verdict]]:
    return [
        (passage, figure, verdict)
        for page in PAGES
        for passage in passages(name_of(page), page.read_text())
        for figure, verdict in verdicts(passage)
    ]


def unsupported(page: str) -> list[str]:
    return [
        f"{page}:{passage.line}: {figure.text}"
        for passage, figure, verdict in all_verdicts()
        if passage.page == page and verdict == "unsupported"
    ]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_measured_figure_of_a_page_is_in_its_result_or_names_its_test_or_source(page: Path) -> None:
    assert unsupported(name_of(page)) == []


def main() -> None:
    counts = Counter(verdict for _, _, verdict in all_verdicts())
    for verdict, count in counts.most_common():
        print(f"{count:4} {verdict}")
    for page in PAGES:
        print("\n".join(unsupported(name_of(page))))


if __name__ == "__main__":
    main()
