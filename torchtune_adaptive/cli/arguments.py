"""Helpers that the commands' parsers share."""

import argparse
import errno
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from torchtune_adaptive.errors import InputError, quote, require_integer
from torchtune_adaptive.output import escape_unknown_characters, filter_messages

PROGRAM = "tune-adaptive"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
Commands: TypeAlias = "argparse._SubParsersAction[Any]"  # argparse has no public name for it


def add_command(
    commands: Commands, name: str, summary: str, *commands_shown: str, **options: Any
) -> argparse.ArgumentParser:
    """Add the command ``name``, with ``commands_shown`` as its examples, and return its parser."""
    examples = "\n  ".join(["examples:", *(f"{PROGRAM} {command}" for command in commands_shown)])
    formatter = argparse.RawDescriptionHelpFormatter
    parser = commands.add_parser(
        name, help=summary, epilog=examples, formatter_class=formatter, allow_abbrev=False, **options
    )
    parser.set_defaults(parser=parser)
    return parser


@contextmanager
def program(arguments: Sequence[str]) -> Iterator[None]:
    """Context of the whole program: a refused value ends it with one sentence on standard error and status 1."""
    filter_messages()
    escape_unknown_characters()
    name = " ".join([PROGRAM, *arguments[:1]])
    try:
        _require_working_directory()
        try:
            yield
        finally:  # also after help, which ends the program
            print(end="", flush=True)
    except InputError as error:
        sys.exit(f"{name}: {error}")
    except BrokenPipeError:  # the reader of the output has stopped early, as `head` does
        _drop_output()
    except OSError as error:
        if error.errno not in _FULL or error.filename is not None:  # not of standard output
            raise
        _drop_output()
        sys.exit(f"{name}: Standard output cannot be written: {error.strerror}.")


def _drop_output() -> None:
    """Send to nowhere what Python still writes to standard output at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _require_working_directory() -> None:
    try:
        os.getcwd()
    except OSError as error:  # torch cannot be imported without one
        raise InputError(f"The working directory {quote(os.environ.get('PWD', '.'))} has been deleted.") from error


def integers(name: str, text: str) -> list[int]:
    """The comma-separated numbers in ``text``, each read by ``integer``."""
    return [integer(name, part) for part in text.split(",")]


def integer(name: str, text: str) -> int:
    """The number in ``text``.

    Raises:
        InputError: ``text`` is not an integer, or is below 1. The message calls the value ``name``.
    """
    try:
        value: object = int(text)
    except ValueError:
        value = text  # the check below refuses it and quotes it
    return require_integer(name, value, minimum=1)


def missing_memory() -> InputError:
    """The error of a plan for a GPU that nobody has named."""
    return InputError("`--memory` is missing: a GPU's name or a size, as in H100 or 80GiB.")
