"""The only reader of our config keys."""

import difflib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, TypeAlias, get_args

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from torchtune_adaptive.engine.search.options import STRATEGIES, SearchOptions, Strategy
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
from torchtune_adaptive.text import parse_memory
from torchtune_adaptive.training.batch.increase_function import BatchIncreaseFunction, check_function, load_function
from torchtune_adaptive.training.batch.noise_scale import MeasuredSchedule

LearningRateScaling: TypeAlias = Literal["none", "sqrt", "linear"]
Objective: TypeAlias = Literal["memory", "throughput"]

# How alike (difflib ratio) an unknown top-level key must be to one of these to be taken for a typo: high
# enough for a config's other keys (`adapter`, `forward_batch_size`) to pass.
_LIKENESS = {"use_maximum_batch_size": 0.8, "batch_increase_function": 0.75, "adaptive": 0.85}
_POSITIVE = ("seq_len", "max_images", "global_batch_size", "save_every_n_steps", "keep_last_n_checkpoints")
_FLAGS = ("use_maximum_batch_size", "oom_recovery", "save_in_background", "search_only")


def _one_of(words: tuple[str, ...]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"


@contextmanager
def named_by_path() -> Iterator[None]:
    """Context, or decorator: a refusal of a setting names its key by the path in a config, as in `adaptive.margin`.

    Code that also serves callers without a config, who know a setting by its argument's name, raises with that name.
    """
    try:
        yield
    except InputError as error:
        raise type(error)(_BLOCK_KEY.sub(r"`adaptive.\1`", str(error))) from error


@dataclass(frozen=True, kw_only=True)
class AdaptiveSettings:
    """What the user asks for, checked.

    `CONFIG_KEYS` has the descriptions by the keys' paths in a config.

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
        "f(epoch, batch_size) -> increment: a dotted path, or a _component_ with arguments",
    ] = None
    strategy: Annotated[Strategy, f"how to search: {_one_of(STRATEGIES)}"] = "linear_extrapolation"
    power_of_two: Annotated[bool, "round the size found down to a power of two"] = True
    max_batch_size: Annotated[int | None, "the largest size to try; null: as many samples as a step can have"] = None
    memory_limit_bytes: Annotated[
        int | None, "per rank, as in 80GiB, or bytes; null: what the device has (a search on a CPU needs one)"
    ] = None
    margin: Annotated[float, "fraction of the memory limit that a search keeps free"] = 0.05
    seq_len: Annotated[int | None, "tokens per row of a search's test steps; null: the longest row there can be"] = None
    max_images: Annotated[int | None, "images per row of a search's test steps; null: the most of a sample"] = None
    oom_recovery: Annotated[bool, "out of memory in training: repeat the step with smaller micro-batches"] = True
    global_batch_size: Annotated[
        int | None, "samples per optimizer step over all ranks; null: as torchtune's own keys say"
    ] = None
    max_tokens_per_micro_batch: Annotated[
        int | Literal["auto"] | None,
        "per rank, with padding: a number, or auto (searched for); null: batch_size rows",
    ] = None
    growth_limit: Annotated[
        int | Literal["memory", "none"], "how large a growing batch may become: memory, none or a number of samples"
    ] = "memory"
    lr_scaling: Annotated[
        LearningRateScaling, f"how the learning rate follows the batch size: {_one_of(get_args(LearningRateScaling))}"
    ] = "none"
    objective: Annotated[
        Objective, "memory: the largest size that fits; throughput: the smallest that is about as fast as the best"
    ] = "memory"
    save_every_n_steps: Annotated[int | None, "optimizer steps between checkpoints; null: after epochs only"] = None
    keep_last_n_checkpoints: Annotated[int | None, "how many checkpoints within epochs to keep; null: all"] = None
    save_in_background: Annotated[bool, "write these checkpoints while training continues, from a copy on the host"] = (
        False
    )
    search_only: Annotated[bool, "end after the search, and write a config with its result to output_dir"] = False

    def __post_init__(self) -> None:
        for name in _FLAGS:
            require_bool(name, getattr(self, name))
        require_one_of("lr_scaling", self.lr_scaling, get_args(LearningRateScaling))
        require_one_of("objective", self.objective, get_args(Objective))
        for name in _POSITIVE:
            if getattr(self, name) is not None:
                require_integer(name, getattr(self, name), minimum=1)
        if self.max_tokens_per_micro_batch not in (None, "auto"):
            _require_integer_or("null, auto", "max_tokens_per_micro_batch", self.max_tokens_per_micro_batch)
        if self.growth_limit not in ("memory", "none"):
            _require_integer_or("memory, none", "growth_limit", self.growth_limit)
        _ = self.search_options  # checks these
        if self.batch_increase_function is not None:
            check_function(self.batch_increase_function)
        self._refuse_contradictions()

    def _refuse_contradictions(self) -> None:
        grows = self.batch_increase_function is not None
        if grows and self.global_batch_size is not None and self.growth_limit == "memory":
            raise InputError(
                "`growth_limit` must be none or a number where `global_batch_size` grows, because memory bounds its"
                " micro-batches alone, but is memory instead."
            )
        if self.objective == "throughput" and not self.use_maximum_batch_size:
            raise InputError(
                "`use_maximum_batch_size` must be True for the objective throughput, which chooses among the sizes"
                " that a search found, but is False instead."
            )
        if self.objective == "throughput" and self.max_tokens_per_micro_batch == "auto":
            raise InputError(
                "`objective` must be memory where `max_tokens_per_micro_batch` is auto, but is throughput instead."
            )
        if not self.search_only:
            return
        # What the values of keys in a config could not say of a search's result.
        if grows:
            raise InputError(
                "`batch_increase_function` must be null with `search_only`, because a run whose batch grows searches"
                f" for its own bound, but is {quote(self.batch_increase_function)} instead."
            )
        if not self.searches:
            raise InputError(
                "`use_maximum_batch_size` must be True with `search_only`, or `max_tokens_per_micro_batch` auto,"
                " but is False instead."
            )
        if self.use_maximum_batch_size and self.lr_scaling != "none":
            raise InputError(
                "`lr_scaling` must be none with `search_only`, because it scales from the `batch_size` that the search"
                f" replaces, but is {self.lr_scaling} instead."
            )
        if self.global_batch_size is not None and isinstance(self.max_tokens_per_micro_batch, int):
            raise InputError(
                "`max_tokens_per_micro_batch` must be null or auto with `search_only` and `global_batch_size`,"
                f" because nothing is left to search for, but is {self.max_tokens_per_micro_batch} instead."
            )

    @classmethod
    @named_by_path()
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
        values["batch_increase_function"] = load_function(values.get("batch_increase_function"))
        return cls(**values)

    @property
    def search_options(self) -> SearchOptions:
        """How a search is to be done."""
        return SearchOptions(
            strategy=self.strategy,
            power_of_two=self.power_of_two,
            margin=self.margin,
            memory_limit_bytes=self.memory_limit_bytes,
            max_batch_size=self.max_batch_size,
        )

    @property
    def cuts_samples(self) -> bool:
        """Whether a step's samples are cut into micro-batches as memory allows, rather than as torchtune's keys say."""
        return self.global_batch_size is not None or self.max_tokens_per_micro_batch is not None

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
        path = one.name if one.name in _LIKENESS else f"adaptive.{one.name.removesuffix('_bytes')}"
        yield ConfigKey(path, one.default, description)


CONFIG_KEYS = tuple(_config_keys())
BLOCK_KEYS = tuple(key.name for key in CONFIG_KEYS if key.path != key.name)
_PLACES = {key.name: key.path for key in CONFIG_KEYS}
_BLOCK_KEY = re.compile(f"`({'|'.join(BLOCK_KEYS)})`")


def unread_key(key: str, *, meant: str) -> InputError:
    """The error for a top-level ``key`` of a config that no recipe reads."""
    return InputError(
        f"A top-level key must be one that the recipe reads, but is {quote(key)} instead; did you mean `{meant}`?"
    )


def _refuse_misplaced_keys(cfg: DictConfig) -> None:
    """Refuse top-level keys that are meant for us but misspelt or misplaced. Any other key belongs to torchtune."""
    for key in cfg:
        name = str(key).lower().replace("-", "_")
        ratios = {known: difflib.SequenceMatcher(None, name, known).ratio() for known in _LIKENESS}
        alike = [known for known in ratios if ratios[known] >= _LIKENESS[known]]
        if name in BLOCK_KEYS and name != "seq_len":  # a plain name, which configs use for their interpolations
            alike = [f"adaptive.{name}"]
        if alike and key not in _LIKENESS:
            raise unread_key(str(key), meant=alike[0])


def _checked_block(block: object) -> dict[str, Any]:
    if block is None:
        return {}
    if not isinstance(block, dict):
        raise InputError(f"`adaptive` must be a mapping, but is {quote(block)} instead.")
    for key in block:
        if key not in BLOCK_KEYS:
            hint = did_you_mean(key, _PLACES)
            raise InputError(
                f"A key of `adaptive` must be one of {', '.join(BLOCK_KEYS)}, but is {quote(key)} instead{hint}"
            )
    return block


def _require_integer_or(words: str, name: str, value: object) -> None:
    if as_integer(value) is None:
        raise InputError(f"`{name}` must be {words} or an integer, but is {quote(value)} instead.")
    require_integer(name, value, minimum=1)


def _read(cfg: DictConfig, key: str) -> Any:
    try:
        node = cfg[key]
        return OmegaConf.to_container(node, resolve=True, throw_on_missing=True) if OmegaConf.is_config(node) else node
    except OmegaConfBaseException as error:
        raise InputError(f"`{key}` must have a value, but has none: {reason_of(error)}.") from error
