"""Gathers at the end of an optimizer step give each metric its own values, however ranks have cut their batches."""

from typing import Any

import pytest
import torch

from torchtune_adaptive.hosts.late_gathers import LateGathers, LateValue


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
    assert (value == other) is is_equal
    assert (value != other) is not is_equal
    assert (value < other) is not is_equal
