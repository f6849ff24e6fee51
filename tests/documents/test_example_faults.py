"""The plain FSDP2 example survives an error at every operation of a micro-step, on either rank and on both."""

from functools import partial
from typing import Any

import pytest
import torch

from examples.fsdp2_loop import SAMPLES_PER_STEP, make_model, micro_step, train
from tests.support.faults import same_bits, tensors_of, under
from tests.support.ranks import run_on_ranks
from torchtune_adaptive import RecoverableStep
from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.engine.recovery.backoff import Backoff
from torchtune_adaptive.engine.recovery.micro_batches import Slices
from torchtune_adaptive.testing import Fault, wrap_micro_steps

RANKS = 2
STEPS = 2  # optimizer steps; the fault is in the first


class Example:
    """The example's model and optimizer, trained again and again from the same state. A collective."""

    def __init__(self) -> None:
        self.model = make_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.slices = Slices(SAMPLES_PER_STEP)
        self.step = RecoverableStep(
            self.model,
            partial(micro_step, self.model),
            micro_batch_size=self.slices,
            optimizer=self.optimizer,
            on_event=lambda event: None,
        )
        self.step.dry_run([[1, 2, 3], [4, 5]])
        self._saved = [tensor.clone() for tensor in tensors_of(self.model, self.optimizer)]

    def trained(self, micro_batch_size: int, fault: Fault) -> tuple[int, list[torch.Tensor]]:
        """The last size of a micro-batch, and all state at the end."""
        for tensor, saved in zip(tensors_of(self.model, self.optimizer), self._saved, strict=True):
            tensor.copy_(saved)
        torch.manual_seed(7)
        self.slices.size = micro_batch_size
        self.step.backoff = Backoff(last_failure=0, wait_steps=10**6)  # the larger size is not tried again
        wrap_micro_steps(self.step, partial(under, {0: fault}))
        train(self.model, self.optimizer, self.step, STEPS)
        return self.slices.size, [tensor.clone() for tensor in tensors_of(self.model, self.optimizer)]


def _every_operation(rank: int, stride: int) -> tuple[int, int, list[Any]]:
    """The places tried, the faults that struck, and where the result was wrong."""
    example, count = Example(), Fault(None)
    example.trained(SAMPLES_PER_STEP, count)
    places = Consensus().min_over_ranks(count.count) // STEPS
    _, expected = example.trained(SAMPLES_PER_STEP // 2, Fault(None))
    tried, struck, wrong = 0, 0, []
    for number, place in enumerate(range(0, places, stride)):
        failing = ([0], [1], [0, 1])[number % 3]
        fault = Fault((place + 7 * rank) % places if len(failing) > 1 else place, ranks=failing)
        size, state = example.trained(SAMPLES_PER_STEP, fault)
        tried += 1
        struck += fault.has_struck
        if size != SAMPLES_PER_STEP // 2 or not same_bits(state, expected):
            wrong.append((place, failing))
    return tried, struck, wrong


def _assert_right(stride: int) -> None:
    ranks = run_on_ranks(_every_operation, RANKS, stride, timeout_s=1200)
    tried, struck = ranks[0][0], [struck for _, struck, _ in ranks]
    print(f"{tried} places, faults struck on rank 0: {struck[0]}, on rank 1: {struck[1]}")
    assert [wrong for _, _, wrong in ranks] == [[], []]
    assert min(struck) * 3 >= tried  # two of three faults strike a rank
    assert sum(struck) >= tried


def test_an_error_at_some_operations_is_survived() -> None:
    _assert_right(stride=61)


@pytest.mark.exhaustive
def test_an_error_at_every_operation_is_survived() -> None:
    _assert_right(stride=1)
