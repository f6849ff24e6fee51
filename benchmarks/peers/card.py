"""A card of limited memory: on CUDA a part of the real one, on the CPU a meter that fails as CUDA does."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from torchtune_adaptive.engine.memory.cpu_meter import CpuMeter
from torchtune_adaptive.engine.memory.meter import device_memory_bytes


def card_on(device: torch.device, limit_bytes: int) -> "Card":
    """A card of ``limit_bytes`` on ``device``: inside ``with card:`` memory runs out above them, if not earlier."""
    return CudaCard(device, limit_bytes) if device.type == "cuda" else CpuCard(limit_bytes)


class CpuCard(CpuMeter):
    """Counts the same bytes as this package's meter. Its errors have CUDA's text, by which peers recognise them.

    Attributes:
        ooms: how often memory has run out.
    """

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(exact=False)
        self.limit_bytes = limit_bytes
        self._total_bytes = limit_bytes
        self.ooms = 0
        self._is_on_host = False

    def __enter__(self) -> "CpuCard":
        super().__enter__()
        return self

    def hold(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Count a model and an optimizer that were made outside of ``with card:``."""
        self.count([list(model.parameters()), list(model.buffers())])
        if optimizer is not None:
            self.count([list(values.values()) for values in optimizer.state.values()])

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """What is made inside lies in the host's memory, not on the card."""
        self._is_on_host = True
        try:
            yield
        finally:
            self._is_on_host = False

    def place(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Bring a batch from the host onto the card."""
        return {name: values.clone() for name, values in batch.items()}

    def after_operation(self, func: Any, inputs: Any, outputs: Any) -> None:
        if self._is_on_host:
            return
        before_bytes = self.live_bytes
        out_of_memory = False
        try:
            super().after_operation(func, inputs, outputs)
        except torch.OutOfMemoryError:
            out_of_memory = True
        if out_of_memory:
            wanted_bytes = self.live_bytes - before_bytes
            _empty(outputs, inputs)
            raise self._out_of_memory(wanted_bytes)

    def after_resize(self, storage: torch.UntypedStorage) -> None:
        if storage in self._storages:
            self._storages.see(storage)

    def _out_of_memory(self, wanted_bytes: int) -> torch.OutOfMemoryError:
        self.ooms += 1
        free_bytes = max(self._total_bytes - self.live_bytes, 0)
        wanted_mib, total_mib, free_mib = (nbytes / 2**20 for nbytes in (wanted_bytes, self._total_bytes, free_bytes))
        return torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate {wanted_mib:.2f} MiB. GPU 0 has a total capacity of"
            f" {total_mib:.2f} MiB of which {free_mib:.2f} MiB is free."
        )


def _empty(outputs: Any, inputs: Any) -> None:
    """Free outputs that are not returned, but that the traceback would keep: CUDA fails before it makes any."""
    given = {tensor.untyped_storage()._cdata for tensor in tree_leaves(inputs) if isinstance(tensor, torch.Tensor)}
    for tensor in tree_leaves(outputs):
        if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in given:
            tensor.untyped_storage().resize_(0)


class CudaCard:
    """The part of the card that the process may use. All of it: memory runs out when CUDA has no more."""

    def __init__(self, device: torch.device, limit_bytes: int) -> None:
        self._device = device
        self._fraction = limit_bytes / device_memory_bytes(device)
        self._ooms_before = self._ooms_so_far()

    @property
    def ooms(self) -> int:
        return self._ooms_so_far() - self._ooms_before

    @property
    def live_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def hold(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Do nothing: the allocator counts them already."""

    def on_host(self) -> AbstractContextManager[object]:
        return nullcontext()

    def place(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: values.to(self._device) for name, values in batch.items()}

    def __enter__(self) -> "CudaCard":
        torch.cuda.set_per_process_memory_fraction(self._fraction, self._device)
        return self

    def __exit__(self, *error: Any) -> None:
        torch.cuda.set_per_process_memory_fraction(1.0, self._device)

    def _ooms_so_far(self) -> int:
        return torch.cuda.memory_stats(self._device).get("num_ooms", 0)


Card = CpuCard | CudaCard
