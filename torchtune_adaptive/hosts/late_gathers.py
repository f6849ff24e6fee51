"""Gathers of metrics that wait until all micro-steps of an optimizer step have run.

A rank that runs out of memory cannot take part in a gather within a micro-step, and its peers would wait. So a gather
returns a ``LateValue``, what the trainer computes from it is noted, and one gather at the end gives the values.
"""

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from torchtune_adaptive.errors import InputError

_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


class LateValue:
    """A value that depends on gathered tensors. Its methods and its arithmetic give further ones.

    Comparisons and ``if`` decide by what this rank has without its peers.
    """

    def __init__(self, notes: list["LateValue"], function: Callable[..., Any], *arguments: Any) -> None:
        self.own = function(*(one.own if isinstance(one, LateValue) else one for one in arguments))
        self._notes, self._number = notes, len(notes)
        self._function, self._arguments = function, arguments
        notes.append(self)

    def compute(self, values: list[Any]) -> Any:
        """The value, from those of all earlier notes."""
        return self._function(*(values[one._number] if isinstance(one, LateValue) else one for one in self._arguments))

    def __getattr__(self, name: str) -> Callable[..., "LateValue"]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *arguments: LateValue(self._notes, operator.methodcaller(name, *arguments), self)

    def __bool__(self) -> bool:
        return bool(self.own)


def _arithmetic(function: Callable[[Any, Any], Any], *, is_swapped: bool) -> Callable[[LateValue, Any], LateValue]:
    def method(one: LateValue, other: Any) -> LateValue:
        return LateValue(one._notes, function, *((other, one) if is_swapped else (one, other)))

    return method


def _comparison(function: Callable[[Any, Any], Any]) -> Callable[[LateValue, Any], bool]:
    return lambda one, other: bool(function(one.own, other.own if isinstance(other, LateValue) else other))


for _name in _OPERATORS:
    setattr(LateValue, f"__{_name}__", _arithmetic(getattr(operator, _name), is_swapped=False))
    setattr(LateValue, f"__r{_name}__", _arithmetic(getattr(operator, _name), is_swapped=True))
for _name in _COMPARISONS:
    setattr(LateValue, f"__{_name}__", _comparison(getattr(operator, _name)))


class LateGathers:
    """Replaces the gathers of an ``accelerate.Accelerator`` in micro-steps by one at the end of the optimizer step."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._notes: list[LateValue] = []
        self._gathered: list[tuple[LateValue, bool]] = []  # and whether it is a metric

    def clear(self) -> None:
        """Forget all gathers so far."""
        self._notes.clear()
        self._gathered.clear()

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Context of a micro-step, in which a gather communicates nothing and gives a ``LateValue``."""

        def note(tensor: Any, *, is_metric: bool) -> LateValue:
            if not isinstance(tensor, torch.Tensor):
                raise InputError(f"A gather in a loss must be of one tensor, but is of a {type(tensor).__name__}.")
            own = tensor.detach()
            self._gathered.append((LateValue(self._notes, lambda: own), is_metric))
            return self._gathered[-1][0]

        gathers = {name: partial(note, is_metric=name != "gather") for name in ("gather", "gather_for_metrics")}
        with with_methods(self._accelerator, **gathers):
            yield

    def finish(self, kept: Any) -> Any:
        """``kept``, lists and dicts, with the values of all gathers since ``clear``. A collective."""
        if not self._gathered:
            return kept
        found = {}
        for (late, is_metric), parts in zip(self._gathered, self._from_all_ranks(), strict=True):
            whole = torch.cat(parts).reshape(-1, *late.own.shape[1:]) if len(parts) > 1 else late.own
            found[id(late)] = self._as_metric(whole) if is_metric else whole
        values: list[Any] = []
        for late in self._notes:
            values.append(found[id(late)] if id(late) in found else late.compute(values))
        kept = _with_values(kept, values)
        self.clear()
        return kept

    def _from_all_ranks(self) -> Iterator[list[torch.Tensor]]:
        """The values [elements] of each gather on every rank. Micro-batches may differ between ranks in their rows."""
        tensors = [late.own for late, _ in self._gathered]
        own = torch.tensor([one.numel() for one in tensors], device=tensors[0].device)
        sizes = self._accelerator.gather(own).view(-1, len(tensors))
        flat = torch.zeros(int(sizes.sum(dim=1).max()), dtype=torch.double, device=own.device)
        flat[: own.sum()] = torch.cat([one.reshape(-1).double() for one in tensors])  # exact for integers below 2**53
        ranks = [
            values[: sum(numbers)].split(numbers)
            for values, numbers in zip(self._accelerator.gather(flat).view(-1, len(flat)), sizes.tolist(), strict=True)
        ]
        for one, *parts in zip(tensors, *ranks, strict=True):
            yield [part.to(one.dtype) for part in parts]

    def _as_metric(self, gathered: torch.Tensor) -> torch.Tensor:
        """Without the samples that fill up the last batch of an epoch, as the accelerator sees it."""
        with with_methods(self._accelerator, gather=lambda _: gathered):
            return self._accelerator.gather_for_metrics(gathered)


@contextmanager
def with_methods(owner: Any, **methods: Callable[..., Any]) -> Iterator[None]:
    """Context: ``owner`` has these methods instead of its own."""
    before = {name: vars(owner)[name] for name in methods if name in vars(owner)}
    vars(owner).update(methods)
    try:
        yield
    finally:
        for name in methods:
            del vars(owner)[name]
        vars(owner).update(before)


def _with_values(kept: Any, values: list[Any]) -> Any:
    if isinstance(kept, LateValue):
        return values[kept._number]
    if isinstance(kept, dict):
        for name, one in kept.items():
            kept[name] = _with_values(one, values)
    elif isinstance(kept, list):
        kept[:] = [_with_values(one, values) for one in kept]
    return kept
