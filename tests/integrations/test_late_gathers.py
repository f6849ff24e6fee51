"""Gathers at the end of an optimizer step give each metric its own values, however ranks have cut their batches."""

import contextlib
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from torchtune_adaptive.errors import InputError
from torchtune_adaptive.integrations.late_gathers import LateGathers, LateValue


class Accelerator:
    """The first of two ranks. The peer has the same gathers, of 1, 3 and 1 values."""

    def __init__(self) -> None:
        self.peer = [torch.tensor([1, 3, 1]), torch.tensor([10.0, 20.0, 21.0, 22.0, 30.0])]

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        peer = self.peer.pop(0)
        padded = torch.zeros_like(tensor)
        padded[: len(peer)] = peer
        return torch.cat((tensor, padded))

    def gather_for_metrics(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.gather(tensor)

    def pad_across_processes(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def test_values_of_ranks_with_other_micro_batches_stay_under_their_names() -> None:
    accelerator: Any = Accelerator()
    late = LateGathers(accelerator)
    with late.collected():
        kept: dict[str, Any] = {
            "tokens": accelerator.gather(torch.tensor([1, 2])).sum(),
            "rewards": accelerator.gather_for_metrics(torch.tensor([3.0, 4.0])).mean(),
            "loss": accelerator.gather(torch.tensor(5.0)),
        }
    found = late.finish(kept)
    assert found["tokens"] == 1 + 2 + 10
    assert found["rewards"] == (3 + 4 + 20 + 21 + 22) / 5
    assert found["loss"].tolist() == [5.0, 30.0]
    assert found["tokens"].dtype == torch.int64


@pytest.mark.parametrize(("other", "is_equal"), [(2.0, True), (3.0, False)])
def test_a_comparison_decides_by_what_this_rank_has(other: float, is_equal: bool) -> None:
    value: Any = LateValue([], lambda: torch.tensor(2.0))
    assert bool(value == other) is is_equal
    assert bool(value != other) is not is_equal
    assert bool(value < other) is not is_equal


class OneRank:
    """An accelerator on one rank, or the first of two whose peer has the ``peer``'s values in every gather."""

    def __init__(self, peer: list[float] | None = None) -> None:
        self.peer, self.num_processes = peer, 1 if peer is None else 2

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.peer is None:
            return tensor
        own = torch.tensor(self.peer, dtype=tensor.dtype) if tensor.dtype == torch.double else tensor
        return torch.cat((tensor, own))

    gather_for_metrics = gather

    def reduce(self, tensor: torch.Tensor, reduction: str = "sum") -> torch.Tensor:
        raise AssertionError("must be replaced")

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def pad_across_processes(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return tensor


METRICS = {
    "method with options": lambda late: late.mean(dim=0, keepdim=True),
    "function of torch": lambda late: torch.stack([late, 2 * late]).amax(dim=0),
    "function of a tensor and a late value": lambda late: torch.where(torch.tensor([True, False]), late, -late),
    "tensor first": lambda late: torch.tensor([3.0, 4.0]) - late,
    "matrix product": lambda late: late @ torch.ones(2),
    "index": lambda late: late[1:],
    "type": lambda late: torch.zeros(2, dtype=late.dtype, device=late.device) + late,
    "attribute": lambda late: late.shape[0],
    "several results": lambda late: [*late.max(dim=0)][1],
    "comparison of each": lambda late: (late > 1.5).float(),
    "number": lambda late: round(abs(-late.sum().item()) ** 2 % 7, 3),
    "in place, of the value itself": lambda late: late.mul_(2) + late,
}


@pytest.mark.parametrize("compute", METRICS.values(), ids=METRICS)
def test_metrics_may_use_methods_arithmetic_and_functions_of_torch(compute: Callable[[Any], Any]) -> None:
    accelerator: Any = OneRank()
    late, values = LateGathers(accelerator), torch.tensor([1.0, 2.0])
    with late.collected():
        kept = [compute(accelerator.gather(values))]
    (found,) = late.finish(kept)
    expected = compute(torch.tensor([1.0, 2.0]))
    assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected))
    assert values.tolist() == [1.0, 2.0]


def test_a_metric_is_of_the_values_when_it_was_computed() -> None:
    accelerator: Any = OneRank()
    late, values, others = LateGathers(accelerator), torch.tensor([1.0, 2.0]), torch.tensor([5.0, 5.0])
    with late.collected():
        kept = [accelerator.gather(values) + others]
        values.zero_()
        others.zero_()
    assert late.finish(kept)[0].tolist() == [6.0, 7.0]


def test_a_value_that_is_used_after_its_step_is_refused() -> None:
    """As one that a trainer keeps in an attribute that it has not named."""
    accelerator: Any = OneRank()
    late = LateGathers(accelerator)
    with late.collected():
        kept = accelerator.gather(torch.ones(2)).mean()
    late.finish([])
    with late.collected():
        accelerator.gather(torch.ones(2))
        with pytest.raises(InputError, match="was kept after its optimizer step: name the attribute"):
            _ = 0 + kept


def test_a_gather_of_several_tensors_keeps_their_names() -> None:
    accelerator: Any = OneRank()
    late = LateGathers(accelerator)
    with late.collected():
        kept = dict(accelerator.gather({"a": torch.tensor([1]), "b": torch.tensor([2])}))
    assert late.finish(kept) == {"a": torch.tensor([1]), "b": torch.tensor([2])}


@pytest.mark.parametrize(("reduction", "expected"), [("sum", [4.0, 6.0]), ("mean", [2.0, 3.0]), ("max", [3.0, 4.0])])
def test_a_reduction_waits_as_a_gather_does(reduction: str, expected: list[float]) -> None:
    for accelerator, whole in ((OneRank([3.0, 4.0]), expected), (OneRank(), [1.0, 2.0])):
        late = LateGathers(accelerator)
        with late.collected():
            kept: list[Any] = [accelerator.reduce(torch.tensor([1.0, 2.0]), reduction=reduction)]
        assert late.finish(kept)[0].tolist() == whole


WRONG_USES = {
    "as a factor": (lambda late, loss, accelerator: accelerator.backward(late.sum() * loss), "the loss depends on one"),
    "in a function": (
        lambda late, loss, accelerator: accelerator.backward(nn.functional.mse_loss(loss, late.sum())),
        "the loss depends on one",
    ),
    "as a number": (
        lambda late, loss, accelerator: accelerator.backward(loss / max(1, late.sum().item())),
        "the loss depends on one",
    ),
    "without accelerate": (lambda late, loss, _: (loss / late.sum()).backward(), "the loss depends on one"),
    "in place": (lambda late, loss, _: loss.detach().add_(late.sum()), "`add_` changes a tensor by one"),
    "by an operator in place": (lambda late, loss, _: operator.iadd(loss, late.sum()), "`add_` changes a tensor"),
    "as an item": (lambda late, loss, _: torch.ones(2).__setitem__(0, late.sum()), "`__setitem__` changes a"),
    "as an output": (lambda late, loss, _: torch.add(late, late, out=torch.ones(2)), "`add` changes a tensor by one"),
    "as a float": (lambda late, loss, _: loss * float(late.sum().item()), "TypeError: float() argument must be"),
    "as a new tensor": (lambda late, loss, _: loss * torch.tensor(late.sum().item()), "something needs its length"),
    "as an item of a list": (lambda late, loss, _: sum([*late]) * loss, "something needs its length"),
    "formatted": (lambda late, loss, _: f"{late.sum():.2f}", "unsupported format string"),
}


@pytest.mark.parametrize(("use", "text"), WRONG_USES.values(), ids=WRONG_USES)
@pytest.mark.parametrize("peer", [None, [3.0, 4.0]])
def test_a_loss_that_depends_on_gathered_values_is_refused(use: Any, text: str, peer: Any) -> None:
    accelerator: Any = OneRank(peer)
    loss = torch.ones(1, requires_grad=True).sum()
    with (
        pytest.raises(InputError, match="for metrics only, by arithmetic and methods of tensors, but") as refused,
        LateGathers(accelerator).collected(),
    ):
        use(accelerator.gather(torch.tensor([1.0, 2.0])), loss, accelerator)
    assert text in str(refused.value)


def test_other_errors_and_losses_are_left_alone() -> None:
    accelerator: Any = OneRank()
    late, weight = LateGathers(accelerator), torch.ones(1, requires_grad=True)
    with late.collected():
        accelerator.backward(weight.sum())
    assert weight.grad is not None
    with pytest.raises(ValueError, match="of the user"), late.collected():
        raise ValueError("of the user")


@pytest.mark.parametrize("is_alone", [True, False])
def test_padding_and_objects_need_one_process(is_alone: bool) -> None:
    accelerator: Any = OneRank(None if is_alone else [1.0])
    uses = [
        (lambda: accelerator.pad_across_processes(torch.ones(1), dim=0), "`pad_across_processes` is called"),
        (lambda: accelerator.gather_for_metrics(["text"]), "another object than a tensor is gathered"),
        (lambda: accelerator.gather_for_metrics(torch.ones(1), use_gather_object=True), "another object than a"),
    ]
    for use, text in uses:
        expected = contextlib.nullcontext() if is_alone else pytest.raises(InputError, match=text)
        with expected, LateGathers(accelerator).collected():
            assert len(use()) == 1


@pytest.mark.parametrize(("peer", "has_warned"), [([-5.0], True), ([5.0], False)])
def test_a_decision_that_other_processes_would_change_is_warned_of_once(
    peer: list[float], has_warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator: Any = OneRank(peer)
    late = LateGathers(accelerator)
    for _ in range(2):
        with late.collected():
            total = accelerator.gather(torch.tensor([1.0])).sum()
            kept = [total if total > 0 else 0.0]
        assert late.finish(kept) == [1 + peer[0]]
    assert [record.message[:70] for record in caplog.records] == [
        "`compute_loss` has decided by a gathered value (`if` or `max`) as it is"[:70]
    ] * has_warned
