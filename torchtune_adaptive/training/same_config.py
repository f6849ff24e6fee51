"""Every rank must have the same config: on several nodes each launcher is given its own."""

import re
from collections.abc import Mapping
from typing import Any

from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.errors import InputError, quote

_MAY_DIFFER = {"adaptive.memory_limit"}  # nodes may have unequal devices; a search goes by the least
# The last words of torchtune's keys for places, as `checkpoint_dir` and `merges_file`. `data_dir` of a data set and
# `name_or_path` may also have a place in the Hub.
_PLACE = re.compile(r"(?!data_dir|.*name_or_path)(.*_)?(path|dir|file)")


def check_same_config(config: Mapping[str, Any], consensus: Consensus) -> None:
    """Check that all ranks have the ``config`` (by dotted keys) of rank 0. A collective. Places of files may differ.

    Raises:
        InputError: on all ranks, a key differs.
    """
    others = consensus.from_rank_zero(dict(config))
    keys = (key for key in sorted({*config, *others}) if not _agree(key, config.get(key), others.get(key)))
    sentence = ""
    if key := next(keys, None):
        sentence = (
            f"`{key}` must be the same on all ranks, but is {quote(others.get(key))} on rank 0 and"
            f" {quote(config.get(key))} on rank {consensus.rank}."
        )
    if sentence := consensus.first_reason(sentence):
        raise InputError(sentence)


def _agree(key: str, one: object, other: object) -> bool:
    """Whether the values of ``key`` are equal, are places in file systems, or need not be equal."""
    if one == other or repr(one) == repr(other) or key in _MAY_DIFFER:  # repr: for nan
        return True
    if not isinstance(one, str) or not isinstance(other, str):
        return False
    return bool(_PLACE.fullmatch(key.rpartition(".")[2])) or (_is_rooted(one) and _is_rooted(other))


def _is_rooted(value: str) -> bool:
    """Whether the value can only be a place in a file system: "a/b" may be a name in the Hub, "/a/b" may not.

    >>> _is_rooted("~/alpaca.json"), _is_rooted("tatsu-lab/alpaca")
    (True, False)
    """
    return value.startswith(("/", "./", "../", "~"))
