"""The examples in docstrings give what they say."""

import doctest
import importlib
from pathlib import Path

import pytest

import torchtune_adaptive

PACKAGE = Path(torchtune_adaptive.__file__).parent
ROOMS_WITH_EXAMPLES = sorted(path.stem for path in PACKAGE.glob("*.py") if ">>> " in path.read_text())


@pytest.mark.parametrize("room", ROOMS_WITH_EXAMPLES)
def test_examples_give_what_they_say(room: str) -> None:
    ran = doctest.testmod(importlib.import_module(f"torchtune_adaptive.{room}"))
    assert ran.attempted > 0, "an example must be in a docstring that is found"
    assert ran.failed == 0


def test_examples_are_found() -> None:
    assert {"errors", "search", "settings", "units"} <= set(ROOMS_WITH_EXAMPLES)
