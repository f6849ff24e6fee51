"""The set-up of a stock recipe: what fails because of the config is refused in one sentence."""

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from datasets.exceptions import DatasetsError

from torchtune_adaptive.errors import InputError, cannot_set_up, reason_of


@contextmanager
def setting_up() -> Iterator[None]:
    """Inside, any error becomes a refusal of the config, whose components can be anybody's code.

    Raises:
        InputError: the set-up failed; the sentence has the error and its place.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        refusal = cannot_set_up(error)
        _free_quietly(error)
        raise refusal from error


def _free_quietly(error: Exception) -> None:
    """Free what ``error`` holds: a component that is half made may fail in its ``__del__``, and Python would say so."""
    printing, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        traceback.clear_frames(error.__traceback__)
    finally:
        sys.unraisablehook = printing


def load_data(load: Callable[[], Any]) -> Any:
    """What ``load`` gives: a data loader, or a sampler and one.

    Raises:
        InputError: the data cannot be loaded, or are no samples.
    """
    try:
        data = load()
    except (DatasetsError, OSError, StopIteration, ValueError) as error:  # StopIteration: an empty JSON file
        raise InputError(f"`dataset` must be loadable and not empty, but failed: {reason_of(error)}.") from error
    loader = data[-1] if isinstance(data, tuple) else data
    if len(loader.dataset) == 0:
        raise InputError("`dataset` must have samples, but has 0.")
    return data
