"""Agree on decisions between ranks. The only module that communicates decisions.

Every method is a collective: all ranks must call it, in the same order and equally often, and all get the same answer.
Each call is one collective on a CPU (gloo) group. This group is separate from the training group, so a decision neither
waits for the device nor mixes with the collectives of training.

Without a process group, or with a single process, nothing is communicated: the answer is the process's own.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.constants import default_pg_timeout
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from torchtune_adaptive.errors import CheckpointError, InputError, RunEnded

Answer = TypeVar("Answer")

_created: Counter[tuple[int, ...]] = Counter()  # groups of some ranks that this process has created


class Consensus:
    """Agreement between ``ranks``, or all ranks of the default process group. Creating it is a collective of them.

    Attributes:
        ranks: the ranks in the default process group, in ascending order.
    """

    def __init__(self, ranks: Collection[int] | None = None) -> None:
        self._group: dist.ProcessGroup | None = None
        world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        self.ranks = tuple(range(world_size) if ranks is None else sorted(ranks))
        if len(self.ranks) > 1:
            if len(self.ranks) == world_size:
                self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=_timeout()))
            else:
                self._group = _new_group(self.ranks)
            self.any_rank(False)  # all have connected: one that closes the group before makes gloo fail on the others

    @classmethod
    def of(cls, model: nn.Module, process_group: dist.ProcessGroup | None = None) -> "Consensus":
        """Agreement between the ranks that train ``model``. A collective of these ranks, and of no others.

        They are the ranks of ``process_group``. None: those of the mesh on which FSDP2 has sharded the model, or of its
        ``DistributedDataParallel``; otherwise all ranks of the default group.

        Raises:
            InputError: the process group lacks a rank that trains the model.
        """
        sharded = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
        training = {rank for parameter in sharded for rank in parameter.device_mesh.mesh.flatten().tolist()}
        if isinstance(model, DistributedDataParallel):
            training = set(dist.get_process_group_ranks(model.process_group))
        if process_group is None:
            return cls(training or None)
        ranks = dist.get_process_group_ranks(process_group)
        if not training <= set(ranks):
            raise InputError(
                f"`process_group` lacks ranks that train the model: it has {ranks}, of {sorted(training)}."
            )
        return cls(ranks)

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return 1 if self._group is None else self._group.size()

    @property
    def rank(self) -> int:
        """This process's place among the ranks."""
        return 0 if self._group is None else self._group.rank()

    def close(self) -> None:
        """Destroy the CPU group. Every rank must call it."""
        if self._group is not None:
            with contextlib.suppress(ValueError):  # it was destroyed together with the default group
                dist.destroy_process_group(self._group)
            self._group = None

    def any_rank(self, flag: bool) -> bool:
        """Return whether ``flag`` is true on at least one rank."""
        return bool(self.max_over_ranks(int(flag)))

    def max_over_ranks(self, number: int) -> int:
        """Return the largest ``number`` of all ranks (64-bit)."""
        return self.max_of_each(number)[0]

    def min_over_ranks(self, number: int) -> int:
        """Return the smallest ``number`` of all ranks (64-bit)."""
        return -self.max_over_ranks(-number)

    def min_and_max(self, number: int) -> tuple[int, int]:
        """Return the smallest and the largest ``number`` of all ranks (64-bit)."""
        negated_smallest, largest = self.max_of_each(-number, number)
        return -negated_smallest, largest

    def max_of_each(self, *numbers: int) -> list[int]:
        """Return each position's largest number of all ranks (64-bit)."""
        if self._group is None:
            return list(numbers)
        tensor = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group)
        return tensor.tolist()

    def from_rank_zero(self, value: Any) -> Any:
        """Return rank 0's ``value`` (anything that can be pickled). The values of other ranks are ignored."""
        if self._group is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=self.ranks[0], group=self._group)
        return values[0]

    def from_all_ranks(self, value: Any) -> list[Any]:
        """Return the ``value`` of every rank (anything that can be pickled), in the order of ranks."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def first_reason(self, reason: str) -> str:
        """Return the ``reason`` of the lowest rank that has one, or ""."""
        return next(filter(None, self.from_all_ranks(reason)), "")

    def ask_rank_zero(self, ask: Callable[[], Answer]) -> Answer:
        """Call ``ask`` on rank 0, and return its answer on every rank.

        Raises:
            InputError, RunEnded, CheckpointError: ``ask`` raised it on rank 0; every rank then raises it. Any other
                error is raised on rank 0 only. It ends rank 0, and the launcher ends the other ranks.
        """
        answer: Any = None
        if self.rank == 0:
            try:
                answer = ask()
            except (InputError, RunEnded, CheckpointError) as error:
                answer = error
        answer = self.from_rank_zero(answer)
        if isinstance(answer, InputError | RunEnded | CheckpointError):
            raise answer
        return answer


def _timeout() -> timedelta:
    """That of the default group, if it is longer than torch's default for the CPU.

    A rank may have to wait for another one that evaluates or uploads, for as long as the user allows.
    """
    group = c10d._get_default_group()
    backends = [group._get_backend(device) for device in group._device_types]
    given = [one.options._timeout for one in backends if hasattr(one, "options")]
    return max([default_pg_timeout, *given])


def _new_group(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """A gloo group of ``ranks``, which are not all of the default group. A collective of them only.

    ``dist.new_group(ranks, use_local_synchronization=True)`` names the group after the number of groups of the process.
    It hangs if a rank is in more groups than another, and takes the name of a destroyed group again.
    """
    _created[ranks] += 1
    name = f"torchtune_adaptive {ranks} {_created[ranks]}"
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        list(ranks),
        dist.Backend("gloo"),
        c10d._get_default_store(),
        cast(Any, name),
        timeout=_timeout(),
    )
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return cast(dist.ProcessGroup, group)
