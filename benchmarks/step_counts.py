"""Counts what a training step needs from the other ranks and from the device: collectives, and reads of tensors."""

import math
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.live import Watch
from torchtune_adaptive.engine.memory.operations import OperationMode

STEPS = 2  # counted; the first step of an epoch is not


class Counts(NamedTuple):
    """The counts of ``STEPS`` steps on one rank.

    ``agreement`` collectives were issued on the CPU group of ``Consensus``, ``training`` ones on all others;
    ``reads`` are tensors whose values Python asked for. On the training device each of these is a wait for it.
    """

    training: int
    agreement: int
    reads: int


class CountReads(OperationMode):
    """Counts the tensors whose values Python asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0
        read_list = torch.Tensor.tolist

        def tolist(tensor: torch.Tensor) -> Any:  # the only way to read that no dispatch mode sees
            self.reads += 1
            return read_list(tensor)

        self._patch = mock.patch.object(torch.Tensor, "tolist", tolist)

    def __enter__(self) -> Any:
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._patch.stop()

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **kwargs)


class StepCounter(Watch):
    """Counts collectives and reads of tensors in ``STEPS`` steps of an epoch, after its first step."""

    counts: Counts
    _steps = -math.inf  # done so far in the epoch that is counted

    def begin(self, recipe: Any) -> None:
        super().begin(recipe)
        before = _numbers()
        if recipe.consensus is not None:
            recipe.consensus.any_rank(False)
        self._agreement = {group for group, number in _numbers().items() if number != before[group]}

    def count(self) -> None:
        """Count in the next epoch."""
        self._steps = 0

    def step(self) -> None:
        self._steps += 1
        if self._steps == 1:
            self._before, self._reads = self._issued(), CountReads()
            self._reads.__enter__()
        if self._steps == 1 + STEPS:
            self._reads.__exit__(None, None, None)
            training, agreement = (now - before for now, before in zip(self._issued(), self._before, strict=True))
            self.counts = Counts(training, agreement, self._reads.reads)

    def _issued(self) -> tuple[int, int]:
        """Collectives so far: of training, and agreements."""
        numbers = _numbers()
        agreement = sum(numbers[group] for group in self._agreement)
        return sum(numbers.values()) - agreement, agreement


def _numbers() -> dict[dist.ProcessGroup, int]:
    """Collectives of each group so far; gloo numbers them, as many as the profiler has events named c10d::."""
    return {
        group: group._get_sequence_number_for_group()  # pyright: ignore[reportAttributeAccessIssue]
        for group in dist.distributed_c10d._world.pg_map
    }
