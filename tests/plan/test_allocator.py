"""The model of torch's caching allocator answers as torch's own does, after every call."""

import json

import pytest

from tests.support.allocator_calls import RECORDED, SETTINGS, Call, of_model, of_torch, random_calls

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
