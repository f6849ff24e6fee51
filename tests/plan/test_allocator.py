"""The model of torch's caching allocator answers as torch's own does, after every call."""

import json
from typing import Any

import pytest
import torch

from tests.support.allocator_calls import (
    RECORDED,
    SETTINGS,
    Call,
    Setting,
    of_model,
    of_torch,
    prepared_streams,
    random_calls,
)
from torchtune_adaptive.plan.allocator import CachingAllocator

CONTENT = json.loads(RECORDED.read_text())


@pytest.mark.parametrize("name", SETTINGS)
def test_it_answers_as_torch_has_answered(name: str) -> None:
    calls = [Call(*call) for call in CONTENT["calls"]]
    assert list(of_model(calls, SETTINGS[name])) == CONTENT["figures"][name]


@pytest.mark.simulated_gpu
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("seed", range(10))
def test_it_answers_as_torch_does(seed: int, name: str) -> None:
    calls = random_calls(seed, 1500)
    for number, figures in enumerate(
        zip(of_model(calls, SETTINGS[name]), of_torch(calls, SETTINGS[name]), strict=True)
    ):
        assert figures[0] == figures[1], (number, calls[number])


@pytest.mark.simulated_gpu
@pytest.mark.parametrize("seed", range(8))
def test_each_block_lies_where_torch_puts_it(seed: int) -> None:
    """Of equal free blocks the one in the oldest segment is taken, whatever address the driver gave that."""
    streams = prepared_streams(Setting())
    allocator, blocks, tensors, segments = CachingAllocator(), list[Any](), list[Any](), dict[int, int]()
    for number, (name, value, stream) in enumerate(random_calls(seed, 1500)):
        if name == "empty_cache":
            torch.cuda.empty_cache()
            allocator.empty_cache()
        elif name == "free":
            allocator.free(blocks[value])
            tensors[value] = None
        else:
            blocks.append(allocator.allocate(value, stream))
            with torch.cuda.stream(streams[stream]):
                tensors.append(torch.empty(value, dtype=torch.uint8, device="cuda"))
            first = blocks[-1]
            while first.before:
                first = first.before
            address = tensors[-1].data_ptr()
            starts = ((one["address"], one["address"] + one["total_size"]) for one in torch.cuda.memory_snapshot())
            segment = next(start for start, end in starts if start <= address < end)
            assert segments.setdefault(first.address, segment) == segment, number
            assert blocks[-1].address - first.address == address - segment, number
