"""``RecoverableStep`` with a model in ``DistributedDataParallel`` trains as plain DistributedDataParallel does."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import MixedPrecision
from torch.nn.parallel import DistributedDataParallel

from tests.support.faults import same_bits, under
from tests.support.layers import RunningMean
from tests.support.ranks import run_on_ranks
from torchtune_adaptive import CannotRecoverError, RecoverableStep
from torchtune_adaptive.engine.distributed.ddp_ledger import buckets_of
from torchtune_adaptive.engine.recovery.backoff import Backoff
from torchtune_adaptive.testing import Fault, wrap_micro_steps

ROWS, STEPS, WIDTH = 8, 3, 16
LARGE, SMALL = 4, 2  # rows of a micro-batch
FAULTS = (0, 9, 30, 55)  # places in a micro-step


class Net(nn.Module):
    """With dropout, and layers that are frozen, that only some ranks or none use, or a layer with buffers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = RunningMean(WIDTH) if "mean" in kind else nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.of_rank_one, self.of_no_rank = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 4)
        self.second.requires_grad_("frozen" not in kind)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(self.norm(self.second(torch.relu(self.first(rows)))))
        if self._kind == "collective in forward":
            mean = hidden.detach().mean().clone()
            dist.all_reduce(mean)
            hidden = hidden - mean
        if "unused" not in self._kind or dist.get_rank() == 1:
            hidden = hidden + self.of_rank_one(hidden)
        if "unused" not in self._kind:
            hidden = hidden + self.of_no_rank(hidden)
        return self.last(hidden)


@dataclass(frozen=True)
class Variant:
    kind: str = ""
    bf16: bool = False  # by autocast
    passes: int = 1  # backward passes of a micro-step
    options: dict[str, Any] = field(default_factory=dict)  # of DistributedDataParallel


VARIANTS = {
    "defaults": Variant(),
    "autocast": Variant(bf16=True),
    "buffers": Variant("mean"),
    "buffers without broadcasts": Variant("mean", options={"broadcast_buffers": False}),
    "gradients as views": Variant(options={"gradient_as_bucket_view": True}),
    "small buckets": Variant(options={"bucket_cap_mb": 0.001}),
    "frozen parameters": Variant("frozen"),
    "layers unfrozen after a step": Variant("thawing", options={"find_unused_parameters": True}),
    "unused parameters": Variant("unused", options={"find_unused_parameters": True}),
    "compiled": Variant("compiled"),
}


class Training:
    """A few optimizer steps on this rank, by plain DistributedDataParallel or with recovery."""

    def __init__(self, variant: Variant) -> None:
        torch.manual_seed(0)
        self.variant = variant
        net = Net(variant.kind)
        if variant.kind == "compiled":
            net.compile(backend="aot_eager")
        self.ddp = DistributedDataParallel(net, **variant.options)
        self.ddp.module.first.requires_grad_(variant.kind != "thawing")
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=0.01)
        torch.manual_seed(1 + dist.get_rank())

    def micro_step(self, rows: torch.Tensor) -> torch.Tensor:
        losses = []
        for part in rows.chunk(self.variant.passes, dim=1):
            with torch.autocast("cpu", torch.bfloat16, enabled=self.variant.bf16):
                loss = self.ddp(part).float().square().sum() / ROWS
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def plain(self, *sizes: int) -> list[torch.Tensor]:
        """The final state after steps with micro-batches of these sizes."""
        for number, size in enumerate(sizes):
            *others, last = self._rows(number).split(size)
            self._thaw(number)
            for rows in others:
                with self.ddp.no_sync():
                    self.micro_step(rows)
            self.micro_step(last)
            self._update()
        return self._state()

    def recoverable(self, size: int = LARGE) -> RecoverableStep[torch.Tensor]:
        options: Any = {"micro_batch_size": size, "on_event": lambda event: None}
        return RecoverableStep(self.ddp, self.micro_step, **options)

    def recovering(self, size: int, place: int | None = None, *, fault_in: tuple[int, int] = (0, 0)) -> list[Any]:
        """The same with recovery, and a fault of rank 1 at ``place`` in a micro-step of a step."""
        step = self.recoverable(size)
        for number in range(STEPS):
            self._thaw(number)
            faults = {fault_in[1]: Fault(place, ranks=[1])} if number == fault_in[0] else {}
            wrap_micro_steps(step, partial(under, faults))
            step.backoff = Backoff()  # which does not try larger micro-batches again
            step(self._rows(number))
            self._update()
        assert len(step.events) == (place is not None)
        step.close()
        return self._state()

    def _rows(self, number: int) -> torch.Tensor:
        return torch.randn(ROWS, 3, WIDTH, generator=torch.Generator().manual_seed(100 * number + dist.get_rank()))

    def _thaw(self, number: int) -> None:
        if number == 1:
            self.ddp.module.first.requires_grad_(True)

    def _update(self) -> None:
        nn.utils.clip_grad_norm_(self.ddp.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _state(self) -> list[torch.Tensor]:
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return [tensor.detach().clone() for tensor in (*self.ddp.state_dict().values(), *states)]


def _compared(rank: int) -> dict[str, dict[str, bool]]:
    """What is equal, bit for bit, to plain training. Before a late fault, steps have none."""
    found: dict[str, dict[str, bool]] = {}
    for number, (name, variant) in enumerate(VARIANTS.items()):
        place, found[name] = FAULTS[(number + 2) % 4], {}
        if variant.kind != "compiled":  # each training is compiled again, which takes a second
            whole = Training(variant).plain(*[ROWS] * STEPS)
            found[name]["without a fault"] = same_bits(whole, Training(variant).recovering(ROWS))
            late = Training(variant).recovering(LARGE, place, fault_in=(2, 1 - number % 2))
            found[name]["late fault"] = same_bits(Training(variant).plain(LARGE, LARGE, SMALL), late)
        early = Training(variant).recovering(LARGE, place, fault_in=(0, number % 2))
        found[name]["early fault"] = same_bits(Training(variant).plain(*[SMALL] * STEPS), early)
    return found


def _differences(rank: int) -> list[float]:
    """The largest difference from plain training, without a fault and with one."""
    plain = Training(Variant()).plain(*[SMALL] * STEPS)
    runs = Training(Variant()).recovering(SMALL), Training(Variant()).recovering(LARGE, FAULTS[2], fault_in=(0, 1))
    return [
        max((one.double() - other.double()).abs().max().item() for one, other in zip(plain, run, strict=True))
        for run in runs
    ]


# ---- buckets


def _issued(rank: int) -> list[list[int]]:
    """How many buckets were under way when the backward pass arrived at the first layer, in each micro-step.

    With one backward pass in a micro-step, and with two.
    """
    found = []
    for passes in (1, 2):
        training = Training(Variant(passes=passes))
        step = training.recoverable()
        buckets: list[int] = []

        def note(*_: Any, step: Any = step, buckets: list[int] = buckets) -> None:
            if step.recovers:
                buckets.append(len(step._recovery._ledger.issued))

        training.ddp.module.first.register_full_backward_hook(note)  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("torchtune_adaptive.engine.distributed.ddp_ledger.BUCKET_BYTES", 4 * WIDTH * WIDTH)
            step(torch.ones(ROWS, 3, WIDTH))
        found.append(buckets)
    return found


def test_a_bucket_has_parameters_of_one_type_up_to_its_size() -> None:
    sizes = (3, 2, 2, 9, 1)
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    parameters.append(nn.Parameter(torch.zeros(1, dtype=torch.bfloat16)))
    buckets = buckets_of(parameters, bucket_bytes=5 * 4)
    assert [[one.numel() for one in bucket] for bucket in buckets] == [[3, 2], [2], [9], [1], [1]]


# ---- what is refused


def _refused(rank: int) -> dict[str, str]:
    """The reason on this rank, by what the model does."""

    def hook(training: Training) -> None:
        training.ddp.register_comm_hook(None, fp16_compress_hook)

    def buffer_hook(training: Training) -> None:
        training.ddp._register_buffer_comm_hook(None, lambda state, buffers: None)

    def nested(training: Training) -> None:
        training.ddp.module.last = DistributedDataParallel(nn.Linear(WIDTH, 4))

    half: Any = MixedPrecision(param_dtype=torch.bfloat16)
    cases: dict[str, tuple[Variant, Callable[[Training], object]]] = {
        "hook": (Variant(), hook),
        "buffer hook": (Variant(), buffer_hook),
        "nested": (Variant(), nested),
        "mixed precision": (Variant(options={"mixed_precision": half}), lambda training: None),
        "static graph": (Variant(options={"static_graph": True}), lambda training: None),
        "collective in forward": (Variant("collective in forward"), lambda training: None),
    }
    told = {}
    for name, (variant, change) in cases.items():
        with mock.patch.object(torch, "Stream"):  # of mixed precision: torch for CUDA cannot make it without a GPU
            training = Training(variant)
        change(training)
        with pytest.raises(CannotRecoverError) as raised:
            training.recovering(LARGE)
        told[name] = str(raised.value).removeprefix("An out-of-memory error in training will end the run: ")
    inside = nn.Sequential(DistributedDataParallel(nn.Linear(WIDTH, 4)))
    step = RecoverableStep(inside, lambda rows: inside(rows).sum().backward(), micro_batch_size=LARGE)
    with pytest.raises(CannotRecoverError) as raised:
        step(torch.ones(ROWS, WIDTH))
    return told | {"inside": str(raised.value)}


def _used_twice(rank: int) -> str:
    """The error if a micro-step uses a parameter more often than in the dry run."""
    training = Training(Variant())
    step = training.recoverable(ROWS)
    step.dry_run(torch.ones(ROWS, 3, WIDTH))
    training.variant = Variant(passes=2)
    with pytest.raises(RuntimeError) as raised:
        step(torch.ones(ROWS, 3, WIDTH))
    return str(raised.value)


def _used_twice_at_times(rank: int) -> bool:
    """Whether steps of one micro-step, of two backward passes for several rows and else of one, equal plain ones."""
    training = Training(Variant())

    def micro_step(rows: torch.Tensor) -> torch.Tensor:
        training.variant = Variant(passes=1 + (len(rows) > 1))
        return training.micro_step(rows)

    step = RecoverableStep(training.ddp, micro_step, micro_batch_size=LARGE)
    step.dry_run(training._rows(0))
    for number, rows in enumerate((1, LARGE, 1, LARGE)):
        step(training._rows(number)[:rows])
        training._update()
    plain = Training(Variant())
    for number, rows in enumerate((1, LARGE, 1, LARGE)):
        *first, last = plain._rows(number)[:rows].chunk(1 + (rows > 1), dim=1)
        with plain.ddp.no_sync():
            for part in first:
                plain.micro_step(part)
        plain.micro_step(last)
        plain._update()
    return same_bits(training._state(), plain._state())


def _penalised(rank: int) -> bool:
    """Whether training with a penalty, whose backward pass comes after the step's, equals plain training."""
    states = []
    for recovers in (False, True):
        training = Training(Variant())
        step: Any = training.recoverable(ROWS) if recovers else training.micro_step
        for number in range(STEPS):
            step(training._rows(number))
            torch.stack([one.square().sum() for one in training.ddp.module.parameters()]).sum().backward()
            training._update()
        states.append(training._state())
    return same_bits(*states)


def _group_of_two(rank: int) -> list[Any]:
    """The events of two ranks of four that train a model together, while the others do something else."""
    groups: list[Any] = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    if rank < 2:
        dist.barrier(groups[0])  # both have connected
        return []
    ddp = DistributedDataParallel(nn.Linear(4, 1), process_group=groups[1])
    step = RecoverableStep(
        ddp, lambda rows: ddp(rows).sum().backward(), micro_batch_size=4, on_event=lambda event: None
    )
    wrap_micro_steps(step, partial(under, {0: Fault(0, ranks=[3])}))
    step(torch.ones(4, 4))
    return [event.ranks for event in step.events]


# ---- on ranks


def _on_two(rank: int) -> dict[str, Any]:
    scenarios = (_compared, _issued, _refused, _used_twice, _used_twice_at_times, _penalised)
    return {scenario.__name__: scenario(rank) for scenario in scenarios}


@pytest.fixture(scope="module")
def on_two() -> list[dict[str, Any]]:
    return run_on_ranks(_on_two, 2)


@pytest.mark.parametrize("name", VARIANTS)
def test_it_equals_plain_training_bit_for_bit_with_faults_and_without(on_two: list[dict[str, Any]], name: str) -> None:
    for of_rank in on_two:
        assert [what for what, is_equal in of_rank["_compared"][name].items() if not is_equal] == []


def test_the_last_micro_step_averages_buckets_while_it_computes(on_two: list[dict[str, Any]]) -> None:
    for once, twice in (found["_issued"] for found in on_two):
        assert once[0] == 0
        assert once[1] >= 4
        assert twice == [0, 0, 0, once[1]]  # complete only in the second pass


def test_what_cannot_work_is_refused_by_name_on_every_rank(on_two: list[dict[str, Any]]) -> None:
    first, second = (found["_refused"] for found in on_two)
    assert first == second
    prefix, suffix = "DistributedDataParallel with ", " is not supported."
    assert first["hook"] == f"{prefix}a communication hook{suffix}"
    assert first["buffer hook"] == f"{prefix}a hook for buffers{suffix}"
    assert first["nested"] == f"{prefix}another DistributedDataParallel or FSDP2 in it{suffix}"
    assert first["static graph"] == f"{prefix}a static graph{suffix}"
    assert first["mixed precision"] == f"{prefix}its own mixed precision{suffix}"
    assert "1 collectives, but only 0 of them gather parameters or reduce gradients" in first["collective in forward"]
    assert "a module is in a DistributedDataParallel; whole models in" in first["inside"]


def test_a_gradient_that_grows_after_its_average_is_an_error_not_a_wrong_result(on_two: list[dict[str, Any]]) -> None:
    for found in on_two:
        assert found["_used_twice"].startswith("A gradient grew after it had been averaged")


def test_how_often_a_gradient_grows_may_change_if_it_did_so_in_the_dry_run(on_two: list[dict[str, Any]]) -> None:
    assert [found["_used_twice_at_times"] for found in on_two] == [True, True]


def test_a_backward_pass_between_the_steps_is_not_averaged(on_two: list[dict[str, Any]]) -> None:
    assert [found["_penalised"] for found in on_two] == [True, True]


def _on_four(rank: int) -> tuple[list[float], list[Any]]:
    return _differences(rank), _group_of_two(rank)


def test_four_ranks_differ_by_the_order_of_their_sums_and_only_those_of_the_process_group_take_part() -> None:
    found = run_on_ranks(_on_four, 4)
    for differences, _ in found:
        assert max(differences) < 1e-5
        assert differences[0] == differences[1]
    assert [events for _, events in found] == [[], [], [(3,)], [(3,)]]
