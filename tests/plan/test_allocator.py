"""The model of torch's caching allocator answers as torch's own does, after every call."""

import json

import pytest

from tests.support.allocator_calls import RECORDED, SETTINGS, Call, of_model, of_torch, random_calls
from torchtune_adaptive.plan.allocator import MIB, CachingAllocator, DoesNotFitError

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


def test_peaks_are_those_since_the_last_reset() -> None:
    allocator = CachingAllocator()
    first, second = allocator.allocate(30 * MIB), allocator.allocate(3 * MIB)
    allocator.free(first)
    allocator.empty_cache()
    assert (allocator.peak_allocated_bytes, allocator.peak_reserved_bytes) == (33 * MIB, 50 * MIB)
    allocator.reset_peaks()
    allocator.free(second)
    assert (allocator.peak_allocated_bytes, allocator.peak_reserved_bytes) == (3 * MIB, 20 * MIB)


def test_what_does_not_fit_leaves_what_does() -> None:
    allocator = CachingAllocator(limit_bytes=40 * MIB)
    block = allocator.allocate(20 * MIB)
    with pytest.raises(DoesNotFitError):
        allocator.allocate(21 * MIB)
    assert (allocator.allocated_bytes, allocator.retries) == (20 * MIB, 1)
    allocator.free(block)
    allocator.allocate(39 * MIB)  # releases the free segment first
    assert (allocator.reserved_bytes, allocator.retries) == (40 * MIB, 2)
