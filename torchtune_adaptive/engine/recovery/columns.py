"""Batches of any structure: their columns, which have an entry per sample, and values for all samples."""

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from numbers import Number
from typing import Any

import torch

from torchtune_adaptive.errors import InputError, quote


def columns(batch: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each column in a batch with names, at any depth.

    A batch has names if it is a mapping, a named tuple or a dataclass. Tensors, arrays and sequences in it are columns.
    Texts, numbers, None and tensors without dimensions are values for all samples.

    >>> dict(columns({"text": {"ids": [[1, 2], [3]], "language": "en"}, "scale": 0.5}))
    {'text.ids': [[1, 2], [3]]}
    """
    for name, value in named_values(batch) or ():
        if named_values(value) is not None:
            yield from ((f"{name}.{inner}", column) for inner, column in columns(value))
        elif is_column(value):
            yield name, value


def column_lengths(batch: Any) -> dict[str, int]:
    """The number of entries of each column in a batch with names; if some are tensors or arrays, of these alone."""
    found = dict(columns(batch))
    arrays = {name: column for name, column in found.items() if hasattr(column, "ndim")}
    return {name: len(column) for name, column in (arrays or found).items()}


def map_columns(batch: Any, change: Callable[[Any], Any], *, lengths: Collection[int]) -> Any:
    """The batch, of the same type, with ``change(column)`` instead of each column.

    A list of columns is changed column by column.

    Args:
        lengths: the numbers of entries that a column may have.

    Raises:
        InputError: a value has another number of entries, or may be a column as well as a list of columns.
    """

    def changed(name: str, value: Any) -> Any:
        if named_values(value) is not None:
            return map_columns(value, change, lengths=lengths)
        if not is_column(value):
            return value
        has_columns = isinstance(value, list | tuple) and bool(value)
        has_columns = has_columns and all(_is_array(one) and len(one) in lengths for one in value)
        if (len(value) in lengths) is has_columns:
            what = "may be a column or a list of columns" if has_columns else f"has {len(value)}"
            expected = " or ".join(map(str, sorted(lengths)))
            raise InputError(
                f"Each column of a batch must have {expected} entries for its samples, but `{name}` {what}."
            )
        return type(value)(map(change, value)) if has_columns else change(value)

    return _with_values(batch, {name: changed(name, value) for name, value in named_values(batch) or ()})


def leaves(batch: Any) -> Iterator[Any]:
    """Yield all values in a batch, also those within lists and tuples, but a list of numbers as one."""
    if (named := named_values(batch)) is not None:
        batch = [value for _, value in named]
    if isinstance(batch, list | tuple) and not (batch and isinstance(batch[0], Number)):
        for one in batch:
            yield from leaves(one)
    else:
        yield batch


def padded_numel(batch: Any) -> int:
    """The number of elements in a batch. Samples in a list count as padded to the largest one.

    >>> padded_numel({"tokens": [[1, 2, 3], [4]], "scale": 2.0})
    6
    """
    if (named := named_values(batch)) is not None:
        return sum(padded_numel(value) for _, value in named)
    if _is_array(batch):
        return math.prod(batch.shape)
    if not isinstance(batch, list | tuple) or not batch:
        return 0
    if isinstance(batch[0], Number | str):  # also NumPy's numbers, as in torchtune's labels
        return len(batch)
    numels = list(map(padded_numel, batch))
    return sum(numels) if isinstance(batch, tuple) else len(numels) * max(numels)


def copied(batch: Any, *, with_tensors: bool = True) -> Any:
    """The batch with copies of its tensors, arrays, lists and mappings. Other objects are shared."""
    change = functools.partial(copied, with_tensors=with_tensors)
    if (named := named_values(batch)) is not None:
        return _with_values(batch, {name: change(value) for name, value in named})
    if isinstance(batch, list | tuple):
        return type(batch)(batch if _has_only_numbers(batch) else map(change, batch))
    if isinstance(batch, torch.Tensor):
        return batch.detach().clone().requires_grad_(batch.requires_grad) if with_tensors else batch
    return batch.copy() if _is_array(batch) else batch


def was_changed(given: Any, original: Any, *, has_own_names: bool = True) -> bool:
    """Whether ``given``, which was ``copied`` from ``original``, has been changed in place.

    Args:
        has_own_names: whether mappings do not count, but only what is in them.
    """
    if (named := named_values(original)) is not None:
        now = dict(named_values(given) or ())
        is_changed = not has_own_names and list(now) != [name for name, _ in named]
        values = [(now[name], value) for name, value in named if name in now]
        return is_changed or any(was_changed(*both, has_own_names=has_own_names) for both in values)
    if isinstance(original, list | tuple) and _has_only_numbers(original):
        return list(given) != list(original)
    if isinstance(original, list | tuple):
        both = list(zip(given, original, strict=False))
        return len(given) != len(original) or any(was_changed(*one, has_own_names=False) for one in both)
    if isinstance(original, torch.Tensor):
        return isinstance(given, torch.Tensor) and (given._version > 0 or not _has_same_bits(given, original))
    return _is_array(original) and given.tobytes() != original.tobytes()


class TensorsBefore:
    """The tensors of samples as they were before a step, which may have to run again.

    Some may get gradients, as samples do in split learning, or once a micro-step has asked for them.
    """

    def __init__(self, samples: Any) -> None:
        tensors = [one for one in leaves(samples) if isinstance(one, torch.Tensor)]
        self._versions = [(one, one._version) for one in tensors if not one.is_inference()]
        own = ((one, one.requires_grad, one.grad) for one in tensors if one.is_leaf)
        self._gradients = [(one, needs, None if grad is None else grad.clone()) for one, needs, grad in own]

    def were_changed(self) -> bool:
        """Whether one of them has been changed in place since then."""
        return any(tensor._version != version for tensor, version in self._versions)

    def restore_gradients(self) -> None:
        for tensor, needs_gradient, gradient in self._gradients:
            tensor.grad = None if gradient is None else gradient.clone()
            if tensor.requires_grad is not needs_gradient:
                tensor.requires_grad_(needs_gradient)


def is_column(value: Any) -> bool:
    """Whether a value of a batch has entries, as a tensor, an array or a sequence has."""
    if isinstance(value, torch.Tensor | str | bytes | type) or named_values(value) is not None:
        return _is_array(value)
    return hasattr(value, "__getitem__") and hasattr(value, "__len__") and getattr(value, "ndim", 1) > 0


def named_values(value: Any) -> list[tuple[str, Any]] | None:
    """The names and values of a mapping, a named tuple or a dataclass; None if it is something else."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(getattr(value, "_fields"), value, strict=True))  # noqa: B009 - unknown to pyright
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(one.name, getattr(value, one.name)) for one in dataclasses.fields(value)]
    return None


def _is_array(value: Any) -> bool:
    """Whether a value is a tensor or an array with dimensions."""
    return getattr(value, "ndim", 0) > 0 and hasattr(value, "shape")


def _has_only_numbers(values: list[Any] | tuple[Any, ...]) -> bool:
    """Whether a list has only numbers and texts, such as the token ids of a long row."""
    return all(issubclass(one, Number | str) for one in {*map(type, values)})


def _has_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal, bit for bit. torch cannot compare sparse and nested ones: they are taken to be."""
    if torch.strided not in (one.layout, other.layout):
        return True
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one, other) or (
        torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())
    )


def _is_tensor_dict(batch: Any) -> bool:
    """Whether a batch is a mapping that checks the length of each column, as ``tensordict.TensorDict`` does."""
    return isinstance(batch, Mapping) and isinstance(getattr(batch, "batch_size", None), torch.Size)


def _with_values(batch: Any, values: dict[str, Any]) -> Any:
    """A copy of the batch with other values."""
    if isinstance(batch, tuple):
        return type(batch)(**values)
    if _is_tensor_dict(batch):
        lengths = [len(one) for one in values.values() if _is_array(one)]
        return type(batch)(values, batch_size=[*lengths[:1], *batch.batch_size[1:]])
    try:
        changed = copy.copy(batch)
        for name, value in values.items():
            if isinstance(batch, Mapping):
                changed[name] = value
            else:
                object.__setattr__(changed, name, value)
    except TypeError:
        raise InputError(f"A batch must be a mapping that can be changed, but is {quote(batch)} instead.") from None
    return changed
