"""The ledger records all collectives of a micro-step, and a rank that failed can replay the rest of them."""

import inspect
import math
import random
import re
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import Shard
from torch.profiler import ProfilerActivity, profile

from tests.support.faults import WIDTH, ShardedTrainee, change_fsdp_settings, fsdp_settings, same_bits
from tests.support.ranks import run_on_ranks
from tests.support.toys import loop_of
from torchtune_adaptive.engine.distributed import fsdp_ledger
from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.engine.distributed.fsdp_ledger import FsdpLedger
from torchtune_adaptive.engine.distributed.fsdp_state import (
    Communicators,
    communicators,
    reset_after_failure,
)
from torchtune_adaptive.engine.distributed.functional_collectives import CannotRecordError
from torchtune_adaptive.engine.distributed.ledger import CollectiveStateUnknownError, Ledger
from torchtune_adaptive.engine.memory.out_of_memory import free_memory
from torchtune_adaptive.engine.recovery.attempts import Recovery
from torchtune_adaptive.engine.recovery.dry_run import dry_run
from torchtune_adaptive.errors import CannotRecoverError, NothingFitsError
from torchtune_adaptive.testing import Fault, out_of_memory

CPU = torch.device("cpu")
POINTS = 8  # how many operations of a micro-step are made to fail, evenly spread
IN_DOUBT = "a collective itself failed, so that it is unknown whether it was issued"
KINDS = {
    "c10d::_allgather_base_": "all-gather",
    "c10d::_reduce_scatter_base_": "reduce-scatter",
    "c10d::allreduce_": "all-reduce",
}


def micro_step(model: nn.Module, rows: int = 4) -> float:
    """Forward and backward on this rank's own samples; returns the loss."""
    inputs = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    loss = model(inputs).square().mean()
    loss.backward()
    return loss.item()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """Copies of this rank's gradients, which are then set to None."""
    found: list[Any] = [parameter.grad for parameter in model.parameters()]
    copies = [gradient.to_local().clone() for gradient in found]
    model.zero_grad(set_to_none=True)
    return copies


def ledger_of(model: nn.Module) -> Ledger:
    """A ledger that expects a micro-step of ``model``."""
    ledger = FsdpLedger(model, CPU, reduces_once=False)
    micro_step(model)  # the first one does lazy set-up
    ledger.begin(is_last=True)
    micro_step(model)
    ledger.expected = ledger.issued, ledger.issued
    model.zero_grad(set_to_none=True)
    return ledger


def loss_under(fault: Fault, model: nn.Module) -> float | None:
    """The loss of a micro-step; None if ``fault`` struck. The model is then reset."""
    loss: float | None = None
    try:
        with fault:
            loss = micro_step(model)
    except torch.OutOfMemoryError:
        pass
    if loss is None:
        reset_after_failure(model)
        free_memory(CPU)
    return loss


def refusal(ledger: Ledger) -> str:
    """Why the ledger does not replay the rest; "none" if it does."""
    try:
        ledger.replay_rest()
    except CollectiveStateUnknownError as error:
        return str(error)
    return "none"


# ---- models sharded in several ways, on two ranks and four; every function is a collective


def recorded_and_issued(model: nn.Module) -> list[list[tuple[str, int | None]]]:
    """The collectives of a micro-step by the ledger, and by the profiler, which sees those inside operations too.

    Each with its number of elements on this rank, except all-reduce, where the profiler does not record it.
    """
    ledger = ledger_of(model)
    ledger.begin(is_last=True)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        micro_step(model)
    events = [event for event in profiler.events() or [] if event.name.startswith("c10d::")]
    events.sort(key=lambda event: event.time_range.start)
    numels = [[math.prod(shape) for shape in event.input_shapes[:2] if shape] for event in events]
    issued = [(KINDS[event.name], min(sizes, default=None)) for event, sizes in zip(events, numels, strict=True)]
    recorded = [(one.kind, None if one.kind == "all-reduce" else one.numel) for one in ledger.issued]
    return [recorded, issued]


def one_rank_fails(model: nn.Module) -> list[tuple[int, bool]]:
    """For micro-steps in which one rank fails and replays the rest: the place, and whether all was right.

    That is the collectives, the loss of the peers and the gradients of the next micro-step.
    """
    ledger = ledger_of(model)
    loss = micro_step(model)
    expected = gradients(model)
    with Fault(None) as operations:
        micro_step(model)
    model.zero_grad(set_to_none=True)
    trials = []
    for index, place in enumerate(range(0, operations.count, operations.count // POINTS)):
        failing = index % dist.get_world_size()
        ledger.begin(is_last=True)
        loss_here = loss_under(Fault(place, ranks=[failing]), model)
        if loss_here is None:
            ledger.replay_rest()
        is_right = ledger.agrees and loss_here == (None if dist.get_rank() == failing else loss)
        model.zero_grad(set_to_none=True)
        micro_step(model)
        trials.append((place, same_bits(gradients(model), expected) and is_right))
    return trials


def sharded(mesh: DeviceMesh, *, reshard_after_forward: bool | int = True) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 4))
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh)
    return model


def replicated() -> nn.Module:
    """By FSDP2's own data parallelism without sharding."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4))
    for module in (*model, model):
        replicate(module, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("replicate",)))
    return model


MODELS: dict[int, dict[str, Callable[[], nn.Module]]] = {
    2: {"sharded": lambda: ShardedTrainee().model},
    4: {
        "HSDP": lambda: sharded(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))),
        "partly freed": lambda: sharded(init_device_mesh("cpu", (4,)), reshard_after_forward=2),
    },
}
if "mesh" in inspect.signature(replicate).parameters:  # not in torch 2.9
    MODELS[2]["replicate"] = replicated


def play_models() -> dict[str, dict[str, Any]]:
    return {
        name: {"recorded and issued": recorded_and_issued(make()), "one rank fails": one_rank_fails(make())}
        for name, make in MODELS[dist.get_world_size()].items()
    }


def after_an_all_reduce_that_itself_failed_nothing_is_replayed() -> None:
    """As where HSDP's all-reduce was issued, and then memory ran out."""
    model, all_reduce = MODELS[4]["HSDP"](), dist.all_reduce

    def failing(*args: Any, **options: Any) -> Any:
        all_reduce(*args, **options)
        out_of_memory()

    ledger = ledger_of(model)
    ledger.begin(is_last=True)
    with mock.patch.object(dist, "all_reduce", failing), pytest.raises(torch.OutOfMemoryError):
        micro_step(model)
    assert refusal(ledger) == IN_DOUBT


def play_on_four(rank: int) -> dict[str, Any]:
    after_an_all_reduce_that_itself_failed_nothing_is_replayed()
    return {"models": play_models()}


# ---- one model on two ranks


def dry_run_of(
    model: nn.Module,
    micro_steps: Sequence[Callable[[], object]],
    *,
    consensus: Consensus | None = None,
    release: Callable[[], object] = lambda: None,
) -> Recovery:
    return dry_run(loop_of(model, consensus or Consensus(), release=release), [micro_steps]).recovery


class Scenarios:
    """Every method is a collective, which asserts what it promises or returns the outcome of a dry run."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.consensus = Consensus()

    def dry_run(self, model: nn.Module, *micro_steps: Callable[[], object]) -> str:
        """The outcome of a dry run: "recovery", "out of memory", or the reason why there is no recovery."""
        steps = micro_steps or (lambda: micro_step(model, 2), lambda: micro_step(model, 3))
        before = communicators_of(model)
        outcome = "recovery"
        try:
            dry_run_of(model, steps, consensus=self.consensus)
        except NothingFitsError:
            outcome = "out of memory"
        except CannotRecoverError as error:
            outcome = str(error).removeprefix("An out-of-memory error in training will end the run: ").rstrip(".")
        assert outcome == "recovery" or communicators_of(model) == before, "not put back"
        return outcome

    def a_dry_run_restores_all_state(self) -> None:
        trainee = ShardedTrainee()
        model = trainee.model
        model.register_buffer("seen", torch.zeros(2))
        model.register_buffer("constant", torch.ones(2**18 + 1))  # too large to be copied in each step
        seen, constant = model.get_buffer("seen"), model.get_buffer("constant")

        def draw_and_count(*_: Any) -> None:
            seen.add_(torch.rand(2) + random.random() + np.random.rand())

        def generators() -> tuple[Any, ...]:
            return random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()

        model.register_forward_pre_hook(draw_and_count)
        micro_step(model)
        before = [*trainee.state(), seen.clone(), constant.clone()], generators()
        steps = [lambda: micro_step(model, 2), lambda: micro_step(model, 3)]
        recovery = dry_run_of(model, steps, consensus=self.consensus)
        assert same_bits([*trainee.state(), seen, constant], before[0])
        assert generators() == before[1]
        assert all(parameter.grad is None for parameter in model.parameters())

        def fail_at_the_end() -> None:
            micro_step(model)
            constant.fill_(7)
            assert not torch.equal(seen, before[0][-2])
            out_of_memory()

        recovery.start_step()
        recovery.attempt([fail_at_the_end])
        assert torch.equal(seen, before[0][-2])
        assert constant.eq(7).all()  # it does not change in micro-steps, and is too large to be kept for nothing

    def with_a_collective_of_its_own(self) -> str:
        model = ShardedTrainee().model

        def step() -> None:
            micro_step(model)
            dist.all_reduce(torch.zeros(1))

        return self.dry_run(model, step, step)

    def with_other_collectives_for_the_second_batch(self) -> str:
        model = ShardedTrainee().model

        def step() -> None:
            model(torch.zeros(2, WIDTH))
            micro_step(model)

        return self.dry_run(model, lambda: micro_step(model), step)

    def with_a_setting_that_the_first_micro_step_changes_for_good(self) -> str:
        model: Any = ShardedTrainee().model

        def step() -> None:
            micro_step(model)
            model.set_reshard_after_forward(False)

        return self.dry_run(model, step, step)

    def a_dry_run_that_ran_out_of_memory_restores_fsdps_settings(self) -> None:
        """They are then those of another model, after the first dry run of a new one."""
        model: Any = ShardedTrainee(warm_steps=0).model
        other = ShardedTrainee().model

        def step() -> None:
            micro_step(model)
            change_fsdp_settings(model)
            out_of_memory()

        assert self.dry_run(model, step, step) == "out of memory"
        assert fsdp_settings(model) == fsdp_settings(other)

    def with_ranks_that_take_the_layers_in_different_order(self) -> str:
        """The layers have equal sizes, so no rank hangs, but each computes with the parameters of the other layer."""
        model = ShardedTrainee().model
        if self.rank == 1:
            take_layers_in_turned_order(model)
        return self.dry_run(model)

    def with_an_obstacle_on_one_rank(self) -> str:
        error = CannotRecordError("an obstacle") if dist.get_rank() else None
        with mock.patch.object(fsdp_ledger, "communicators", side_effect=error, wraps=communicators):
            return self.dry_run(ShardedTrainee().model)

    def with_another_step_that_is_open(self) -> str:
        model = ShardedTrainee().model
        ledger_of(model)
        return self.dry_run(model)

    def with_several_meshes(self) -> str:
        """The outcome, or why it cannot be tested."""
        if not hasattr(_fsdp_common, "ShardPlacementResult"):
            return "torch < 2.13"
        other = _fsdp_common.FSDPMeshInfo(group_mesh(), shard_mesh_dim=0)
        model = nn.Linear(WIDTH, WIDTH)
        elsewhere = _fsdp_common.ShardPlacementResult(Shard(0), other)
        fully_shard(model, mesh=group_mesh(), shard_placement_fn=lambda one: elsewhere if one is model.bias else None)
        return self.dry_run(model)

    def all_ranks_learn_of_a_dry_run_that_ran_out_of_memory_on_one(self) -> None:
        trainee = ShardedTrainee()
        model = trainee.model
        before, random_state, own = trainee.state(), torch.get_rng_state(), communicators(model)
        for place in (0, 60, 120):
            faults = [Fault(place, ranks=[place // 60 % 2])]

            def step(place: int = place, faults: list[Fault] = faults) -> None:
                if faults[-1].has_struck:  # so does another one in the second try
                    faults.append(Fault(place, ranks=[place // 60 % 2]))
                torch.rand(1)
                with faults[-1]:
                    micro_step(model)

            assert self.dry_run(model, step, step) == "out of memory"
        assert same_bits(trainee.state(), before)
        assert torch.equal(torch.get_rng_state(), random_state)
        assert communicators(model) == own
        assert self.dry_run(model) == "recovery"

    def after_a_collective_that_itself_failed_nothing_is_replayed(self) -> None:
        """But the next micro-step is right."""
        model = ShardedTrainee().model
        ledger = ledger_of(model)
        loss = micro_step(model)
        assert len(ledger.expected_now) > 6
        for place in range(len(ledger.expected_now)):
            ledger.begin(is_last=True)
            loss_under(Fault(place, kind="collective"), model)
            assert ledger.issued == ledger.expected_now[:place]
            assert refusal(ledger) == IN_DOUBT
        ledger.begin(is_last=True)
        loss_under(Fault(0), model)
        assert refusal(ledger) == "none"
        assert micro_step(model) == loss

    def after_other_collectives_than_expected_nothing_is_replayed(self) -> None:
        """After too many micro-steps, and after layers in another order."""
        model = ShardedTrainee().model
        ledger = ledger_of(model)
        ledger.begin(is_last=True)
        micro_step(model)
        micro_step(model)
        assert refusal(ledger) == "the issued collectives are not the first ones of the dry run"
        take_layers_in_turned_order(model)
        ledger.begin(is_last=True)
        loss_under(Fault(60), model)
        assert 0 < len(ledger.issued) < len(ledger.expected_now)
        assert refusal(ledger) == "the issued collectives are not the first ones of the dry run"

    def a_collective_that_cannot_be_replayed_is_named(self) -> None:
        """It has no memory for its buffer, or differs from the expected one."""
        model = ShardedTrainee().model
        ledger = ledger_of(model)
        ledger.begin(is_last=True)
        with Fault(2, kind="all-gather allocation"):
            assert re.search("all-gather .* failed: CUDA out of memory", refusal(ledger))
        reset_after_failure(model)
        first, *rest = ledger.expected_now
        changed = [first._replace(numel=first.numel + 1), *rest]
        ledger.expected = changed, changed
        ledger.begin(is_last=True)
        assert refusal(ledger).endswith("all-gather was not issued as in the dry run")


def group_mesh() -> DeviceMesh:
    """A mesh of all ranks, with its own group."""
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    return DeviceMesh.from_group(group, "cpu")


def communicators_of(model: nn.Module) -> list[Communicators] | None:
    """The communicators of ``model``; None if they cannot be recorded."""
    try:
        return communicators(model)
    except CannotRecordError:
        return None


def take_layers_in_turned_order(model: Any) -> None:
    model.forward = lambda inputs: model[3](model[2](model[0](model[1](inputs))))


def play_on_two(rank: int) -> dict[str, Any]:
    scenarios = Scenarios(rank)
    names = [name for name in vars(Scenarios) if not name.startswith("_") and name != "dry_run"]
    return {"models": play_models()} | {name: getattr(scenarios, name)() for name in names}


@pytest.fixture(scope="module")
def on_two() -> list[dict[str, Any]]:
    return run_on_ranks(play_on_two, 2)


@pytest.fixture(scope="module")
def on_four() -> list[dict[str, Any]]:
    return run_on_ranks(play_on_four, 4)


@pytest.fixture(scope="module", params=[2, 4], ids="{} ranks".format)
def models(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """The findings with each model on each rank."""
    played = request.getfixturevalue("on_two" if request.param == 2 else "on_four")
    return {f"{name}, rank {rank}": found for rank, one in enumerate(played) for name, found in one["models"].items()}


# ---- recording and replaying


def test_the_ledger_records_what_was_issued(models: dict[str, dict[str, Any]]) -> None:
    for name, found in models.items():
        recorded, issued = found["recorded and issued"]
        assert len(recorded) > (1 if "repl" in name else 6), name
        assert recorded == issued, name


def test_a_rank_that_failed_anywhere_issues_the_rest_and_its_peers_and_its_next_micro_step_compute_right(
    models: dict[str, dict[str, Any]],
) -> None:
    for name, found in models.items():
        trials = found["one rank fails"]
        assert len(trials) >= POINTS, name
        assert [place for place, is_right in trials if not is_right] == [], name


# ---- dry runs


@pytest.mark.parametrize(
    ("scenario", "reason"),
    [
        ("with_a_collective_of_its_own", "a micro-step issues 9 collectives, but only 8 of them gather parameters"),
        ("with_other_collectives_for_the_second_batch", "micro-steps on different batches issue different collectives"),
        ("with_ranks_that_take_the_layers_in_different_order", "ranks issue different collectives in a micro-step"),
        ("with_an_obstacle_on_one_rank", "an obstacle"),
        ("with_another_step_that_is_open", "another `RecoverableStep` of this model has not been closed"),
        ("with_a_setting_that_the_first_micro_step_changes_for_good", "recovery"),
        ("with_several_meshes", "a module of type FSDPLinear is sharded over several meshes"),
    ],
)
def test_all_ranks_have_the_same_outcome_which_is_recovery_or_the_reason_why_there_is_none(
    on_two: list[dict[str, Any]], scenario: str, reason: str
) -> None:
    reasons = [ranks[scenario] for ranks in on_two]
    if reasons == ["torch < 2.13"] * 2:
        pytest.skip("a module can be sharded over several meshes from torch 2.13 on")
    assert reasons == [reasons[0]] * 2
    assert reasons[0].startswith(reason)


@pytest.mark.parametrize("fails", [False, True])
def test_a_dry_run_frees_what_micro_steps_left_outside_the_model(fails: bool) -> None:
    model = nn.Linear(WIDTH, 4)
    kept: list[torch.Tensor] = []
    watched: list[weakref.ref[torch.Tensor]] = []

    def step() -> None:
        kept.append(model(torch.zeros(2, WIDTH)))
        watched.append(weakref.ref(kept[-1]))
        if fails:
            raise torch.OutOfMemoryError("injected")

    with pytest.raises(NothingFitsError) if fails else nullcontext():
        dry_run_of(model, [step, step], release=kept.clear)
    assert [reference() for reference in watched] == [None] * 2  # two tries, or two micro-steps of the first one
