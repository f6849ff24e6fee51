"""The set-up of a stock recipe, in which an error of the config becomes one sentence."""

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from datasets.exceptions import DatasetsError
from omegaconf import OmegaConf
from torchtune import config

from torchtune_adaptive.errors import InputError, cannot_set_up, reason_of


@contextmanager
def setting_up() -> Iterator[None]:
    """Context: any error becomes an ``InputError`` for the config, because its components can be any code.

    Raises:
        InputError: the set-up failed; the message has the error and its place in the code.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        block, values = _block_of(error)
        refusal = cannot_set_up(error, block=block, values=values)
        _free_quietly(error)
        raise refusal from error


def _block_of(error: Exception) -> tuple[str, object]:
    """The block of the config that torchtune was creating when ``error`` was raised, and its values; "" if none."""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        if frame.f_code is config.instantiate.__code__:
            block = frame.f_locals["config"]
            return (
                (block._get_full_key(None), OmegaConf.to_container(block)) if OmegaConf.is_dict(block) else ("", None)
            )
    return "", None


def _free_quietly(error: Exception) -> None:
    """Free the objects that ``error`` holds. Python would print errors in ``__del__`` of incomplete components."""
    printing, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        traceback.clear_frames(error.__traceback__)
    finally:
        sys.unraisablehook = printing


def load_data(load: Callable[[], Any]) -> Any:
    """The result of ``load``: a data loader, or a sampler and a data loader.

    Raises:
        InputError: the data cannot be loaded, or there are no samples.
    """
    try:
        data = load()
    except (DatasetsError, OSError, StopIteration, ValueError) as error:  # StopIteration: an empty JSON file
        raise InputError(f"`dataset` must be loadable and not empty, but failed: {reason_of(error)}.") from error
    loader = data[-1] if isinstance(data, tuple) else data
    if len(loader.dataset) == 0:
        raise InputError("`dataset` must have samples, but has 0.")
    return data
