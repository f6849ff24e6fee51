"""Agree on decisions between ranks. The only module that communicates decisions.

Every method except ``world_size`` and ``rank`` is a collective: all ranks must call it, in the same order and equally
often, and all get the same answer. Each call is one collective on a CPU (gloo) group. This group is separate from the
training group, so a decision neither waits for the device nor mixes with the collectives of training.

Without a process group, or with a single process, nothing is communicated: the answer is the process's own.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from torchtune_adaptive.errors import InputError, RunEnded

Answer = TypeVar("Answer")


class Consensus:
    """Agreement between all ranks of the default process group. Creating the object is itself a collective."""

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return 1 if self._group is None else self._group.size()

    @property
    def rank(self) -> int:
        """This process's rank."""
        return 0 if self._group is None else self._group.rank()

    def close(self) -> None:
        """Destroy the CPU group. Every rank must call it."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def any_rank(self, flag: bool) -> bool:
        """Return whether ``flag`` is true on at least one rank."""
        return bool(self.max_over_ranks(int(flag)))

    def max_over_ranks(self, number: int) -> int:
        """Return the largest ``number`` of all ranks (64-bit)."""
        return self.begin_max(number)()[0]

    def min_over_ranks(self, number: int) -> int:
        """Return the smallest ``number`` of all ranks (64-bit)."""
        return -self.max_over_ranks(-number)

    def min_and_max(self, number: int) -> tuple[int, int]:
        """Return the smallest and the largest ``number`` of all ranks (64-bit)."""
        negated_smallest, largest = self.begin_max(-number, number)()
        return -negated_smallest, largest

    def begin_max(self, *numbers: int) -> Callable[[], list[int]]:
        """Start an asynchronous max all-reduce of ``numbers`` (64-bit). Returns a function that waits for the result.

        The result has the largest number at each position. Work between both calls overlaps with the exchange. Every
        rank must call the function.
        """
        if self._group is None:
            return lambda: list(numbers)
        tensor = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        work = cast(dist.Work, dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group, async_op=True))

        def wait() -> list[int]:
            work.wait()
            return tensor.tolist()

        return wait

    def from_rank_zero(self, value: Any) -> Any:
        """Return rank 0's ``value`` (anything that can be pickled). The values of other ranks are ignored."""
        if self._group is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._group)
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
            InputError, RunEnded: ``ask`` raised it on rank 0; every rank then raises it. Any other error is raised on
                rank 0 only. It ends rank 0, and the launcher ends the other ranks.
        """
        answer: Any = None
        if self.rank == 0:
            try:
                answer = ask()
            except (InputError, RunEnded) as error:
                answer = error
        answer = self.from_rank_zero(answer)
        if isinstance(answer, InputError | RunEnded):
            raise answer
        return answer
