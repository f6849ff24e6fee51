"""Reads and checks our config keys."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from types import NoneType
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_origin

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from torchtune_adaptive.engine.search.options import SearchOptions, Strategy
from torchtune_adaptive.errors import (
    InputError,
    as_integer,
    did_you_mean,
    quote,
    reason_of,
    require_bool,
    require_integer,
    require_one_of,
)
from torchtune_adaptive.increase_function import BatchIncreaseFunction, load_function
from torchtune_adaptive.schedule import MeasuredSchedule
from torchtune_adaptive.text import parse_memory

LearningRateScaling: TypeAlias = Literal["none", "sqrt", "linear"]
Objective: TypeAlias = Literal["memory", "speed"]

TOP_LEVEL_KEYS = ("use_maximum_batch_size", "batch_increase_function", "adaptive")
_OF_SEARCH = tuple(one.name for one in fields(SearchOptions))


@contextmanager
def named_by_path() -> Iterator[None]:
    """Context, or decorator: a refusal of a setting names its key by the path in a config, as in `adaptive.margin`.

    Code that also serves callers without a config, who know a setting by its argument's name, raises with that name.
    """
    try:
        yield
    except InputError as error:
        raise type(error)(_BLOCK_KEY.sub("`adaptive.", str(error))) from error


@dataclass(frozen=True, kw_only=True)
class AdaptiveSettings:
    """What the user asks for, checked.

    A setting's annotation says which values it may have, and describes it. `CONFIG_KEYS` has them by their paths.

    Raises:
        InputError: a value is out of its range or of another type, or contradicts another; the sentence quotes it.

    >>> AdaptiveSettings(use_maximum_batch_size=True).searches
    True
    """

    use_maximum_batch_size: Annotated[
        bool, "before training, search for the largest batch_size that fits, and train with it"
    ] = False
    batch_increase_function: Annotated[
        BatchIncreaseFunction | None,
        "f(epoch, batch_size) -> increment, called before every epoch",
    ] = None
    strategy: Annotated[Strategy, "how to search"] = SearchOptions.strategy
    power_of_two: Annotated[
        bool, "round the rows found down to a power of two, unless a step's samples all fit at once; PPO: to a divisor"
    ] = True
    max_batch_size: Annotated[
        int | None, "the most rows of the longest length to try; null: as many samples as a rank can have"
    ] = None
    memory_limit_bytes: Annotated[
        int | None,
        "memory of a rank in search and training (PPO: search); null: what a GPU has free (a CPU search needs a limit)",
    ] = None
    margin: Annotated[float, "fraction of that memory that a search keeps free"] = SearchOptions.margin
    seq_len: Annotated[int | None, "tokens per row of a search's test steps; null: the longest row there can be"] = None
    max_images: Annotated[int | None, "images per row of a search's test steps; null: the most in a sample"] = None
    oom_recovery: Annotated[bool, "out of memory in training: repeat the step with smaller micro-batches"] = True
    global_batch_size: Annotated[
        int | None, "samples per optimizer step over all ranks; null: as torchtune's own keys say"
    ] = None
    max_tokens_per_micro_batch: Annotated[
        int | Literal["auto"] | None,
        "tokens of a rank, with padding: a number, or auto (searched for); null: micro-batches are counted in rows",
    ] = None
    growth_limit: Annotated[
        int | Literal["memory", "none"],
        "bound of a growing batch: memory (what fits), none or a number: a global_batch_size if set, else a batch_size",
    ] = "memory"
    lr_scaling: Annotated[
        LearningRateScaling, "how the learning rate follows the samples per step, from those in the config"
    ] = "none"
    objective: Annotated[
        Objective, "memory: the largest size that fits; speed: of several that fit, the one that trains fastest"
    ] = "memory"
    save_every_n_steps: Annotated[int | None, "optimizer steps between checkpoints; null: none within epochs"] = None
    keep_last_n_checkpoints: Annotated[int | None, "how many checkpoints within epochs to keep; null: all"] = None
    save_in_background: Annotated[
        bool, "write these checkpoints while training continues, from a copy in host memory"
    ] = False
    search_only: Annotated[bool, "end after the search, and write a config with its result to output_dir"] = False

    def __post_init__(self) -> None:
        _ = self.search_options  # checks these
        for one in fields(self):
            if one.name not in _OF_SEARCH:
                _check(one.name, getattr(self, one.name), get_args(one.type)[0])
        self._refuse_contradictions()

    def _refuse_contradictions(self) -> None:
        grows = self.batch_increase_function is not None
        if grows and self.global_batch_size is not None and self.growth_limit == "memory":
            raise InputError(
                "A growing `global_batch_size` needs `growth_limit: none` or a number: `memory` bounds only its"
                " micro-batches."
            )
        if self.objective == "speed" and not self.use_maximum_batch_size:
            raise InputError("`objective: speed` needs `use_maximum_batch_size: True`.")
        if self.objective == "speed" and self.max_tokens_per_micro_batch is not None:
            raise InputError(
                "`objective: speed` cannot be combined with"
                f" `max_tokens_per_micro_batch: {self.max_tokens_per_micro_batch}`: it chooses rows or tokens itself."
            )
        if not self.search_only:
            return
        # What the values of keys in a config could not say of a search's result.
        if grows:
            raise InputError(
                "`search_only: True` cannot be combined with a `batch_increase_function`: its run searches for its own"
                " bound."
            )
        if not self.searches:
            raise InputError(
                "`search_only: True` needs `use_maximum_batch_size: True` or `max_tokens_per_micro_batch: auto`."
            )
        if self.use_maximum_batch_size and self.lr_scaling != "none":
            raise InputError(
                f"`search_only: True` cannot be combined with `lr_scaling: {self.lr_scaling}`, which scales from the"
                " `batch_size` that the search replaces."
            )
        if self.global_batch_size is not None and isinstance(self.max_tokens_per_micro_batch, int):
            raise InputError(
                "`search_only: True` has nothing to search for with `global_batch_size` and"
                f" `max_tokens_per_micro_batch: {self.max_tokens_per_micro_batch}`."
            )

    @classmethod
    @named_by_path()
    def from_cfg(cls, cfg: DictConfig) -> "AdaptiveSettings":
        """The settings a config holds; keys it lacks have their defaults, and the config is left as it is.

        A `batch_increase_function` given by its path is imported; the working directory is searched for it last.

        Raises:
            InputError: an unknown key of `adaptive`, a value out of its range, or a function that cannot be used.

        >>> AdaptiveSettings.from_cfg(OmegaConf.create({"adaptive": {"memory_limit": "1KiB"}})).memory_limit_bytes
        1024
        """
        values = {key: _read(cfg, key) for key in TOP_LEVEL_KEYS if key in cfg}
        values |= _checked_block(values.pop("adaptive", None))
        limit = values.pop("memory_limit", None)
        values["memory_limit_bytes"] = None if limit is None else parse_memory(limit)
        values["batch_increase_function"] = load_function(values.get("batch_increase_function"))
        return cls(**values)

    @property
    def search_options(self) -> SearchOptions:
        """How a search is to be done."""
        return SearchOptions(**{name: getattr(self, name) for name in _OF_SEARCH})

    @property
    def cuts_samples(self) -> bool:
        """Whether a step's samples are cut into micro-batches as memory allows, rather than as torchtune's keys say."""
        return self.global_batch_size is not None or self.max_tokens_per_micro_batch is not None

    @property
    def may_cut(self) -> bool:
        """Whether a step may have other micro-batches than torchtune's keys say, also without out-of-memory errors."""
        return self.cuts_samples or self.growth_limit != "memory" or self.needs_gradient_noise

    @property
    def needs_gradient_noise(self) -> bool:
        """Whether gradients are measured to decide on growth. A measured step has at least two micro-batches."""
        return isinstance(self.batch_increase_function, MeasuredSchedule)

    @property
    def overrides_batching(self) -> bool:
        """Whether a step's samples are chosen or cut by these settings, rather than by torchtune's keys alone."""
        return self.searches or self.cuts_samples

    @property
    def searches(self) -> bool:
        """Whether a search for the largest batch size runs before training, where memory has a limit."""
        return self._needs_search or self.batch_increase_function is not None

    def searches_on(self, device_type: str) -> bool:
        """Whether a search runs before training on such a device.

        Growth beyond memory uses a search only to cut its steps, and does without on a CPU without a limit.
        """
        is_limited = device_type != "cpu" or self.memory_limit_bytes is not None
        return self._needs_search or (self.searches and is_limited)

    @property
    def _needs_search(self) -> bool:
        """Whether a search decides on a size; growth by memory needs it as its bound."""
        grows_by_memory = self.batch_increase_function is not None and self.growth_limit == "memory"
        return self.use_maximum_batch_size or self.max_tokens_per_micro_batch == "auto" or grows_by_memory


@dataclass(frozen=True)
class ConfigKey:
    """A key in a config, by its dotted path, as in `adaptive.margin`. A missing key has its default."""

    path: str
    default: Any
    description: str

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]


def _config_keys() -> Iterator[ConfigKey]:
    for one in fields(AdaptiveSettings):
        _, description = get_args(one.type)
        # The settings' own names but for the limit, which has a unit in the config.
        path = one.name if one.name in TOP_LEVEL_KEYS else f"adaptive.{one.name.removesuffix('_bytes')}"
        yield ConfigKey(path, one.default, description)


CONFIG_KEYS = tuple(_config_keys())
BLOCK_KEYS = tuple(key.name for key in CONFIG_KEYS if key.path != key.name)
_PLACES = {key.name: key.path for key in CONFIG_KEYS}
_BLOCK_KEY = re.compile(f"`(?=(?:{'|'.join(BLOCK_KEYS)})[`:])")  # as in `margin` and `margin: 0.1`


def _checked_block(block: object) -> dict[str, Any]:
    if block is None:
        return {}
    if not isinstance(block, dict):
        raise InputError(f"`adaptive` must be a mapping, but is {quote(block)} instead.")
    for key in block:
        if key not in BLOCK_KEYS:
            hint = did_you_mean(key, _PLACES)
            known = f", only {', '.join(BLOCK_KEYS)}." if hint == "." else hint
            raise InputError(f"`adaptive` has no key {quote(key)}{known}")
    return block


def _check(name: str, value: object, kind: Any) -> None:
    """Check the value of a setting of this ``kind``: True or False, or words, null and integers from 1 up."""
    kinds = (kind,) if get_origin(kind) is Literal else get_args(kind) or (kind,)
    words = tuple(word for one in kinds if get_origin(one) is Literal for word in get_args(one))
    if value is None and NoneType in kinds:
        return
    if kind is bool:
        require_bool(name, value)
    elif int not in kinds:
        if words:
            require_one_of(name, value, words)
    elif value not in words:
        if words and as_integer(value) is None:
            others = ("null", *words) if NoneType in kinds else words
            raise InputError(f"`{name}` must be {', '.join(others)} or an integer, but is {quote(value)} instead.")
        require_integer(name, value, minimum=1)


def _read(cfg: DictConfig, key: str) -> Any:
    try:
        node = cfg[key]
        return OmegaConf.to_container(node, resolve=True, throw_on_missing=True) if OmegaConf.is_config(node) else node
    except OmegaConfBaseException as error:
        raise InputError(f"`{key}` has no value: {reason_of(error)}.") from error
