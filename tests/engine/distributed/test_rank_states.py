"""Random generators draw the same after a round trip through a file, and each rank gets its own states again."""

import io
from typing import Any

import torch

from tests.engine.distributed.test_snapshot import draw, seed_all
from tests.support.toys import OneOf
from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.engine.distributed.rank_states import RankStates
from torchtune_adaptive.engine.distributed.snapshot import RandomStates

CPU = torch.device("cpu")


def through_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def states_of(consensus: Consensus | None = None) -> RankStates:
    return RankStates(consensus or Consensus(), CPU)


def test_loading_leaves_generators_alone_and_they_are_restored_once() -> None:
    seed_all(3)
    saved = states_of().now()
    resumed = states_of()
    seed_all(4)
    resumed.load(saved)
    again = resumed.now()  # a run that ends before it draws saves what it has loaded
    drawn = draw()
    seed_all(4)
    assert drawn == draw()
    resumed.restore()
    first = draw()
    resumed.restore()
    assert draw() != first
    second = states_of()
    second.load(again)
    second.restore()
    assert draw() == first
    states_of().restore()  # of a run that was not resumed


def test_each_rank_gets_its_own_state_and_an_additional_one_keeps_its_generators() -> None:
    seed_all(1)
    first = states_of().now(longest_row_tokens=10)[0]
    expected_first = draw()
    seed_all(2)
    saved = through_file(states_of(OneOf(1, 2, first)).now(longest_row_tokens=20))
    expected_second = draw()
    assert [one["longest_row_tokens"] for one in saved] == [10, 20]
    for rank, (length, expected) in enumerate(((10, expected_first), (20, expected_second))):
        resumed = states_of(OneOf(rank, 2, first))
        own = resumed.load(saved)
        assert own is not None
        assert own["longest_row_tokens"] == length
        resumed.restore()
        assert draw() == expected
    additional = states_of(OneOf(2, 3, *saved))
    assert additional.load(saved) is None
    seed_all(3)
    expected = draw()
    seed_all(3)
    additional.restore()
    assert draw() == expected


def test_generators_that_a_state_lacks_are_left_alone() -> None:
    """For example, a state saved without NumPy."""
    seed_all(3)
    saved = RandomStates(CPU).state_dict()
    del saved["numpy"]
    expected = draw()
    seed_all(4)
    states = RandomStates(CPU)
    states.load_state_dict(saved)
    states.restore()
    after = draw()
    seed_all(4)
    assert after == [*expected[:2], *draw()[2:4], *expected[4:]]
