"""FSDP2's collectives through the host's memory, for ranks that share a device, which NCCL refuses."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchtune_adaptive.engine.distributed.fsdp_state import AllGather, ReduceScatter, communicators


def stage_collectives(model: nn.Module) -> None:
    """Have all FSDP2 modules of ``model`` communicate through the host. Their groups must be gloo's."""
    all_gather, reduce_scatter = StagedAllGather(), StagedReduceScatter()
    for found in communicators(model):
        found.module.set_custom_all_gather(all_gather)
        found.module.set_custom_reduce_scatter(reduce_scatter)


class _Staged:
    """Keeps the buffers on the host, so that only the first call allocates."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.Size, torch.dtype, str], torch.Tensor] = {}

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def on_host(self, like: torch.Tensor, dtype: torch.dtype, use: str) -> torch.Tensor:
        """A buffer of the shape of ``like`` for one ``use``, with whatever was last in it."""
        key = like.shape, dtype, use
        if key not in self._buffers:
            self._buffers[key] = torch.empty(like.shape, dtype=dtype, pin_memory=like.device.type == "cuda")
        return self._buffers[key]


class StagedAllGather(_Staged, AllGather):
    """An all-gather on the host; it is complete when it returns."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        own = self.on_host(input_tensor, input_tensor.dtype, "own").copy_(input_tensor)
        gathered = self.on_host(output_tensor, output_tensor.dtype, "gathered")
        dist.all_gather_into_tensor(gathered, own, group=group)
        output_tensor.copy_(gathered)


class StagedReduceScatter(_Staged, ReduceScatter):
    """A reduce-scatter on the host, summed in float32; it is complete when it returns."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise NotImplementedError(f"reduction must be SUM or AVG, but is {op} instead")
        own = self.on_host(input_tensor, torch.float32, "own").copy_(input_tensor)
        reduced = self.on_host(output_tensor, torch.float32, "reduced")
        dist.reduce_scatter_tensor(reduced, own, op=dist.ReduceOp.SUM, group=group)
        if op == dist.ReduceOp.AVG:
            reduced.div_(group.size())
        output_tensor.copy_(reduced)
