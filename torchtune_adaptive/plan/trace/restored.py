"""What a trace changes in this process, and restores. It needs torch alone."""

import importlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtune_adaptive.errors import InputError

_MOST_RANKS = 2**16  # torch notes each of them
_CLEAR_SHARDINGS = "_clear_DTensor_sharding_propagator_cache"


@contextmanager
def settings_restored() -> Iterator[None]:
    """Restore what code of a user may set in torch. Within the context no default device is set."""
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    device, dtype, state = None if context is None else context.device, torch.get_default_dtype(), random.getstate()
    numpy: Any = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.set_default_device(None)
        try:
            yield
        finally:
            torch.set_default_device(device)
            torch.set_default_dtype(dtype)
            random.setstate(state)
            if numpy:
                numpy.random.set_state(numpy_state)


@contextmanager
def fake_process_group(world_size: int) -> Iterator[None]:
    """Within the context this process is rank 0 of ``world_size`` ranks of which no other exists.

    Raises:
        InputError: it is in a process group already.
    """
    if world_size > _MOST_RANKS:
        raise InputError(f"A plan takes up to {_MOST_RANKS} ranks, but there are {world_size}.")
    if dist.is_initialized():
        ranks = dist.get_world_size()
        raise InputError(f"A plan starts a process group of its own, but this process is in one of size {ranks}.")
    if not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::_allgather_base_", "Meta"):
        importlib.import_module("torch.distributed._tools.fake_collectives")  # registers them; delete with torch < 2.11
    excepthook = sys.excepthook  # which torch replaces
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        # A mesh that a recipe or FSDP2 makes by default would be one of the machine's GPUs.
        with mock.patch.object(torch._C, "_get_accelerator", return_value=torch.device("cpu")):
            yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        _forget_shardings()
        sys.excepthook = excepthook


def _forget_shardings() -> None:
    """What DTensor has worked out names meshes of this group. A later mesh of the same shape would equal them."""
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache.cache_clear()
    if hasattr(torch._C, _CLEAR_SHARDINGS):  # newer ones of torch have another cache in C++
        getattr(torch._C, _CLEAR_SHARDINGS)()
