"""Random calls of an allocator, and what torch's own allocator for CUDA and its model answer to them.

python -m tests.support.allocator_calls  # on a GPU or a simulated one: records tests/plan/allocator_calls.json
"""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchtune_adaptive.plan.allocator import MIB, CachingAllocator, DoesNotFitError

RECORDED = Path(__file__).parents[1] / "plan" / "allocator_calls.json"
NUM_STREAMS = 3


class Call(NamedTuple):
    """``allocate`` a number of bytes in a stream, ``free`` the value-th allocation, or ``empty_cache``."""

    name: str
    value: int = 0
    stream: int = 0


class Setting(NamedTuple):
    """How the allocator is set."""

    limit_bytes: int | None = None
    expandable: bool = False


SETTINGS = {
    "no limit": Setting(),
    "limit": Setting(2 * 2**30 + 12345),
    "expandable": Setting(expandable=True),
    "expandable, limit": Setting(2 * 2**30 + 12345, expandable=True),
}
Figures = list[int]  # allocated and reserved bytes, retries, and whether the call was refused


def random_calls(seed: int, number: int) -> list[Call]:
    """Calls for blocks of all classes of sizes, many of equal size."""
    rng = random.Random(seed)
    streams = rng.choice([1, NUM_STREAMS])
    most_held, calls, held = rng.randint(5, 120), list[Call](), list[int]()
    allocated = 0
    while len(calls) < number:
        if rng.random() < 0.002:
            calls.append(Call("empty_cache"))
        elif held and (rng.random() < 0.15 or rng.random() < 0.5 * len(held) / most_held):
            calls.append(Call("free", held.pop(rng.randrange(len(held)))))
        else:
            calls.append(Call("allocate", _random_size(rng), rng.randrange(streams)))
            held.append(allocated)
            allocated += 1
    return calls


def _random_size(rng: random.Random) -> int:
    kind = rng.random()
    if kind < 0.35:
        return rng.randint(1, MIB)
    if kind < 0.65:
        return rng.randint(MIB - 512, 12 * MIB)
    if kind < 0.9:
        return rng.choice([2, 3, 4, 8, 10, 12, 16, 20, 24, 32, 64]) * MIB
    return rng.randint(10 * MIB, 700 * MIB)


def of_model(calls: Sequence[Call], setting: Setting) -> Iterator[Figures]:
    """The figures of the model after each call."""
    limit_bytes = float("inf") if setting.limit_bytes is None else setting.limit_bytes
    allocator = CachingAllocator(limit_bytes=limit_bytes, expandable=setting.expandable)
    blocks: list[Any] = []
    for name, value, stream in calls:
        refused = False
        if name == "empty_cache":
            allocator.empty_cache()
        elif name == "free":
            if blocks[value] is not None:
                allocator.free(blocks[value])
        else:
            try:
                blocks.append(allocator.allocate(value, stream))
            except DoesNotFitError:
                blocks.append(None)
                refused = True
        yield [allocator.allocated_bytes, allocator.reserved_bytes, allocator.retries, int(refused)]


def prepared_streams(setting: Setting) -> list[torch.cuda.Stream]:
    """Streams of torch's allocator, which is set so and holds nothing."""
    torch._C._cuda_clearCublasWorkspaces()  # which matrix products of other tests have left
    torch.cuda.empty_cache()
    torch.cuda.memory._set_allocator_settings(f"expandable_segments:{setting.expandable}")
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (setting.limit_bytes or total_bytes) / total_bytes))
    return [torch.cuda.default_stream(), *(torch.cuda.Stream() for _ in range(NUM_STREAMS - 1))]


def of_torch(calls: Sequence[Call], setting: Setting) -> Iterator[Figures]:
    """The figures of torch's allocator after each call."""
    streams = prepared_streams(setting)
    retries = torch.cuda.memory_stats()["num_alloc_retries"]
    tensors: list[torch.Tensor | None] = []
    for name, value, stream in calls:
        refused = False
        if name == "empty_cache":
            torch.cuda.empty_cache()
        elif name == "free":
            tensors[value] = None
        else:
            try:
                with torch.cuda.stream(streams[stream]):
                    tensors.append(torch.empty(value, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                tensors.append(None)
                refused = True
        now = torch.cuda.memory_stats()["num_alloc_retries"] - retries
        yield [torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), now, int(refused)]


def record(*, seed: int = 0, number: int = 150) -> None:
    """Write calls, and torch's figures after each, to ``RECORDED``."""
    calls = random_calls(seed, number)
    content = {
        "torch": torch.__version__,
        "calls": calls,
        "figures": {name: list(of_torch(calls, setting)) for name, setting in SETTINGS.items()},
    }
    RECORDED.write_text(json.dumps(content) + "\n")


if __name__ == "__main__":
    record()
