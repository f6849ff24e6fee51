"""How a search is to be done."""

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from torchtune_adaptive.errors import require_bool, require_fraction, require_integer, require_one_of

Strategy: TypeAlias = Literal["linear_extrapolation", "binary_search", "decrease_until_oom"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """How to search, and for what, checked.

    Attributes:
        power_of_two: round the size found down to a power of two.
        margin: fraction of the memory limit that stays free, in [0, 1).
        memory_limit_bytes: what this rank may use; None: all memory of its device.
        max_batch_size: the largest size to try; None: no such bound.

    Raises:
        InputError: a value is out of its range or of another type.
    """

    strategy: Strategy
    power_of_two: bool
    margin: float
    memory_limit_bytes: int | None = None
    max_batch_size: int | None = None

    def __post_init__(self) -> None:
        require_one_of("strategy", self.strategy, STRATEGIES)
        require_bool("power_of_two", self.power_of_two)
        for name in ("memory_limit_bytes", "max_batch_size"):
            if (value := getattr(self, name)) is not None:  # an int from now on: NumPy's lack methods
                object.__setattr__(self, name, require_integer(name, value, minimum=1))
        require_fraction("margin", self.margin)
