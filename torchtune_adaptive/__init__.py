"""Finds the largest batch that fits, trains with it and grows it: a torchtune recipe extension."""

from typing import TYPE_CHECKING, Any

from torchtune_adaptive.errors import InputError, NothingFitsError
from torchtune_adaptive.search.strategies import Probe, SearchResult

if TYPE_CHECKING:
    from torchtune_adaptive.search.any_loop import find_max_batch_size

__all__ = ["InputError", "NothingFitsError", "Probe", "SearchResult", "find_max_batch_size"]


def __getattr__(name: str) -> Any:
    """Import ``find_max_batch_size`` when it is asked for: torch takes seconds, which a plan need not wait for."""
    if name != "find_max_batch_size":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from torchtune_adaptive.search.any_loop import find_max_batch_size

    return find_max_batch_size
