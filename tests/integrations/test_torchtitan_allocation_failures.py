"""torchtitan's trainer recovers from errors of torch's own allocator for CUDA, on the simulated GPU."""

# pyright: reportMissingImports=false

import gc
import os
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import run_on_ranks

pytest.importorskip("torchtitan", reason="`make simulated-gpu` runs this file")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch about its own modules
    from tests.integrations.titan_runs import ROWS, Run, plain_config, recovering, train

pytestmark = [pytest.mark.simulated_gpu, pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]

SMALL = ROWS // 2
TOKENS = 512  # of a row, so that the memory of a step follows the rows


def _train(size: int, *, limit: int | None = None, **options: Any) -> tuple[Run, int, int]:
    """Train with micro-batches of ``size`` rows; ``limit`` in bytes. Also returns reserved bytes (peak), and errors."""
    gc.collect()  # of the trainer before
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    device = torch.cuda.current_device()
    errors = torch.cuda.memory_stats(device)["num_ooms"]
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(1.0 if limit is None else limit / total)
    config = plain_config(**options)
    config.training.seq_len = TOKENS
    run = train(recovering(config, size))
    return run, torch.cuda.max_memory_reserved(), torch.cuda.memory_stats(device)["num_ooms"] - errors


def recovery(rank: int, accumulate: int, replicas: int) -> tuple[Any, ...]:
    """What happened, in how many errors of the allocator, and whether training equals one told the smaller size."""
    torch.cuda.set_device(rank)
    os.environ["WORLD_SIZE"] = str(dist.get_world_size())
    options = {"accumulate": accumulate, "replicas": replicas}
    (large, high, _), (told, low, _) = (_train(size, **options) for size in (ROWS, SMALL))
    is_limited = rank == dist.get_world_size() - 1
    ours, _, errors = _train(ROWS, limit=low + (high - low) // 4 if is_limited else None, **options)
    events = [(one.step, one.before, one.after, one.ranks) for one in ours.events]
    return events, errors, ours.equals(told), ours.equals(large)


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize(("world_size", "replicas"), [(1, 1), (2, 1), (2, 2)], ids=["one process", "fsdp2", "replicas"])
def test_an_allocation_failure_changes_only_the_micro_batches(world_size: int, replicas: int, accumulate: int) -> None:
    last = world_size - 1
    # With several ranks the size has fitted on another one, so that the second step tries it again.
    events = [(step, ROWS, SMALL, (last,)) for step in (range(1, 3) if last else range(1, 2))]
    errors = [0] * last + [len(events)]
    assert run_on_ranks(recovery, world_size, accumulate, replicas) == [(events, one, True, False) for one in errors]
