"""What optimizers hold: other optimizers, all the state that a search must restore, and hooks of their steps."""

import collections
import functools
import itertools
import logging
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from types import MemberDescriptorType, ModuleType
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.optim.optimizer as torch_optimizer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchtune_adaptive.engine.memory import phases
from torchtune_adaptive.engine.memory.copies import Copies, Restore
from torchtune_adaptive.engine.references import state_access
from torchtune_adaptive.errors import InputError

_STEP_HOOKS = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
_GLOBAL_STEP_HOOKS = "_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"
_CONTAINERS = dict, list, tuple, set, frozenset, collections.deque
_UNCHANGED = (  # by steps, as far as a search is concerned
    *(type(None), bool, int, float, complex, str, bytes, Enum, ModuleType, functools.partial, logging.Logger),
    *(
        torch.dtype,
        torch.layout,
        torch.memory_format,
        torch.finfo,
        torch.iinfo,
        torch.Stream,
        torch.Event,
        torch.cuda.Event,
    ),
    *(type(threading.Lock()), type(threading.RLock())),
    *(DeviceMesh, dist.ProcessGroup, dist.distributed_c10d.Store, dist.Work, torch.futures.Future),
)


class SavedOptimizers:
    """The state of optimizers and of all that they hold: every object is restored in place, and stays the same object.

    These are ``state``, ``param_groups`` and all other attributes; other optimizers in them; tensors; lists, dicts and
    sets; arrays and random generators; objects of Python classes; and parameters and buffers of modules. Tensors of
    ``model`` are left to whoever restores the model. Not seen are values outside of the attributes: globals, attributes
    of classes, variables that a function keeps, and what a library written in C keeps for an optimizer.

    Attributes:
        tensors: all that ``copy`` will copy.

    Raises:
        InputError: an optimizer holds an object that cannot be restored.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], model: nn.Module) -> None:
        of_model = {id(one) for one in itertools.chain(model.parameters(), model.buffers())}
        self.tensors: list[torch.Tensor] = []
        self._restores: list[Restore] = []
        for optimizer in optimizers:
            for place, value in _objects_in(optimizer, of_model):
                self._restores += _restores_of(value, place, type(optimizer).__name__)
                if isinstance(value, torch.Tensor):
                    self.tensors.append(value)

    def copy(self, copies: Copies) -> None:
        """Copy the tensors. Until then ``restore`` restores everything else."""
        self._restores += [copies.copy(tensor) for tensor in self.tensors]

    def restore(self) -> None:
        """Restore everything bit for bit, any number of times."""
        for restore in self._restores:
            restore()


def optimizers_within(optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """All ``optimizers``, and those that they hold, such as the local one of ``ZeroRedundancyOptimizer``."""
    seen: set[int] = set()
    found = (value for optimizer in optimizers for _, value in _objects_in(optimizer, seen))
    return [value for value in found if isinstance(value, torch.optim.Optimizer)]


@contextmanager
def without_step_hooks(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """Context: steps of ``optimizers`` and of those within them run no hooks, except those that track phases.

    Hooks act on what a search does not restore, such as an average of the weights. A part of the optimizer itself may
    be a hook, for example a weight decay: it is left out as well, which rarely changes the memory of a step.
    """
    owners: list[tuple[Any, str]] = [(vars(one), name) for one in optimizers_within(optimizers) for name in _STEP_HOOKS]
    owners += [(vars(torch_optimizer), name) for name in _GLOBAL_STEP_HOOKS]
    hooks = [(owner, name, owner[name]) for owner, name in owners if name in owner]
    for owner, name, all_hooks in hooks:  # a handle refers to the dict of its hook, which therefore stays as it is
        owner[name] = collections.OrderedDict((key, one) for key, one in all_hooks.items() if _tracks_phases(one))
    try:
        yield
    finally:
        for owner, name, all_hooks in hooks:
            owner[name] = all_hooks


def _tracks_phases(hook: Callable[..., object]) -> bool:
    return getattr(hook, "__module__", None) == phases.__name__


def _objects_in(optimizer: torch.optim.Optimizer, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield each object in ``optimizer`` that may change, and the path of attributes to it, except ids in ``seen``."""
    waiting: list[tuple[str, Any]] = [("", optimizer)]
    while waiting:
        place, value = waiting.pop()
        if id(value) not in seen and not _is_unchanged(value):
            seen.add(id(value))
            yield place, value
            waiting += reversed(list(_held_by(place, value)))


def _is_unchanged(value: Any) -> bool:
    """Whether ``value`` is immutable, or an object like a function or a process group, which a step does not change."""
    if isinstance(value, _UNCHANGED) or (callable(value) and hasattr(value, "__name__")):
        return True
    if isinstance(value, (torch.Tensor, nn.Module, *_CONTAINERS)) or _has_only_attributes(value):
        return False
    kind = type(value)  # of a library in C, for example a device, a date, or a number of NumPy
    return kind.__eq__ is not object.__eq__ and kind.__hash__ not in (None, object.__hash__)


def _held_by(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what ``value`` holds, and the path to it."""
    if isinstance(value, torch.Tensor):
        yield place, value.grad if value.is_leaf else None
        return
    if isinstance(value, nn.Module):
        yield from ((f"{place}.{name}", one) for name, one in (*value.named_parameters(), *value.named_buffers()))
        return
    if isinstance(value, dict):
        for key, one in value.items():
            yield place, key
            yield f"{place}[{key!r}]" if isinstance(key, str | int) else f"{place}[...]", one
    elif isinstance(value, _CONTAINERS):
        yield from ((f"{place}[...]", one) for one in value)
    for name, one in _attributes(value).items():
        yield f"{place}.{name}".lstrip("."), one


def _restores_of(value: Any, place: str, optimizer_name: str) -> Iterator[Restore]:
    """Yield functions that restore what ``value`` holds itself, except the bits of a tensor."""
    if isinstance(value, torch.Tensor):
        if value.is_leaf:
            yield functools.partial(setattr, value, "grad", value.grad)
        return
    if isinstance(value, nn.Module):
        return
    if isinstance(value, _CONTAINERS):
        if not isinstance(value, tuple | frozenset):
            yield functools.partial(_fill, value, list(value.items() if isinstance(value, dict) else value))
    elif not _has_only_attributes(value):
        restore = _restore_of_other(value)
        if restore is None:
            raise InputError(
                f"`optimizer` cannot be restored after a search: `{place}` of `{optimizer_name}` is a"
                f" {type(value).__name__}, which is no tensor, number, list, dict or plain object."
            )
        yield restore
    if attributes := _attributes(value):
        yield functools.partial(_set_attributes, value, attributes)


def _fill(container: Any, items: list[Any]) -> None:
    """Replace all items of ``container``."""
    container.clear()
    if isinstance(container, dict):
        for key, value in items:
            container[key] = value
    elif isinstance(container, set):
        container.update(items)
    else:
        container.extend(items)


def _restore_of_other(value: Any) -> Restore | None:
    """A function that restores an array or a random generator, whose state is not in attributes. None for others."""
    if (access := state_access(value)) is not None:
        get, put = access
        return functools.partial(put, get())
    try:
        with memoryview(value) as view, view.cast("B") as flat:
            has_pointers = view.format == "O"
            return None if view.readonly or has_pointers else functools.partial(_set_bytes, value, flat.tobytes())
    except (TypeError, ValueError):
        return None


def _set_bytes(array: Any, values: bytes) -> None:
    """Set the bytes of an array of Python or NumPy."""
    if isinstance(array, bytearray):  # the only one whose length often changes
        array[:] = values
    else:
        memoryview(array).cast("B")[:] = values


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object of a Python class, also those in slots, at this moment."""
    slots = (name for name in _slots(type(value)) if hasattr(value, name))
    return {**getattr(value, "__dict__", {}), **{name: getattr(value, name) for name in slots}}


def _set_attributes(value: Any, attributes: dict[str, Any]) -> None:
    """Give ``value`` these ``attributes``, and no others."""
    slots = _slots(type(value))
    for name in slots:
        if name in attributes:
            object.__setattr__(value, name, attributes[name])  # also if a dataclass is frozen
        elif hasattr(value, name):
            object.__delattr__(value, name)
    if hasattr(value, "__dict__"):
        value.__dict__.clear()
        value.__dict__.update((name, one) for name, one in attributes.items() if name not in slots)


def _slots(kind: type) -> list[str]:
    members = (vars(one).items() for one in kind.__mro__ if "__slots__" in vars(one))
    return [name for one in members for name, member in one if isinstance(member, MemberDescriptorType)]


def _has_only_attributes(value: Any) -> bool:
    """Whether ``value`` is of a Python class, unlike an iterator or a file, which keep more than their attributes.

    The memory of such an object has only its head, pointers to the values of slots, and, in older versions of Python,
    pointers to a dict and to weak references.
    """
    kind = cast(Any, type(value))
    num_pointers = len(_slots(kind)) + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    return kind.__basicsize__ == object.__basicsize__ + num_pointers * struct.calcsize("P") and not kind.__itemsize__
