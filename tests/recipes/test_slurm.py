"""Jobs of a real Slurm by the script that ships: whatever becomes of them, no training is lost."""

from collections.abc import Callable, Iterator

import pytest

from tests.support.slurm import cluster, missing
from tests.support.slurm_scenarios import SCENARIOS, Outcome, Scenarios

pytestmark = pytest.mark.exhaustive
REQUEUED = "REQUEUED, then COMPLETED, 0:0"
# By the scenario's name: the states of the job, and the checkpoint from which it went on.
WANTED = {
    "one_node": ("COMPLETED, 0:0", "the beginning"),
    "two_nodes": ("COMPLETED, 0:0", "the beginning"),
    "requeued": (REQUEUED, "step_6"),
    "requeued_on_two_nodes": (REQUEUED, "step_6"),
    "signal_before_the_limit": (REQUEUED, "step_6"),
    "step_too_long": (REQUEUED, "step_4"),
    "node_down": (REQUEUED, "step_4"),
    "cancelled": ("CANCELLED, then COMPLETED, 0:0", "step_6"),
    "out_of_memory": ("COMPLETED, 0:0", "the beginning"),
}


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scenarios]:
    if reason := missing():
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp("slurm")
    with cluster(directory / "cluster"):
        yield Scenarios(directory)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_a_job_goes_on_as_if_nothing_had_happened(
    scenario: Callable[[Scenarios], Outcome], scenarios: Scenarios
) -> None:
    outcome = scenario(scenarios)
    assert (outcome.states, outcome.resumed_from) == WANTED[scenario.__name__]
    assert outcome.difference == ""
