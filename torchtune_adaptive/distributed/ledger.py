"""The collectives that FSDP2 issues in a micro-step: recorded one by one, and the rest of them made up for.

A rank that fails alone leaves its peers waiting in collectives which it no longer issues. With the list of
a whole micro-step (the template) and of those issued so far, it can issue the rest: each rank then takes
part in the same sequence, whatever has become of its own computation. Recording costs an entry in a list
per collective, neither a collective nor a wait for the device.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from torchtune_adaptive.distributed.fsdp_state import AllGather, Communicators, ReduceScatter, communicators


class CollectiveInDoubtError(RuntimeError):
    """Nobody knows which collectives this rank has issued; the run must end, lest the ranks fall out of step."""


class Collective(NamedTuple):
    """One collective: of which FSDP2 module (by its place in the model), and how many elements of each rank."""

    kind: str
    place: int
    numel: int
    dtype: torch.dtype
    group: dist.ProcessGroup
    op: Any = None

    def description(self) -> str:
        """What must be the same on every rank; the groups of HSDP are not."""
        op = self.op if isinstance(self.op, dist.ReduceOp.RedOpType) else type(self.op).__name__
        return f"{self.kind} of {self.numel} {self.dtype} among {self.group.size()} ranks at {self.place} by {op}"


class Ledger:
    """Records the collectives of micro-steps, from ``begin`` on.

    Attributes:
        template: the collectives of a whole micro-step; set by who has compared them over ranks and batches.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        """Take a place in every collective of ``model``'s FSDP2 modules. A model without such modules has none.

        Raises:
            CannotRecordError: the model communicates in a way that cannot be recorded.
        """
        self.template: list[Collective] = []
        self._device = device
        self._issued: list[Collective] = []
        self._in_doubt = False
        self._communicators = communicators(model)
        for place, found in enumerate(self._communicators):
            replicated = found.replicate_group is not None
            reduce_scatter = RecordedReduceScatter(self, place, found.reduce_scatter, all_reduce_follows=replicated)
            found.module.set_custom_all_gather(RecordedAllGather(self, place, found.all_gather))
            found.module.set_custom_reduce_scatter(reduce_scatter)
            if replicated:
                found.module.set_all_reduce_hook(_RecordAllReduce(self, place, found))

    def detach(self) -> None:
        """Leave the collectives as they were before."""
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
        """Whether the collectives since ``begin`` are those of the template."""
        return self._issued == self.template

    def begin(self) -> None:
        """A micro-step begins."""
        self._issued.clear()
        self._in_doubt = False

    def issuing(self) -> None:
        """A collective is being issued; until ``record`` nobody knows whether it was."""
        self._in_doubt = True

    def record(self, collective: Collective) -> None:
        """``collective`` was issued."""
        self._issued.append(collective)
        self._in_doubt = False

    def replay_rest(self) -> None:
        """Issue what of the template has not been issued since ``begin``, while the peers issue their own.

        All-gathers bring the real parameters, so that what the peers compute stays sound; what is reduced
        are zeros, and the peers' sums are therefore worthless. The model must stand between steps.

        Raises:
            CollectiveInDoubtError: the last collective failed in itself, those issued are not the template's
                first, or one of the rest failed.
        """
        if self._in_doubt:
            raise CollectiveInDoubtError("a collective failed in itself, so that nobody knows whether it was issued")
        done = len(self._issued)
        if self._issued != self.template[:done]:
            raise CollectiveInDoubtError("the collectives issued are not those with which the rehearsal began")
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
        kind, place, numel, dtype, group, op = collective
        found = self._communicators[place]
        if kind == "all-gather" and group == found.shard_group:
            found.module.unshard()  # which records it
            found.module.reshard()
            return
        if kind == "all-gather":  # among fewer ranks, where the parameters were only partly freed after forward
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
    """What both kinds have: a place, and FSDP2's own communication, whose buffers they use."""

    def __init__(self, ledger: Ledger, place: int, inner: Any, *, all_reduce_follows: bool = False) -> None:
        self._ledger = ledger
        self._place = place
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
        self._ledger.record(Collective("all-gather", self._place, numel, dtype, group))
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
        self._ledger.record(Collective("reduce-scatter", self._place, numel, dtype, group, op))
        if self._all_reduce_follows:
            self._ledger.issuing()  # nothing but FSDP2's own call lies before the hook that records it
        return work


class _RecordAllReduce:
    """FSDP2 calls it after HSDP's all-reduce of a module's gradients; a hook that was there before goes on."""

    def __init__(self, ledger: Ledger, place: int, found: Communicators) -> None:
        self._ledger = ledger
        self._place = place
        self._group = found.replicate_group
        self._next = found.all_reduce_hook

    def __call__(self, reduced: torch.Tensor) -> None:
        assert self._group is not None
        # As FSDP2 chooses, unless it is told otherwise: types that may overflow are divided apart from the sum.
        is_wide = reduced.dtype in (torch.float32, torch.bfloat16)
        op = dist.ReduceOp.AVG if is_wide else dist.ReduceOp.SUM
        self._ledger.record(Collective("all-reduce", self._place, reduced.numel(), reduced.dtype, self._group, op))
        if self._next is not None:
            self._next(reduced)
