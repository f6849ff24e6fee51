"""The examples in docstrings have the results that they show."""

import doctest
import importlib
from pathlib import Path

import pytest

import torchtune_adaptive
from tests.support.checkout import REPOSITORY

FOLDERS = (Path(torchtune_adaptive.__file__).parent, REPOSITORY / "scripts", REPOSITORY / "tests" / "support")
MODULES_WITH_EXAMPLES = sorted(
    ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
    for folder in FOLDERS
    for path in folder.rglob("*.py")
    if ">>> " in path.read_text()
)


@pytest.mark.parametrize("module", MODULES_WITH_EXAMPLES)
def test_examples_have_the_results_that_they_show(module: str) -> None:
    ran = doctest.testmod(importlib.import_module(module))
    assert ran.attempted > 0, "an example must be in a docstring that is found"
    assert ran.failed == 0
