"""With recovery, training is as plain training in ``DistributedDataParallel``, or under FSDP2 that reduces once."""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import FSDPModule, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.support.faults import fsdp_settings, same_bits, tensors_of, under
from tests.support.layers import RunningMean
from tests.support.ranks import run_on_ranks
from torchtune_adaptive import CannotRecoverError, InputError, RecoverableStep
from torchtune_adaptive.engine.distributed.ddp_ledger import buckets_of
from torchtune_adaptive.engine.recovery import attempts
from torchtune_adaptive.engine.recovery.backoff import Backoff
from torchtune_adaptive.errors import CannotCutError
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
    options: dict[str, Any] = field(default_factory=dict)  # of DistributedDataParallel or FSDP2
    changes_gradients: bool = False  # after the backward pass, in the micro-step
    changes_in_hooks: bool = False  # of parameters, which are there from the second step on
    is_whole_later: bool = False  # FSDP2 does not reshard a layer after its forward pass, from the second step on


SHARDED = Variant("sharded")
VARIANTS = {
    "defaults": Variant(),
    "autocast and buffers": Variant("mean", bf16=True),
    "buffers without broadcasts": Variant("mean", options={"broadcast_buffers": False}),
    "small buckets as views, and frozen parameters": Variant(
        "frozen", options={"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001}
    ),
    "layers unfrozen after a step": Variant("thawing", options={"find_unused_parameters": True}),
    "unused parameters": Variant("unused", options={"find_unused_parameters": True}),
    "compiled": Variant("compiled"),
    "gradients that a micro-step changes after its backward pass": Variant(changes_gradients=True),
    "the same, of which some are of one rank or of none": Variant(
        "unused", options={"find_unused_parameters": True}, changes_gradients=True
    ),
    "gradients that late hooks change": Variant(changes_in_hooks=True),
    "sharded": SHARDED,
    "sharded, with other settings after a step": Variant("sharded", is_whole_later=True),
    "sharded, bf16": Variant("sharded", options={"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}),
}


class Training:
    """A few optimizer steps on this rank, plain or with recovery."""

    def __init__(self, variant: Variant) -> None:
        torch.manual_seed(0)
        self.variant = variant
        self.net = Net(variant.kind)
        if variant.kind == "compiled":
            self.net.compile(backend="aot_eager", dynamic=True)
        self.model: Any = self.net
        if variant.kind == "sharded":
            for part in (self.net.first, self.net):
                fully_shard(part, **variant.options)
        else:
            self.model = DistributedDataParallel(self.net, **variant.options)
        self.net.first.requires_grad_(variant.kind != "thawing")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        torch.manual_seed(1 + dist.get_rank())

    def micro_step(self, rows: torch.Tensor) -> torch.Tensor:
        losses = []
        for part in rows.chunk(self.variant.passes, dim=1):
            with torch.autocast("cpu", torch.bfloat16, enabled=self.variant.bf16):
                loss = self.model(part).float().square().sum() / ROWS
            loss.backward()
            losses.append(loss.detach())
        if self.variant.changes_gradients:
            for parameter in (self.net.first.weight, self.net.last.weight):
                assert parameter.grad is not None
                parameter.grad.add_(parameter.detach(), alpha=len(rows) / 100)
        return torch.stack(losses).sum()

    def plain(self, *sizes: int) -> list[torch.Tensor]:
        """The final state after steps with micro-batches of these sizes."""
        for number, size in enumerate(sizes):
            parts = self.rows(number).split(size)
            self._change(number)
            for micro_step, rows in enumerate(parts, start=1):
                with self.reducing(is_last=micro_step == len(parts)):
                    self.micro_step(rows)
            self.update()
        return self.state()

    def reducing(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """Context of a plain backward pass: the last one of an optimizer step reduces gradients."""
        if self.variant.kind == "sharded":
            self.model.set_requires_gradient_sync(is_last)
        return nullcontext() if is_last or self.variant.kind == "sharded" else self.model.no_sync()

    def recoverable(self, size: int = LARGE, micro_step: Any = None) -> RecoverableStep[torch.Tensor]:
        options: Any = {"micro_batch_size": size, "optimizer": self.optimizer, "on_event": lambda event: None}
        options |= {"reduce": "last"} if self.variant.kind == "sharded" else {}
        return RecoverableStep(self.model, micro_step or self.micro_step, **options)

    def recovering(self, size: int, faults: Mapping[int, tuple[int, int]]) -> list[torch.Tensor]:
        """The same with recovery, and ``faults`` of rank 1: by step, the micro-step and the place in it."""
        step = self.recoverable(size)
        for number in range(STEPS):
            self._change(number)
            wrap_micro_steps(step, partial(under, _of_rank_one(*faults[number]) if number in faults else {}))
            step.backoff = Backoff()  # which does not try larger micro-batches again
            step(self.rows(number))
            self.update()
        assert len(step.events) == len(faults)
        step.close()
        return self.state()

    def without_recovery(self, size: int) -> list[torch.Tensor]:
        """The same with recovery turned off."""
        step = self.recoverable(size)
        step.disable()
        for number in range(STEPS):
            self._change(number)
            step(self.rows(number))
            self.update()
        step.close()
        return self.state()

    def rows(self, number: int) -> torch.Tensor:
        return torch.randn(ROWS, 3, WIDTH, generator=torch.Generator().manual_seed(100 * number + dist.get_rank()))

    def _change(self, number: int) -> None:
        if number == 1:
            self.net.first.requires_grad_(True)
            if self.variant.changes_in_hooks:
                for parameter in self.model.parameters():
                    parameter.register_post_accumulate_grad_hook(_enlarge)
            if self.variant.is_whole_later:
                cast(FSDPModule, self.net.first).set_reshard_after_forward(False)

    def update(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in (*tensors_of(self.model, self.optimizer), *self.model.buffers())]


def _enlarge(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(1.5)


def _of_rank_one(micro_step: int, place: int) -> dict[int, Fault]:
    return {micro_step: Fault(place, ranks=[1])}


def _compared(rank: int) -> dict[str, dict[str, bool]]:
    """What is equal, bit for bit, to plain training. In turn the first step fails or the second, and then the last."""
    found: dict[str, dict[str, bool]] = {}
    for number, (name, variant) in enumerate(VARIANTS.items()):
        first, place = number % 2, FAULTS[(number + 2) % 4]
        plain = Training(variant).plain(*[ROWS] * first, *[LARGE] * (2 - first), SMALL)
        recovered = Training(variant).recovering(ROWS, {first: (0, place), 2: (1 - first, place)})
        found[name] = {"faults": same_bits(plain, recovered)}
        if variant.kind != "compiled":  # which takes long
            halves = Training(variant).plain(*[LARGE] * STEPS)
            found[name]["without recovery"] = same_bits(halves, Training(variant).without_recovery(LARGE))
    return found


# ---- what is reduced


def _the_last_micro_step_averages_buckets_while_it_computes(rank: int) -> None:
    """They are under way when the backward pass arrives at the first layer. With one backward pass, and with two."""
    found = []
    for passes in (1, 2):
        training = Training(Variant(passes=passes))
        step = training.recoverable()
        buckets: list[int] = []

        def note(*_: Any, step: Any = step, buckets: list[int] = buckets) -> None:
            if step.recovers:
                buckets.append(len(step._preparation.recovery.ledger.issued))

        training.net.first.register_full_backward_hook(note)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("torchtune_adaptive.engine.distributed.ddp_ledger.BUCKET_BYTES", 4 * WIDTH * WIDTH)
            step(torch.ones(ROWS, 3, WIDTH))
        found.append(buckets)
    once, twice = found
    assert once[0] == 0
    assert once[1] >= 4
    assert twice == [0, 0, 0, once[1]]  # complete only in the second pass


def test_a_bucket_has_parameters_of_one_type_up_to_its_size() -> None:
    sizes = (3, 2, 2, 9, 1)
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    parameters.append(nn.Parameter(torch.zeros(1, dtype=torch.bfloat16)))
    buckets = buckets_of(parameters, bucket_bytes=5 * 4)
    assert [[one.numel() for one in bucket] for bucket in buckets] == [[3, 2], [2], [9], [1], [1]]


def _only_the_last_micro_step_reduces_under_fsdp2_whose_settings_are_then_as_before(rank: int) -> None:
    training = Training(SHARDED)
    step = training.recoverable()
    training.model(torch.ones(1, WIDTH))  # sets FSDP2 up
    before = fsdp_settings(training.model)
    step(training.rows(0))
    assert fsdp_settings(training.model) == before
    training.update()
    wrap_micro_steps(step, _fail)
    with pytest.raises(KeyError):
        step(training.rows(0))
    assert fsdp_settings(training.model) == before
    recovery: Any = step._preparation.recovery
    kinds = [{one.kind for one in expected} for expected in recovery.ledger.expected]
    assert kinds == [{"all-gather"}, {"all-gather", "reduce-scatter"}]


def _fail(number: int, run: Callable[[], Any]) -> Any:
    raise KeyError("the user's own mistake")


# ---- what is refused


def _what_cannot_work_is_refused_by_name(rank: int) -> None:
    def hook(training: Training) -> None:
        training.model.register_comm_hook(None, fp16_compress_hook)

    def buffer_hook(training: Training) -> None:
        training.model._register_buffer_comm_hook(None, lambda state, buffers: None)

    def nested(training: Training) -> None:
        training.net.dropout = DistributedDataParallel(nn.Linear(WIDTH, WIDTH))  # pyright: ignore

    def inside(training: Training) -> None:
        training.model = nn.Sequential(training.model)

    def never_last(training: Training) -> None:
        training.net.register_forward_pre_hook(lambda *_: training.model.set_is_last_backward(False))

    of_ddp = "DistributedDataParallel with {} is not supported".format
    half: Any = MixedPrecision(param_dtype=torch.bfloat16)
    cases: dict[str, tuple[Variant, Callable[[Training], object]]] = {
        of_ddp("a communication hook"): (Variant(), hook),
        of_ddp("a hook for buffers"): (Variant(), buffer_hook),
        of_ddp("another DistributedDataParallel or FSDP2 in it"): (Variant(), nested),
        of_ddp("its own mixed precision"): (Variant(options={"mixed_precision": half}), lambda _: None),
        of_ddp("a static graph"): (Variant(options={"static_graph": True}), lambda _: None),
        "a module within it is in a DistributedDataParallel: pass that module itself as `model`": (Variant(), inside),
        "a micro-step ends after `set_is_last_backward(False)`": (SHARDED, never_last),
    }
    for sentence, (variant, change) in cases.items():
        with mock.patch.object(torch, "Stream"):  # of mixed precision: torch for CUDA cannot make it without a GPU
            training = Training(variant)
        change(training)
        with pytest.raises(CannotRecoverError, match=re.escape(sentence)):
            training.recovering(LARGE, {})
    late = Training(Variant())
    step = late.recoverable(LARGE)
    step(late.rows(0))
    late.update()
    hook(late)
    with pytest.raises(CannotRecoverError, match=re.escape(of_ddp("a communication hook"))):
        step(late.rows(1))


def _what_differs_between_ranks_is_refused_on_each(rank: int) -> None:
    training = Training(Variant(options={"find_unused_parameters": True}))
    step = training.recoverable()
    step(training.rows(0))
    training.update()
    training.net.last.requires_grad_(rank == 0)
    with pytest.raises(InputError, match=r"^Ranks must train the same parameters"):
        step(training.rows(1))
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH).eval())
    model = DistributedDataParallel(layers)
    step = RecoverableStep(model, lambda rows: model(rows).square().sum().backward(), micro_batch_size=LARGE)
    step(torch.ones(ROWS, WIDTH))
    model.zero_grad()
    layers.train(rank == 0)
    with pytest.raises(CannotCutError, match="BatchNorm1d"):
        step(torch.ones(ROWS, WIDTH))


def _contexts_in_which_ranks_train_apart_are_refused(rank: int) -> None:
    """As accelerate's `LocalSGD` and `join_uneven_inputs`; before the dry run and after it."""
    contexts: list[tuple[str, Callable[[Any], AbstractContextManager[Any]]]] = [
        ("within `no_sync`", lambda model: model.no_sync()),
        ("in `Join`", lambda model: Join([model])),  # the last one: its setting stays
    ]
    training, other = Training(Variant()), Training(Variant())
    step = training.recoverable()
    step(training.rows(0))
    training.update()
    before = training.state()
    for text, context in contexts:
        for one, its_step in ((training, step), (other, other.recoverable())):
            with pytest.raises(InputError, match=text), context(one.model):
                its_step(one.rows(1))
    assert same_bits(training.state(), before)


def _collectives_of_its_own_that_come_after_the_dry_run_are_noticed(rank: int) -> None:
    for variant in (SHARDED, Variant()):
        training = Training(variant)
        reported = list[torch.Tensor]()

        def micro_step(rows: torch.Tensor, training: Training = training, reported: Any = reported) -> torch.Tensor:
            loss = training.micro_step(rows)
            for one in reported:
                dist.all_reduce(one)
            return loss

        step = training.recoverable(micro_step=micro_step)
        with mock.patch.object(attempts.log, "warning") as warning:
            step(training.rows(0))
            training.update()
            assert warning.call_count == 0
            reported.append(torch.ones(1))
            step(training.rows(1))
            training.update()
            assert warning.call_count == 1
        step.close()


def _gradients_of_parameters_that_stay_whole_are_compared(rank: int) -> None:
    training = Training(SHARDED)
    training.model.set_reshard_after_backward(False)

    def mean(rows: torch.Tensor) -> torch.Tensor:
        loss = training.model(rows).square().mean()
        loss.backward()
        return loss.detach()

    with pytest.raises(CannotCutError, match="the loss is a mean"):
        training.recoverable(micro_step=mean)(training.rows(0))


# ---- how often a gradient grows


def _a_gradient_that_grows_after_its_average_is_an_error_not_a_wrong_result(rank: int) -> None:
    """As where a micro-step uses a parameter more often than in the dry run."""
    training = Training(Variant())
    step = training.recoverable(ROWS)
    step.dry_run(torch.ones(ROWS, 3, WIDTH))
    training.variant = Variant(passes=2)
    with pytest.raises(RuntimeError, match=r"^A gradient grew after it had been averaged"):
        step(torch.ones(ROWS, 3, WIDTH))


def _how_often_a_gradient_grows_may_change_if_it_did_so_in_the_dry_run(rank: int) -> None:
    """Steps of one micro-step have two backward passes for several rows, and else one."""
    training, plain = Training(Variant()), Training(Variant())

    def micro_step(rows: torch.Tensor) -> torch.Tensor:
        training.variant = Variant(passes=1 + (len(rows) > 1))
        return training.micro_step(rows)

    step = training.recoverable(micro_step=micro_step)
    step.dry_run(training.rows(0))
    for number, rows in enumerate((1, LARGE, 1, LARGE)):
        step(training.rows(number)[:rows])
        training.update()
    torch.manual_seed(1 + rank)
    for number, rows in enumerate((1, LARGE, 1, LARGE)):
        parts = plain.rows(number)[:rows].chunk(1 + (rows > 1), dim=1)
        for place, part in enumerate(parts, start=1):
            with plain.reducing(is_last=place == len(parts)):
                plain.micro_step(part)
        plain.update()
    assert same_bits(training.state(), plain.state())


class OfLongRows(nn.Module):
    """Layers before a frozen one. For long rows each is computed again in backward, by a backward pass of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 4).requires_grad_(False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = rows.clone().requires_grad_()
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=True) if rows.shape[1] > 2 else layer(hidden)
        return self.head(hidden)


def _a_backward_pass_that_runs_others_is_one_pass(rank: int) -> None:
    """And its gradients are averaged after all of them, also where only this rank has such rows."""
    models = [DistributedDataParallel(OfLongRows()) for _ in range(2)]
    own, plain = models

    def micro_step(rows: torch.Tensor) -> None:
        own(rows).square().sum().backward()

    step = RecoverableStep(own, micro_step, micro_batch_size=ROWS)
    for num_rows in (2, 2, 2 + rank, 3):
        rows = torch.full((ROWS, num_rows, WIDTH), 1.0 + rank)
        for model in models:
            model.zero_grad()
        step(rows)
        plain(rows).square().sum().backward()
        assert same_bits(*([one.grad for one in model.parameters() if one.grad is not None] for model in models))


def _a_backward_pass_between_the_steps_is_as_in_plain_training(rank: int) -> None:
    """As of a penalty, whose backward pass comes after the step's: it is averaged if it goes through the wrapper."""

    def of_weights(training: Training) -> torch.Tensor:
        return torch.stack([one.square().sum() for one in training.net.parameters()]).sum()

    def of_outputs(training: Training) -> torch.Tensor:
        return training.model(training.rows(9)).square().sum()

    for penalty in (of_weights, of_outputs):
        states = []
        for recovers in (False, True):
            training = Training(Variant())
            step: Any = training.recoverable(ROWS) if recovers else training.micro_step
            for number in range(STEPS):
                step(training.rows(number))
                penalty(training).backward()
                training.update()
            states.append(training.state())
        assert same_bits(*states)


def _a_forward_pass_between_the_steps_changes_nothing(rank: int) -> None:
    """As of a validation without `no_grad`, after which the wrapper expects a backward pass."""
    states = []
    for has_graph in (False, True):
        training = Training(Variant())
        step = training.recoverable()
        for number in range(STEPS):
            wrap_micro_steps(step, partial(under, _of_rank_one(1, FAULTS[1]) if number == 1 else {}))
            step(training.rows(number))
            training.update()
            with torch.set_grad_enabled(has_graph):
                training.model(training.rows(number))
        assert step.retries == 1
        states.append(training.state())
    assert same_bits(*states)


class OfFewOrMany(nn.Module):
    """A layer for up to two rows, and another one for more."""

    def __init__(self) -> None:
        super().__init__()
        self.few, self.many = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.few(rows) if len(rows) <= 2 else self.many(rows)


def _without_recovery_a_layer_that_only_the_dry_run_has_used_is_none_of_the_step(rank: int) -> None:
    """As where the loss is a mean, so that a step stays whole, and the wrapper averages itself."""
    states = []
    for has_dry_run in (False, True):
        torch.manual_seed(0)
        training = Training(Variant())
        training.model = DistributedDataParallel(OfFewOrMany(), find_unused_parameters=True)
        training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=0.01)

        def micro_step(rows: torch.Tensor, training: Training = training) -> torch.Tensor:
            loss = training.model(rows).square().mean()
            loss.backward()
            return loss.detach()

        step: Any = training.recoverable(ROWS, micro_step) if has_dry_run else micro_step
        for number in range(STEPS):
            step(training.rows(number))
            training.update()
        states.append(training.state())
    assert same_bits(*states)


# ---- between the steps under FSDP2


def _a_step_that_the_caller_skips_leaves_no_gradients(rank: int) -> None:
    """After an error of its own in the second micro-step, in the forward or the backward pass."""
    states = []
    for name in ("", "register_forward_pre_hook", "register_full_backward_hook"):
        training = Training(SHARDED)
        step = training.recoverable()
        step.dry_run(training.rows(0))
        micro_steps = itertools.count()

        def fail_in_the_second(*_: object, micro_steps: Iterator[int] = micro_steps) -> None:
            if next(micro_steps):
                raise KeyError("the user's own mistake")

        for number in (0, 1, 2) if name else (0, 2):
            hooks = [getattr(training.net.second, name)(fail_in_the_second)] if number == 1 else []
            torch.manual_seed(number)
            with suppress(KeyError):
                step(training.rows(number))
                training.update()
            for hook in hooks:
                hook.remove()
            training.optimizer.zero_grad()
        assert next(micro_steps) == (2 if name else 0)
        states.append(training.state())
    assert same_bits(states[0], states[1])
    assert same_bits(states[0], states[2])


def _parameters_that_stay_whole_show_their_gradients_after_a_step(rank: int) -> None:
    training = Training(SHARDED)
    training.model.set_reshard_after_backward(False)
    training.recoverable()(training.rows(0))
    assert all(one.grad is not None for one in training.model.parameters())


def _parameters_that_the_caller_has_gathered_do_no_harm(rank: int) -> None:
    """As where `unshard` starts the gathering of a step's first parameters, also before the first forward pass."""
    states = []
    for is_early in (False, True):
        training = Training(SHARDED)
        step = training.recoverable()
        for number in range(STEPS):
            wrap_micro_steps(step, partial(under, _of_rank_one(1, FAULTS[1]) if number == 1 else {}))
            if is_early:
                training.model.unshard()
            step(training.rows(number))
            training.update()
        assert step.retries == 1
        states.append(training.state())
    assert same_bits(*states)


# ---- on two ranks


def _on_two(rank: int) -> dict[str, dict[str, bool]]:
    _the_last_micro_step_averages_buckets_while_it_computes(rank)
    _only_the_last_micro_step_reduces_under_fsdp2_whose_settings_are_then_as_before(rank)
    _what_cannot_work_is_refused_by_name(rank)
    _what_differs_between_ranks_is_refused_on_each(rank)
    _contexts_in_which_ranks_train_apart_are_refused(rank)
    _collectives_of_its_own_that_come_after_the_dry_run_are_noticed(rank)
    _gradients_of_parameters_that_stay_whole_are_compared(rank)
    _a_gradient_that_grows_after_its_average_is_an_error_not_a_wrong_result(rank)
    _how_often_a_gradient_grows_may_change_if_it_did_so_in_the_dry_run(rank)
    _a_backward_pass_that_runs_others_is_one_pass(rank)
    _a_backward_pass_between_the_steps_is_as_in_plain_training(rank)
    _a_forward_pass_between_the_steps_changes_nothing(rank)
    _without_recovery_a_layer_that_only_the_dry_run_has_used_is_none_of_the_step(rank)
    _a_step_that_the_caller_skips_leaves_no_gradients(rank)
    _parameters_that_stay_whole_show_their_gradients_after_a_step(rank)
    _parameters_that_the_caller_has_gathered_do_no_harm(rank)
    return _compared(rank)


@pytest.fixture(scope="module")
def on_two() -> list[dict[str, dict[str, bool]]]:
    return run_on_ranks(_on_two, 2)


@pytest.mark.parametrize("name", VARIANTS)
def test_it_equals_plain_training_bit_for_bit_with_faults_and_without(on_two: Any, name: str) -> None:
    for compared in on_two:
        assert [what for what, is_equal in compared[name].items() if not is_equal] == []
