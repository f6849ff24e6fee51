"""The public API. Adding or removing a name must be a decision, so it needs a change of these tests."""

import dataclasses
import inspect

import torchtune_adaptive
from torchtune_adaptive import Probe, SearchResult, find_max_batch_size, testing


def test_the_package_offers_these_names() -> None:
    assert sorted(torchtune_adaptive.__all__) == [
        "CannotRecoverError",
        "FastestStep",
        "InputError",
        "MemoryEvent",
        "NothingFitsError",
        "Probe",
        "RecoverableStep",
        "SearchResult",
        "TokenSearchResult",
        "find_fastest",
        "find_max_batch_size",
        "find_max_tokens",
        "plan_max_batch_size",
    ]


def test_the_test_tool_offers_these_names() -> None:
    names = ["Fault", "faults_in", "kill_process", "out_of_memory", "wrap_micro_steps"]
    assert sorted(testing.__all__) == names


def test_find_max_batch_size_has_the_signature_that_is_promised() -> None:
    parameters = inspect.signature(find_max_batch_size).parameters
    assert {name: parameter.default for name, parameter in parameters.items()} == {
        "train_step": inspect.Parameter.empty,
        "make_batch": inspect.Parameter.empty,
        "model": inspect.Parameter.empty,
        "optimizer": inspect.Parameter.empty,
        "memory_limit": None,
        "strategy": "linear_extrapolation",
        "power_of_two": False,
        "margin": 0.05,
        "max_batch_size": None,
        "process_group": None,
    }
    positional = [name for name, parameter in parameters.items() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    assert positional == ["train_step", "make_batch"]


def test_results_carry_these_fields() -> None:
    of_probe, of_result = ({field.name for field in dataclasses.fields(kind)} for kind in (Probe, SearchResult))
    assert of_probe == {"batch_size", "fits", "peak_bytes", "phase_peak_bytes", "seconds", "failure"}
    assert of_result >= {"strategy", "exact_batch_size", "batch_size", "memory_limit_bytes", "margin", "world_size"}
    assert "probes" in of_result
