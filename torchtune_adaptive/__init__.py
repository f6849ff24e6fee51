"""Finds the largest batch that fits, trains with it and grows it: a torchtune recipe extension."""

import importlib
from typing import TYPE_CHECKING, Any

from torchtune_adaptive.engine.search.strategies import Probe, SearchResult
from torchtune_adaptive.errors import CannotRecoverError, InputError, NothingFitsError

if TYPE_CHECKING:
    from torchtune_adaptive.engine.recovery.step import RecoverableStep
    from torchtune_adaptive.engine.recovery.watch import MemoryEvent
    from torchtune_adaptive.engine.search.any_loop import TokenSearchResult, find_max_batch_size, find_max_tokens
    from torchtune_adaptive.engine.search.fastest_step import FastestStep, find_fastest
    from torchtune_adaptive.plan.any_loop import plan_max_batch_size

__version__ = "0.1.0"
__all__ = [
    "CannotRecoverError",
    "FastestStep",
    "InputError",
    "MemoryEvent",
    "NothingFitsError",
    "Probe",
    "RecoverableStep",
    "SearchResult",
    "TokenSearchResult",
    "find_fastest",
    "find_max_batch_size",
    "find_max_tokens",
    "plan_max_batch_size",
]

# Imported at first use: torch takes seconds to import, and a plan does not need it.
_WITH_TORCH = {
    "FastestStep": "engine.search.fastest_step",
    "MemoryEvent": "engine.recovery.watch",
    "RecoverableStep": "engine.recovery.step",
    "TokenSearchResult": "engine.search.any_loop",
    "find_fastest": "engine.search.fastest_step",
    "find_max_batch_size": "engine.search.any_loop",
    "find_max_tokens": "engine.search.any_loop",
    "plan_max_batch_size": "plan.any_loop",
}


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)
