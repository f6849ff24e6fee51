"""Batches of any structure are cut and copied as what they are."""

import dataclasses
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from torchtune_adaptive.engine.recovery.columns import (
    copied,
    leaves,
    map_columns,
    named_values,
    padded_numel,
    was_changed,
)
from torchtune_adaptive.errors import InputError


class Named(NamedTuple):
    ids: torch.Tensor
    words: list[list[str]]
    scale: float


@dataclasses.dataclass(frozen=True)
class Frozen:
    ids: torch.Tensor
    words: list[list[str]]
    scale: float


class Derived(dict[str, Any]):
    pass


KINDS: list[Callable[..., Any]] = [Named, Frozen, Derived, dict]


def of(batch: Any) -> dict[str, Any]:
    return dict(named_values(batch) or ())


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_of_a_batch_has_its_type(kind: Callable[..., Any]) -> None:
    batch = kind(ids=torch.arange(3), words=[["a"], ["b"], []], scale=2.0)
    part = map_columns(batch, lambda column: column[1:], lengths={3})
    assert type(part) is type(batch)
    assert of(part)["ids"].tolist() == [1, 2]
    assert (of(part)["words"], of(part)["scale"]) == ([["b"], []], 2.0)


class Checked(UserDict[str, Any]):
    """Checks each column against its number of rows, as ``tensordict.TensorDict`` does."""

    def __init__(self, columns: Mapping[str, Any], batch_size: Sequence[int]) -> None:
        self.batch_size = torch.Size(batch_size)
        super().__init__(columns)

    batch_size: torch.Size = torch.Size()

    def __setitem__(self, name: str, column: torch.Tensor) -> None:
        if column.shape[: len(self.batch_size)] != self.batch_size:
            raise RuntimeError("batch dimension mismatch")
        super().__setitem__(name, column)


def test_a_part_of_a_mapping_that_checks_its_rows_has_fewer() -> None:
    batch = Checked({"ids": torch.arange(6).view(3, 2), "mask": torch.ones(3, 2)}, batch_size=[3, 2])
    part = map_columns(batch, lambda column: column[1:], lengths={3})
    assert isinstance(part, Checked)
    assert (part["ids"].tolist(), part.batch_size) == ([[2, 3], [4, 5]], (2, 2))


class Counted(UserDict[str, Any]):
    batch_size = 3  # a number of its own


def test_a_mapping_with_a_batch_size_of_its_own_is_any_mapping() -> None:
    part = map_columns(Counted(ids=torch.arange(3)), lambda column: column[1:], lengths={3})
    assert (type(part), part["ids"].tolist()) == (Counted, [1, 2])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", [lambda ids, words: ids.add_(1), lambda ids, words: words[0].append("c")])
def test_a_change_of_a_copy_is_seen_and_leaves_the_batch(
    kind: Callable[..., Any], change: Callable[[torch.Tensor, list[list[str]]], object]
) -> None:
    batch = kind(ids=torch.arange(2), words=[["a"], ["b"]], scale=2.0)
    given = copied(batch)
    assert type(given) is type(batch)
    assert not was_changed(given, batch)
    change(of(given)["ids"], of(given)["words"])
    assert was_changed(given, batch)
    assert (of(batch)["ids"].tolist(), of(batch)["words"]) == ([0, 1], [["a"], ["b"]])


@pytest.mark.parametrize("numbers", [[1, 2, 3], list(np.arange(3)), list(np.ones(3))])
def test_a_list_of_numbers_is_one_value(numbers: list[Any]) -> None:
    """To look at each token of a long row costs more than a train step adds otherwise."""
    assert list(leaves({"labels": numbers})) == [numbers]
    assert padded_numel({"labels": [numbers, numbers[:1]]}) == 6
    assert copied(numbers)[0] is numbers[0]


def test_a_nan_is_no_change() -> None:
    batch = {"ids": torch.tensor([1.0, torch.nan])}
    assert not was_changed(copied(batch), batch)


def test_a_mapping_that_cannot_be_changed_is_refused() -> None:
    with pytest.raises(InputError, match="must be a mapping that can be changed"):
        map_columns(MappingProxyType({"ids": [1, 2]}), lambda column: column[:1], lengths={2})


@pytest.mark.parametrize(
    "tensor",
    [torch.eye(2).to_sparse(), torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)],
    ids=["sparse", "nested"],
)
def test_a_tensor_that_torch_cannot_compare_is_seen_to_change_by_its_version(tensor: torch.Tensor) -> None:
    given = copied({"rows": tensor})
    assert not was_changed(given, {"rows": tensor})
    given["rows"].mul_(2)
    assert was_changed(given, {"rows": tensor})
