"""The public function on plain PyTorch loops finds what exhaustive search finds on all ranks and restores all state."""

import gc
import itertools
import random
import warnings
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from tests.support.faults import ShardedTrainee, change_fsdp_settings, fsdp_settings, same_bits
from tests.support.ranks import run_on_ranks
from torchtune_adaptive import InputError, NothingFitsError, SearchResult, find_max_batch_size, find_max_tokens
from torchtune_adaptive.engine.memory.devices import meter_for, optimizers_of
from torchtune_adaptive.engine.memory.meter import device_memory_bytes
from torchtune_adaptive.engine.search.options import Strategy

CPU = torch.device("cpu")
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
MOST_ROWS = 64
LIMITS = (28_000, 18_000)  # bytes of two ranks, sharded by FSDP2
DDP_LIMITS = (140_000, 90_000)
PAIR_LIMITS = (100_000_000, 1_000_000)
SHORTEST_TOKENS = 4  # of rows that a search for tokens tries


class Loop:
    """A training loop: a model, an optimizer, a step and batches."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def make_batch(self, batch_size: int) -> Any:
        raise NotImplementedError

    def loss(self, batch: Any) -> torch.Tensor:
        raise NotImplementedError

    def train_step(self, batch: Any) -> None:
        self.loss(batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def find(self, memory_limit: int | str | None, **options: Any) -> SearchResult:
        options = {"max_batch_size": MOST_ROWS, "margin": 0.0} | options
        return find_max_batch_size(
            self.train_step,
            self.make_batch,
            model=self.model,
            optimizer=self.optimizer,
            memory_limit=memory_limit,
            **options,
        )

    def state(self) -> list[torch.Tensor]:
        """Everything a search might change, as tensors."""
        optimizers = [optimizer.state_dict() for optimizer in optimizers_of(self.optimizer)]
        leaves = tree_leaves([self.model.state_dict(), *optimizers])
        numbers = [leaf for leaf in leaves if isinstance(leaf, int | float)] + list(random.getstate()[1])
        tensors = [leaf.clone() for leaf in leaves if isinstance(leaf, torch.Tensor)]
        return [*tensors, torch.tensor(numbers, dtype=torch.float64), torch.get_rng_state()]


class Perceptron(Loop):
    """A model with dropout, so that steps draw random numbers; Adam's state is created in the first step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.BatchNorm1d(64), nn.Linear(64, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def make_batch(self, batch_size: int) -> dict[str, torch.Tensor]:
        return {"inputs": torch.ones(batch_size, 16), "targets": torch.zeros(batch_size, dtype=torch.long)}

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if len(batch["inputs"]) == 1:
            batch = {name: values.repeat_interleave(2, dim=0) for name, values in batch.items()}  # BatchNorm needs two
        return F.cross_entropy(self.model(batch["inputs"]), batch["targets"])


def peak_of(train_step: Callable[[Any], object], batch: Any, trainee: Any) -> int:
    """The peak of a step on ``batch``, with all that the model and the optimizer of ``trainee`` hold."""
    meter = meter_for(CPU, trainee.model, optimizers_of(trainee.optimizer))
    meter.count(batch)
    with meter:
        train_step(batch)
    return meter.peak_bytes


@pytest.fixture(scope="module")
def peaks() -> list[int]:
    """The peak of a step of ``Perceptron``, by number of rows (0 for no rows), once the optimizer has its state."""
    loop = Perceptron()
    loop.train_step(loop.make_batch(1))
    return [0, *(peak_of(loop.train_step, loop.make_batch(size), loop) for size in range(1, MOST_ROWS + 1))]


@pytest.fixture(params=STRATEGIES)
def strategy(request: pytest.FixtureRequest) -> Strategy:
    return request.param


# ---- what is found


@pytest.mark.parametrize(("rows", "more_bytes"), [(1, 0), (20, 10), (47, 0), (MOST_ROWS, 1000)])
def test_every_strategy_finds_what_exhaustive_search_finds_and_shows_what_it_tried(
    peaks: list[int], strategy: Strategy, rows: int, more_bytes: int
) -> None:
    limit_bytes = peaks[rows] + more_bytes
    found = Perceptron().find(limit_bytes, strategy=strategy)
    largest = max(size for size in range(MOST_ROWS + 1) if peaks[size] <= limit_bytes)
    assert found.exact_batch_size == found.batch_size == largest
    assert largest in [probe.batch_size for probe in found.probes if probe.fits]
    for probe in found.probes:
        assert probe.fits == (probe.batch_size <= largest)
        assert probe.seconds > 0
        if probe.fits:
            assert probe.peak_bytes == peaks[probe.batch_size]
            assert list(probe.phase_peak_bytes)[-3:] == ["forward", "backward", "optimizer"]
            assert max(probe.phase_peak_bytes.values()) == probe.peak_bytes
        else:
            assert probe.peak_bytes > limit_bytes
    assert (found.strategy, found.world_size, found.bound) == (strategy, 1, MOST_ROWS)
    if strategy == "linear_extrapolation" and rows == 47:
        assert [probe.batch_size for probe in found.probes] == [2, 3, 47]


def test_a_model_that_cannot_train_on_one_row_can_be_searched() -> None:
    loop = Perceptron()
    loop.loss = lambda batch: F.cross_entropy(loop.model(batch["inputs"]), batch["targets"])
    assert loop.find("1GiB").exact_batch_size == MOST_ROWS


# ---- batches of fewer rows than were asked for

ROWS = torch.arange(20.0).repeat_interleave(16).reshape(20, 16)


@dataclass
class Sample:
    inputs: torch.Tensor
    name: str


class Opaque:
    """A batch that nothing can look into."""

    def __init__(self, inputs: torch.Tensor) -> None:
        self.inputs = inputs


Batches = Callable[[int], Any]
INPUTS_OF: dict[str, tuple[Batches, Callable[[Any], torch.Tensor]]] = {
    "tensor": (lambda n: ROWS[:n], lambda batch: batch),
    "array": (lambda n: ROWS[:n].numpy(), torch.as_tensor),
    "dict": (lambda n: {"meta": {"scale": torch.ones(2)}, "inputs": ROWS[:n]}, lambda batch: batch["inputs"]),
    "UserDict": (lambda n: UserDict({"inputs": ROWS[:n]}), lambda batch: batch["inputs"]),
    "pair": (lambda n: (ROWS[:n], Opaque(ROWS)), lambda batch: batch[0]),
    "dataclass": (lambda n: Sample(ROWS[:n], "of 2"), lambda batch: batch.inputs),
    "list of samples": (lambda n: [{"inputs": row} for row in ROWS[:n]], lambda batch: _stacked(batch)),
    "micro-batches": (lambda n: [ROWS[:n], ROWS[:n]], lambda batch: torch.cat(batch)),
    "time first": (lambda n: ROWS[:n].T, lambda batch: batch.T),
    "with rows of noise": (lambda n: [ROWS[:n], torch.ones(min(n, 5))], lambda batch: batch[0]),
}


def _stacked(samples: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    return torch.stack([sample["inputs"] for sample in samples])


def fed_by(make_batch: Batches, inputs: Callable[[Any], torch.Tensor] = lambda batch: batch) -> Loop:
    """A loop over batches of ``make_batch``, without a bound of its own."""
    loop: Any = Perceptron()
    loop.model = nn.Linear(16, 4)
    loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.1)
    loop.make_batch = make_batch
    loop.loss = lambda batch: loop.model(inputs(batch)).square().sum()
    return loop


@pytest.mark.parametrize("kind", INPUTS_OF)
def test_the_rows_that_exist_are_the_largest_size(kind: str) -> None:
    found = fed_by(*INPUTS_OF[kind]).find("1GiB", max_batch_size=4096)
    assert (found.exact_batch_size, found.batch_size, found.bound) == (20, 20, 20)
    assert all(probe.fits and probe.batch_size <= 20 for probe in found.probes)
    assert found.probes[-1].batch_size == 20


@pytest.mark.parametrize("rows", [3, 4])
def test_a_data_set_of_few_rows_is_searched_to_its_end(strategy: Strategy, rows: int) -> None:
    loop = fed_by(lambda n: ROWS[: min(n, rows)])
    assert loop.find("1GiB", strategy=strategy, max_batch_size=100).exact_batch_size == rows
    assert loop.find("1GiB", strategy=strategy, max_batch_size=3).exact_batch_size == 3


@pytest.mark.parametrize(
    "make_batch",
    [lambda n: ROWS[: min(n, 2)], lambda n: [ROWS, "a name", 3]],
    ids=["two rows", "without n, in a list"],
)
def test_batches_that_never_change_are_refused_by_one_sentence(strategy: Strategy, make_batch: Batches) -> None:
    loop = fed_by(make_batch, lambda batch: tree_leaves(batch)[0])
    before = loop.state()
    with pytest.raises(InputError) as caught:
        loop.find("1GiB", strategy=strategy, max_batch_size=4096)
    sizes = "2, 3 and 4096" if strategy == "decrease_until_oom" else "2, 3 and 4"
    sizes = "2 and 3" if strategy == "linear_extrapolation" else sizes
    assert str(caught.value) == (
        f"`make_batch` returns the same batch for {sizes} rows; if there are no more rows, give their number as the"
        " largest to try."
    )
    assert same_bits(loop.state(), before)
    assert loop.find("1GiB", strategy=strategy, max_batch_size=2).exact_batch_size == 2


def test_data_that_can_be_read_only_once_end_the_search_by_one_sentence(strategy: Strategy) -> None:
    rows = iter(ROWS)
    loop = fed_by(lambda n: torch.cat([torch.empty(0, 16), *(row[None] for row in itertools.islice(rows, n))]))
    with pytest.raises(InputError, match="`make_batch` must return at least one row, but returns none for"):
        loop.find("1GiB", strategy=strategy, max_batch_size=100)


def test_batches_that_cannot_be_looked_into_are_taken_to_have_their_rows() -> None:
    loop = fed_by(lambda n: Opaque(ROWS[:n]), lambda batch: batch.inputs)
    assert loop.find("1GiB", max_batch_size=50).exact_batch_size == 50


def test_a_step_that_makes_its_own_rows_is_not_refused() -> None:
    """Its batches are all the same, but its memory is not."""
    loop = fed_by(lambda n: asked.append(n) or torch.zeros(1), lambda batch: torch.ones(asked[-1], 16))
    asked: list[int] = []
    assert loop.find(60_000, max_batch_size=1000).exact_batch_size > 100


# ---- state is restored


@pytest.mark.parametrize("warm", [False, True], ids=["fresh", "warm"])
def test_a_search_restores_all_state(peaks: list[int], warm: bool) -> None:
    loop = Perceptron()
    if warm:
        loop.train_step(loop.make_batch(2))
    before = loop.state()
    found = loop.find(peaks[40])
    assert found.exact_batch_size == 40
    assert same_bits(loop.state(), before)
    assert all(parameter.grad is None for parameter in loop.model.parameters())
    assert hooks_of(loop) == 0


@pytest.mark.parametrize("is_passed", [True, False])
def test_a_step_that_changes_a_frozen_teacher_is_an_error(is_passed: bool) -> None:
    """Its weights are an average of the student's. The search has no copy of them."""
    loop = Perceptron()
    student, teacher = loop.model, Perceptron().model.requires_grad_(False)
    if is_passed:
        loop.model = nn.ModuleList([student, teacher])
    loop.loss = lambda batch: F.cross_entropy(student(batch["inputs"]), batch["targets"])
    assert loop.find("1MiB").batch_size > 1
    step = loop.train_step

    def averaging(batch: Any) -> None:
        step(batch)
        for ours, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
            ours.data.lerp_(theirs.data, 0.1)

    loop.train_step = averaging
    name = r"1\.0\.weight" if is_passed else "weight of Linear"
    with pytest.raises(InputError, match=rf"has changed `{name}`, which is not restored, as it needs no gradients or"):
        loop.find("1MiB")


def test_the_optimizers_state_counts_if_a_gradient_scaler_skips_the_first_steps() -> None:
    loop = Perceptron()
    expected = loop.find("256KiB", max_batch_size=None).batch_size
    loop.train_step = lambda batch: loop.loss(batch).backward()  # as with a scale that is too large
    assert loop.find("256KiB", max_batch_size=None).batch_size == expected
    assert not loop.optimizer.state


def test_sizes_may_be_numbers_of_numpy() -> None:
    assert Perceptron().find("1GiB", max_batch_size=np.int64(37), power_of_two=True).batch_size == 32


@pytest.mark.parametrize("place", ["train_step", "make_batch"])
def test_another_error_is_raised_and_all_state_is_restored(place: str) -> None:
    loop = Perceptron()
    before = loop.state()
    resize = torch.UntypedStorage.resize_
    attempts: list[Any] = []
    works = getattr(loop, place)

    def break_down(argument: Any) -> Any:
        attempts.append(argument)
        if len(attempts) == 2:
            loop.loss(Perceptron().make_batch(2)).backward()
            raise ValueError("the user's own mistake")
        return works(argument)

    setattr(loop, place, break_down)
    with pytest.raises(ValueError, match="the user's own mistake"):
        loop.find("1GiB")
    assert same_bits(loop.state(), before)
    assert all(parameter.grad is None for parameter in loop.model.parameters())
    assert hooks_of(loop) == 0
    assert torch.UntypedStorage.resize_ is resize


def test_several_optimizers_are_searched_together_and_restored() -> None:
    loop: Any = Perceptron()
    weights = [one for one in loop.model.parameters() if one.dim() == 2]
    biases = [one for one in loop.model.parameters() if one.dim() == 1]
    optimizers = [torch.optim.AdamW(weights), torch.optim.SGD(biases, lr=0.1, momentum=0.9)]

    def train_step(batch: Any) -> None:
        loop.loss(batch).backward()
        for one in optimizers:
            one.step()
            one.zero_grad()

    loop.train_step, loop.optimizer = train_step, optimizers
    train_step(loop.make_batch(2))
    limit_bytes = peak_of(train_step, loop.make_batch(20), loop)
    before = loop.state()
    assert loop.find(limit_bytes).exact_batch_size == 20
    assert same_bits(loop.state(), before)


def hooks_of(loop: Loop) -> int:
    hooks: list[dict[int, Any]] = [loop.model._forward_hooks, loop.model._forward_pre_hooks]
    return sum(len(registered) for registered in [*hooks, loop.optimizer._optimizer_step_pre_hooks])


# ---- what is refused


# The sentences of options that are also keys of a config are compared in tests/test_settings.py.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "margin 1": ({"margin": 1.0}, "`margin` must"),
    "limit unreadable": ({"memory_limit": "80 gigs"}, "`memory_limit` must be a size .*, but is '80 gigs' instead"),
    "limit missing on the CPU": ({"memory_limit": None}, "A search on the CPU needs `memory_limit`"),
    "limit above the device": (
        {"memory_limit": device_memory_bytes(CPU) + 1},
        "`memory_limit` must be at most what the device has",
    ),
    "no bound to decrease from": (
        {"strategy": "decrease_until_oom", "max_batch_size": None},
        "`decrease_until_oom` needs `max_batch_size`",
    ),
}


@pytest.mark.parametrize(("options", "sentence"), REFUSED.values(), ids=list(REFUSED))
def test_bad_arguments_are_refused_before_any_step(options: dict[str, Any], sentence: str) -> None:
    loop = Perceptron()
    steps: list[Any] = []
    loop.train_step = lambda batch: steps.append(batch)
    with pytest.raises(InputError, match=sentence):
        loop.find(**({"memory_limit": "1MiB"} | options))
    assert steps == []


def test_what_is_no_model_or_function_is_refused() -> None:
    def refusal(**changes: Any) -> str:
        loop = Perceptron()
        for name, value in changes.items():
            setattr(loop, name, value)
        with pytest.raises(InputError) as caught:
            loop.find("1MiB")
        return str(caught.value)

    assert refusal(model=nn.Identity()) == "`model` has no parameters."
    assert refusal(model=None) == "`model` must be a module of torch, but is None instead."
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer releases of torch say that it is old
        scripted = torch.jit.script(nn.Linear(1, 1))
    assert refusal(model=scripted) == "`model` must be a module that runs in Python, but is one of `torch.jit` instead."
    assert refusal(train_step="step") == "`train_step` must be a function, but is 'step' instead."


def test_a_step_without_operations_fits_with_any_size() -> None:
    loop = Perceptron()
    loop.train_step = lambda batch: None
    assert loop.find("1MiB", max_batch_size=64).batch_size == 64


# ---- on two ranks


def sharded_find(trainee: ShardedTrainee, limit_bytes: int, **options: Any) -> SearchResult:
    return find_max_batch_size(
        trainee.train,
        trainee.batch,
        model=trainee.model,
        optimizer=trainee.optimizer,
        memory_limit=limit_bytes,
        margin=0.0,
        **options,
    )


def sharded_tokens(trainee: ShardedTrainee, limit_bytes: int) -> int:
    """The token budget of rows of up to four times ``SHORTEST_TOKENS``."""
    options: Any = {"memory_limit": limit_bytes, "margin": 0.0, "seq_len": 4 * SHORTEST_TOKENS}
    options |= {"model": trainee.model, "optimizer": trainee.optimizer}
    return find_max_tokens(trainee.train, lambda rows, length: trainee.batch(rows * length), **options).max_tokens


def on_unequal_ranks(rank: int, limits: tuple[int, int]) -> dict[str, Any]:
    """What every strategy finds if rank 1 has less memory, and the peaks of all steps on this rank."""
    trainee = ShardedTrainee(warm_steps=0)
    before = trainee.state()
    found: dict[str, Any] = {}
    for strategy in STRATEGIES:
        result = sharded_find(trainee, limits[rank], strategy=strategy, max_batch_size=MOST_ROWS)
        found[strategy] = (result, same_bits(trainee.state(), before))
    outcomes: list[str] = []
    for limit_bytes in ((limits[0], 100), (100, limits[1])):
        try:
            sharded_find(trainee, limit_bytes[rank])
        except NothingFitsError as error:
            outcomes.append(str(error))
    found["nothing fits on one rank"] = outcomes
    few = fed_by(lambda n: ROWS[: min(n, (20, 7)[rank])])
    found["few rows"] = {strategy: few.find("1GiB", strategy=strategy, max_batch_size=4096) for strategy in STRATEGIES}
    found["curves"] = along_a_curve(PAIR_LIMITS[rank])
    found["tokens"] = sharded_tokens(trainee, limits[rank])
    found["settings"] = fails_while_settings_are_changed()
    found["DDP"] = in_distributed_data_parallel(DDP_LIMITS[rank])
    found["without a trace"] = same_bits(trainee.state(), before)
    trainee.step()
    results = [found[strategy][0] for strategy in STRATEGIES]
    sizes = {probe.batch_size for result in results for probe in result.probes}
    sizes |= {result.exact_batch_size + 1 for result in results}
    sizes |= {found["tokens"], found["tokens"] + SHORTEST_TOKENS}
    found["peaks"] = {size: peak_of(trainee.train, trainee.batch(size), trainee) for size in sorted(sizes)}
    return found


def along_a_curve(limit_bytes: int) -> tuple[SearchResult, list[int]]:
    """What a search finds if memory grows with pairs of rows, as in contrastive learning; peaks of it and of the next.

    Without a bound.
    """
    loop = fed_by(lambda n: torch.ones(n, 16))
    loop.loss = lambda batch: F.cross_entropy(loop.model(batch) @ loop.model(batch).T, torch.arange(len(batch)))
    found = loop.find(limit_bytes, max_batch_size=None)
    peaks = [peak_of(loop.train_step, loop.make_batch(found.exact_batch_size + more), loop) for more in (0, 1)]
    return found, peaks


class MoreForMany(nn.Sequential):
    """Layers of which only the first computes for up to four rows."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) if len(input) > 4 else self[0](input)


class Replicated(Loop):
    """A model in DistributedDataParallel."""

    def __init__(self, kind: type[nn.Sequential] = nn.Sequential, **options: Any) -> None:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3)]
        self.model = DistributedDataParallel(kind(*layers), bucket_cap_mb=0.005, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def make_batch(self, batch_size: int) -> torch.Tensor:
        return torch.full((batch_size, 16), 1.0 + dist.get_rank())

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return self.model(batch).square().sum()

    def trained(self) -> list[torch.Tensor]:
        """The state after three steps."""
        for _ in range(3):
            self.train_step(self.make_batch(4))
        return self.state()


def in_distributed_data_parallel(limit_bytes: int) -> dict[str, Any]:
    """What two searches find, the peaks of that size and the next, and whether training then is as without."""
    loop, undisturbed = Replicated(), Replicated().trained()
    largest, again = (loop.find(limit_bytes).exact_batch_size for _ in range(2))
    as_without = same_bits(loop.trained(), undisturbed)
    with loop.model.no_sync():  # pyright: ignore[reportCallIssue]  # the meter does not know the reducer's buckets
        peaks = [peak_of(loop.train_step, loop.make_batch(largest + more), loop) for more in (0, 1)]
    with pytest.raises(InputError) as raised:
        Replicated(static_graph=True).find(limit_bytes)
    uneven, undisturbed = (Replicated(MoreForMany, find_unused_parameters=True) for _ in range(2))
    uneven.find(limit_bytes)
    uneven_as_without = same_bits(uneven.trained(), undisturbed.trained())
    return {
        "found": (largest, again, as_without),
        "peaks": peaks,
        "refused": str(raised.value),
        "uneven": uneven_as_without,
    }


def fails_while_settings_are_changed() -> list[Any]:
    """FSDP2's settings after each forward pass of a search whose large steps leave them changed, and at its end."""
    trainee, found = ShardedTrainee(warm_steps=0), []

    def train(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        trainee.train(batch)
        found.append(fsdp_settings(trainee.model))
        if len(batch[0]) > 4:
            change_fsdp_settings(trainee.model)
            raise torch.OutOfMemoryError("on purpose")

    options: Any = {"memory_limit": "1MiB", "strategy": "binary_search"}
    find_max_batch_size(train, trainee.batch, model=trainee.model, optimizer=trainee.optimizer, **options)
    return [*found, fsdp_settings(trainee.model)]


@pytest.fixture(scope="module")
def on_ranks() -> list[dict[str, Any]]:
    return run_on_ranks(on_unequal_ranks, 2, LIMITS)


def test_both_ranks_find_the_maximum_of_the_rank_with_less_memory(on_ranks: list[dict[str, Any]]) -> None:
    peaks = on_ranks[1]["peaks"]
    largest = max(size for size, peak in peaks.items() if peak <= LIMITS[1])
    assert peaks[largest + 1] > LIMITS[1]
    assert 10 < largest < MOST_ROWS
    assert on_ranks[0]["peaks"][largest + 1] <= LIMITS[0]  # rank 0 alone would find more
    for strategy in STRATEGIES:
        assert [ranks[strategy][0].exact_batch_size for ranks in on_ranks] == [largest, largest]


def test_a_search_on_ranks_restores_all_state(on_ranks: list[dict[str, Any]]) -> None:
    assert all(ranks[strategy][1] for ranks in on_ranks for strategy in STRATEGIES)
    assert all(ranks["without a trace"] for ranks in on_ranks)


def test_ranks_try_the_same_sizes_and_each_sees_its_own_peak(on_ranks: list[dict[str, Any]]) -> None:
    for strategy in STRATEGIES:
        results = [ranks[strategy][0] for ranks in on_ranks]
        assert tried_by(results[0]) == tried_by(results[1])
        assert [result.memory_limit_bytes for result in results] == [min(LIMITS)] * 2
        for ranks, result in zip(on_ranks, results, strict=True):
            fitting = [probe for probe in result.probes if probe.fits]
            assert [probe.peak_bytes for probe in fitting] == [ranks["peaks"][probe.batch_size] for probe in fitting]


def test_both_ranks_find_the_token_budget_of_the_rank_with_less_memory(on_ranks: list[dict[str, Any]]) -> None:
    budget, peaks = on_ranks[0]["tokens"], on_ranks[1]["peaks"]
    assert budget == on_ranks[1]["tokens"]
    assert peaks[budget] <= LIMITS[1] < peaks[budget + SHORTEST_TOKENS]


def test_ranks_agree_on_the_rows_that_all_of_them_have(on_ranks: list[dict[str, Any]]) -> None:
    for strategy in STRATEGIES:
        results = [ranks["few rows"][strategy] for ranks in on_ranks]
        assert [result.exact_batch_size for result in results] == [7, 7]
        assert tried_by(results[0]) == tried_by(results[1])


def test_ranks_follow_the_same_curve_where_only_one_runs_out_of_memory(on_ranks: list[dict[str, Any]]) -> None:
    (first, _), (second, (peak, next_peak)) = (ranks["curves"] for ranks in on_ranks)
    assert tried_by(first) == tried_by(second)
    assert peak <= PAIR_LIMITS[1] < next_peak
    assert sum(fits for _, fits in tried_by(second)) <= 8
    assert 1 <= sum(not fits for _, fits in tried_by(second)) <= 3
    share = (PAIR_LIMITS[1] - peak) / (next_peak - peak)
    assert second.forecast_rows == pytest.approx(second.exact_batch_size + share, abs=0.02)


def tried_by(found: SearchResult) -> list[tuple[int, bool]]:
    return [(probe.batch_size, probe.fits) for probe in found.probes]


def test_nothing_fits_on_any_rank_if_nothing_fits_on_one(on_ranks: list[dict[str, Any]]) -> None:
    for ranks in on_ranks:
        assert len(ranks["nothing fits on one rank"]) == 2
        assert all("not even one row fits" in text for text in ranks["nothing fits on one rank"])
        assert all("of 100 B usable (limit 100 B, margin 0)" in text for text in ranks["nothing fits on one rank"])


def test_settings_of_fsdp_that_a_failed_step_has_changed_are_restored(on_ranks: list[dict[str, Any]]) -> None:
    for ranks in on_ranks:
        first, *rest = ranks["settings"]
        assert len(rest) > 4
        assert rest == [first] * len(rest)


def test_a_model_in_distributed_data_parallel_is_searched_and_trains_as_without(on_ranks: list[dict[str, Any]]) -> None:
    (largest, *_), (peak, next_peak) = on_ranks[1]["DDP"]["found"], on_ranks[1]["DDP"]["peaks"]
    assert peak <= DDP_LIMITS[1] < next_peak
    assert 10 < largest < MOST_ROWS
    for ranks in on_ranks:
        assert ranks["DDP"]["found"] == (largest, largest, True)
        assert ranks["DDP"]["uneven"]
        assert ranks["DDP"]["refused"] == (
            "DistributedDataParallel with `static_graph` cannot be searched: turn it off."
        )


# ---- faults during a search


def test_one_row_is_found_if_two_rows_fail_while_the_state_is_created() -> None:
    loop: Any = fed_by(lambda n: torch.ones(n, 8))
    loop.model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))
    loop.optimizer = torch.optim.AdamW(loop.model.parameters(), foreach=False)
    held: list[torch.Tensor] = []

    def train_step(batch: torch.Tensor) -> None:
        held.clear()
        loop.loss(batch).backward()
        held.append(torch.zeros(len(batch), 1000))  # 4000 bytes a row, while the optimizer makes its state
        loop.optimizer.step()
        held.clear()

    loop.train_step = train_step
    limit_bytes = 4 * sum(parameter.nbytes for parameter in loop.model.parameters()) + 4000 + 2000
    assert loop.find(limit_bytes, max_batch_size=4, strategy="binary_search").exact_batch_size == 1


def test_a_first_step_at_a_size_with_other_operations_does_not_prevent_the_forecast() -> None:
    """As with compilation: the small sizes are run once more, and a forecast is made."""
    loop = Perceptron()
    seen: set[int] = set()
    train_step = loop.train_step

    def tuning_step(batch: dict[str, torch.Tensor]) -> None:
        size = len(batch["inputs"])
        if size == 3 and size not in seen:
            torch.zeros(1).add(1)
        seen.add(size)
        train_step(batch)

    loop.train_step = tuning_step
    found = loop.find("1MiB", strategy="linear_extrapolation")
    assert [probe.batch_size for probe in found.probes[:4]] == [2, 3, 2, 3]
    assert len(found.probes) <= 6
    assert all(probe.fits for probe in found.probes)


def test_steps_that_always_run_different_operations_are_searched_by_their_peaks_with_one_warning(
    peaks: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    loop = Perceptron()
    train_step = loop.train_step

    def step_with_another_operation_for_each_size(batch: dict[str, torch.Tensor]) -> None:
        operation = (torch.sin, torch.cos, torch.tan)[len(batch["inputs"]) % 3]
        operation(batch["inputs"][0, 0])
        train_step(batch)

    loop.train_step = step_with_another_operation_for_each_size
    found = loop.find(peaks[20], strategy="linear_extrapolation")
    assert [probe.batch_size for probe in found.probes[:4]] == [2, 3, 2, 3]
    assert found.exact_batch_size == 20
    assert caplog.text.count("ran different operations: the forecast goes by their peaks alone") == 1


@pytest.mark.slow
def test_probes_look_for_garbage_only_among_their_own_objects() -> None:
    frozen: list[int] = []

    class Watching(Perceptron):
        def train_step(self, batch: Any) -> None:
            frozen.append(gc.get_freeze_count())
            super().train_step(batch)

    gc.unfreeze()
    gc.collect()
    frozen_by_python = gc.get_freeze_count()  # immortal objects in 3.12, until they are unfrozen; else none
    try:
        Watching().find("1MiB")
        assert min(frozen) > 10_000
        assert gc.get_freeze_count() <= frozen_by_python
    finally:
        gc.freeze()  # as other tests expect


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model_on_a_cpu_is_refused(in_place: bool) -> None:
    loop: Any = Perceptron()
    if in_place:
        loop.model.compile(backend="eager")
    else:
        loop.model = torch.compile(loop.model, backend="eager")
    with pytest.raises(InputError, match="`model` is compiled: on the CPU"):
        loop.find("1MiB")


def test_data_that_a_step_changes_in_place_is_as_before() -> None:
    data = torch.randn(4000, 16, generator=torch.Generator().manual_seed(1))
    before = data.clone()
    loop = fed_by(lambda n: data[:n], lambda batch: batch.sub_(1).div_(2))
    assert loop.find("64KiB", max_batch_size=None).batch_size > 100
    assert torch.equal(data, before)


def test_a_batch_that_is_part_of_a_larger_tensor_counts_as_a_copy_of_it() -> None:
    data = torch.ones(4096, 16)  # 256 KiB
    makers: list[Batches] = [lambda n: data[:n], lambda n: data[:n].clone()]
    of_parts, of_copies = (fed_by(make).find("64KiB", max_batch_size=None).exact_batch_size for make in makers)
    assert of_parts == of_copies > 100
