"""The user's function is called on rank 0 for all ranks; the batch never exceeds the maximum and never shrinks."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.increase_function import BatchIncreaseFunction
from torchtune_adaptive.schedule import GradientNorms, gradient_noise_scale
from torchtune_adaptive.training.batch.growth import BatchGrowth, gradient_norms, next_batch_size, plan_growth

HERE = __name__
NORMS = GradientNorms(small_samples=4, small_norm_squared=11.0, samples=8, norm_squared=6.0)  # noise scale 40


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


# ---- the decision for one epoch


@given(noise_scale=st.floats(0, 500), maximum=st.integers(1, 60))
def test_the_increase_of_a_measured_schedule_is_cut_to_the_maximum(noise_scale: float, maximum: int) -> None:
    schedule = gradient_noise_scale(max_factor=4, min_measurements=1)
    schedule.observe(GradientNorms(4, 1 + noise_scale / 4, 8, 1 + noise_scale / 8))
    growth = next_batch_size(schedule, epoch=1, batch_size=16, maximum=maximum)
    assert growth.batch_size == max(16, min(16 + schedule(1, 16), maximum))


def test_an_integer_of_numpy_is_an_answer_and_becomes_int() -> None:
    growth = next_batch_size(lambda *_: np.uint8(4), epoch=0, batch_size=4, maximum=8)  # pyright: ignore[reportArgumentType]
    assert growth.batch_size == 8
    assert type(growth.increment) is int


def answers(epoch: int, current_batch_size: int) -> Any:
    return ANSWERS[epoch]


ANSWERS = [0.5, True, np.bool_(True), "two\nlines", -4]


@pytest.mark.parametrize("epoch", range(len(ANSWERS)))
def test_bad_answer_is_refused_quoting_value_epoch_and_function(epoch: int) -> None:
    rule = "at least 0" if ANSWERS[epoch] == -4 else "an integer"
    with pytest.raises(InputError) as caught:
        next_batch_size(answers, epoch=epoch, batch_size=16, maximum=99)
    assert str(caught.value) == (
        f"`batch_increase_function` must return {rule}, but {HERE}.answers returned {ANSWERS[epoch]!r} at epoch"
        f" {epoch} with batch size 16 instead."
    )


# ---- all epochs in advance


def raises_at_three(epoch: int, current_batch_size: int) -> int:
    return 8 // (epoch - 3) * 0


def test_raising_function_is_refused_quoting_its_error() -> None:
    with pytest.raises(InputError) as caught:
        plan_growth(raises_at_three, total_epochs=9, batch_size=4, maximum=99)
    assert str(caught.value) == (
        f"`batch_increase_function` {HERE}.raises_at_three failed at epoch 3 with batch size 4: ZeroDivisionError:"
        " integer division or modulo by zero."
    )
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


class Uncopyable:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int, current_batch_size: int) -> int:
        self.calls += 1
        return self.calls

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("cannot be copied")


def test_function_that_cannot_be_copied_is_called_itself() -> None:
    uncopyable = Uncopyable()
    assert plan_growth(uncopyable, total_epochs=2, batch_size=4, maximum=99) == [5, 7]
    assert uncopyable.calls == 2


@given(
    increments=st.lists(st.integers(0, 100), min_size=1, max_size=20),
    start=st.integers(1, 64),
    room=st.integers(-9, 200),
)
def test_planned_sizes_never_grow_above_the_maximum_and_never_shrink(
    increments: list[int], start: int, room: int
) -> None:
    sizes = plan_growth(
        lambda epoch, _: increments[epoch], total_epochs=len(increments), batch_size=start, maximum=start + room
    )
    for before, size, increment in zip([start, *sizes], sizes, increments, strict=False):
        assert size == before + (increment if before + increment <= start + room else 0)


# ---- sizes of a run


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


def test_rank_zero_answers_for_all_ranks() -> None:
    function = Counting()
    consensus: Any = SimpleNamespace(ask_rank_zero=lambda ask: "the answer of rank 0")
    growth = growth_by(function, consensus=consensus)
    assert growth.sizes(8) == growth.next(2, 8) == "the answer of rank 0"
    assert function.asked == []


# ---- the norms of a measured step


@pytest.mark.parametrize("ranks", [1, 4])
def test_norms_are_those_of_the_mean_gradient_over_the_weight_of_all_ranks(ranks: int) -> None:
    """Gradients are sums over tokens, divided by the ranks; parameters are in shards."""
    small_shards, shards = (torch.randn(ranks, 6, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    squares = [(part / ranks).square().sum().item() for part in (small_shards, shards)]
    norms = gradient_norms([squares[0], 20.0, squares[1]], weight=50, samples=8, ranks=ranks)
    assert norms == GradientNorms(
        small_samples=4,
        small_norm_squared=pytest.approx((small_shards / 20).square().sum().item()),  # pyright: ignore[reportArgumentType]
        samples=8,
        norm_squared=pytest.approx((shards / 50).square().sum().item()),  # pyright: ignore[reportArgumentType]
    )


def test_a_small_batch_without_weight_gives_no_norms() -> None:
    assert gradient_norms([0.0, 0.0, 3.0], weight=50, samples=8, ranks=2) is None


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
        "`batch_increase_function` cannot load the resumed run's state {'trace': 0.1}: KeyError: 'asked'."
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
