"""What a function or an object refers to: by its variables, or by those of functions and objects that it refers to."""

import inspect
import itertools
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from torchtune_adaptive.engine.distributed.attributes import INTERNAL

_MOST_ITEMS = 64  # of a list or dict that is looked into; a larger one has data
_MOST_OBJECTS = 10_000
_DEPTH = 6  # of references from one object to another
_WITHOUT_OWN_GENERATORS = frozenset({"torch", "numpy", "random"})  # their global ones are restored anyway
_CONTAINERS = (dict, list, tuple, set, deque)
_WITHOUT_METHODS = (type(None), bool, int, float, str, list, dict, tuple, type, types.FunctionType, types.ModuleType)


def modules_within_reach(model: nn.Module, function: Callable[..., Any]) -> list[nn.Module]:
    """The modules of ``model``, and others that ``function`` refers to: a loss with a buffer, a GAN's other network.

    Also those that their attributes refer to, as a dict of losses. A ``DistributedDataParallel`` cannot be passed
    together with them. Modules that are found in another way, such as those that a function of a library keeps, are not
    seen.

    >>> loss = nn.MSELoss()
    >>> modules_within_reach(nn.Linear(1, 1), lambda rows: loss(rows, rows))
    [Linear(in_features=1, out_features=1, bias=True), MSELoss()]
    """
    found = dict.fromkeys(model.modules())

    def add(*starts: Any) -> None:
        for value, _ in _within_reach(*starts, leads_nowhere=_has_no_modules):
            if isinstance(value, nn.Module):
                found.update(dict.fromkeys(value.modules()))

    add(function)
    add(*_attributes_of(_of_own_classes(found)))
    return list(found)


def generators_within_reach(start: Any, modules: Iterable[nn.Module] = ()) -> list[Any]:
    """The random generators of Python, NumPy and torch that ``start`` refers to: a function, an object, or several.

    Args:
        modules: generators that their attributes or their forward passes are or refer to, too.

    >>> generator = random.Random(0)
    >>> generators_within_reach(lambda: generator.random()) == [generator]
    True
    """
    return Generators(start, modules).now()


class Generators:
    """What ``generators_within_reach`` finds, now and later: a program may make a new one in place of another."""

    def __init__(self, start: Any, modules: Iterable[nn.Module] = ()) -> None:
        modules = list(modules)
        own = _of_own_classes(modules)
        forward_passes = list({type(one): one.forward for one in own}.values())
        found = itertools.chain(
            _within_reach(start, leads_nowhere=_has_no_generators),
            _within_reach(*forward_passes[:_MOST_ITEMS], leads_nowhere=_has_no_generators),
            ((value, one) for one in modules for value in vars(one).values()),
            _within_reach(*_attributes_of(own), leads_nowhere=_has_no_generators),
        )
        pairs = [(one, holder) for one, holder in found if _is_generator(type(one))]
        self._first = [one for one, _ in pairs]
        self._holders = list({id(holder): holder for _, holder in pairs if holder is not None}.values())

    def now(self) -> list[Any]:
        """The generators that were found at first, and those that are now in their places."""
        found = itertools.chain(self._first, *map(_held_by, self._holders))
        return list({id(one): one for one in found if _is_generator(type(one))}.values())


@cache
def _is_generator(kind: type) -> bool:
    """Whether objects of ``kind`` are random generators that have a state."""
    kinds: list[type] = [random.Random, torch.Generator]
    if (numpy := sys.modules.get("numpy")) is not None:
        kinds += [numpy.random.Generator, numpy.random.RandomState]
    return issubclass(kind, tuple(kinds)) and not issubclass(kind, random.SystemRandom)


def state_access(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], None]] | None:
    """Functions that return and set the state of a generator of Python, NumPy or torch; None for another object."""
    for get, put in (("get_state", "set_state"), ("getstate", "setstate")):
        if hasattr(generator, get) and hasattr(generator, put):
            return getattr(generator, get), getattr(generator, put)
    if hasattr(generator, "bit_generator"):  # of NumPy's newer generators
        return partial(getattr, generator.bit_generator, "state"), partial(setattr, generator.bit_generator, "state")
    return None


def _of_own_classes(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Those that are not torch's. FSDP2 makes the class of a sharded one, but not its forward pass."""
    return [one for one in modules if not _is_of_torch(one.forward)]


def _attributes_of(modules: Iterable[nn.Module]) -> list[Any]:
    return [value for one in modules for name, value in vars(one).items() if name not in INTERNAL]


def _within_reach(*starts: Any, leads_nowhere: Callable[[Any], bool]) -> Iterator[tuple[Any, Any]]:
    """``starts`` and what they refer to, the nearest first, each with its holder. A module is not looked into."""
    seen = dict[Any, Any]()
    waiting = deque[tuple[int, Any, Any]]((0, one, None) for one in starts)
    while waiting and len(seen) < _MOST_OBJECTS:
        depth, value, holder = waiting.popleft()
        key = (id(value.__self__), id(value.__func__)) if isinstance(value, types.MethodType) else id(value)
        if key in seen or leads_nowhere(value):
            continue
        seen[key] = value  # so that no other object gets the same number
        yield value, holder
        if not isinstance(value, nn.Module) and depth < _DEPTH:
            waiting += ((depth + 1, one, value) for one in _referred_to(value))


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
    """What a function, a container or an object refers to: itself, or by its class."""
    held = _held_by(value)
    yield from held
    if isinstance(value, types.MethodType):
        if isinstance(value.__func__, types.FunctionType):
            names = _names_in(value.__func__.__code__)
            yield from _of_classes([value.__self__, *getattr(value.__self__, "__dict__", {}).values()], names)
    elif isinstance(value, types.FunctionType):
        yield from _of_classes(held, _names_in(value.__code__))
    elif not isinstance(value, (partial, types.BuiltinMethodType, *_CONTAINERS)):
        yield from _of_classes([value], ["__call__"])


def _held_by(value: Any) -> list[Any]:
    """What a function, a container or an object itself refers to, now."""
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, types.BuiltinMethodType):  # such as the method `random` of a generator
        return [value.__self__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.FunctionType):
        named = _named_in(value.__globals__, _names_in(value.__code__))
        return [*(value.__defaults__ or ()), *_variables_around(value), *named]
    if isinstance(value, _CONTAINERS):
        if len(value) > _MOST_ITEMS:
            return []
        return list(value.values() if isinstance(value, dict) else value)
    return [*getattr(value, "__dict__", {}).values(), *_in_slots(value)]


def _in_slots(value: Any) -> Iterator[Any]:
    """The attributes of ``value`` that are in slots."""
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            yield getattr(value, name, None)


def _variables_around(function: types.FunctionType) -> Iterator[Any]:
    """The values of the variables that ``function`` has from a function around it."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a variable that has no value yet
            continue


def _of_classes(values: Iterable[Any], names: Sequence[str]) -> Iterator[Any]:
    """The attributes with these names of the classes of ``values``; a method is bound to its value."""
    for value in values:
        if isinstance(value, _WITHOUT_METHODS) or (_is_of_torch(type(value)) and not isinstance(value, nn.Module)):
            continue
        for name in names:
            found = inspect.getattr_static(type(value), name, None)
            if isinstance(found, types.FunctionType):
                if not _is_of_torch(found):
                    yield types.MethodType(found, value)
            elif isinstance(found, property):
                yield found.fget
            elif found is not None:
                yield getattr(found, "__func__", found)  # of a static method


def _named_in(variables: dict[str, Any], names: Sequence[str]) -> Iterator[Any]:
    """The values of the ``variables`` with these names; of a file of Python, its own variables with these names.

    The code of ``augment.draw()`` has the names of both, the file and its function.
    """
    files, waiting = set[str](), [variables]
    for holder in waiting:
        for name in names:
            value = holder.get(name)
            if not isinstance(value, types.ModuleType):
                yield value
            elif value.__name__ not in files and value.__name__.partition(".")[0] not in _WITHOUT_OWN_GENERATORS:
                files.add(value.__name__)
                waiting.append(vars(value))


def _names_in(code: types.CodeType) -> list[str]:
    """The names of attributes and global variables in ``code`` and in functions within it, each once."""
    within = (_names_in(one) for one in code.co_consts if isinstance(one, types.CodeType))
    return list(dict.fromkeys(itertools.chain(code.co_names, *within)))
