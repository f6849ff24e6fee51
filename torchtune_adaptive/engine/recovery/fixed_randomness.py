"""Random numbers that do not depend on a sample's place in a batch, so that micro-steps can be compared."""

import math
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from torchtune_adaptive.engine.memory.operations import OperationMode, is_collective

_SEEDS = -(2**63), 2**63 - 1  # the bounds with which compiled code draws a seed of its own
_FRACTIONS = [math.sqrt(prime) % 1 for prime in (2, 3, 5, 7, 11, 13)]  # of each dimension's steps; evenly spread


class FixedRandomness(OperationMode):
    """Random operations give the same values to all entries of their first dimension, and dropout drops nothing.

    Draws without replacement, permutations and code compiled by ``torch.compile`` stay random. A generator of the
    user's own stays as it was.

    Args:
        is_constant: all entries have the same value: samples may lie along any dimension, as in ``rsample((5,))``.

    Attributes:
        dtypes: the floating types of all results.
        draws: how many results it has filled.
    """

    def __init__(self, *, is_constant: bool = False) -> None:
        super().__init__()
        self._is_constant = is_constant
        self.dtypes: set[torch.dtype] = set()
        self.draws = 0

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        place, is_random = _kind(func)
        if place is not None and place < len(args):  # attention with dropout, forward and backward
            args = (*args[:place], 0.0, *args[place + 1 :])
        elif place is not None:
            kwargs = kwargs | {"dropout_p": 0.0}
        result = self._fixed(func, args, kwargs) if is_random else func(*args, **kwargs)
        if not is_collective(func):
            for one in result if isinstance(result, tuple | list) else (result,):
                if isinstance(one, torch.Tensor) and one.is_floating_point():
                    self.dtypes.add(one.dtype)
        return result

    def _fixed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = {one.name: one.default_value for one in func._schema.arguments}
        given |= dict(zip(given, args, strict=False)) | kwargs
        name = func._schema.name.removeprefix("aten::")
        if name == "native_dropout":
            return _kept(given["input"], given["p"]) if given["train"] in (True, None) else func(*args, **kwargs)
        generator = given.get("generator")
        state = None if generator is None else generator.get_state()
        result = func(*args, **kwargs)
        if generator is not None:
            generator.set_state(state)
        values = _VALUES.get(name.rstrip("_").removesuffix("_like"))
        is_seed = name == "randint" and (given.get("low"), given.get("high")) == _SEEDS
        if values is not None and isinstance(result, torch.Tensor) and not is_seed:
            with _disable_current_modes(), torch.no_grad():
                spread = _spread(result[(slice(0, 1),) * result.ndim] if self._is_constant else result)
                result.copy_(values(spread, given))
            self.draws += 1
        return result


@cache
def _kind(func: Any) -> tuple[int | None, bool]:
    """The place of an operation's argument ``dropout_p``, and whether it draws random numbers otherwise."""
    schema = getattr(func, "_schema", None)
    if schema is None:  # of a higher-order operator, such as flex attention
        return None, False
    names = [one.name for one in schema.arguments]
    place = names.index("dropout_p") if "dropout_p" in names else None
    return place, place is None and torch.Tag.nondeterministic_seeded in func.tags


def _kept(values: torch.Tensor, p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """What dropout with probability ``p`` gives if it drops nothing: scaled values, and the mask."""
    scale = 0.0 if p == 1 else 1 / (1 - p)
    return values * scale, torch.ones_like(values, dtype=torch.bool)


def _spread(like: torch.Tensor) -> torch.Tensor:
    """Numbers in (0, 1) in the shape of ``like``, evenly spread over all dimensions but the first."""
    spread = torch.full((1,) * like.ndim, _FRACTIONS[0], dtype=torch.float32, device=like.device)
    for dimension in range(1, like.ndim):
        steps = torch.arange(like.shape[dimension], dtype=torch.float32, device=like.device)
        shape = [-1 if one == dimension else 1 for one in range(like.ndim)]
        spread = spread + (steps * _FRACTIONS[dimension % len(_FRACTIONS)]).view(shape)
    return (spread % 1.0).clamp(1e-4, 1 - 1e-4)


def _bernoulli(spread: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    """With one probability for all, as in dropout, everything is kept."""
    p = given["self"] if given.get("p") is None else given["p"]
    return spread < p if isinstance(p, torch.Tensor) else torch.full_like(spread, float(p > 0))


def _uniform(spread: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    low, high = given.get("from", 0.0), given.get("to", 1.0)
    return low + (high - low) * spread


def _normal(spread: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    mean, std = given.get("mean", 0.0), given.get("std", 1.0)
    return mean + std * math.sqrt(2) * torch.erfinv(2 * spread - 1)


def _integers(spread: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    low = given.get("low", given.get("from")) or 0
    high = given.get("high", given.get("to"))
    return (low + ((2 if high is None else high) - low) * spread).floor()


def _exponential(spread: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    return -torch.log(spread) / given.get("lambd", 1.0)


_VALUES = {
    "bernoulli": _bernoulli,
    "rand": _uniform,
    "uniform": _uniform,
    "randn": _normal,
    "normal": _normal,
    "randint": _integers,
    "random": _integers,
    "exponential": _exponential,
}
