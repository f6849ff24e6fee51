"""Each sentence that promises behaviour names the test or the result that shows it, in docs/development/promises.md.

A row of a table counts as a sentence, with its cells joined by semicolons. In a quotation ``...`` stands for any words.
"""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.documents.test_figures import passages
from tests.support.documents import REPOSITORY

PROMISES = "docs/development/promises.md"
# A page, and the sections of it that are read: all if none is named.
PAGES: dict[str, tuple[str, ...]] = {
    "README.md": (
        "# torchtune_adaptive: train with the largest batch that fits, and survive running out of memory",
        "## Features",
        "## Out of memory in training",
        "## Any PyTorch loop",
    ),
    "docs/out_of_memory.md": (),
    "docs/checkpoints.md": (),
    "docs/several_nodes.md": (),
}
NO_TEST = ("explanation", "advice", "pointer", "not tested")
_LINK = re.compile(r"(!?)\[((?:[^][]|\[[^]]*\])*)\]\([^()\s]*\)")
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
_RESULT = re.compile(r"\[[\w.]+\]\(\.\./\.\./(benchmarks/results/[\w.]+)\)")


def sentences(text: str, sections: tuple[str, ...] = ()) -> list[str]:
    """The sentences of a page, without headings, blocks, pictures, links and bold type."""
    found: list[str] = []
    heading = ""
    for passage in passages("", text):
        if passage.text.startswith("#"):
            heading = passage.text if not passage.text.startswith("###") else heading
        elif passage.text.startswith("|"):
            if passage.headings and (not sections or heading in sections):
                found.append("; ".join(cell.strip() for cell in _plain(passage.text).strip("| ").split("|")))
        elif not sections or heading in sections:
            found += re.split(r"(?<=[.?!])\s+", re.sub(r"^([-*]|\d+\.) ", "", _plain(passage.text)).strip())
    return [sentence for sentence in found if sentence]


def _plain(text: str) -> str:
    return _LINK.sub(lambda link: "" if link[1] else link[2], text).replace("**", "")


def rows(text: str) -> dict[str, list[tuple[str, str]]]:
    """The rows of the table under the heading of each page: the quotation, and what shows it."""
    found: dict[str, list[tuple[str, str]]] = {}
    for passage in passages(PROMISES, text):
        if passage.text.startswith("## "):
            found[passage.text.removeprefix("## ")] = []
        elif passage.headings:
            quotation, shown_by = passage.text.strip("| ").split(" | ")
            [*found.values()][-1].append((quotation.strip(), shown_by.strip()))
    return found


def problems(page: str, wanted: list[str], listed: list[tuple[str, str]]) -> list[str]:
    """What is to be done where sentences and rows do not match."""
    patterns = {quotation: re.escape(quotation).replace(r"\.\.\.", ".*") for quotation, _ in listed}
    new = [one for one in wanted if not any(re.fullmatch(pattern, one) for pattern in patterns.values())]
    gone = [
        quotation for quotation, pattern in patterns.items() if not any(re.fullmatch(pattern, one) for one in wanted)
    ]
    return [
        f"{page} has a sentence without a row in {PROMISES}. Add this one, with the test that shows it, or"
        f" instead of a test one of {', '.join(NO_TEST)}:\n"
        f"| {one} | `tests/FILE.py::test_NAME` |"
        for one in new
    ] + [
        f"{page} no longer has the sentence of this row in {PROMISES}. If it was changed, read whether the test still"
        f" shows it, and change the row; else remove it:\n| {one} |"
        for one in gone
    ]


LISTED = rows((REPOSITORY / PROMISES).read_text())


@pytest.mark.parametrize("page", PAGES)
def test_every_sentence_of_a_page_has_its_row_and_every_row_its_sentence(page: str) -> None:
    found = problems(page, sentences((REPOSITORY / page).read_text(), PAGES[page]), LISTED[page])
    assert not found, "\n\n".join(found)


@cache
def functions_of(path: str) -> set[str]:
    """The names of the functions of a file, which is not imported."""
    file = Path(REPOSITORY / path)
    body = ast.parse(file.read_text()).body if file.exists() else []
    return {one.name for one in body if isinstance(one, ast.FunctionDef)}


@pytest.mark.parametrize("page", PAGES)
def test_what_shows_a_promise_exists(page: str) -> None:
    for quotation, shown_by in LISTED[page]:
        if shown_by in NO_TEST:
            continue
        for one in shown_by.split(", "):
            if test := _TEST.fullmatch(one):
                assert test[2] in functions_of(test[1]), f"{one} does not exist, which is to show: {quotation}"
            else:
                result = _RESULT.fullmatch(one)
                assert result, f"{one!r} must be a test, a link to a result, or one of {NO_TEST}: {quotation}"
                assert (REPOSITORY / result[1]).exists(), f"{result[1]} does not exist, which is to show: {quotation}"


def test_only_the_pages_that_are_read_have_rows() -> None:
    assert LISTED.keys() == PAGES.keys()


def test_a_changed_sentence_a_new_one_and_a_row_too_many_are_found() -> None:
    page = (
        "# Page\n\nIt **ends** in 30 s. The [log](a.md) says why.\n\n- It saves.\n\n| a | b |\n|---|---|\n| c | d |\n"
    )
    assert sentences(page) == ["It ends in 30 s.", "The log says why.", "It saves.", "c; d"]
    assert sentences(page + "\n## More\n\nNo.\n", ("## More",)) == ["No."]
    listed = [("It ends in 20 s.", ""), ("The log ...", ""), ("It saves.", ""), ("c; d", ""), ("Gone.", "")]
    assert [one.partition("\n")[2] for one in problems("page.md", sentences(page), listed)] == [
        "| It ends in 30 s. | `tests/FILE.py::test_NAME` |",
        "| It ends in 20 s. |",
        "| Gone. |",
    ]
