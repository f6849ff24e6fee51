"""The document of evidence is made from the results, and names the source of each."""

import re
from pathlib import Path

import pytest

from benchmarks import evidence


def test_the_document_is_up_to_date_with_the_results() -> None:
    assert evidence.DOCUMENT.read_text() == evidence.document(), "run `python -m benchmarks.evidence`"


@pytest.mark.parametrize("path", sorted(evidence.RESULTS.glob("*.md")), ids=lambda path: path.stem)
def test_each_result_has_its_command_date_commit_and_machine(path: Path) -> None:
    text = path.read_text()
    head = "".join(text.split("\n\n")[1:3])
    assert re.search(r"`([A-Z_]+=\w+ )*(python -m|make|\.venv)", head)
    assert re.search(r"\b20\d\d-\d\d-\d\d\b", head)
    assert re.search(r"\b[0-9a-f]{7,}\b", text)
    assert "x86_64" in head
