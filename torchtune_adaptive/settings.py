"""The only reader of our config keys."""

import difflib
import importlib
import math
import os
import re
import sys
import types
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, TypeAlias, get_args

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from torchtune_adaptive.errors import InputError, as_integer, quote, reason_of, require_integer
from torchtune_adaptive.schedule import BatchIncreaseFunction, check_function

Strategy: TypeAlias = Literal["linear_extrapolation", "binary_search", "decrease_until_oom"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)

_BLOCK_KEYS = ("strategy", "power_of_two", "max_batch_size", "memory_limit", "margin", "seq_len", "oom_recovery")
# How alike (difflib ratio) a stranger's top-level key must be to one of ours to be taken for a slip of the pen: high
# enough for a config's other keys (`adapter`, `forward_batch_size`) to pass.
_LIKENESS = {"use_maximum_batch_size": 0.8, "batch_increase_function": 0.75, "adaptive": 0.85}
_PLACES = {name: f"adaptive.{name}" for name in _BLOCK_KEYS} | {name: name for name in _LIKENESS}
_MEMORY_TEXT = re.compile(r"\s*(-?)([0-9]{1,20}(?:\.[0-9]{0,20})?|\.[0-9]{1,20})\s*([a-z]*)\s*", re.IGNORECASE)
_BYTES_PER_UNIT = {"": 1, "b": 1} | {
    prefix + suffix: base**power
    for suffix, base in (("b", 1000), ("ib", 1024))
    for power, prefix in enumerate("kmgt", start=1)
}


@dataclass(frozen=True, kw_only=True)
class AdaptiveSettings:
    """What the user asked for, checked: sizes in samples per rank, the limit in bytes per rank.

    ``margin`` is the fraction of the limit held back, ``seq_len`` the tokens of a probe's row (None: the worst case),
    ``oom_recovery`` whether training survives out-of-memory errors.

    Raises:
        InputError: a value is out of its range or of another type; the sentence quotes it.

    >>> AdaptiveSettings(use_maximum_batch_size=True).searches
    True
    """

    use_maximum_batch_size: bool = False
    batch_increase_function: BatchIncreaseFunction | None = None
    strategy: Strategy = "linear_extrapolation"
    power_of_two: bool = True
    max_batch_size: int | None = None
    memory_limit_bytes: int | None = None
    margin: float = 0.05
    seq_len: int | None = None
    oom_recovery: bool = True

    def __post_init__(self) -> None:
        for name in ("use_maximum_batch_size", "power_of_two", "oom_recovery"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"`{name}` must be True or False, but is {quote(getattr(self, name))} instead.")
        if self.strategy not in STRATEGIES:
            hint = _did_you_mean(self.strategy, {name: name for name in STRATEGIES})
            raise InputError(
                f"`strategy` must be one of {', '.join(STRATEGIES)}, but is {quote(self.strategy)} instead{hint}"
            )
        for name in ("max_batch_size", "memory_limit_bytes", "seq_len"):
            if getattr(self, name) is not None:
                require_integer(name, getattr(self, name), minimum=1)
        is_number = isinstance(self.margin, int | float) and not isinstance(self.margin, bool)
        if not is_number or not 0 <= self.margin < 1:  # nan fails the comparison
            raise InputError(f"`margin` must be in [0, 1), but is {quote(self.margin)} instead.")
        if self.batch_increase_function is not None:
            check_function(self.batch_increase_function)

    @classmethod
    def from_cfg(cls, cfg: DictConfig) -> "AdaptiveSettings":
        """The settings a config holds; keys it lacks have their defaults, and the config is left as it is.

        A `batch_increase_function` given by its path is imported; the working directory is searched for it last.

        Raises:
            InputError: an unknown or misspelt key, a value out of its range, or a function that cannot be used.

        >>> AdaptiveSettings.from_cfg(OmegaConf.create({"adaptive": {"memory_limit": "1KiB"}})).memory_limit_bytes
        1024
        """
        _refuse_misplaced_keys(cfg)
        values = {key: _read(cfg, key) for key in map(str, cfg) if key in _LIKENESS}
        values |= _checked_block(values.pop("adaptive", None))
        limit = values.pop("memory_limit", None)
        values["memory_limit_bytes"] = None if limit is None else parse_memory(limit)
        values["batch_increase_function"] = _load_function(values.get("batch_increase_function"))
        return cls(**values)

    @property
    def searches(self) -> bool:
        """Whether a search for the largest batch size runs before training: growth needs it as its bound."""
        return self.use_maximum_batch_size or self.batch_increase_function is not None


def parse_memory(value: object) -> int:
    """Bytes, from whole bytes or a text with a unit; KiB to TiB are binary, KB to TB decimal.

    Raises:
        InputError: the value cannot be read, or is not above zero.

    >>> parse_memory("1.5GiB"), parse_memory("80 gb"), parse_memory(1024)
    (1610612736, 80000000000, 1024)
    """
    whole = int(value) if isinstance(value, float) and value.is_integer() else as_integer(value)
    match = _MEMORY_TEXT.fullmatch(value) if isinstance(value, str) else None
    if match and match[3].lower() in _BYTES_PER_UNIT:
        size = Fraction(match[2]) * _BYTES_PER_UNIT[match[3].lower()]
        whole = math.floor(-size if match[1] else size)
    if whole is None:
        raise InputError(f"`memory_limit` must be a size like 80GiB or whole bytes, but is {quote(value)} instead.")
    if whole <= 0:
        raise InputError(f"`memory_limit` must be at least one byte, but is {quote(value)} instead.")
    return whole


def _refuse_misplaced_keys(cfg: DictConfig) -> None:
    """Refuses top-level keys that can only be meant for us; any other stranger belongs to the recipe below."""
    for key in cfg:
        name = str(key).lower().replace("-", "_")
        ratios = {known: difflib.SequenceMatcher(None, name, known).ratio() for known in _LIKENESS}
        alike = [known for known in ratios if ratios[known] >= _LIKENESS[known]]
        if name in _BLOCK_KEYS and name != "seq_len":  # a plain name, which configs use for their interpolations
            alike = [f"adaptive.{name}"]
        if alike and key not in _LIKENESS:
            raise InputError(f"`{key}` must not be a top-level key of the config; did you mean `{alike[0]}`?")


def _checked_block(block: object) -> dict[str, Any]:
    if block is None:
        return {}
    if not isinstance(block, dict):
        raise InputError(f"`adaptive` must be a mapping, but is {quote(block)} instead.")
    for key in block:
        if key not in _BLOCK_KEYS:
            hint = _did_you_mean(key, _PLACES)
            raise InputError(
                f"A key of `adaptive` must be one of {', '.join(_BLOCK_KEYS)}, but is {quote(key)} instead{hint}"
            )
    return block


def _did_you_mean(value: object, places: dict[str, str]) -> str:
    nearest = difflib.get_close_matches(str(value).lower(), places, n=1)
    return f"; did you mean `{places[nearest[0]]}`?" if nearest else "."


def _read(cfg: DictConfig, key: str) -> Any:
    try:
        node = cfg[key]
        return OmegaConf.to_container(node, resolve=True, throw_on_missing=True) if OmegaConf.is_config(node) else node
    except OmegaConfBaseException as error:
        raise InputError(f"`{key}` must have a value, but has none: {reason_of(error)}.") from error


def _load_function(value: object) -> BatchIncreaseFunction | None:
    """The function whose dotted path is ``value``, or that the `_component_` of ``value`` makes; None for null."""
    if value is None:
        return None
    if isinstance(value, str):
        return check_function(_import(value), name=quote(value))
    if not isinstance(value, dict) or not isinstance(value.get("_component_"), str):
        raise InputError(
            "`batch_increase_function` must be a dotted path or a mapping with a `_component_`, "
            f"but is {quote(value)} instead."
        )
    arguments = {str(key): argument for key, argument in value.items() if key != "_component_"}
    path = value["_component_"]
    component = _import(path)
    try:
        made = component(**arguments)
    except Exception as error:  # the user's own code and arguments: whatever it raises is reported
        raise InputError(
            f"`batch_increase_function` must be made by its `_component_`, but {quote(path)} "
            f"with {quote(arguments)} failed instead: {reason_of(error)}."
        ) from error
    return check_function(made, name=f"what {quote(path)} makes")


def _import(path: str) -> Any:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # as stock does for its components: a user's module lies beside the config
    found: Any = None
    try:
        for end, part in enumerate(path.split("."), start=1):
            if end > 1 and (hasattr(found, part) or not isinstance(found, types.ModuleType)):
                found = getattr(found, part)
            else:
                found = importlib.import_module(".".join(path.split(".")[:end]))
    except Exception as error:  # importing runs the user's own module: whatever it raises is reported
        raise InputError(
            f"`batch_increase_function` must be importable, but {quote(path)} is not: {reason_of(error)}."
        ) from error
    return found
