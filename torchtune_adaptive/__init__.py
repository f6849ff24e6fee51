"""Finds the largest batch that fits, trains with it and grows it: a torchtune recipe extension."""

from torchtune_adaptive.errors import InputError, NothingFitsError
from torchtune_adaptive.search.any_loop import find_max_batch_size
from torchtune_adaptive.search.strategies import Probe, SearchResult

__all__ = ["InputError", "NothingFitsError", "Probe", "SearchResult", "find_max_batch_size"]
