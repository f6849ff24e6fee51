"""Record the collectives that FSDP2 issues in a micro-step, and replay those that a failed rank has not issued.

When one rank fails, its peers wait for it in their next collective. The ledger knows the collectives of a whole
micro-step (the template) and those that the rank has already issued, so the rank can issue the rest without
computing. All ranks then issue the same sequence. Recording adds a list entry per collective; it neither
communicates nor waits for the device.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from torchtune_adaptive.engine.distributed.fsdp_state import AllGather, Communicators, ReduceScatter, communicators


class CollectiveInDoubtError(RuntimeError):
    """It is unknown which collectives this rank has issued. The run must end, or collectives would be mismatched."""


class Collective(NamedTuple):
    """One collective of an FSDP2 module. ``numel`` is the number of elements per rank."""

    kind: str
    module_index: int
    numel: int
    dtype: torch.dtype
    group: dist.ProcessGroup
    op: Any = None

    def description(self) -> str:
        """Describe what must be equal on every rank. The group itself is not included: under HSDP groups differ."""
        op = self.op if isinstance(self.op, dist.ReduceOp.RedOpType) else type(self.op).__name__
        return (
            f"{self.kind} of {self.numel} {self.dtype} among {self.group.size()} ranks at {self.module_index} by {op}"
        )


class Ledger:
    """Records the collectives of one micro-step at a time, and replays the rest of it.

    Attributes:
        template: the collectives of a whole micro-step, which must be the same on every rank and for every batch.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        """Replace the communication functions of ``model``'s FSDP2 modules, if any, by functions that record them.

        Raises:
            CannotRecordError: the model communicates in a way that cannot be recorded.
        """
        self.template: list[Collective] = []
        self._device = device
        self._issued: list[Collective] = []
        self._in_doubt = False
        self._communicators = communicators(model)
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

    @property
    def issued(self) -> list[Collective]:
        """A copy of the collectives since ``begin``."""
        return list(self._issued)

    @property
    def agrees(self) -> bool:
        """Whether the collectives since ``begin`` are equal to the template."""
        return self._issued == self.template

    def begin(self) -> None:
        """Start recording a new micro-step."""
        self._issued.clear()
        self._in_doubt = False

    def issuing(self) -> None:
        """Note that a collective is about to be issued. Until ``record`` it is unknown whether it was issued."""
        self._in_doubt = True

    def record(self, collective: Collective) -> None:
        """Note that ``collective`` was issued."""
        self._issued.append(collective)
        self._in_doubt = False

    def replay_rest(self) -> None:
        """Issue the collectives of the template that were not issued since ``begin``, while the peers issue theirs.

        All-gathers send the real parameters, so the peers compute with correct values. There is one exception: with
        ``reshard_after_forward`` as a number, the all-gathers of a backward pass within the smaller group send zeros,
        because this rank no longer has its part of the parameters. Reductions send zeros. The peers' gradients must
        be thrown away. Call ``reset_after_failure`` on the model first.

        Raises:
            CollectiveInDoubtError: the last collective failed while it was issued, the issued collectives are not the
                first ones of the template, or a replayed one failed.
        """
        if self._in_doubt:
            raise CollectiveInDoubtError("a collective itself failed, so that it is unknown whether it was issued")
        done = len(self._issued)
        if self._issued != self.template[:done]:
            raise CollectiveInDoubtError("the issued collectives are not the first ones of the rehearsal")
        for collective in self.template[done:]:
            try:
                self._replay(collective)
            except Exception as error:
                raise CollectiveInDoubtError(
                    f"issuing this rank's {collective.kind} without computing failed: {error}"
                ) from error
            if self._issued[-1:] != [collective]:
                raise CollectiveInDoubtError(f"this rank's {collective.kind} was not issued as in the rehearsal")

    def _replay(self, collective: Collective) -> None:
        """Issue ``collective`` and record it."""
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

    def __init__(self, ledger: Ledger, index: int, inner: Any, *, all_reduce_follows: bool = False) -> None:
        self._ledger = ledger
        self._index = index
        self._inner = inner
        self._all_reduce_follows = all_reduce_follows

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._inner.allocate(size, dtype=dtype, device=device)


class RecordedAllGather(_Recorded, AllGather):
    """FSDP2's own all-gather, recorded."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self._ledger.issuing()
        work = self._inner(output_tensor=output_tensor, input_tensor=input_tensor, group=group, async_op=async_op)
        numel, dtype = input_tensor.numel(), output_tensor.dtype
        self._ledger.record(Collective("all-gather", self._index, numel, dtype, group))
        return work


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
        self._ledger.issuing()
        work = self._inner(
            output_tensor=output_tensor, input_tensor=input_tensor, group=group, op=op, async_op=async_op
        )
        numel, dtype = output_tensor.numel(), output_tensor.dtype
        self._ledger.record(Collective("reduce-scatter", self._index, numel, dtype, group, op))
        if self._all_reduce_follows:
            self._ledger.issuing()  # FSDP2 issues it next, and then calls `_RecordAllReduce`
        return work


class _RecordAllReduce:
    """Hook that FSDP2 calls after HSDP's all-reduce of a module's gradients. Calls the hook that it replaces."""

    def __init__(self, ledger: Ledger, index: int, found: Communicators) -> None:
        self._ledger = ledger
        self._index = index
        self._group = found.replicate_group
        self._next = found.all_reduce_hook

    def __call__(self, reduced: torch.Tensor) -> None:
        assert self._group is not None
        # FSDP2's default: types that may overflow are summed, and divided separately.
        is_wide = reduced.dtype in (torch.float32, torch.bfloat16)
        op = dist.ReduceOp.AVG if is_wide else dist.ReduceOp.SUM
        self._ledger.record(Collective("all-reduce", self._index, reduced.numel(), reduced.dtype, self._group, op))
        if self._next is not None:
            self._next(reduced)
