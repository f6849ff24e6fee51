"""What the commands' parsers share."""

import argparse
from typing import Any, TypeAlias

from torchtune_adaptive.errors import require_integer

PROGRAM = "tune-adaptive"
Commands: TypeAlias = "argparse._SubParsersAction[Any]"  # argparse has no public name for it


def integers(name: str, text: str) -> list[int]:
    """The numbers of ``text``, with commas between them, as ``integer`` reads them."""
    return [integer(name, part) for part in text.split(",")]


def integer(name: str, text: str, *, minimum: int = 1) -> int:
    """The number that ``text`` is.

    Raises:
        InputError: it is none, or less than ``minimum``. The sentence calls it ``name``.
    """
    try:
        value: object = int(text)
    except ValueError:
        value = text  # which the check refuses and quotes
    return require_integer(name, value, minimum=minimum)


def examples(*commands: str) -> str:
    """The end of a command's help.

    >>> print(examples("ls", "cat tiny/full"))
    examples:
      tune-adaptive ls
      tune-adaptive cat tiny/full
    """
    return "\n  ".join(["examples:", *(f"{PROGRAM} {command}" for command in commands)])
