"""The user's function is called on rank 0 for all ranks, up to a maximum, and its state is saved and loaded."""

from types import SimpleNamespace
from typing import Any

import pytest

from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.training.batch.growth import BatchGrowth
from torchtune_adaptive.training.batch.increase_function import BatchIncreaseFunction
from torchtune_adaptive.training.batch.noise_scale import GradientNorms, gradient_noise_scale

NORMS = GradientNorms(small_samples=4, small_norm_squared=11.0, samples=8, norm_squared=6.0)  # noise scale 40


class SecondRank(Consensus):
    """Rank 1 of two, which gets the answers of rank 0."""

    def __init__(self, *answers: Any) -> None:
        super().__init__()
        self._answers = list(answers)

    @property
    def rank(self) -> int:
        return 1

    def from_rank_zero(self, value: Any) -> Any:
        return self._answers.pop(0)


class Counting:
    """Grows by one more at each call; remembers its calls, which are its state."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def __call__(self, epoch: int, current_batch_size: int) -> int:
        self.asked.append((epoch, current_batch_size))
        return len(self.asked)

    def state_dict(self) -> dict[str, Any]:
        return {"asked": [list(one) for one in self.asked]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.asked = [(epoch, size) for epoch, size in state_dict["asked"]]


def grows_by_four(epoch: int, current_batch_size: int) -> int:
    return 4


def growth_by(
    function: BatchIncreaseFunction | None, *, maximum: int = 10**6, consensus: Consensus | None = None
) -> BatchGrowth:
    return BatchGrowth(
        function, total_epochs=3, samples_per_unit=2, consensus=consensus or Consensus(), maximum=maximum
    )


# ---- sizes


def test_without_a_function_the_batch_stays() -> None:
    growth = growth_by(None)
    assert growth.grows is False
    assert not growth.measures(0)
    assert growth.sizes(8) == [8, 8, 8]
    assert growth.next(0, 8) is None
    assert growth.figures() == {}


def test_the_sizes_of_all_epochs_are_known_before_the_first_and_keep_to_the_maximum_once_there_is_one() -> None:
    growth = growth_by(grows_by_four)
    assert growth.grows is True
    assert not growth.measures(0)
    assert growth.sizes(8) == [12, 16, 20]
    growth.maximum = 17
    assert growth.sizes(8) == [12, 16, 16]


def test_computing_the_sizes_in_advance_does_not_change_a_function_with_a_state() -> None:
    function = Counting()
    growth = growth_by(function, maximum=100)
    assert growth.sizes(8) == [9, 11, 14]
    assert function.asked == []
    sizes, size = [], 8
    for epoch in range(3):
        found = growth.next(epoch, size)
        assert found is not None
        size = found.batch_size
        sizes.append(size)
    assert sizes == [9, 11, 14]
    assert function.asked == [(0, 8), (1, 9), (2, 11)]


def test_other_ranks_take_rank_zeros_answers_and_never_ask_the_function() -> None:
    function = Counting()
    rank_zero = growth_by(Counting(), maximum=100)
    decided = rank_zero.next(2, 8)
    growth = growth_by(function, maximum=100, consensus=SecondRank([9, 9], decided))
    assert growth.sizes(8) == [9, 9]
    assert growth.next(2, 8) == decided
    assert function.asked == []


# ---- measurements


def test_a_measured_schedule_observes_every_nth_step_from_the_first_on() -> None:
    schedule = gradient_noise_scale(every_steps=3, min_measurements=1)
    growth = growth_by(schedule, maximum=100)
    assert [growth.measures(step) for step in range(7)] == [True, False, False, True, False, False, True]
    assert growth.figures() == {}
    growth.observe(None)  # a small batch without weight
    assert growth.figures() == {}
    growth.observe(NORMS)
    assert growth.figures() == {"gradient_noise_scale": 40.0}


def test_growth_by_the_noise_scale_ends_there_without_further_measurements() -> None:
    """The noise scale counts samples of a whole step, of which there are two per unit of the batch size here."""
    growth = growth_by(gradient_noise_scale(min_measurements=1))
    growth.observe(NORMS)
    sizes = [8]
    for epoch in range(3):
        found = growth.next(epoch, sizes[-1])
        assert found is not None
        sizes.append(found.batch_size)
    assert sizes == [8, 16, 20, 20]


# ---- the state of a function


def test_a_function_with_a_state_resumes_from_it() -> None:
    function, resumed = Counting(), Counting()
    growth = growth_by(function, maximum=100)
    growth.next(0, 8)
    assert growth.state_dict() == {"schedule": {"asked": [[0, 8]]}}
    growth_by(resumed).load_state_dict(growth.state_dict())
    assert resumed.asked == [(0, 8)]


@pytest.mark.parametrize("function", [None, grows_by_four])
def test_a_function_without_a_state_saves_none_and_ignores_a_loaded_one(function: Any) -> None:
    growth = growth_by(function)
    assert growth.state_dict() == {"schedule": None}
    growth.load_state_dict({"schedule": {"of": "another function"}})
    assert growth.state_dict() == {"schedule": None}


def test_a_state_of_another_function_is_refused_and_quoted() -> None:
    growth = growth_by(Counting())
    with pytest.raises(InputError) as refused:
        growth.load_state_dict({"schedule": {"trace": 0.1}})
    assert str(refused.value) == (
        "`batch_increase_function` must accept the state of the resumed run, but does not accept {'trace': 0.1}:"
        " KeyError: 'asked'."
    )


# ---- states that could not be saved


def raises_in_its_state() -> dict[str, Any]:
    raise AttributeError("no state yet")


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        (lambda: {1: (2, 3)}, "but returns {1: (2, 3)}, which is loaded as {'1': [2, 3]}."),
        (lambda: {"bytes": b"1"}, "but fails: TypeError: Object of type bytes is not JSON serializable."),
        (raises_in_its_state, "but fails: AttributeError: no state yet."),
    ],
)
def test_a_state_that_fails_or_that_json_changes_is_refused(state: Any, sentence: str) -> None:
    function: Any = SimpleNamespace(state_dict=state, load_state_dict=lambda state: None)
    with pytest.raises(InputError) as caught:
        growth_by(function)
    assert str(caught.value).endswith(sentence)
