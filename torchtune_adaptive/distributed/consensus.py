"""What all ranks agree on. The only room that exchanges decisions between ranks.

| process group         | any_rank, min/max_over_ranks, from_rank_zero/all_ranks |
|-----------------------|--------------------------------------------------------|
| none, or one process  | this process's own answer, nothing is communicated     |
| several processes     | one collective on a CPU (gloo) group per call          |

Every method is a collective: all ranks must call it, in the same order and equally often; afterwards
all of them know the same answer. The CPU group is separate from the training group, so that a decision
neither waits for the device nor gets between the training's own collectives.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from torchtune_adaptive.errors import InputError

Answer = TypeVar("Answer")


class Consensus:
    """Agreement of all ranks of the default process group. Creating it is itself a collective."""

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))

    @property
    def world_size(self) -> int:
        """Number of ranks that take part."""
        return 1 if self._group is None else self._group.size()

    @property
    def rank(self) -> int:
        """This process's rank."""
        return 0 if self._group is None else self._group.rank()

    def close(self) -> None:
        """Give back the CPU group. A collective of a kind: every rank does so when it is done."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def any_rank(self, flag: bool) -> bool:
        """Whether ``flag`` is true on at least one rank."""
        return bool(self.max_over_ranks(int(flag)))

    def max_over_ranks(self, number: int) -> int:
        """The largest ``number`` that any rank has (64-bit)."""
        return self._reduce(number, dist.ReduceOp.MAX)

    def min_over_ranks(self, number: int) -> int:
        """The smallest ``number`` that any rank has (64-bit)."""
        return self._reduce(number, dist.ReduceOp.MIN)

    def from_rank_zero(self, value: Any) -> Any:
        """Rank 0's ``value`` (anything that can be pickled); what the other ranks pass is ignored."""
        if self._group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def from_all_ranks(self, value: Any) -> list[Any]:
        """Every rank's ``value`` (anything that can be pickled), by rank."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def ask_rank_zero(self, ask: Callable[[], Answer]) -> Answer:
        """Rank 0's answer, on every rank; what it refuses, every rank refuses.

        Raises:
            InputError: ``ask`` raised it on rank 0. Any other error ends rank 0, and the launcher the others.
        """
        answer: Any = None
        if self.rank == 0:
            try:
                answer = ask()
            except InputError as error:
                answer = error
        answer = self.from_rank_zero(answer)
        if isinstance(answer, InputError):
            raise answer
        return answer

    def _reduce(self, number: int, op: Any) -> int:
        if self._group is None:
            return number
        box = torch.tensor([number], dtype=torch.int64, device="cpu")
        dist.all_reduce(box, op=op, group=self._group)
        return int(box.item())
