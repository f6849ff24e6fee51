"""What code allocates, by the allocator's own events, which PyTorch's profiler records."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def rises_by_events(run: Callable[[], Any]) -> tuple[Any, list[int]]:
    """What ``run`` returns, and the bytes that it has allocated, less those freed, after each event on the CPU.

    Copies of the random generator's state, which activation checkpointing keeps for each layer, are left out: no
    operation makes them, and with a GPU they are on the host too.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded:
        returned = run()
    assert recorded.profiler is not None
    assert recorded.profiler.kineto_results is not None
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    sizes = (event.nbytes() for event in events)  # pyright: ignore[reportAttributeAccessIssue]  # stub lacks it
    return returned, list(itertools.accumulate(size for size in sizes if abs(size) != torch.get_rng_state().nbytes))
