"""Every measured figure of a page is in the result that it links to, or names the test or the source that has it.

A figure is a number with a unit of time, memory or share, or with a
decimal point; beside a link to ``benchmarks/results`` every number is one. Code, versions, and pages that a program
writes are left out.
"""

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest

from tests.support.document_commands import commands
from tests.support.documents import DOCUMENTS, OUTPUT, REPOSITORY, Block, blocks, name_of
from torchtune_adaptive.engine.search.strategies import round_down_to_power_of_two
from torchtune_adaptive.settings import AdaptiveSettings

RESULTS = REPOSITORY / "benchmarks" / "results"
# Written by a program, of earlier versions, or quotations of other pages, where they are read.
NOT_READ = (
    "CHANGELOG.md",
    "docs/command_line.md",
    "docs/configuration.md",
    "docs/development/promises.md",
    "docs/stock_configs.md",
)
PAGES = [page for page in DOCUMENTS if name_of(page) not in NOT_READ]
# Text with numbers that nobody measured: they are definitions, examples, or from a source that the page names.
NOT_MEASURED = {
    "README.md": ("a timeout, 10 to 30 minutes",),
    "docs/checkpoints.md": ("kills its ranks 30 s later",),
    "docs/comparison.md": ("multiplies by 0.9", "aims at 60 % of memory", "at most 3 times"),
    "docs/development/cuda.md": ("the margin is 5 %",),
    "docs/cuda.md": ("measures on a real GPU in half an hour",),
    "docs/design.md": ("a probe waits 2 ms", "A counter that stands still for 30 s"),
    "docs/my_run_ran_out_of_memory.md": ("512 MiB that this config allows",),
    "docs/out_of_memory.md": ("a timeout of 10 to 30 minutes",),
    "docs/output.md": ("with a limit of 128 MiB",),
    "docs/plan.md": ("stock configs at 24, 40, 80 and 141 GiB", "`margin` (0.05)"),
    "docs/quickstart.md": ("the safety margin of 5 %",),
    "docs/recoverable_step.md": ("| 0.05 | the fraction of the limit that stays free",),
    "docs/several_nodes.md": (
        "120 s before the time limit",
        "take longer than 120 s",
        "minus 120 s",
        "seen on Slurm 22.05",
        "if a collective fails (gloo), else after 30 s",
        "does not answer, after 30 s",
        "does not answer for 30 s",
        "after ten to thirty minutes",
        "counter stands still for 30 s is gone",
        "shown five seconds later",
        "they have ten minutes",
        "end their ranks 30 s after",
        "torchrun ends them, up to 30 s later",
        "has ended it: up to 30 s more",
        "interpreter stands still for 30 s",
    ),
}

# ---- reading numbers

_UNITS = {
    name: (kind, scale)
    for kind, scales in {
        "time": {"ms": 1e-3, "millisecond": 1e-3, "s": 1.0, "second": 1.0, "minute": 60.0, "hour": 3600.0},
        "share": {"%": 0.01, "times": 1.0},
        "memory": {"byte": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30},
    }.items()
    for name, scale in scales.items()
}
_WORDS = {0.5: "half an?", 10: "ten", 20: "twenty", 30: "thirty", 40: "forty", 60: "sixty"}
_WORDS |= {2: "two", 3: "three", 4: "four", 5: "five", 6: "six", 7: "seven", 8: "eight", 9: "nine", 12: "twelve"}
_UNIT = r" *(?P<unit>%|(?:ms|s|[KMG]i?B)\b|(?:millisecond|second|minute|hour|byte)s?\b|times\b)"
_DIGITS = r"(?:\d{1,3}(?:[ ,]\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:e-?\d+)?(?![\w.]*[A-Za-z_]\w*\d|[A-Z]\b|\.?\d)"
_NUMBER = re.compile(rf"(?<![\w./#-])(?P<number>[+-]?{_DIGITS})(?:{_UNIT})?")
_IN_WORDS = re.compile(
    rf"\b(?P<word>{'|'.join(_WORDS.values())})(?= (?:milli)?(?:second|minute|hour)s?\b)", re.IGNORECASE
)
_SAME_UNIT = re.compile(r"(?:,| and| to| or| /) (?:\d+ of )?")
_NAME = re.compile(  # of versions of torch, torchao and Python, of models, ranks and appendices
    r"\b(?:2\.(?:9|1[0-5])|3\.1[0-2]|torchao below 0\.16)\b"
    r"|\b(?:Llama|Qwen|Gemma|Phi|Mistral|appendix [A-Z]|rank)[ .][\d.]+(?:(?:,| and) \d[\d.]*)*"
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
        most = self.step / 2 if self.looks_measured else 0.0  # a count is not rounded
        return any(abs(abs(self.value) - one / self.scale) <= most + 1e-9 for one in found)


def figures(text: str, heading: str = "") -> list[Figure]:
    """The numbers in a text; those of a table's cell without a unit have that of the column's ``heading``."""
    hidden = [found.span() for pattern in (_CODE, _NAME) for found in pattern.finditer(text)]
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
    if found := re.search(rf"(?<!/)(?<!per )\b(?:{'|'.join(_UNITS)})s?\b|%", text):
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

Verdict = str  # "not measured", "result", "test", "source" or "unsupported"


def verdicts(passage: Passage) -> Iterator[tuple[Figure, Verdict]]:
    """Each figure of a passage, and what has it."""
    excepted = [
        range(start, start + len(text))
        for text in NOT_MEASURED.get(passage.page, ())
        if (start := passage.plain.find(text)) >= 0
    ]
    results = passage.named(r"benchmarks/results/([\w.]+\.md)")
    has_test, has_source = passage.named(r"`tests/[\w/]+\.py`"), passage.named(r"\]\(https?://")
    for figure in passage.figures:
        if any(figure.start in one for one in excepted):
            yield figure, "not measured"
        elif results and any(figure.agrees_with(one) for name in results for one in result_figures(name)):
            yield figure, "result"
        elif results or figure.looks_measured:
            yield figure, "test" if has_test else "source" if has_source else "unsupported"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_measured_figure_of_a_page_is_in_its_result_or_names_its_test_or_source(page: Path) -> None:
    assert [
        f"line {passage.line}: {figure.text}"
        for passage in passages(name_of(page), page.read_text())
        for figure, verdict in verdicts(passage)
        if verdict == "unsupported"
    ] == []


def test_the_margin_that_pages_name_is_the_default() -> None:
    named = [text for texts in NOT_MEASURED.values() for text in texts if "margin" in text]
    assert named
    assert {one.value * one.scale for text in named for one in figures(text)} == {AdaptiveSettings().margin}


# ---- output that a page shows


def shown(pattern: str) -> list[Block]:
    return [block for page in PAGES for block in blocks(page, *OUTPUT) if re.search(pattern, block.text)]


A_PLAN, A_SEARCH = r"tokens per row +largest batch", r"(?:^|\n)batch_size +forward"


@pytest.mark.parametrize("block", shown(A_SEARCH), ids=str)
def test_the_table_of_a_search_is_consistent(block: Block) -> None:
    rows = [line.split() for line in re.findall(r"(?m)^ +\d.*", block.text)]
    margin = AdaptiveSettings().margin
    (limit_mib,) = [float(one) for one in re.findall(r"limit ([\d.]+) MiB", block.text)]
    largest, used = re.findall(r"that fits (\d+), used (\d+)", block.text)[0]
    for row in rows:
        *phases, peak, usable = (float(one) for one in row[1:15:2])
        assert (peak, usable) == (max(phases), round(limit_mib * (1 - margin), 1))
        assert (row[15] == "yes") == (peak <= usable)
    assert int(largest) == max(int(row[0]) for row in rows if row[15] == "yes")
    assert int(used) == round_down_to_power_of_two(int(largest))


@pytest.mark.exhaustive
@pytest.mark.parametrize("block", shown(A_PLAN), ids=str)
def test_the_table_of_a_plan_is_what_the_command_above_it_prints(block: Block) -> None:
    command = [one for one in blocks(block.document, "bash") if one.line < block.line][-1]
    (words,) = commands(command.text)
    printed = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line for line in block.text.splitlines() if line not in printed] == []


# ---- the check itself


def test_a_figure_that_is_not_in_its_result_is_found() -> None:
    link = "[measured](../benchmarks/results/checkpoints_cpu.md)"
    page = (
        f"Takes 0.77 of it, or 1.10 times ({link}).\n\nTakes 3 s.\n\n| ms per step |\n|---|\n| 584 |\n| 583 |\n\n{link}"
    )
    found = [(one.text, verdict) for part in passages("docs/new.md", page) for one, verdict in verdicts(part)]
    assert [text for text, verdict in found if verdict == "unsupported"] == ["1.10 times", "3 s", "583"]
