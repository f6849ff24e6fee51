"""The words of the project: standard terms, and short sentences in help texts and docstrings."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
FOLDERS = ("torchtune_adaptive", "recipes", "examples", "tests", "benchmarks", "scripts")
PROGRAMS = sorted(
    path
    for folder in FOLDERS
    for path in (REPOSITORY / folder).rglob("*.py")
    if path != Path(__file__)  # has the list
)
PAGE_PATTERNS = (
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/**/*.md", "examples/**/*.md"),
    *("configs/**/*.md", "configs/**/*.yaml", "benchmarks/results/*.md"),
)
PAGES = sorted(path for pattern in PAGE_PATTERNS for path in REPOSITORY.glob(pattern))
WITH_HELP = [path for path in PROGRAMS if path.parent.name == "cli" or path.name == "tiny.py"]
LONGEST_HELP_WORDS = 25
LONGEST_SENTENCE_WORDS = 30
# Idioms as regular expressions, each with the words to use instead.
INSTEAD_OF = {
    r"told by": "from, by",
    r"(is|are|be) told": "gets, is notified",
    r"said aloud": "logged",
    r"slip of the pen": "typo",
    r"come what may": "always",
    r"(gives?|gave|giving) back": "frees, releases, returns",
    r"fore(tells?|told)": "predicts, estimates",
    r"metered says": "measured",
    r"(what|that) travels with": "together with",
    r"(held|holds?) back": "reserved as margin, kept free",
    r"(leaves?|leaving|left) no trace": "restores all state",
    r"its like": "similar",
    r"of ours": "of this package, adaptive",
    r"anew": "again",
    r"(as|in) stock( does)?(?! recipe| attribute)": "as the stock recipe does",
    r"stock's": "the stock recipe's",
    r"by hand": "manually",
    r"give or take": "uncertainty",
    r"surely": "safe",
    r"ha(s|ve) its say": "limits",
    r"in vain": "without effect",
    r"nobody knows": "it is unknown",
    r"passed over": "skipped",
    r"(go|goes|going|went) on": "continues, resumes",
    r"is (no|none|not one) (integer|positive)": "is not an integer",
    r"on (leaving|entering)": "on exit, on entry",
    r"lets? go of": "frees, drops",
    r"takes? no notice": "ignores",
}
FORBIDDEN = re.compile("|".join(rf"\b{idiom}\b" for idiom in INSTEAD_OF), re.IGNORECASE)


def forbidden_in(text: str) -> list[str]:
    """The idioms in ``text``, also across the lines of a comment."""
    return [found.group() for found in FORBIDDEN.finditer(re.sub(r"\s+(#\s)?\s*", " ", text))]


def sentences(text: str) -> Iterator[str]:
    """The sentences of a docstring or a help text, without its examples; each item of a list is one."""
    paragraph: list[str] = []
    for line in [*re.sub(r"(?m)^\s*>>>.*(\n(?!\s*$).+)*", "", text).splitlines(), ""]:
        starts_item = re.match(r"\s*(- |[\w*`, ]+: )", line)
        if not line.strip() or starts_item:
            yield from re.split(r"(?<=[.:;!?])\s+", " ".join(paragraph))
            paragraph = []
        paragraph.extend(line.split())


def docstrings(path: Path) -> Iterator[str]:
    """All docstrings of a module, but that of the program, which lists commands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            yield "" if "\ntune-adaptive plan " in text else text


def help_texts(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.keyword) and node.arg in {"help", "description", "epilog"}:
            values = (one.value for one in ast.walk(node.value) if isinstance(one, ast.Constant))
            yield from (value for value in values if isinstance(value, str))


def longer_than(most: int, texts: Iterator[str]) -> list[str]:
    return [one for text in texts for one in sentences(text) if len(one.split()) > most]


def test_no_idioms_of_our_own_are_used() -> None:
    assert {path: found for path in [*PROGRAMS, *PAGES] if (found := forbidden_in(path.read_text()))} == {}


def test_help_texts_have_short_sentences() -> None:
    assert {path: long for path in WITH_HELP if (long := longer_than(LONGEST_HELP_WORDS, help_texts(path)))} == {}


def test_docstrings_have_no_long_sentences() -> None:
    assert {path: long for path in PROGRAMS if (long := longer_than(LONGEST_SENTENCE_WORDS, docstrings(path)))} == {}


def test_help_texts_are_found() -> None:
    assert "name or path of a config" in {text for path in WITH_HELP for text in help_texts(path)}


@pytest.mark.parametrize("text", ["As stock does.", "Left as it was, come\n    # what may.", "Held back: 5 %"])
def test_an_idiom_is_found_in_any_case_and_across_lines(text: str) -> None:
    assert len(forbidden_in(text)) == 1


def test_the_words_to_use_instead_are_allowed() -> None:
    assert forbidden_in("The `held_back` bytes are kept free, as the stock recipe does.") == []


@pytest.mark.parametrize("before", ["Short. ", "Short.\n\nArgs:\n    name: "])
def test_a_long_sentence_is_found(before: str) -> None:
    text = f"{before}{'one ' * 31}two.\nShort.\n>>> {'three ' * 40}\n{'four ' * 40}\n"
    assert [len(one.split()) for one in longer_than(30, iter([text]))] == [32]
