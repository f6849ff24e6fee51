"""What a step of training asks of the other ranks and of the device: collectives, and reads of tensors."""

from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from torchtune_adaptive.memory.operations import is_on_wrappers

STEPS = 2  # counted; the first step of an epoch is not


class Counts(NamedTuple):
    """Of ``STEPS`` steps on one rank.

    ``agreement`` collectives were issued on the CPU group of ``Consensus``, ``training`` ones on all others;
    ``reads`` are tensors whose values Python asked for. On the training device each of these is a wait for it.
    """

    training: int
    agreement: int
    reads: int


class CountReads(TorchDispatchMode):
    """Counts the tensors whose values Python asks for."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0
        read_list = torch.Tensor.tolist

        def tolist(tensor: torch.Tensor) -> Any:  # the one way to ask that no mode sees
            self.reads += 1
            return read_list(tensor)

        self._patch = mock.patch.object(torch.Tensor, "tolist", tolist)

    def __enter__(self) -> "CountReads":
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._patch.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_on_wrappers(types):
            return NotImplemented
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


class StepCounter:
    """Takes the place of a recipe's profiler, which is told of each step's end."""

    def __init__(self, recipe: Any) -> None:
        consensus = vars(recipe).get("_consensus")  # stock has none
        self._agreement = consensus and consensus._group
        self._reads = CountReads()
        self._steps = 0

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def step(self) -> None:
        self._steps += 1
        if self._steps == 1:
            self._before = self._issued()
            self._reads.__enter__()
        if self._steps == 1 + STEPS:
            self._reads.__exit__(None, None, None)
            training, agreement = (now - before for now, before in zip(self._issued(), self._before, strict=True))
            self.counts = Counts(training, agreement, self._reads.reads)

    def _issued(self) -> tuple[int, int]:
        """Collectives so far; gloo numbers those of each group, as many as the profiler has events named c10d::."""
        numbers = {
            group: group._get_sequence_number_for_group()  # pyright: ignore[reportAttributeAccessIssue]
            for group in dist.distributed_c10d._world.pg_map
        }
        agreement = numbers.get(self._agreement, 0)
        return sum(numbers.values()) - agreement, agreement
