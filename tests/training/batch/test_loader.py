"""Each optimizer step has as many samples as its batch size gives; none is lost at an epoch's end or by a resume."""

from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data.distributed import DistributedSampler

from tests.support.loaders import step_loader
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.training.batch.loader import StepLoader
from torchtune_adaptive.training.batch.row_format import Row

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # by torchdata 0.11


def dataset_of(samples: int, *, longest: int | None = None) -> Any:
    """Rows whose tokens are all their index in the data set; two tokens each, five at the index ``longest``."""
    return [{"tokens": [place] * (5 if place == longest else 2)} for place in range(samples)]


global_loader = partial(step_loader, is_global=True)


def places(rows: list[Row]) -> list[int]:
    return [row["tokens"][0] for row in rows]


def steps_of(loader: StepLoader, epoch: int = 0) -> list[list[int]]:
    """The indices of the samples of each step."""
    return [places(samples.rows) for samples in loader.steps(epoch)]


# ---- the samples of a step


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    samples=st.integers(1, 60),
    batch_size=st.integers(1, 9),
    micro_steps=st.integers(1, 4),
    ranks=st.integers(1, 4),
    most=st.none() | st.integers(1, 5),
)
def test_an_epoch_has_the_promised_number_of_steps_and_each_the_promised_number_of_samples(
    samples: int, batch_size: int, micro_steps: int, ranks: int, most: int | None
) -> None:
    options: dict[str, Any] = {"batch_size": batch_size, "max_steps_per_epoch": most, "ranks": ranks}
    loader = step_loader(dataset_of(samples), micro_steps=micro_steps, **options)
    steps = list(loader.steps(0))
    assert loader.samples_per_step == batch_size * micro_steps * ranks
    assert (len(steps), loader.rows_per_micro_step) == (loader.steps_per_epoch, batch_size)
    for step in steps:
        assert step.num_samples == loader.samples_per_step
        assert len(step.rows) == step.largest_share == loader.rows_per_step
    assert loader.steps_per_epoch_at(loader.largest_batch_size or 1) == (1 if loader.largest_batch_size else 0)
    assert loader.steps_per_epoch_at(loader.largest_batch_size + 1) == 0


@settings(derandomize=True, deadline=None, max_examples=40)
@given(samples=st.integers(1, 60), ranks=st.integers(1, 4), more=st.integers(0, 9), shuffle=st.booleans())
def test_each_global_batch_is_the_next_slice_of_one_order_shared_out_over_the_ranks(
    samples: int, ranks: int, more: int, shuffle: bool
) -> None:
    size, dataset = ranks + more, dataset_of(samples)
    loaders = [
        global_loader(dataset, batch_size=size, ranks=ranks, rank=rank, shuffle=shuffle) for rank in range(ranks)
    ]
    assert {(loader.rows_per_step, loader.rows_per_micro_step) for loader in loaders} == {(-(-size // ranks),) * 2}
    assert {loader.largest_batch_size for loader in loaders} == {samples}
    steps = [list(loader.steps(1)) for loader in loaders]
    assert [len(of_rank) for of_rank in steps] == [samples // size] * ranks
    whole: Any = DistributedSampler(dataset, 1, 0, shuffle=shuffle, seed=3)
    whole.set_epoch(1)
    order = list(whole)
    for index, of_ranks in enumerate(zip(*steps, strict=True)):
        assert {step.num_samples for step in of_ranks} == {size}
        assert {step.largest_share for step in of_ranks} == {max(len(step.rows) for step in of_ranks)}
        taken = [place for step in of_ranks for place in places(step.rows)]
        assert sorted(taken) == sorted(order[index * size : (index + 1) * size])


def test_fewer_samples_than_ranks_are_refused() -> None:
    with pytest.raises(InputError) as refused:
        global_loader(dataset_of(8), batch_size=2, ranks=3)
    assert str(refused.value) == ("`global_batch_size` must be at least the number of ranks (3), but is 2 instead.")


# ---- one epoch after another


def test_samples_left_over_at_an_epochs_end_begin_the_first_step_of_the_next_epoch() -> None:
    loader = step_loader(dataset_of(17), batch_size=2, micro_steps=3, ranks=1)
    assert steps_of(loader, 0) == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]  # 12 to 15 are left, 16 fills no batch
    first, second = loader.steps(1)
    assert places(first.rows) == [12, 13, 14, 15, 0, 1, 2, 3, 4, 5]
    assert (first.largest_share, first.num_samples) == (10, 10)
    assert places(second.rows) == [6, 7, 8, 9, 10, 11]


def test_left_over_samples_are_kept_when_the_batch_size_changes() -> None:
    loader = step_loader(dataset_of(10), batch_size=2, micro_steps=2)
    assert steps_of(loader, 0) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    loader.set_batch_size(3)
    assert steps_of(loader, 1) == [[8, 9, 0, 1, 2, 3, 4, 5]]


def test_a_bound_on_steps_ends_the_epoch_and_leaves_nothing_over() -> None:
    loader = step_loader(dataset_of(20), batch_size=2, micro_steps=2, max_steps_per_epoch=2)
    assert loader.steps_per_epoch == 2
    assert steps_of(loader, 0) == steps_of(loader, 1) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert loader.state_dict()["left_over"] == (20, 20)
    loader.set_batch_size(10)
    assert loader.steps_per_epoch == 1


@settings(derandomize=True, deadline=None, max_examples=40)
@given(ranks=st.integers(1, 4), more=st.integers(0, 9))
def test_both_halves_of_a_step_know_their_samples_over_all_ranks(ranks: int, more: int) -> None:
    size = 2 * ranks + more
    loaders = [global_loader(dataset_of(size), batch_size=size, ranks=ranks, rank=rank) for rank in range(ranks)]
    steps = [next(loader.steps(0)) for loader in loaders]
    for step in steps:
        first, second = step.halves()
        assert first.rows + second.rows == step.rows
        assert len(first.rows) == (len(step.rows) + 1) // 2
    for of_ranks in zip(*(step.halves() for step in steps), strict=True):
        lengths = [len(half.rows) for half in of_ranks]
        assert {(half.num_samples, half.largest_share) for half in of_ranks} == {(sum(lengths), max(lengths))}
