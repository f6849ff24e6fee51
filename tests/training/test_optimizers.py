"""A version of torch that leaks host memory in sharded steps is named."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from torchtune_adaptive.training.optimizers import leak_warning


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[torch.optim.Optimizer]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path_factory.mktemp('group')}/file", rank=0, world_size=1)
    tensor = distribute_tensor(torch.zeros(2), init_device_mesh("cpu", (1,)))
    yield torch.optim.SGD([nn.Parameter(torch.zeros(2)), nn.Parameter(tensor)], lr=0.1)
    dist.destroy_process_group()


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
