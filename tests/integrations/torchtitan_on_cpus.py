"""Makes torchtitan 0.3.0 run with torch 2.13, and on CPUs with gloo. Import it before any other module of torchtitan.

As a program it is ``torchtitan.train``: ``torchrun -m tests.integrations.torchtitan_on_cpus --module ...``.
"""

# pyright: reportMissingImports=false

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.tools.utils as utils
from torch.distributed.fsdp import FSDPModule

from tests.support.ranks import DEVICE

_GIB = 2**30
# What torchtitan asks of a device module, and `torch.cpu` does not have.
_LACKING = {
    "get_device_name": lambda device=None: "CPU",
    "get_device_properties": lambda device=None: SimpleNamespace(total_memory=8 * _GIB),
    "memory_stats": lambda device=None: {},
    "reset_peak_memory_stats": lambda device=None: None,
    "empty_cache": lambda: None,
}
_barrier, _divide = dist.barrier, FSDPModule.set_gradient_divide_factor


def _barrier_without_devices(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
    return _barrier(group, async_op)  # gloo refuses `device_ids`


def _divide_after_sum(self: FSDPModule, factor: float) -> None:
    _divide(self, factor)
    self.set_force_sum_reduction_for_comms(True)  # gloo cannot divide in a sum


if not hasattr(dist, "set_timeout"):  # torchtitan calls it after the first step: it is written for newer versions
    dist.set_timeout = lambda timeout, group=None: None  # pyright: ignore[reportAttributeAccessIssue]

torch.autograd.set_multithreading_enabled(False)  # as torchtitan does, if it makes the process group itself
if DEVICE == "cpu":
    utils.device_type = "cpu"
    utils.device_module = SimpleNamespace(**{**vars(torch.cpu), **_LACKING})
    utils.get_local_device = lambda: torch.device("cpu")
    dist.barrier = _barrier_without_devices
    FSDPModule.set_gradient_divide_factor = _divide_after_sum

if __name__ == "__main__":
    from torchtitan.train import main

    main()
