"""What a function or an object refers to: by its variables, or by those of functions and objects that it refers to."""

import itertools
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

_MOST_ITEMS = 64  # of a list or dict that is looked into; a larger one has data
_MOST_OBJECTS = 10_000
_DEPTH = 6  # of references from one object to another


def modules_within_reach(model: nn.Module, function: Callable[..., Any]) -> list[nn.Module]:
    """The modules of ``model``, and others that ``function`` refers to: a loss with a buffer, a GAN's other network.

    A ``DistributedDataParallel`` cannot be passed together with them. Modules that are found in another way, such as
    those that a function of a library keeps, are not seen.

    >>> loss = nn.MSELoss()
    >>> modules_within_reach(nn.Linear(1, 1), lambda rows: loss(rows, rows))
    [Linear(in_features=1, out_features=1, bias=True), MSELoss()]
    """
    found = dict.fromkeys(model.modules())
    for value in _within_reach(function, leads_nowhere=_has_no_modules):
        if isinstance(value, nn.Module):
            found |= dict.fromkeys(value.modules())
    return list(found)


def generators_within_reach(start: Any, modules: Iterable[nn.Module] = ()) -> list[Any]:
    """The random generators of Python, NumPy and torch that ``start`` refers to: a function, an object, or several.

    Args:
        modules: generators in their attributes, too.

    >>> generator = random.Random(0)
    >>> generators_within_reach(lambda: generator.random()) == [generator]
    True
    """
    kinds: list[type] = [random.Random, torch.Generator]
    if (numpy := sys.modules.get("numpy")) is not None:
        kinds += [numpy.random.Generator, numpy.random.RandomState]
    found = itertools.chain(
        _within_reach(start, leads_nowhere=_has_no_generators), *(vars(one).values() for one in modules)
    )
    generators = (one for one in found if isinstance(one, tuple(kinds)))
    return list({id(one): one for one in generators if not isinstance(one, random.SystemRandom)}.values())


def _within_reach(start: Any, *, leads_nowhere: Callable[[Any], bool]) -> Iterator[Any]:
    """``start`` and what it refers to, the nearest first. A module is not looked into."""
    seen = dict[int, Any]()
    waiting = deque[tuple[int, Any]]([(0, start)])
    while waiting and len(seen) < _MOST_OBJECTS:
        depth, value = waiting.popleft()
        if id(value) in seen or leads_nowhere(value):
            continue
        seen[id(value)] = value  # so that no other object gets the same number
        yield value
        if not isinstance(value, nn.Module) and depth < _DEPTH:
            waiting += ((depth + 1, one) for one in _referred_to(value))


def _has_no_modules(value: Any) -> bool:
    """Whether ``value`` leads to no module that a step could change: a class, a file of Python, an object of torch."""
    kind = value if isinstance(value, types.FunctionType) else type(value)
    return isinstance(value, type | types.ModuleType) or (_is_of_torch(kind) and not isinstance(value, nn.Module))


def _has_no_generators(value: Any) -> bool:
    """Whether ``value`` is a class, a file of Python, or a function of torch."""
    is_function = isinstance(value, types.FunctionType)
    return isinstance(value, type | types.ModuleType) or (is_function and _is_of_torch(value))


def _is_of_torch(kind: Any) -> bool:
    return str(getattr(kind, "__module__", "")).partition(".")[0] == "torch"


def _referred_to(value: Any) -> Iterator[Any]:
    """What a function, a container or an object refers to."""
    if isinstance(value, types.MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.FunctionType):
        yield from value.__defaults__ or ()
        for cell in value.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # a variable that has no value yet
                continue
        yield from (value.__globals__[name] for name in _names_in(value.__code__) if name in value.__globals__)
    elif isinstance(value, dict | list | tuple):
        if len(value) <= _MOST_ITEMS:
            yield from value.values() if isinstance(value, dict) else value
    elif hasattr(value, "__dict__"):
        yield from list(vars(value).values())


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield from _names_in(one)
