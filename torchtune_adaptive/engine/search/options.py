"""How a search is to be done."""

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from torchtune_adaptive.errors import require_bool, require_fraction, require_integer, require_one_of

Strategy: TypeAlias = Literal["linear_extrapolation", "binary_search", "decrease_until_oom"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """How to search, and for what, checked. Functions and settings that have the same options take their defaults here.

    Attributes:
        power_of_two: round the size found down to a power of two.
        margin: fraction of the memory limit that stays free, in [0, 1).
        memory_limit_bytes: what this rank may use; None: all memory of its device.
        max_batch_size: the largest size to try; None: no such bound.

    Raises:
        InputError: a value is out of its range or of another type.
    """

    strategy: Strategy = "linear_extrapolation"
    power_of_two: bool = False
    margin: float = 0.05
    memory_limit_bytes: int | None = None
    max_batch_size: int | None = None

    def __post_init__(self) -> None:
        require_one_of("strategy", self.strategy, STRATEGIES)
        require_bool("power_of_two", self.power_of_two)
        require_fraction("margin", self.margin)
        if self.max_batch_size is not None:  # an int from now on: NumPy's lack methods
            largest = require_integer("max_batch_size", self.max_batch_size, minimum=1)
            object.__setattr__(self, "max_batch_size", largest)
