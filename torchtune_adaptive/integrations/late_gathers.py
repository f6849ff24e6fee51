"""Gathers of metrics that wait until all micro-steps of an optimizer step have run.

A rank that runs out of memory cannot take part in a gather within a micro-step, and its peers would wait. So a gather
returns a ``LateValue``, what the trainer computes from it is noted, and one gather at the end gives the values.

The notes of a step are one list of late values, in the order in which they were computed: a gather adds one, and each
computation with one adds another, which keeps its function and arguments. Arguments come before what is computed from
them, so that one pass over the list gives all values.
"""

import logging
import operator
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from torchtune_adaptive.errors import InputError, reason_of

log = logging.getLogger(__name__)

_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or")
_UNARY_OPERATORS = ("neg", "abs", "invert")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_IN_PLACE = ("__setitem__", "__iand__", "__ior__", "__ixor__")  # and names that end with one "_"


def _refused(what: str) -> InputError:
    return InputError(
        "Values gathered from other processes are for metrics only, by arithmetic and methods of tensors, but"
        f" {what}: use this process's own, or `num_items_in_batch`."
    )


def kept_too_long() -> InputError:
    """The error that a value is used after its optimizer step, in which it was not known yet."""
    return InputError(
        "A value gathered from other processes in `compute_loss` was kept after its optimizer step: name the attribute"
        " of the trainer that keeps it in the class attribute `counters`, or log the value by `self.log` there."
    )


class LateValue:
    """A value that depends on gathered tensors. Its methods, its arithmetic and functions of torch give further ones.

    ``if`` decides by what this rank has without its peers.

    Attributes:
        own: the value without the peers.
        decided: what ``if`` was told; None: it has not asked.
        is_over: whether its optimizer step has ended.
    """

    def __init__(self, notes: list["LateValue"], function: Callable[..., Any], *arguments: Any) -> None:
        # Copies without a graph, because the loss may change tensors afterwards, and cannot depend on this value.
        self._arguments = [one.detach().clone() if isinstance(one, torch.Tensor) else one for one in arguments]
        self.own = function(*(one.own if isinstance(one, LateValue) else one for one in self._arguments))
        self.decided: bool | None = None
        self.is_over = False
        self._notes, self._number = notes, len(notes)
        self._function = function
        notes.append(self)

    def compute(self, values: list[Any]) -> Any:
        """The value, from those of all earlier notes."""
        return self._function(*(values[one._number] if isinstance(one, LateValue) else one for one in self._arguments))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name == "backward":
            raise _refused("the loss depends on one")
        found = getattr(self.own, name)
        if callable(found):
            return partial(_late, lambda own, *args, **kwargs: getattr(own, name)(*args, **kwargs), self)
        return _late(getattr, self, name)

    def __getitem__(self, key: Any) -> "LateValue":
        return _late(operator.getitem, self, key)

    def __iter__(self) -> Iterator["LateValue"]:
        return (self[index] for index in range(len(self)))

    def __len__(self) -> int:
        if not isinstance(self.own, tuple):
            raise _refused("something needs its length, which may differ with the values of other processes")
        return len(self.own)

    def __round__(self, digits: int | None = None) -> "LateValue":
        return _late(round, self, digits)

    def __bool__(self) -> bool:
        self.decided = bool(self.own)
        return self.decided

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> "LateValue":
        name = function.__name__
        if name in _IN_PLACE or (name.endswith("_") and not name.endswith("__")) or "out" in (kwargs or {}):
            raise _refused(f"`{name}` changes a tensor by one")
        return _late(function, *args, **(kwargs or {}))


def _late(function: Callable[..., Any], *args: Any, **kwargs: Any) -> LateValue:
    """The value of ``function``; there is a late one among the arguments, or within them."""
    leaves, structure = tree_flatten((args, kwargs))

    def call(*leaves: Any) -> Any:
        args, kwargs = tree_unflatten(list(leaves), structure)
        return function(*args, **kwargs)

    late = [one for one in leaves if isinstance(one, LateValue)]
    if any(one.is_over for one in late):
        raise kept_too_long()
    return LateValue(late[0]._notes, call, *leaves)


def _arithmetic(function: Callable[..., Any], *, is_swapped: bool = False) -> Callable[..., LateValue]:
    return lambda *values: _late(function, *(reversed(values) if is_swapped else values))


for _name in _OPERATORS:
    _function = getattr(operator, f"__{_name}__")
    setattr(LateValue, f"__{_name}__", _arithmetic(_function))
    setattr(LateValue, f"__r{_name}__", _arithmetic(_function, is_swapped=True))
for _name in (*_UNARY_OPERATORS, *_COMPARISONS):
    setattr(LateValue, f"__{_name}__", _arithmetic(getattr(operator, _name)))


class LateGathers:
    """Replaces the gathers of an ``accelerate.Accelerator`` in micro-steps by one at the end of the optimizer step."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._notes: list[LateValue] = []
        self._gathered: list[tuple[LateValue, Callable[..., torch.Tensor]]] = []  # and what makes the whole value
        self._has_warned = False

    def clear(self) -> None:
        """Forget all gathers so far."""
        for one in self._notes:
            one.is_over = True
        self._notes.clear()
        self._gathered.clear()

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Context of a micro-step, in which a gather communicates nothing and gives a ``LateValue``.

        Raises:
            InputError: the loss depends on one, or the code needs what cannot wait.
        """
        accelerator = self._accelerator
        pad = accelerator.pad_across_processes

        def pad_alone(*args: Any, **kwargs: Any) -> Any:
            if accelerator.num_processes > 1:
                raise _refused("`pad_across_processes` is called")
            return pad(*args, **kwargs)

        methods = {
            "gather": partial(self._note, _concatenated),
            "gather_for_metrics": partial(self._note, self._as_metric),
            "reduce": lambda values, reduction="sum", **_: self._note(partial(_reduced, reduction), values),
            "pad_across_processes": pad_alone,
        }
        try:
            with with_attributes(accelerator, **methods):
                yield
        except (TypeError, ValueError, RuntimeError, AttributeError) as error:
            if LateValue.__name__ in str(error):  # code that is not torch's cannot use it
                raise _refused(reason_of(error)) from error
            raise

    def _note(self, finish: Callable[..., Any], values: Any, use_gather_object: bool = False) -> Any:
        """Late values instead of the tensors in ``values``, of which ``finish`` makes those of all ranks."""
        if use_gather_object or not all(isinstance(one, torch.Tensor) for one in tree_leaves(values)):
            if self._accelerator.num_processes > 1:
                raise _refused("another object than a tensor is gathered")
            return values

        def note(tensor: torch.Tensor) -> LateValue:
            self._gathered.append((LateValue(self._notes, tensor.detach().clone().clone), finish))
            return self._gathered[-1][0]

        return tree_map_only(torch.Tensor, note, values)

    def finish(self, kept: Any) -> Any:
        """``kept``, lists and dicts, with the values of all gathers since ``clear``. A collective."""
        if not self._gathered:
            return kept
        found = {}
        owns = [late.compute([]) for late, _ in self._gathered]
        for (late, finish), own, parts in zip(self._gathered, owns, self._from_all_ranks(owns), strict=True):
            found[id(late)] = finish(own, parts) if len(parts) > 1 else own
        values: list[Any] = []
        for late in self._notes:
            values.append(found[id(late)] if id(late) in found else late.compute(values))
        self._warn_of_decisions(values)
        self.clear()
        return tree_map_only(LateValue, lambda one: values[one._number], kept)

    def _warn_of_decisions(self, values: list[Any]) -> None:
        """Warn once if the trainer's code has decided otherwise than with the values of all processes."""
        decisions = [(one.decided, values[one._number]) for one in self._notes if one.decided is not None]
        if not self._has_warned and any(bool(whole) is not decided for decided, whole in decisions):
            self._has_warned = True
            log.warning(
                "`compute_loss` has decided by a gathered value (`if` or `max`) as it is on this process alone: what"
                " depends on it differs from training without recovery."
            )

    def _from_all_ranks(self, tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """The values [elements] of each gather on every rank. Micro-batches may differ between ranks in their rows."""
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

    def _as_metric(self, own: torch.Tensor, parts: list[torch.Tensor]) -> torch.Tensor:
        """Without the samples that fill up the last batch of an epoch, as the accelerator sees it."""
        gathered = _concatenated(own, parts)
        with with_attributes(self._accelerator, gather=lambda _: gathered):
            return self._accelerator.gather_for_metrics(gathered)


def _concatenated(own: torch.Tensor, parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts).reshape(-1, *own.shape[1:])


def _reduced(reduction: str, own: torch.Tensor, parts: list[torch.Tensor]) -> torch.Tensor:
    """As ``accelerate.utils.reduce``, which takes the sum for an unknown ``reduction``."""
    stacked = torch.stack(parts).reshape(-1, *own.shape)
    reduced = stacked.amax(dim=0) if reduction == "max" else stacked.sum(dim=0)
    return reduced / len(parts) if reduction == "mean" else reduced


def with_attributes(owner: Any, **values: Any) -> AbstractContextManager[None]:
    """Context: ``owner`` has these attributes or methods instead of its own."""
    return with_entries(vars(owner), values)


@contextmanager
def with_entries(mapping: MutableMapping[str, Any], values: Mapping[str, Any]) -> Iterator[None]:
    """Context: ``mapping`` has these ``values`` instead of its own."""
    before = {name: mapping[name] for name in values if name in mapping}
    mapping.update(values)
    try:
        yield
    finally:
        for name in values:
            del mapping[name]
        mapping.update(before)
