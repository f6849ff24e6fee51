"""The ledger of a model under FSDP2, or of one that issues no collectives."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchtune_adaptive.engine.distributed.fsdp_state import AllGather, Communicators, ReduceScatter, communicators
from torchtune_adaptive.engine.distributed.functional_collectives import CannotRecordError, IssuedCounts
from torchtune_adaptive.engine.distributed.ledger import Collective, Ledger


class FsdpLedger(Ledger):
    """Records the collectives of FSDP2, which include those of HSDP and of replicas alone.

    Replayed all-gathers send the real parameters, so the peers compute with correct values. There is one exception:
    with ``reshard_after_forward`` as a number, the all-gathers of a backward pass within the smaller group send zeros,
    because this rank no longer has its part of the parameters. Replayed reductions send zeros.
    """

    def __init__(self, model: nn.Module, device: torch.device, *, reduces_once: bool) -> None:
        """Replace the communication functions of ``model``'s FSDP2 modules, if any, by functions that record them.

        Raises:
            CannotRecordError: the model communicates in a way that cannot be recorded.
        """
        super().__init__(device, reduces_once=reduces_once)
        self._communicators = communicators(model)
        if any(isinstance(found.all_gather, RecordedAllGather) for found in self._communicators):
            raise CannotRecordError("another `RecoverableStep` of this model has not been closed")
        of_each = ((found.shard_group, found.replicate_group) for found in self._communicators)
        self.of_any_code = IssuedCounts({*chain.from_iterable(of_each)} - {None})
        self.can_record_dry = all(found.replicate_group is None for found in self._communicators)
        for index, found in enumerate(self._communicators):
            replicated = found.replicate_group is not None
            reduce_scatter = RecordedReduceScatter(self, index, found.reduce_scatter, all_reduce_follows=replicated)
            found.module.set_custom_all_gather(RecordedAllGather(self, index, found.all_gather))
            found.module.set_custom_reduce_scatter(reduce_scatter)
            if replicated:
                found.module.set_all_reduce_hook(_RecordAllReduce(self, index, found))

    def detach(self) -> None:
        """Restore the original communication functions."""
        for found in self._communicators:
            found.module.set_custom_all_gather(found.all_gather)
            found.module.set_custom_reduce_scatter(found.reduce_scatter)
            if found.replicate_group is not None:
                found.module.set_all_reduce_hook(found.all_reduce_hook)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context of a micro-step: it reduces gradients in each one, or only in the last."""
        if self.reduces_once:
            self._set_gradient_sync(self.is_last)
        try:
            yield
        finally:
            if self.reduces_once:
                self._set_gradient_sync(True)

    def _set_gradient_sync(self, is_on: bool) -> None:
        for found in self._communicators:
            found.module.set_requires_gradient_sync(is_on, recurse=False)

    def _replay(self, collective: Collective) -> None:
        kind, index, numel, dtype, group, op = collective
        found = self._communicators[index]
        if kind == "all-gather" and group == found.shard_group:
            found.module.unshard()  # this also records the collective
            found.module.reshard()
            return
        if kind == "all-gather":  # within a smaller group, because `reshard_after_forward` is an int
            output = found.all_gather.allocate((numel * group.size(),), dtype=dtype, device=self._device)
            own = output.narrow(0, group.rank() * numel, numel).zero_()
            found.all_gather(output_tensor=output, input_tensor=own, group=group)
        elif kind == "reduce-scatter":
            zeros = found.reduce_scatter.allocate((numel * group.size(),), dtype=dtype, device=self._device).zero_()
            output = found.reduce_scatter.allocate((numel,), dtype=dtype, device=self._device)
            found.reduce_scatter(output_tensor=output, input_tensor=zeros, group=group, op=op)
        else:
            dist.all_reduce(torch.zeros(numel, dtype=dtype, device=self._device), op=op, group=group)
        self.record(collective)


class _Recorded:
    """Wraps ``inner``, one of FSDP2's communication functions, and allocates its buffers."""

    def __init__(self, ledger: FsdpLedger, index: int, inner: Any, *, all_reduce_follows: bool = False) -> None:
        self._ledger = ledger
        self._index = index
        self._inner = inner
        self._all_reduce_follows = all_reduce_follows

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._inner.allocate(size, dtype=dtype, device=device)

    def _issue(self, collective: Collective, output_tensor: torch.Tensor, **arguments: Any) -> dist.Work | None:
        if self._ledger.is_dry(collective):
            output_tensor.zero_()
            return None
        self._ledger.issuing()
        work = self._inner(output_tensor=output_tensor, **arguments)
        self._ledger.record(collective)
        return work


class RecordedAllGather(_Recorded, AllGather):
    """FSDP2's own all-gather, recorded."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        collective = Collective("all-gather", self._index, input_tensor.numel(), output_tensor.dtype, group)
        return self._issue(collective, output_tensor, input_tensor=input_tensor, group=group, async_op=async_op)


class RecordedReduceScatter(_Recorded, ReduceScatter):
    """FSDP2's own reduce-scatter, recorded."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        collective = Collective("reduce-scatter", self._index, output_tensor.numel(), output_tensor.dtype, group, op)
        work = self._issue(collective, output_tensor, input_tensor=input_tensor, group=group, op=op, async_op=async_op)
        if self._all_reduce_follows:
            self._ledger.issuing()  # FSDP2 issues it next, and then calls `_RecordAllReduce`
        return work


@dataclass(eq=False)
class _RecordAllReduce:
    """Hook that FSDP2 calls after the all-reduce of a module's gradients. Calls the hook that it replaces."""

    ledger: FsdpLedger
    index: int
    found: Communicators

    def __call__(self, reduced: torch.Tensor) -> None:
        group, next_hook = self.found.replicate_group, self.found.all_reduce_hook
        assert group is not None
        # Types that may overflow are summed, and divided separately.
        op = self.found.replicate_op if reduced.dtype in (torch.float32, torch.bfloat16) else dist.ReduceOp.SUM
        self.ledger.record(Collective("all-reduce", self.index, reduced.numel(), reduced.dtype, group, op))
        if next_hook is not None:
            next_hook(reduced)
