"""A version of torch that leaks host memory in sharded steps is named."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from torchtune_adaptive.training.optimizers import leak_warning


@pytest.fixture
def sharded(group_of_one: None) -> torch.optim.Optimizer:
    tensor = distribute_tensor(torch.zeros(2), init_device_mesh("cpu", (1,)))
    return torch.optim.SGD([nn.Parameter(torch.zeros(2)), nn.Parameter(tensor)], lr=0.1)


@pytest.mark.parametrize(
    ("version", "leaks"),
    [("2.9.1", False), ("2.10.0+cpu", True), ("2.11.1", True), ("2.12.1", False)],
)
def test_torch_is_named_where_steps_of_a_sharded_model_leak(
    version: str, leaks: bool, sharded: torch.optim.Optimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert leak_warning([sharded]).startswith(f"torch {version} leaks host memory") is leaks
    assert leak_warning([torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)]) == ""
