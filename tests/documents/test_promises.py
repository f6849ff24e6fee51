"""Every sentence of the pages that promise something has its place in ``docs/development/promises.md``."""

import ast
import functools
import re
from collections.abc import Iterator

import pytest

from tests.support.documents import REPOSITORY

TABLE = REPOSITORY / "docs" / "development" / "promises.md"
# Other parts of the README are commands, limits and pointers.
PARTS_OF_README = ("", "Features", "Out of memory in training", "Any PyTorch loop")
PAGES: dict[str, str] = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", TABLE.read_text(), re.M | re.S))


def rows_of(page: str) -> Iterator[tuple[list[str], str]]:
    """The quotations of each row, and what shows them."""
    for line in PAGES[page].splitlines():
        if line.startswith('| "'):
            quoted, _, shown_by = line.strip("| ").rpartition(" | ")
            yield re.findall(r'"([^"]+)"', quoted), shown_by


def plain(text: str) -> str:
    """Without the signs of markdown."""
    return " ".join(re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text).replace("`", "").replace("*", "").split())


def sentences_of(page: str) -> Iterator[str]:
    """Sentences and rows of tables, without headings, pictures and programs."""
    text = re.sub(r"^```.*?^```$", "", (REPOSITORY / page).read_text(), flags=re.M | re.S)
    if page == "README.md":
        parts = dict(re.findall(r"^#+ (.*)\n((?:(?!^#).*\n)*)", text, flags=re.M))
        first = next(iter(parts))
        text = "\n\n".join(parts[name or first] for name in PARTS_OF_README)
    for block in re.split(r"\n\s*\n", text):
        if block.lstrip().startswith(("#", "![")):
            continue
        if block.lstrip().startswith("|"):
            yield from (plain(line.strip("| ")) for line in block.strip().splitlines()[2:])
            continue
        for paragraph in re.split(r"^- ", block, flags=re.M):
            yield from filter(None, map(plain, re.split(r"(?<=[.?!])\s+(?=[A-Zt`*[(-])", paragraph)))


@functools.cache
def functions_of(file: str) -> set[str]:
    tree = ast.parse((REPOSITORY / "tests" / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("page", PAGES)
def test_every_sentence_has_its_place(page: str) -> None:
    quotations = [one for quoted, _ in rows_of(page) for one in quoted]
    new = [sentence for sentence in sentences_of(page) if not any(sentence.startswith(one) for one in quotations)]
    assert not new, f"{page}: name what shows these sentences in {TABLE.name}"


@pytest.mark.parametrize("page", PAGES)
def test_every_quotation_begins_a_sentence(page: str) -> None:
    sentences = list(sentences_of(page))
    old = [one for quoted, _ in rows_of(page) for one in quoted if not any(it.startswith(one) for it in sentences)]
    assert not old, f"{page} no longer has these sentences: remove them from {TABLE.name}"


@pytest.mark.parametrize("page", PAGES)
def test_what_shows_a_promise_exists(page: str) -> None:
    for quoted, shown_by in rows_of(page):
        tests = re.findall(r"`([\w/]+\.py)::(\w+)`", shown_by)
        results = re.findall(r"\]\(\.\./\.\./(benchmarks/results/\w+\.md)\)", shown_by)
        assert shown_by == "-" or tests or results, quoted
        assert all(name in functions_of(file) for file, name in tests), shown_by
        assert all((REPOSITORY / place).is_file() for place in results), shown_by


def test_a_sentence_that_is_missing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PAGES, "README.md", PAGES["README.md"].replace('"Twelve recipes: full"', '"Thirteen"'))
    for test in (test_every_sentence_has_its_place, test_every_quotation_begins_a_sentence):
        with pytest.raises(AssertionError, match=r"recipes: full|Thirteen"):
            test("README.md")
