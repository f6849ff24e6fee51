"""What modules hold beside parameters, and a step may change: buffers, tensors in attributes, flags, lists."""

import collections
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from numbers import Number
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from torchtune_adaptive.engine.memory.operations import can_be_written, plain_parts

SMALL_BYTES = 2**20  # of tensors that cost nothing to keep in each step
INTERNAL = frozenset(vars(nn.Module()))  # the names of a module's own attributes
_UNCHANGING = frozenset({"abc", "builtins", "torch", "torchtune", "typing"})
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device})
_CONTAINERS = frozenset(
    {list, set, collections.deque, dict, collections.OrderedDict, collections.defaultdict, collections.Counter}
)
_OTHER = object()  # in place of what is not kept


class TensorPlace(NamedTuple):
    """Where a module holds a buffer, or another tensor that is no parameter: its ``_buffers`` or its attributes.

    A step may put another tensor there: ``self.mean = 0.9 * self.mean + ...``. There may be None before the first one.

    Attributes:
        is_state: whether it is a buffer, or known to change as one does: it is then kept in each step, however large.
    """

    holder: dict[str, Any]
    name: str
    is_state: bool

    @property
    def tensor(self) -> torch.Tensor | None:
        """The tensor that is there now."""
        found = self.holder.get(self.name)
        return found if isinstance(found, torch.Tensor) else None

    @property
    def costs_little(self) -> bool:
        """Whether what is there now can be kept in each step: it may be an activation of the step before."""
        return self.is_state or (self.tensor is not None and _costs_little(self.tensor))

    def put(self, tensor: torch.Tensor | None) -> None:
        self.holder[self.name] = tensor


def tensor_places(modules: Sequence[nn.Module]) -> list[TensorPlace]:
    """The places of all buffers of ``modules``, and of tensors in attributes of those of the user's own classes.

    Also those of attributes that are None: a step may put its first tensor there.
    """
    places = [TensorPlace(buffers, name, True) for buffers in map(_buffers_of, modules) for name in buffers]
    holders = (vars(module) for module in modules if not _changes_nothing(module))
    found = ((one, name) for one in holders for name, value in one.items() if value is None or _can_be_set(value))
    return places + [TensorPlace(holder, name, False) for holder, name in found if name not in INTERNAL]


def _buffers_of(module: nn.Module) -> dict[str, Any]:
    """The buffers of ``module``; a scripted one has no dict of them, and keeps its tensors."""
    return module._buffers if isinstance(module._buffers, dict) else dict(module._buffers.items())


def _changes_nothing(module: nn.Module) -> bool:
    """Whether all classes of ``module`` are of packages whose modules a train step does not change, but ``training``.

    torchtune's set attributes in their set-up alone, and while they generate text.
    """
    return all(one.__module__.partition(".")[0] in _UNCHANGING for one in type(module).__mro__)


def _can_be_set(value: Any) -> TypeGuard[torch.Tensor]:
    """Whether ``value`` is a tensor that could be filled again, and not the result of a step."""
    return isinstance(value, torch.Tensor) and value.is_leaf and can_be_refilled(value)


def can_be_refilled(tensor: torch.Tensor) -> bool:
    """Whether the values of ``tensor`` can be compared and restored in place: not if it is sparse or expanded."""
    return all(part.layout is torch.strided and can_be_written(part) for part in plain_parts(tensor))


class KeptAttributes:
    """What a step may leave changed in modules beside tensors, above all if it fails halfway.

    These are the modes of modules; in modules of the user's own classes, plain attributes such as flags and counters,
    also NumPy's numbers, and tuples, lists, dicts, sets, deques and dataclasses, also one within another; small tensors
    within these, and small arrays of NumPy; which parameters need gradients; and whether this thread computes
    gradients. What is within an object of another class is not restored; nor is a list with the result of an earlier
    step, which would then keep its memory. Attributes and buffers that a step adds are removed, so that the next step
    adds them again, unless they hold another object. Hooks of modules that a step adds stay, and so do their handles,
    and flags that have become True together with them: transformers sets one to install its hooks only once.

    Args:
        places: of tensors that the caller restores. Small tensors at other places, which a step may have added or put
            in place of a number, are restored here.
    """

    def __init__(self, modules: Sequence[nn.Module], places: Iterable[TensorPlace] = ()) -> None:
        self._modules = modules
        self._restored_elsewhere = {(id(one.holder), one.name) for one in places}
        named = itertools.chain.from_iterable(one._parameters.values() for one in modules)
        self._parameters = list(dict.fromkeys(one for one in named if one is not None))
        own = [module for module in self._modules if not _changes_nothing(module)]
        self._holders = [holder for module in own for holder in (vars(module), module._buffers)]
        self._names: list[list[str]] = []
        self._places: list[tuple[dict[str, Any], str]] = []
        self.save()

    def save(self) -> None:
        """Keep what is there now."""
        self._computes_gradients = torch.is_grad_enabled()
        self._first_new_hook = RemovableHandle.next_id
        self._modes = [module.training for module in self._modules]
        self._need_gradients = [parameter.requires_grad for parameter in self._parameters]
        names = list(map(list, self._holders))
        if names != self._names:
            self._names = names
            self._places = [(holder, name) for holder in self._holders for name in holder if name not in INTERNAL]
        self._values: list[Any] = [holder[name] for holder, name in self._places]
        self._containers, tensors, known = list[Any](), list[Any](), set[int]()
        for index in [index for index, value in enumerate(self._values) if type(value) not in _PLAIN]:
            holder, name = self._places[index]
            is_elsewhere = (id(holder), name) in self._restored_elsewhere
            found = None if is_elsewhere else _within(self._values[index], known)
            if found is None:
                self._values[index] = _OTHER
            else:
                self._containers += found[0]
                tensors += found[1]
        self._copies = [one.copy() for one in self._containers]
        self._tensors = [(one, _copy_of(one)) for one in {id(one): one for one in tensors}.values()]

    def restore(self) -> None:
        """Restore what was kept, any number of times."""
        has_installed = self._has_new_hooks()

        def stays(value: Any) -> bool:
            return has_installed and _tells_of_hooks(value)

        self._restore_settings()
        for holder, names in zip(self._holders, self._names, strict=True):
            for name in holder.keys() - set(names):
                if _can_be_removed(holder[name]) and not stays(holder[name]):
                    del holder[name]
        for (holder, name), value in zip(self._places, self._values, strict=True):
            if value is not _OTHER and not stays(holder.get(name)):
                holder[name] = value
        for container, kept in zip(self._containers, self._copies, strict=True):
            if not stays(container):
                container.clear()
                (container.extend if hasattr(container, "extend") else container.update)(kept)
        with torch.no_grad():
            for tensor, copied in self._tensors:
                tensor[...] = copied

    def _restore_settings(self) -> None:
        torch.set_grad_enabled(self._computes_gradients)
        for parameter, needs_gradients in zip(self._parameters, self._need_gradients, strict=True):
            if parameter.requires_grad is not needs_gradients:
                parameter.requires_grad_(needs_gradients)
        for module, is_training in zip(self._modules, self._modes, strict=True):
            module.training = is_training

    def _has_new_hooks(self) -> bool:
        hooks = (hooks for one in self._modules for hooks in (one._forward_hooks, one._forward_pre_hooks))
        return any(number >= self._first_new_hook for numbers in hooks for number in numbers)


class _Slots:
    """The attributes of a dataclass with slots, as a container."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def __iter__(self) -> Iterator[Any]:
        return iter(self.copy().values())

    def copy(self) -> dict[str, Any]:
        names = (one.name for one in fields(self._owner))
        return {name: getattr(self._owner, name) for name in names if hasattr(self._owner, name)}

    def clear(self) -> None:
        for name in self.copy():
            object.__delattr__(self._owner, name)

    def update(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            object.__setattr__(self._owner, name, value)


def _copy_of(value: Any) -> Any:
    """A copy of a tensor or an array."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value.copy()


def _values_in(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def _content(value: Any) -> Any:
    """The container that ``value`` is, or the attributes of a dataclass or a namespace; None if it is something else.

    Objects of other classes may belong to another thread, or stand for something outside the program.
    """
    if type(value) in _CONTAINERS:
        return value
    if not _is_data(type(value)):
        return None
    return vars(value) if hasattr(value, "__dict__") else _Slots(value)


@cache
def _is_data(kind: type) -> bool:
    """Whether ``kind`` is a dataclass, whose attributes are in a dict or all in slots, or a namespace."""
    if issubclass(kind, SimpleNamespace):
        return True
    has_only_slots = all("__slots__" in vars(one) for one in kind.__mro__[:-1])
    return is_dataclass(kind) and (kind.__dictoffset__ != 0 or has_only_slots)


def _within(value: Any, known: set[int]) -> tuple[list[Any], list[Any]] | None:
    """The containers that ``value`` is or has, at any depth, and the tensors and arrays in them.

    None if it is another object, or has a tensor that costs memory.

    Args:
        known: the identities of what was met before, which is left out; it grows.
    """
    if id(value) in known:
        return [], []
    first = _content(value)
    if first is None and not isinstance(value, (tuple, frozenset)):
        is_small_tensor = isinstance(value, torch.Tensor) and _costs_little(value)
        if is_small_tensor or _is_small_array(value):
            return [], [value]
        return ([], []) if _is_plain(type(value)) else None
    if first is not None and _PLAIN.issuperset(map(type, _values_in(first))):  # as most are
        known.add(id(value))
        return [first], []
    containers, tensors, met = list[Any](), list[Any](), set[int]()
    waiting = [value]
    for one in waiting:
        parts = one
        if (content := _content(one)) is not None:
            if id(one) in known or id(one) in met:
                continue
            met.add(id(one))
            containers.append(content)
            parts = _values_in(content)
        if _PLAIN.issuperset(map(type, parts)):
            continue
        for part in parts:
            if not _costs_little(part):
                return None
            if isinstance(part, torch.Tensor):
                if not isinstance(part, nn.Parameter):  # a `DistributedDataParallel` lists those of its model
                    tensors.append(part)
            elif isinstance(part, tuple) or _content(part) is not None:
                waiting.append(part)
            elif _is_small_array(part):
                tensors.append(part)
    known |= met
    return containers, tensors


def _costs_little(value: Any) -> bool:
    """Whether ``value`` can be kept in each step: it may be an activation of the step before."""
    return not isinstance(value, torch.Tensor) or (_can_be_set(value) and value.nbytes <= SMALL_BYTES)


@cache
def _is_plain(kind: type) -> bool:
    """Whether values of ``kind`` never change: numbers of any class, also NumPy's, texts, members of an enum."""
    return kind in _PLAIN or issubclass(kind, (Number, Enum)) or _is_of_numpy(kind, "generic")  # flags are no `Number`


def _is_small_array(value: Any) -> bool:
    """Whether ``value`` is an array of NumPy that can be kept in each step, and changed in place."""
    return _is_of_numpy(type(value), "ndarray") and value.flags.writeable and value.nbytes <= SMALL_BYTES


@cache
def _is_of_numpy(kind: type, name: str) -> bool:
    """Whether ``kind`` is this class of NumPy, or one derived from it."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(kind, getattr(numpy, name))


def _can_be_removed(value: Any) -> bool:
    """Whether a step that has set an attribute to ``value`` will set it again once it is gone."""
    is_plain = _is_plain(type(value)) or _is_small_array(value)
    return is_plain or isinstance(value, (torch.Tensor, tuple)) or _content(value) is not None


def _tells_of_hooks(value: Any) -> bool:
    """Whether ``value`` is a flag that is True, or has handles of hooks."""
    has_values = type(value) in _CONTAINERS or isinstance(value, tuple)
    return value is True or (has_values and any(isinstance(one, RemovableHandle) for one in _values_in(value)))
