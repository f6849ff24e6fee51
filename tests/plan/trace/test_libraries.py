"""What kernels and libraries take beside tensors is what torch gives them, at any number of rows."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.plans import MIB
from torchtune_adaptive.plan.allocator import BLOCK_BYTES, ceil_to
from torchtune_adaptive.plan.decide import BatchSizes, Device
from torchtune_adaptive.plan.gpu import Card
from torchtune_adaptive.plan.replay import exact, replayed
from torchtune_adaptive.plan.trace.events import Event
from torchtune_adaptive.plan.trace.libraries import INPUTS, OUTPUTS, PRODUCT, scratch_bytes
from torchtune_adaptive.plan.trace.loop import trace_loop
from torchtune_adaptive.plan.trace.recorder import size_of_sum
from torchtune_adaptive.plan.trace.step_events import StepEvents

A100 = 108 * 2048  # threads
_ATEN: Any = torch.ops.aten
SUM, MEAN, NORM = _ATEN.sum.dim_IntList, _ATEN.mean.dim, _ATEN.linalg_vector_norm.default


def traced(build_model: Callable[[], nn.Module], shape: tuple[int, ...]) -> StepEvents:
    """A step on samples of this shape."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: torch.Tensor) -> None:
        model(rows).sum().backward()
        optimizer.step()
        model.zero_grad()

    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters())

    return trace_loop(build_model, optimizer_of, step, lambda size: torch.zeros(size, *shape)).step


@pytest.mark.parametrize(
    ("rows", "columns", "num_bytes"),
    [
        (1024, 2048, 16 * MIB),  # seen in `Trainer`, the gradient of a norm's weight
        (12288, 2048, 108 * MIB),  # and that of DoRA's magnitudes
        (1023, 2048, 16 * MIB),
        (511, 2048, 0),  # too few values for each thread
        (12288, 4 * 32 * 1729, 0),  # so many outputs that each has one block
        (0, 2048, 0),
    ],
)
def test_it_is_what_torch_was_seen_to_take(rows: int, columns: int, num_bytes: int) -> None:
    assert scratch_bytes(columns, rows * columns, A100) == num_bytes


def test_sums_over_leading_dimensions_count_alone() -> None:
    rows = torch.zeros(2, 8, 64)
    assert size_of_sum(SUM, (rows, [0, 1])) == (64, 1024)
    assert size_of_sum(MEAN, (rows, [0], True)) == (512, 1024)
    assert size_of_sum(NORM, (rows, 2, [-3, 1])) == (64, 1024)
    assert size_of_sum(SUM, (rows.mT, [0, 2])) == (64, 1024)
    assert size_of_sum(SUM, (rows[:1], [0, 1])) == (64, 512)  # the same operation in a smaller batch
    for func, args in (
        (SUM, (rows, [2])),
        (SUM, (rows, [0, 1, 2])),
        (SUM, (rows, None)),
        (SUM, (rows.long(), [0, 1])),
        (SUM, (rows.mT, [0, 1])),
        (SUM, (rows[..., :63], [0, 1])),
        (SUM, (rows[..., ::2], [0, 1])),
        (SUM, (torch.zeros(()), [0])),
        (torch.ops.aten.amax.default, (rows, [0, 1])),
    ):
        assert size_of_sum(func, args) is None


def test_a_step_has_that_of_its_own_rows_and_a_cpu_has_none() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2048))

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return rows * self.weight

    found = traced(Scaled, (1024, 2048))
    for rows in (1, 2, 3, 12, 40):
        events = found.at(rows)
        without, own = exact(events).allocated_bytes, replayed(events, threads=A100).allocated_bytes
        assert own - without == pytest.approx(scratch_bytes(2048, rows * 1024 * 2048, A100), abs=8 * BLOCK_BYTES)
        assert replayed(events).allocated_bytes == pytest.approx(without, abs=8 * BLOCK_BYTES)


def test_a_card_that_runs_more_threads_takes_more_for_a_sum() -> None:
    events = (
        Event("backward", OUTPUTS, "temporaries", 2048),
        Event("backward", OUTPUTS, "temporaries", 0, taken=0),
        Event("backward", INPUTS, "temporaries", 12 * 1024 * 2048),
        Event("backward", INPUTS, "temporaries", 0, taken=2),
    )
    taken = {
        name: BatchSizes(
            StepEvents(1024, {12: (events,)}),
            Device(name=name, memory_bytes=None, margin=0, overhead=Card.named(name).overhead(1)),
        )
        .memory(12)
        .kinds()["temporaries"]
        for name in ("T4", "A100 80GB", "H200", "80GiB")
    }
    assert taken["T4"] < taken["A100 80GB"] == 108 * MIB < taken["H200"] == taken["80GiB"]


def test_forward_and_backward_have_a_first_product_each() -> None:
    found = traced(lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), (8,))
    assert [event.phase for event in found.at(2) if event.operation == PRODUCT and event.taken < 0] == [
        *("forward", "backward")
    ]


@pytest.mark.simulated_gpu
@pytest.mark.parametrize("seed", range(40))
def test_it_is_what_torch_takes(seed: int) -> None:
    generator = random.Random(seed)
    rows, columns = (round(2 ** generator.uniform(4, 15)) for _ in range(2))
    columns = ceil_to(columns, 4)
    func, args = generator.choice([(SUM, ([0],)), (MEAN, ([0],)), (NORM, (2, [0]))])
    tensor = torch.empty(rows, columns, dtype=generator.choice([torch.float32, torch.bfloat16]), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    result = func(tensor, *args)
    taken = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before - result.nbytes
    sizes = size_of_sum(func, (tensor, *args))
    assert sizes == (columns, rows * columns)
    properties = torch.cuda.get_device_properties(0)
    threads = properties.multi_processor_count * properties.max_threads_per_multi_processor
    scratch = scratch_bytes(columns, rows * columns, threads)
    semaphores = taken - scratch  # one for each of the blocks that share the outputs
    assert 0 < semaphores <= columns if scratch else semaphores == 0
