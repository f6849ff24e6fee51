"""Training on two machines, which are two networks of Linux: a cable that is bad or cut, and machines that end."""

from collections.abc import Callable

import pytest

from tests.support.cable_scenarios import SCENARIOS, Outcome, Scenarios
from tests.support.two_machines import missing

pytestmark = pytest.mark.exhaustive
GOES_ON = {"undisturbed", "slow", "lossy", "cut_for_a_moment", "unplugged_for_a_moment"}
# docs/design.md: 30 s, and 5 s until an error of torch is shown. The rest is for a busy machine.
LONGEST_S = 60.0


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory: pytest.TempPathFactory) -> Scenarios:
    if reason := missing():
        pytest.skip(reason)
    return Scenarios(tmp_path_factory.mktemp("cable"))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_a_run_goes_on_or_ends_soon_with_a_sentence_on_each_machine(
    scenario: Callable[[Scenarios], Outcome], scenarios: Scenarios
) -> None:
    outcome = scenario(scenarios)
    assert outcome.difference == ""
    if scenario.__name__ in GOES_ON:
        assert outcome.seconds is None
        assert outcome.statuses == [0, 0]
        return
    assert outcome.seconds is not None
    assert max(outcome.seconds) < LONGEST_S
    assert 0 not in outcome.statuses
    silent = {"side_killed": 0, "rank_killed": 1}.get(scenario.__name__)  # has no rank left
    assert all(said for node, said in enumerate(outcome.sentences) if node != silent), outcome.sentences
