"""Collectives that a model issues itself, as tensor parallelism does: torch's functional collectives.

Their results are waited for when they are first used. Until then, torch keeps them in a registry.
"""

import gc

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor


def wait_for_unused_results() -> None:
    """Wait for the functional collectives whose results nobody has used, because an error came first.

    Otherwise torch's registry keeps their memory for good. Call it while the error still keeps the results alive. All
    ranks must issue these collectives.
    """
    if not torch._C._distributed_c10d._get_work_registry_size():
        return
    for one in gc.get_objects():
        if issubclass(type(one), AsyncCollectiveTensor):
            one = one.elem
        if type(one) is torch.Tensor:  # others do nothing here
            torch.ops._c10d_functional.wait_tensor(one)
