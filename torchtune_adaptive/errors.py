"""Errors for users: one sentence that quotes the refused value."""

import difflib
import operator
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TypeGuard

NOTHING_FITS_ADVICE = "shorter rows, activation checkpointing, LoRA or more ranks would need less"

_LONGEST_QUOTE_CHARS = 200


class InputError(ValueError):
    """A value from the user is invalid. The message is one sentence that quotes it."""


class NothingFitsError(InputError):
    """A batch of one row does not fit. The message has the figures, and advice on what needs less memory."""


class CannotRecoverError(InputError):
    """Recovery from out-of-memory errors is not possible for a model. The message says why."""


class CannotCutError(CannotRecoverError):
    """The samples of an optimizer step cannot be cut into micro-batches. The message says why."""


class TracingError(InputError):
    """Tracing a config's train step failed unexpectedly. The message names a file with the whole error."""


class CheckpointError(Exception):
    """A checkpoint cannot be written. The message is the reason."""


class RunEnded(Exception):
    """A run ends before its training is complete, or has nothing to train.

    Attributes:
        status: the exit status of its processes.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message, status)
        self.status = status

    def __str__(self) -> str:
        return str(self.args[0])


def cannot_recover(reason: str) -> CannotRecoverError:
    """The error that recovery is not possible for ``reason``."""
    return CannotRecoverError(f"An out-of-memory error in training will end the run: {reason}.")


def quote(value: object) -> str:
    """The value as one line of at most 200 characters, for an error sentence.

    >>> quote("80 GiB"), len(quote("x" * 500))
    ("'80 GiB'", 200)
    """
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST_QUOTE_CHARS else text[: _LONGEST_QUOTE_CHARS - 3] + "..."


def reason_of(error: BaseException) -> str:
    """Type and text of an exception in one line without a final full stop. For an ``InputError``, only its text.

    For what would end the process without a traceback, such as ``SystemExit``, also the place in the code.

    >>> reason_of(ZeroDivisionError("division by zero"))
    'ZeroDivisionError: division by zero'
    >>> reason_of(SystemExit(0))
    'SystemExit: 0'
    """
    text = " ".join(str(error).split()).rstrip(".")
    if isinstance(error, InputError | CheckpointError):
        return text
    reason = f"{type(error).__name__}: {text}" if text else type(error).__name__
    is_placed = not isinstance(error, Exception) and error.__traceback__ is not None  # it may be from another process
    return f"{reason} ({place_of(error)})" if is_placed else reason


def place_of(error: BaseException) -> str:
    """Where in the code an exception was raised, for example "data.py, line 12"."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(place.filename).name}, line {place.lineno}"


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether ``value`` is a number. A bool is not one."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def as_integer(value: object) -> int | None:
    """The value as an ``int`` if it is an integer of any type (also numpy's), else None. A bool is not an integer.

    >>> as_integer(8), as_integer(8.0), as_integer(True)
    (8, None, None)
    """
    if type(value).__name__ in ("bool", "bool_"):  # numpy's too, which before numpy 2.3 can be an index
        return None
    try:
        return operator.index(value)  # pyright: ignore[reportArgumentType]  # any object may come from a config
    except Exception:  # of a user's class it may be any
        return None


def require_integer(name: str, value: object, *, minimum: int) -> int:
    """The value as an ``int`` of at least ``minimum``.

    Raises:
        InputError: the value is not an integer (a bool is not one), or is below ``minimum``.

    >>> require_integer("max_batch_size", 8, minimum=1)
    8
    """
    integer = as_integer(value)
    if integer is None:
        raise InputError(f"`{name}` must be an integer, but is {quote(value)} instead.")
    if integer < minimum:
        raise InputError(f"`{name}` must be at least {minimum}, but is {integer} instead.")
    return integer


def require_fraction(name: str, value: object) -> None:
    """Check that the value is a number in [0, 1).

    Raises:
        InputError: it is not.
    """
    if not is_number(value) or not 0 <= value < 1:  # nan fails the comparison
        raise InputError(f"`{name}` must be in [0, 1), but is {quote(value)} instead.")


def require_bool(name: str, value: object) -> None:
    """Check that the value is a bool.

    Raises:
        InputError: it is not.
    """
    if not isinstance(value, bool):
        raise InputError(f"`{name}` must be True or False, but is {quote(value)} instead.")


def require_callable(**values: object) -> None:
    """Check that each value is a function, or another object that can be called.

    Raises:
        InputError: one is not.
    """
    for name, value in values.items():
        if not callable(value):
            raise InputError(f"`{name}` must be a function, but is {quote(value)} instead.")


def require_one_of(name: str, value: object, words: tuple[str, ...]) -> None:
    """Check that the value is one of ``words``.

    Raises:
        InputError: it is not. The message has the word that is most like it.
    """
    if value not in words:
        hint = did_you_mean(value, {word: word for word in words})
        raise InputError(f"`{name}` must be one of {', '.join(words)}, but is {quote(value)} instead{hint}")


def did_you_mean(value: object, named: Mapping[str, str]) -> str:
    """The end of an error sentence: a question with what ``named`` has for the word most like ``value``, or ".".

    >>> did_you_mean("margn", {"margin": "adaptive.margin"}), did_you_mean("zzz", {"margin": "adaptive.margin"})
    ('; did you mean `adaptive.margin`?', '.')
    """
    nearest = difflib.get_close_matches(str(value).lower(), named, n=1)
    return f"; did you mean `{named[nearest[0]]}`?" if nearest else "."
