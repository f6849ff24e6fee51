"""Each optimizer step has as many samples as its batch size gives; none is lost at an epoch's end or by a resume."""

import itertools
import re
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import SequentialSampler
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from tests.support.loaders import step_loader
from tests.support.toys import Samples
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.training.batch.loader import GlobalBatchSampler, StepLoader, check_fills_step, check_sampler
from torchtune_adaptive.training.batch.row_format import Row


def dataset_of(samples: int, *, longest: int | None = None) -> Any:
    """Rows whose tokens are all their index in the data set; two tokens each, five at the index ``longest``."""
    rows = [[place] * (5 if place == longest else 2) for place in range(samples)]
    return [{"tokens": row, "labels": row} for row in rows]


global_loader = partial(step_loader, is_global=True)


def places(rows: list[Row]) -> list[int]:
    return [row["tokens"][0] for row in rows]


def steps_of(loader: StepLoader, epoch: int = 0) -> list[list[int]]:
    """The indices of the samples of each step."""
    return [places(samples.rows) for samples in loader.steps(epoch)]


# ---- samples that cannot be used


class LastFails(list[Any]):
    """Samples, of which reading the last one raises ``error``."""

    def __init__(self, samples: list[Any], error: Exception) -> None:
        super().__init__(samples)
        self._error = error

    def __getitem__(self, index: Any) -> Any:
        if index == len(self) - 1:
            raise self._error
        return super().__getitem__(index)


@pytest.mark.parametrize("is_global", [True, False])
@pytest.mark.parametrize(
    ("dataset", "sentence"),
    [
        (dataset_of(8, longest=7), "`dataset` has 5 tokens in sample 7, but the model takes at most 4; set"),
        (LastFails(dataset_of(8), KeyError("output")), "`dataset` cannot load sample 7: KeyError: 'output'."),
        (
            LastFails(dataset_of(8), StopIteration()),  # which must not end the epoch
            "`dataset` ended an epoch after 3 of 4 steps: a sample raised StopIteration.",
        ),
        (
            [*dataset_of(7), {"tokens": [7, 7], "text": ""}],
            "Samples of `dataset` need tokens, labels, but sample 7 has tokens, text.",
        ),
        ([*dataset_of(7), None], "Samples of `dataset` need tokens, labels, but sample 7 is None."),
    ],
)
def test_a_sample_that_cannot_be_used_is_refused_by_its_number(dataset: Any, sentence: str, is_global: bool) -> None:
    steps = step_loader(dataset, batch_size=2, longest=4, is_global=is_global).steps(0)
    assert [places(next(steps).rows) for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}"):
        next(steps)


# ---- the samples of a step


@settings(max_examples=40)
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


@settings(max_examples=40)
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


@settings(max_examples=100)
@given(
    samples=st.integers(1, 60),
    ranks=st.integers(1, 5),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**31),
    times=st.integers(1, 4),
    epoch=st.integers(0, 3),
)
def test_with_equal_samples_on_each_rank_steps_are_those_of_the_stock_sampler(
    samples: int, ranks: int, shuffle: bool, seed: int, times: int, epoch: int
) -> None:
    dataset: Any = range(samples)
    for rank in range(ranks):
        stock: Any = StatefulDistributedSampler(dataset, ranks, rank, shuffle, seed)
        stock.set_epoch(epoch)
        sampler = GlobalBatchSampler(dataset, ranks, rank, shuffle, seed)
        sampler.samples_per_step = times * ranks
        sampler.set_epoch(epoch)
        assert list(sampler) == list(stock)[: samples // (times * ranks) * times]
        assert len(sampler) == len(list(sampler))


def test_fewer_samples_than_ranks_are_refused() -> None:
    with pytest.raises(InputError) as refused:
        global_loader(dataset_of(8), batch_size=2, ranks=3)
    assert str(refused.value) == ("`global_batch_size` must be at least the number of ranks (3), but is 2 instead.")


# ---- one epoch after another


@pytest.mark.parametrize(("batch_size", "rows"), [(2, 10), (3, 13)], ids=["same size", "larger batch"])
def test_samples_left_over_at_an_epochs_end_begin_the_first_step_of_the_next_epoch(batch_size: int, rows: int) -> None:
    loader = step_loader(dataset_of(17), batch_size=2, micro_steps=3)
    assert steps_of(loader, 0) == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]  # 12 to 15 are left, 16 fills no batch
    loader.set_batch_size(batch_size)
    first, *others = loader.steps(1)
    assert places(first.rows) == [12, 13, 14, 15, *range(rows - 4)]
    assert (first.largest_share, first.num_samples) == (rows, rows)
    assert [places(one.rows) for one in others] == [list(range(6, 12))] * (batch_size == 2)


def test_a_bound_on_steps_ends_the_epoch_and_leaves_nothing_over() -> None:
    loader = step_loader(dataset_of(20), batch_size=2, micro_steps=2, max_steps_per_epoch=2)
    assert loader.steps_per_epoch == 2
    assert steps_of(loader, 0) == steps_of(loader, 1) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert loader.state_dict()["left_over"] == (20, 20)
    loader.set_batch_size(10)
    assert loader.steps_per_epoch == 1


@settings(max_examples=40)
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


# ---- samplers of one's own


class Backwards(StatefulDistributedSampler):
    """An order of its own."""

    def __iter__(self) -> Any:
        return iter(range(len(self))[::-1])


def test_a_sampler_whose_order_cannot_be_kept_is_refused() -> None:
    dataset = dataset_of(4)
    options: dict[str, Any] = {"num_replicas": 1, "rank": 0}
    for sampler in (StatefulDistributedSampler(dataset, **options), DistributedSampler(dataset, **options)):
        check_sampler(sampler, is_global=True)
    check_sampler(Backwards(dataset, **options), is_global=False)
    with pytest.raises(InputError, match="`global_batch_size` needs torchtune's sampler: it would not keep the order"):
        check_sampler(Backwards(dataset, **options), is_global=True)
    with pytest.raises(InputError, match="must have a `DistributedSampler`, but has a SequentialSampler instead"):
        check_sampler(SequentialSampler(dataset), is_global=False)


# ---- samples that are missing


def test_a_data_set_that_fills_no_step_is_refused() -> None:
    loader = step_loader(dataset_of(23), batch_size=3, micro_steps=2, ranks=2)
    check_fills_step(loader, 6)
    with pytest.raises(InputError) as refused:
        check_fills_step(loader, 7)
    assert str(refused.value) == (
        "`dataset` has 23 samples, too few for one optimizer step (7 rows * 2 micro-steps * 2 ranks = 28 samples per"
        " optimizer step)."
    )
    loader = global_loader(dataset_of(23), batch_size=3, ranks=2)
    check_fills_step(loader, 23)
    with pytest.raises(InputError) as refused:
        check_fills_step(loader, 24)
    assert str(refused.value) == (
        "`dataset` has 23 samples, too few for one optimizer step (24 samples per optimizer step on 2 ranks)."
    )


# ---- resumed on other data


@pytest.mark.parametrize(
    ("samples", "ranks", "is_global", "rows"),
    [(40, 2, False, 2 + 1), (42, 2, False, 1), (40, 1, False, 1), (40, 2, True, 3)],
    ids=["same", "other data", "other ranks", "a batch in another unit"],
)
def test_a_run_on_other_data_or_ranks_drops_left_over_samples(
    samples: int, ranks: int, is_global: bool, rows: int
) -> None:
    """In another unit too: otherwise the first step would have different numbers of rows on the ranks."""
    loader = step_loader(dataset_of(40), batch_size=2, micro_steps=3, ranks=2)
    steps_of(loader, 0)
    assert loader.state_dict()["left_over"] == (18, 20)
    batch_size = 5 if is_global else 1
    resumed = step_loader(dataset_of(samples), batch_size=batch_size, ranks=ranks, is_global=is_global)
    resumed.load_state_dict(loader.state_dict(), epoch=0)
    first = next(resumed.steps(1))
    assert len(first.rows) == rows
    assert first.num_samples == (5 if is_global else rows * ranks)


# ---- within an epoch


@settings(max_examples=60)
@given(
    is_global=st.booleans(),
    more=st.integers(0, 40),
    ranks=st.integers(1, 3),
    shuffle=st.booleans(),
    most=st.none() | st.integers(1, 3),
    data=st.data(),
)
def test_a_run_resumed_after_any_step_has_the_steps_of_an_uninterrupted_one(
    is_global: bool, more: int, ranks: int, shuffle: bool, most: int | None, data: st.DataObject
) -> None:
    """This holds for the epoch that it resumes in and for later ones; steps already done are not read again."""
    size, micro_steps = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    options: dict[str, Any] = {"ranks": ranks, "shuffle": shuffle, "max_steps_per_epoch": most}
    options["rank"] = data.draw(st.integers(0, ranks - 1))
    dataset = dataset_of(size * micro_steps * ranks + more)

    def make() -> StepLoader:
        if is_global:
            return global_loader(dataset, batch_size=size + ranks - 1, **options)
        return step_loader(dataset, batch_size=size, micro_steps=micro_steps, **options)

    whole = make()
    expected = [steps_of(whole, epoch) for epoch in range(3)]
    interrupted = make()
    epoch = data.draw(st.integers(0, 1))
    for before in range(epoch):
        steps_of(interrupted, before)
    done = data.draw(st.integers(0, len(expected[epoch])))  # 0: after the epoch before
    steps = interrupted.steps(epoch)
    taken = [places(next(steps).rows) for _ in range(done)]
    assert interrupted.steps_done == done
    state = interrupted.state_dict()
    resumed = make()
    resumed.load_state_dict(state, epoch=epoch - 1)
    assert resumed.steps_done == done
    assert resumed.state_dict() == state
    assert taken + steps_of(resumed, epoch) == expected[epoch]
    assert resumed.steps_done == 0
    assert steps_of(resumed, epoch + 1) == expected[epoch + 1]


@pytest.mark.parametrize(
    ("is_global", "ranks", "size", "first"),
    [
        *((False, 2, 4, 24), (False, 1, 9, 18), (False, 4, 5, 20)),
        *((True, 2, 12, 24), (True, 5, 7, 21)),
    ],
)
def test_on_other_ranks_or_with_another_batch_size_a_run_resumes_where_one_of_its_own_steps_begins(
    is_global: bool, ranks: int, size: int, first: int
) -> None:
    """It resumes at sample 24 or earlier: no sample is skipped, and less than a step is trained twice."""
    options: dict[str, Any] = {"is_global": is_global, "shuffle": True}
    before: set[int] = set()
    state: dict[str, Any] = {}
    for rank in range(3):
        loader = step_loader(dataset_of(96), batch_size=12 if is_global else 4, ranks=3, rank=rank, **options)
        steps = loader.steps(0)
        before |= {*places(next(steps).rows), *places(next(steps).rows)}
        state = loader.state_dict()
    assert state["epoch_samples"] == len(before) == 24
    after: list[int] = []
    samples_per_step = size if is_global else ranks * size
    for rank in range(ranks):
        resumed = step_loader(dataset_of(96), batch_size=size, ranks=ranks, rank=rank, **options)
        resumed.load_state_dict(state, epoch=-1)
        assert resumed.steps_done * samples_per_step == first
        after += itertools.chain(*steps_of(resumed, 0))
    sampler: Any = DistributedSampler(dataset_of(96), 1, 0, shuffle=True, seed=3)
    order = list(sampler)
    assert before == set(order[:24])
    assert sorted(after) == sorted(order[first : 96 // samples_per_step * samples_per_step])


@pytest.mark.parametrize(
    ("samples", "micro_steps", "most"),
    [(40, 2, 2), (12, 1, None)],
    ids=["a lower bound, with an accumulation", "a smaller data set"],
)
def test_an_epoch_whose_bound_is_reached_or_passed_ends_at_once_and_the_next_is_whole(
    samples: int, micro_steps: int, most: int | None
) -> None:
    options: dict[str, Any] = {"batch_size": 2, "micro_steps": micro_steps, "max_steps_per_epoch": most}
    whole, resumed = (step_loader(dataset_of(samples), **options) for _ in range(2))
    bound = whole.steps_per_epoch
    for steps_done in (bound - 1, bound, bound + 1, bound + 2):
        state = resumed.state_dict() | {"epoch_samples": steps_done * resumed.samples_per_step}
        resumed.load_state_dict(state, epoch=-1)
        assert resumed.steps_done == min(steps_done, bound)
        assert steps_of(resumed, 0) == steps_of(whole, 0)[steps_done:]
        assert steps_of(resumed, 1) == steps_of(whole, 1)


def test_nothing_before_the_position_of_a_resumed_run_is_read() -> None:
    state = step_loader(dataset_of(20), batch_size=3).state_dict() | {"epoch_samples": 12}
    order = list(itertools.chain(*steps_of(step_loader(dataset_of(20), batch_size=3, shuffle=True), 1)))
    samples = Samples(*[1] * 20)
    resumed = step_loader(samples, batch_size=3, shuffle=True)
    resumed.load_state_dict(state | {"left_over": (18, 18)}, epoch=0)
    steps = resumed.steps(1)
    assert samples.read == []
    next(steps)
    assert samples.read == order[12:15]
    assert len(list(steps)) == 1  # the last two rows fill no batch
    assert samples.read == order[12:18]


def test_an_epoch_draws_one_random_number_when_it_begins_also_where_it_is_resumed() -> None:
    """Dropout draws from the same generator."""
    loader = step_loader(dataset_of(12), batch_size=2, shuffle=True)
    torch.manual_seed(0)
    torch.empty((), dtype=torch.int64).random_()
    expected = torch.get_rng_state()
    for epoch, done in enumerate((0, 4, 0)):
        loader.load_state_dict(loader.state_dict() | {"epoch_samples": 2 * done}, epoch=0)
        torch.manual_seed(0)
        steps = loader.steps(epoch)
        assert torch.equal(torch.get_rng_state(), expected)
        assert len(list(steps)) == 6 - done
        assert torch.equal(torch.get_rng_state(), expected)
