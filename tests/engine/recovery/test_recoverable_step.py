"""``RecoverableStep`` as a custom training loop uses it, in one process and on two ranks."""

import collections
import contextlib
import copy
import gc
import io
import random
import re
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.parallel import DistributedDataParallel

from tests.support.allocator import rises_by_events
from tests.support.documents import REPOSITORY, blocks
from tests.support.faults import WIDTH, same_bits, tensors_of, under
from tests.support.layers import RunningMean
from tests.support.ranks import DEVICE, run_alone, run_on_ranks
from tests.support.toys import Prepared
from torchtune_adaptive import (
    CannotRecoverError,
    InputError,
    MemoryEvent,
    NothingFitsError,
    RecoverableStep,
    find_max_batch_size,
)
from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.engine.distributed.fsdp_state import communicators, fsdp_states
from torchtune_adaptive.engine.memory.devices import optimizers_of
from torchtune_adaptive.engine.memory.operations import plain_parts
from torchtune_adaptive.engine.recovery.micro_batches import Slices
from torchtune_adaptive.engine.recovery.watch import MemoryPressure
from torchtune_adaptive.testing import Fault, out_of_memory, wrap_micro_steps

FAULT = "OutOfMemoryError: CUDA out of memory (a fault on purpose)"
PAGE = REPOSITORY / "docs" / "loops.md"
SAMPLES = torch.arange(32.0).reshape(8, 4) / 32


class Toy:
    """A model with dropout and a step of its own.

    Attributes:
        sizes: samples of each micro-batch.
        events: the memory events so far.
    """

    def __init__(self, micro_batch_size: Any = 4, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.sizes: list[int] = []
        self.events: list[MemoryEvent] = []
        options = {"on_event": self.events.append} | options
        self.step = RecoverableStep(self.model, self._micro_step, micro_batch_size=micro_batch_size, **options)

    def _micro_step(self, samples: torch.Tensor) -> tuple[torch.Tensor, int]:
        self.sizes.append(len(samples))
        loss_sum = self.model(samples).square().sum()
        loss_sum.backward()
        return loss_sum.detach(), len(samples)

    def failing(self, *numbers: int, place: int = 0, strike: Callable[[], object] = out_of_memory) -> "Toy":
        """Return this toy; from now on, micro-steps with these numbers fail."""

        def around(number: int, run: Callable[[], Any]) -> Any:
            with Fault(place if number in numbers else None, strike=strike):
                return run()

        wrap_micro_steps(self.step, around)
        return self

    def gradients(self, samples: Any = SAMPLES) -> list[torch.Tensor]:
        """The gradients of one step; the model's own are then cleared."""
        torch.manual_seed(1)
        self.step(samples)
        gradients = [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
        self.model.zero_grad()
        return gradients


def step_of(model: nn.Module, micro_batch_size: int = 4, **options: Any) -> RecoverableStep[None]:
    """A step of ``model`` whose loss is the sum of what it returns."""

    def micro_step(rows: torch.Tensor) -> None:
        model(rows).sum().backward()

    return RecoverableStep(model, micro_step, micro_batch_size=micro_batch_size, **options)


# ---- one process


@pytest.mark.parametrize(("place", "phase"), [(0, "forward"), (9, "loss"), (25, "backward")])
def test_after_an_error_the_step_is_run_again_in_halves_with_the_same_random_numbers(place: int, phase: str) -> None:
    toy = Toy(4).failing(1, place=place)
    toy.step.dry_run(SAMPLES)
    toy.sizes.clear()
    gradients = toy.gradients()
    assert toy.events[0].phase == phase
    assert toy.sizes == [4, 4, 2, 2, 2, 2]
    assert toy.step.micro_batch_size == 2
    assert same_bits(gradients, Toy(2).gradients())


def test_after_an_error_garbage_is_collected_a_single_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a large program that takes tenths of a second."""
    toy = Toy().failing(0)
    toy.step.dry_run(SAMPLES)
    collect = mock.Mock(wraps=gc.collect)
    monkeypatch.setattr(gc, "collect", collect)
    toy.step(SAMPLES)
    assert (toy.step.retries, collect.call_count) == (1, 1)


def test_an_event_says_what_happened_as_an_object_and_as_a_line() -> None:
    toy = Toy(4)
    toy.gradients()
    toy.failing(1, place=25).gradients()
    event = MemoryEvent(2, MemoryPressure.OUT_OF_MEMORY, (0,), "backward", "not metered", FAULT, 4, 2, "samples")
    assert toy.events == list(toy.step.events) == [event]
    assert str(event) == (
        f"micro-batch 4 -> 2 samples: in step 2 rank 0 ran out of memory in backward (not metered: {FAULT})"
    )


def test_a_size_that_had_fitted_is_tried_again_in_the_next_step_and_then_after_two() -> None:
    toy = Toy(4)
    toy.gradients()
    toy.failing(1).gradients()
    gradients = toy.gradients()  # the trial fails
    toy.failing()
    waiting, grown = toy.gradients(), toy.gradients()
    assert [(event.step, event.before, event.after) for event in toy.events] == [(2, 4, 2), (3, 4, 2), (5, 2, 4)]
    assert str(toy.events[-1]) == "micro-batch 2 -> 4 samples: fits again in step 5"
    assert toy.step.retries == 2
    for found, size in ((gradients, 2), (waiting, 2), (grown, 4)):
        assert same_bits(found, Toy(size).gradients())


def test_of_many_equal_events_every_tenth_has_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    toy = Toy(4, on_event=None).failing(1)
    for _ in range(25):
        toy.gradients()
        toy.step.backoff.next_trial = 0
    lines = [record.getMessage() for record in caplog.records if "ran out of memory" in record.getMessage()]
    assert toy.step.retries == 25
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    assert lines[0].startswith("micro-batch 4 -> 2 samples: in step 1 rank 0 ran out of memory")
    assert len(lines) == 10 + 1
    assert lines[-1].endswith("(20 times so far)")


def test_gradients_must_be_none_before_a_step() -> None:
    toy = Toy(4)
    toy.step(SAMPLES)
    with pytest.raises(InputError, match="Gradients must be None before a step"):
        toy.step(SAMPLES)
    toy.model.zero_grad()
    toy.step(SAMPLES)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"micro_batch_size": 0}, "`micro_batch_size` must be .*, but is 0"),
        ({"micro_batch_size": True}, "`micro_batch_size` must be .*, but is True"),
        ({"memory_limit": "much"}, "`memory_limit` must be a size like 80GiB"),
        ({"memory_limit": "900TiB"}, "`memory_limit` must be at most what"),
        ({"on_event": 5}, "^`on_event` must be a function, but is 5 instead"),
        ({"optimizer": "adamw"}, "^`optimizer` must be an optimizer of torch, or several, but is 'adamw' instead"),
        ({"optimizer": [nn.Linear(1, 1)]}, "^`optimizer` must be an optimizer of torch, or several, but is .* instead"),
    ],
    ids=str,
)
def test_a_bad_argument_is_quoted(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        Toy(**options)


class _Sums(NamedTuple):
    loss: float
    tokens: int


@pytest.mark.parametrize(
    ("results", "total"),
    [
        ([2, 2, 2], 6),
        ([None, None], None),
        ([(1, (2.0, None)), (1, (2.0, None))], (2, (4.0, None))),
        ([_Sums(1.0, 2), _Sums(1.0, 3)], _Sums(2.0, 5)),
        ([{"loss": 1, "more": {"tokens": 2}}, {"loss": 1, "more": {"tokens": 3}}], {"loss": 2, "more": {"tokens": 5}}),
        ([{"loss": 1, "first": 2}, {"loss": 1, "second": None}, {"second": 3}], {"loss": 2, "first": 2, "second": 3}),
    ],
    ids=str,
)
def test_results_may_be_numbers_tuples_dicts_or_nothing(results: list[Any], total: Any) -> None:
    step = RecoverableStep(nn.Linear(1, 1), lambda rows: results[rows[0]], micro_batch_size=1)
    summed = step(list(range(len(results))))
    assert summed == total
    assert type(summed) is type(total)


def test_tuples_of_different_lengths_are_refused() -> None:
    step = RecoverableStep(nn.Linear(1, 1), lambda rows: (1,) * rows[0], micro_batch_size=1)
    with pytest.raises(InputError, match="has returned tuples of 1 and of 2 values"):
        step([1, 2])


def test_samples_may_be_a_list_a_tensor_or_columns_of_one_length() -> None:
    columns = {"tokens": SAMPLES, "names": list("abcdefgh"), "task": "eight"}
    columns["more"] = {"weights": SAMPLES[:, 0], "step": 3}
    parts = Slices(3).cut(columns)
    assert [(len(part["tokens"]), part["names"]) for part in parts] == [
        (3, ["a", "b", "c"]),
        (3, ["d", "e", "f"]),
        (2, ["g", "h"]),
    ]
    assert [(part["task"], len(part["more"]["weights"]), part["more"]["step"]) for part in parts] == [
        ("eight", 3, 3),
        ("eight", 3, 3),
        ("eight", 2, 3),
    ]
    scalar = torch.tensor(3.0)
    pair = [SAMPLES, SAMPLES[:, 0].long()]
    for bad in ({"tokens": SAMPLES, "more": {"ids": SAMPLES[:3]}}, {"a": scalar}, 7, {}, scalar, {1, 2}, "text", pair):
        with pytest.raises(InputError, match=r"`samples` must be .* of one length, but (is|has)"):
            Slices(3).cut(bad)
    for bad in ({"tokens": SAMPLES, "names": ["a"]}, {"tokens": SAMPLES, "levels": [SAMPLES] * 8}):
        with pytest.raises(InputError, match=r"must have 8 entries for its samples, but `(names|levels)` "):
            Slices(3).cut(bad)


def test_the_micro_batch_is_halved_from_what_the_step_had() -> None:
    toy = Toy(100).failing(0)
    toy.step.dry_run(SAMPLES[:5])
    toy.sizes.clear()
    toy.gradients(SAMPLES[:5])
    assert toy.sizes == [5, 2, 2, 1]
    assert (toy.events[0].before, toy.events[0].after) == (100, 2)
    slices = Slices(100)
    assert not slices.reduce(SAMPLES[:1])
    assert slices.size == 100


def test_a_disabled_step_runs_micro_steps_and_lets_errors_pass() -> None:
    toy = Toy(4)
    expected = toy.gradients()
    toy.step.disable()
    assert not toy.step.recovers
    assert same_bits(toy.gradients(), expected)
    with pytest.raises(torch.OutOfMemoryError):
        toy.failing(0).gradients()
    with pytest.raises(InputError, match="This optimizer step has no samples"):
        toy.step([])


def test_a_limit_of_memory_holds_for_micro_steps_on_a_cpu() -> None:
    model = nn.Sequential(nn.Linear(4, 1000), nn.Linear(1000, 1))  # with gradients and optimizer state 96 KB
    optimizer = torch.optim.AdamW(model.parameters())
    told: list[MemoryEvent] = []
    step = step_of(model, 64, optimizer=optimizer, memory_limit="400KiB", on_event=told.append)
    samples = torch.ones(64, 4)  # 256 KB of activations, and as much of their gradients
    step(samples)
    (event,) = told
    assert (event.before, event.after) == (64, 32)
    assert event.figures.endswith("limit 400.0 KiB")
    assert event.phase in ("forward", "backward")
    optimizer.step()
    optimizer.zero_grad()
    step(samples)
    assert len(told) == 1


def test_the_optimizers_state_is_there_after_the_dry_run_or_one_sentence_says_that_it_does_not_fit() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    step = step_of(model, 2, optimizer=optimizer)
    before = [parameter.clone() for parameter in model.parameters()]
    sentence = (
        r"^the optimizer's state does not fit beside model and gradients \(not metered\); an 8-bit optimizer, LoRA"
    )
    with pytest.raises(NothingFitsError, match=sentence), Fault(0):
        step.dry_run(SAMPLES)
    assert len(optimizer.state) == 0
    step.dry_run(SAMPLES)
    assert len(optimizer.state) == 2
    assert same_bits(before, [parameter.detach() for parameter in model.parameters()])
    assert all(parameter.grad is None for parameter in model.parameters())


def test_samples_without_slices_are_refused() -> None:
    with pytest.raises(InputError, match=r"^Samples must be cut by slices, but of a deque that fails: TypeError"):
        Toy().step(collections.deque(SAMPLES))


def test_a_search_of_a_recoverable_step_is_refused() -> None:
    toy = Toy()
    options: Any = {"model": toy.model, "optimizer": torch.optim.SGD(toy.model.parameters()), "memory_limit": "1MiB"}
    with pytest.raises(InputError, match=r"^The train step of a search must not use a `RecoverableStep`"):
        find_max_batch_size(toy.step, lambda size: SAMPLES[:1].repeat(size, 1), **options)
    assert toy.gradients()


def test_a_closed_step_leaves_no_hooks_and_is_refused() -> None:
    toy = Toy(4)
    toy.gradients()
    hooks: Any = toy.model
    assert hooks._forward_hooks
    toy.step.close()
    assert not hooks._forward_hooks
    assert not hooks._forward_pre_hooks
    for call in (toy.step, toy.step.dry_run):
        with pytest.raises(InputError, match="This `RecoverableStep` has been closed"):
            call(SAMPLES)


def test_a_mistake_while_the_caller_handles_an_error_of_its_own_is_not_taken_for_it() -> None:
    def mistake() -> None:
        raise ValueError("a bug")

    toy = Toy(4)
    toy.gradients()
    try:
        out_of_memory()
    except torch.OutOfMemoryError:
        with pytest.raises(ValueError, match="a bug"):
            toy.failing(1, strike=mistake).gradients()
    assert toy.events == []


@pytest.mark.parametrize("is_written", [False, True])
def test_a_dry_run_copies_no_large_buffer_on_the_device_and_restores_it(is_written: bool) -> None:
    """Such as the quantized weights of a model that trains adapters."""
    weights = torch.arange(2**21, dtype=torch.int32)
    expected = weights.clone()
    model = nn.Linear(4, 1)
    model.register_buffer("weights", weights)

    def micro_step(samples: torch.Tensor) -> None:
        model(samples).sum().backward()
        if is_written:
            weights.add_(1)

    step = RecoverableStep(model, micro_step, micro_batch_size=4)
    _, rises = rises_by_events(lambda: step.dry_run(SAMPLES))
    assert 0 < max(rises) < weights.nbytes / 2
    assert torch.equal(weights, expected)


@pytest.mark.parametrize(
    ("limit", "kind", "fits"),
    [("2.5MiB", torch.optim.SGD, True), ("1.5MiB", torch.optim.SGD, False), ("2.5MiB", torch.optim.AdamW, False)],
)
def test_where_one_micro_step_fits_a_second_one_beside_its_gradients_need_not(
    limit: str, kind: Any, fits: bool
) -> None:
    """Weights and gradients have 1 MiB each; a backward pass needs another for those that it adds. AdamW needs two."""
    model = nn.Linear(512, 512, bias=False)
    step = step_of(model, optimizer=kind(model.parameters(), lr=0.1), memory_limit=limit)
    samples = torch.ones(4, 512)
    with contextlib.nullcontext() if fits else pytest.raises(NothingFitsError):
        step.dry_run(samples)
    assert step.recovers is fits
    if fits:
        step(samples)
        assert not step.events
        assert [one.grad is not None and one.grad.unique().item() for one in model.parameters()] == [4.0]


class _OfLightning(torch.optim.AdamW):
    """As Lightning's, which shares what its inner optimizer has."""

    __module__ = "lightning.pytorch.core.optimizer"

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.__dict__ = {**vars(optimizer), "optimizer": optimizer}


@pytest.mark.parametrize("wrapper", [Prepared, _OfLightning])
def test_of_an_optimizer_in_a_trainers_wrapper_torchs_own_is_used(wrapper: Any) -> None:
    optimizer = torch.optim.AdamW(nn.Linear(4, 1).parameters())
    assert optimizers_of(wrapper(optimizer)) == [optimizer]


def test_a_model_in_training_can_be_copied_and_saved_as_a_whole() -> None:
    toy = Toy(4)
    toy.gradients()
    saved = io.BytesIO()
    torch.save(toy.model, saved)
    saved.seek(0)
    phases: list[str] = []
    toy.step._watch.phases._meter = SimpleNamespace(enter_phase=phases.append)  # pyright: ignore[reportAttributeAccessIssue]
    copies = (torch.load(saved, weights_only=False), copy.deepcopy(toy.model))
    outputs = [list(one.eval()(SAMPLES)) for one in copies]
    assert phases == []
    own = list(toy.model.eval()(SAMPLES))
    assert phases == ["forward", "loss"]
    assert all(same_bits(one, own) for one in outputs)


class _Averaging(nn.Module):
    """With buffers that each forward pass replaces, and a layer whose buffers change only in training mode."""

    mean: torch.Tensor
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 1), RunningMean(4)
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("last", None)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * rows.detach().mean()
        self.count = self.count + 1
        self.last = rows.detach().sum()
        return self.layer(self.norm(rows))


def test_buffers_that_are_replaced_or_change_only_later_are_those_of_a_run_without_the_error() -> None:
    buffers = []
    for fails in (False, True):
        torch.manual_seed(0)
        model = _Averaging()
        model.norm.eval()
        step = step_of(model)
        step(SAMPLES[:4])
        assert model.count == 1
        model.norm.train()
        step._cutter.size = 4 if fails else 2  # pyright: ignore[reportAttributeAccessIssue]
        wrap_micro_steps(step, lambda number, run, fails=fails: (run(), fails and number == 0 and out_of_memory()))
        model.zero_grad()
        step(SAMPLES[:4])
        assert len(step.events) == fails
        buffers.append([*model.buffers()])
    assert buffers[0][1] == 3
    assert same_bits(*buffers)


class _Odd(nn.Module):
    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.register_buffer("odd", buffer)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(rows)


@torch.inference_mode()
def _inference_tensor() -> torch.Tensor:
    return torch.ones(4)


@pytest.mark.parametrize(
    "make_buffer",
    [
        lambda: torch.ones(1).expand(4),
        lambda: torch.eye(4).to_sparse(),
        lambda: torch.ones(4, device="meta"),
        _inference_tensor,
    ],
    ids=["expanded", "sparse", "meta", "inference"],
)
def test_buffers_that_no_step_can_write_to_do_no_harm(make_buffer: Callable[[], torch.Tensor]) -> None:
    model = _Odd(make_buffer())
    optimizer = torch.optim.AdamW(model.parameters())

    def train_step(rows: torch.Tensor) -> None:
        model(rows).sum().backward()
        optimizer.step()

    train_step(SAMPLES)
    find_max_batch_size(
        train_step, lambda n: torch.ones(n, 4), model=model, optimizer=optimizer, memory_limit="1MiB", max_batch_size=4
    )
    assert optimizer.state[model.layer.weight]["step"] == 1
    step = step_of(model, optimizer=optimizer)
    wrap_micro_steps(step, lambda number, run: (run(), number == 0 and out_of_memory()))
    step(SAMPLES)
    assert len(step.events) == 1


@pytest.mark.parametrize(("is_even", "exchanges"), [(True, 1), (False, 2)])
def test_ranks_exchange_once_in_a_step_and_twice_if_their_numbers_may_differ(is_even: bool, exchanges: int) -> None:
    model = nn.Linear(4, 4)
    step: Any = step_of(model)
    step(SAMPLES)
    model.zero_grad()
    step._cutter.is_even = is_even
    consensus = step._loop.consensus
    with mock.patch.object(consensus, "max_of_each", wraps=consensus.max_of_each) as max_of_each:
        step(SAMPLES)
    assert max_of_each.call_count == exchanges


def test_a_module_that_is_added_in_training_is_restored_too(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    step = step_of(model)
    step(SAMPLES[:4])
    model.zero_grad()
    added = _Averaging()
    model.append(added)
    fails = iter([True])
    wrap_micro_steps(step, lambda number, run: (run(), next(fails, False) and out_of_memory()))
    step(SAMPLES[:4])
    assert step.retries == 1
    assert added.count == 2
    assert "Step 2 makes another dry run: since the last one, modules were added or removed." in caplog.text


def test_a_module_without_tensors_that_each_step_makes_anew_needs_no_dry_run() -> None:
    """As a loss that is made in the forward pass."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.loss: Any = None

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            self.loss = nn.CrossEntropyLoss(reduction="sum")
            return self.loss(self.layer(rows), torch.zeros(len(rows), dtype=torch.long))

    model = Net()
    step = RecoverableStep(model, lambda rows: model(rows).backward(), micro_batch_size=4)
    step(SAMPLES)
    with mock.patch.object(step, "dry_run") as dry_run:
        for _ in range(2):
            model.zero_grad()
            step(SAMPLES)
    assert not dry_run.called


@pytest.mark.parametrize("kind", ["inference", "sparse"])
def test_a_micro_step_that_changes_a_buffer_that_cannot_be_restored_is_refused(kind: str) -> None:
    model = nn.Linear(4, 4)
    with torch.inference_mode(kind == "inference"):
        buffer = torch.ones(4) if kind == "inference" else torch.eye(4).to_sparse()
    model.register_buffer("count", buffer)

    def micro_step(rows: torch.Tensor) -> None:
        with torch.inference_mode(kind == "inference"):
            buffer.mul_(2)
        model(rows).sum().backward()

    step = RecoverableStep(model, micro_step, micro_batch_size=4)
    with pytest.raises(CannotRecoverError, match="a micro-step writes to the buffer `count`"):
        step(SAMPLES)


def test_an_operator_of_higher_order_can_be_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    model = nn.Linear(4, 4)

    def micro_step(rows: torch.Tensor) -> None:
        hidden = model(rows)
        with torch.no_grad():  # on a CPU flex attention has no backward pass
            heads = hidden.detach()[:, None, None].expand(-1, 1, 16, -1)
            flex_attention(heads, heads, heads)
        hidden.sum().backward()

    step = RecoverableStep(model, micro_step, micro_batch_size=4)
    step(SAMPLES)
    assert step.recovers


def test_a_step_that_fits_nowhere_ends_with_one_sentence_and_leaves_nothing_behind() -> None:
    model = _Averaging()
    model.norm.eval()
    step = step_of(model, 2)
    step.dry_run(SAMPLES)
    wrap_micro_steps(step, lambda number, run: (run(), out_of_memory()))
    with pytest.raises(NothingFitsError, match="not even one row fits: in step 1 rank 0 ran out"):
        step(SAMPLES)
    assert model.count == 0
    assert all(parameter.grad is None for parameter in model.parameters())


# ---- two ranks


def _sentence(call: Callable[[], object], kind: type[Exception] = InputError) -> str:
    with pytest.raises(kind) as raised:
        call()
    return str(raised.value)


def _two_ranks_get_the_same_sentence_for_a_mistake_and_continue(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    fully_shard(model)

    def micro_step(samples: torch.Tensor) -> int:
        model(samples).sum().backward()
        return len(samples)

    def train(step: RecoverableStep[int]) -> None:
        assert step(SAMPLES) == 8
        model.zero_grad()

    sizes = RecoverableStep(model, micro_step, micro_batch_size=2 + rank)
    assert _sentence(lambda: sizes(SAMPLES)) == (
        "`micro_batch_size` must be the same on every rank, but is 2 on one and 3 on another."
    )
    step = RecoverableStep(model, micro_step, micro_batch_size=2)
    assert _sentence(lambda: step(SAMPLES[: 4 * rank])) == "A rank has no samples for this optimizer step."
    train(step)
    fewer = "Ranks must have equally many micro-steps, but one has 2 and another 4."
    none = "Ranks must have equally many micro-steps, but one has 0 and another 1."
    for samples, sentence in (((4, 8), fewer), ((1, 0), none), ((0, 0), "This optimizer step has no samples.")):
        assert _sentence(partial(step, SAMPLES[: samples[rank]])) == sentence
        train(step)
    wrap_micro_steps(step, lambda number, run: out_of_memory() if rank == 0 else run())
    assert _sentence(lambda: step(SAMPLES[: 4 + 4 * rank])) == fewer
    wrap_micro_steps(step, lambda number, run: out_of_memory() if rank == 0 else run())
    nothing_fits = _sentence(lambda: step(SAMPLES[:1]), NothingFitsError)
    assert "not even one row fits: in step 9 rank 0 ran out of memory" in nothing_fits
    wrap_micro_steps(step, None)
    train(step)
    step.close()
    ragged = RecoverableStep(model, micro_step, micro_batch_size=4)
    ragged(SAMPLES[:4])
    model.zero_grad()
    wrap_micro_steps(ragged, lambda number, run: out_of_memory() if (rank, number) == (0, 0) else run())
    ragged(SAMPLES[: 3 + rank])  # as many micro-steps as on the other rank, also in halves
    assert ragged.micro_batch_size == 2


def _events_of_failing_steps(rank: int) -> list[list[MemoryEvent]]:
    """Those of three steps of one micro-step, of which the first fails on both ranks or on the second one only."""
    found = []
    for failing in ((0, 1), (1,)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        fully_shard(model)
        before = communicators(model)
        step = step_of(model)
        step.dry_run(SAMPLES)
        assert communicators(model) != before
        wrap_micro_steps(step, partial(under, {0: Fault(9, ranks=failing)}))
        for _ in range(3):
            step(SAMPLES[:4])
            model.zero_grad()
        step.close()
        assert communicators(model) == before
        found.append(list(step.events))
    return found


def _settings_of_fsdp_that_a_failed_micro_step_has_changed_are_restored(rank: int) -> None:
    """The loss calls the first layer again, in two chunks, and meanwhile neither frees nor reduces this layer."""
    torch.manual_seed(0)
    group = dist.new_group(timeout=timedelta(seconds=60))  # a hang ends sooner
    assert isinstance(group, dist.ProcessGroup)
    shared: Any = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Tanh(), nn.Dropout(0.1), nn.Linear(4, 4))
    for module in (shared, model[-1], model):
        fully_shard(module, mesh=DeviceMesh.from_group(group, "cpu"))

    def micro_step(samples: torch.Tensor) -> torch.Tensor:
        hidden = model(samples)  # [B, S, D]
        leaf, loss_sum = hidden.detach().requires_grad_(), torch.zeros(())
        shared.set_reshard_after_forward(False)
        shared.set_reshard_after_backward(False)
        for is_last, chunk in enumerate(leaf.chunk(2, dim=1)):
            shared.set_requires_gradient_sync(bool(is_last))
            loss = shared(chunk).square().sum()
            loss.backward()
            loss_sum += loss.detach()
        shared.set_reshard_after_forward(True)
        shared.set_reshard_after_backward(True)
        shared.reshard()
        hidden.backward(leaf.grad)
        return loss_sum

    slices = Slices(2)
    step = RecoverableStep(model, micro_step, micro_batch_size=slices)
    samples = torch.randn(4, 4, 4, generator=torch.Generator().manual_seed(rank))
    step.dry_run(samples)

    def gradients(size: int, fault: Fault, number: int = 0) -> list[torch.Tensor]:
        slices.size = size
        wrap_micro_steps(step, partial(under, {number: fault}))
        torch.manual_seed(rank)
        step(samples)
        found: list[Any] = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        return [gradient.to_local() for gradient in found]

    expected = gradients(1, never := Fault(None))
    struck, wrong = 0, []
    for place in range(0, never.count, 15):
        fault = Fault(place, ranks=[place % 2])
        if not same_bits(gradients(2, fault, number=place // 2 % 2), expected):
            wrong.append(place)
        struck += step.micro_batch_size == 1
    assert struck > 6
    assert wrong == []


class _Loss(nn.Module):
    """Calls ``head`` alone, which is in a group with ``norm``. A validation skips ``extra``, gathered ahead."""

    def __init__(self, reshard_after_forward: bool | None) -> None:
        super().__init__()
        self.trunk: Any = nn.Linear(WIDTH, WIDTH)
        self.extra, self.norm, self.head = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2)
        for modules in (self.trunk, self.extra, [self.norm, self.head], self):
            fully_shard(modules, reshard_after_forward=reshard_after_forward)
        self.trunk.set_modules_to_forward_prefetch([self.extra])

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.trunk(rows)
        return self.norm(self.extra(hidden) if torch.is_grad_enabled() else hidden)


def _a_validation_between_steps_does_not_prevent_recovery(rank: int) -> None:
    """Training with a fault is as training told the smaller micro-batches, without validations."""
    for reshard_after_forward in (None, False):
        states = []
        for size, is_validated in ((4, True), (2, False)):
            torch.manual_seed(0)
            model = _Loss(reshard_after_forward)

            def micro_step(rows: torch.Tensor, model: _Loss = model) -> None:
                assert not any(state._modules_to_run_forward for state in fsdp_states(model))
                model.head(model(rows)).square().sum().backward()

            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            step = RecoverableStep(model, micro_step, micro_batch_size=size, on_event=lambda event: None)
            for number in range(3):
                if is_validated:
                    with torch.no_grad():
                        model.head(model(torch.ones(3, WIDTH)))
                    wrap_micro_steps(step, partial(under, {0: Fault(30, ranks=[1])} if number == 2 else {}))
                step(torch.ones(8, WIDTH).cumsum(0) if number == 2 else torch.ones(2, WIDTH))
                optimizer.step()
                optimizer.zero_grad()
            assert len(step.events) == is_validated
            states.append(tensors_of(model, optimizer))
        assert same_bits(*states)


def _page_prints(*_: int) -> str:
    """What the first program of the page prints."""
    (program, *_rest), printed = blocks(PAGE, "python"), io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program.text, str(program), "exec"), {})
    return " ".join(printed.getvalue().split())


def _on_two(rank: int) -> tuple[list[list[MemoryEvent]], str]:
    _two_ranks_get_the_same_sentence_for_a_mistake_and_continue(rank)
    _settings_of_fsdp_that_a_failed_micro_step_has_changed_are_restored(rank)
    _a_validation_between_steps_does_not_prevent_recovery(rank)
    printed = _page_prints() if DEVICE == "cpu" else ""  # its limit of 4 MiB is for a CPU
    return _events_of_failing_steps(rank), printed


@pytest.fixture(scope="module")
def on_two() -> list[tuple[list[list[MemoryEvent]], str]]:
    return run_on_ranks(_on_two, 2)


def test_ranks_have_equal_events_and_a_size_that_has_fitted_on_one_of_them_is_tried_again_on_both(on_two: Any) -> None:
    (first, _), (second, _) = on_two
    assert first == second
    assert [[(event.step, event.ranks, event.before, event.after) for event in events] for events in first] == [
        [(1, (0, 1), 4, 2)],
        [(1, (1,), 4, 2), (2, (), 2, 4)],
    ]


def test_the_program_of_the_page_recovers_on_one_device_and_prints_what_the_page_says() -> None:
    assert run_alone(_page_prints) == " ".join(blocks(PAGE, "text")[0].text.split())


def test_the_program_of_the_page_recovers_on_two_ranks(on_two: Any) -> None:
    for _, printed in on_two:
        assert re.search(r"micro-batch (\d+) -> (\d+) samples: in step 1 .* micro-batches of \2 samples$", printed)


def _trainers_of_a_larger_program(rank: int) -> dict[str, Any]:
    """What ranks 1 and 2 of three find and do, under FSDP2 and in DistributedDataParallel.

    Rank 0 does not train; rank 1 is in another group with it.
    """
    plane = DeviceMesh("cpu", [[1], [2]], mesh_dim_names=("replicate", "shard"))
    other: Any = dist.new_group([0, 1])
    group = dist.new_group([1, 2], timeout=timedelta(seconds=60))
    if rank < 2:
        dist.barrier(other)  # both have connected
    if rank == 0:
        return {}
    assert isinstance(group, dist.ProcessGroup)
    torch.manual_seed(0)
    sharded: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    replicated = DistributedDataParallel(copy.deepcopy(sharded), process_group=group)
    fully_shard(sharded, mesh=DeviceMesh.from_group(group, "cpu"))

    def micro_step(samples: torch.Tensor, model: nn.Module = sharded) -> int:
        model(samples).square().sum().backward()
        return len(samples)

    def gradients(model: nn.Module, size: int, fault: Fault) -> list[torch.Tensor]:
        step = RecoverableStep(model, partial(micro_step, model=model), micro_batch_size=size)
        step.dry_run(SAMPLES)
        wrap_micro_steps(step, partial(under, {1: fault}))
        assert step(SAMPLES + rank) == 8
        found = [part.clone() for parameter in model.parameters() for part in plain_parts(parameter.grad)]
        model.zero_grad()
        events.extend(step.events)
        step.close()
        return found

    events: list[MemoryEvent] = []
    told = [gradients(model, 2, Fault(None)) for model in (sharded, replicated)]
    recovered = [gradients(model, 4, Fault(9, ranks=[2])) for model in (sharded, replicated)]
    options: Any = {"model": sharded, "optimizer": torch.optim.SGD(sharded.parameters()), "memory_limit": "64KiB"}
    found = find_max_batch_size(micro_step, lambda size: torch.ones(size, 4), **options)
    hybrid: Any = fully_shard(nn.Linear(4, 4), mesh=plane)
    refused = partial(RecoverableStep, sharded, micro_step, micro_batch_size=2, process_group=other)
    return {
        "same bits": all(map(same_bits, recovered, told)),
        "events": [(event.ranks, event.before, event.after) for event in events],
        "world size": found.world_size,
        "hybrid": Consensus.of(hybrid).ranks,
        "lacks a rank": _sentence(refused) if rank == 1 else "",
    }


def test_only_the_ranks_that_train_take_part() -> None:
    _, *trainers = run_on_ranks(_trainers_of_a_larger_program, 3, timeout_s=120)
    for found in trainers:
        assert found["same bits"]
        assert found["events"] == [((2,), 4, 2)] * 2
        assert found["world size"] == 2
        assert found["hybrid"] == (1, 2)
    assert trainers[0]["lacks a rank"] == (
        "`process_group` lacks ranks that train the model: it has [0, 1], of [1, 2]."
    )


@pytest.mark.parametrize("is_in_module", [False, True])
def test_generators_of_ones_own_draw_the_same_numbers_when_a_step_runs_again(is_in_module: bool) -> None:
    """As for the noise of a diffusion model."""

    def trained(*, recovers: bool) -> tuple[list[torch.Tensor], list[float]]:
        torch.manual_seed(0)
        model, generator = nn.Linear(4, 1), torch.Generator().manual_seed(1)
        of_python, of_numpy, drawn = random.Random(2), np.random.default_rng(3), list[float]()
        if is_in_module:
            vars(model)["own"], generator = generator, None

        def micro_step(rows: torch.Tensor) -> None:
            noise = torch.randn(rows.shape, generator=generator or vars(model)["own"])
            drawn[:] = [of_python.random(), of_numpy.random()]
            model(rows + noise).square().sum().mul(drawn[0] + drawn[1]).backward()
            if recovers and len(rows) > 2 and step.recovers and step.retries < 1:
                raise torch.OutOfMemoryError("out of memory")

        step = RecoverableStep(model, micro_step, micro_batch_size=4)
        if recovers:
            step(SAMPLES)
            assert step.retries == 1
        else:
            for rows in SAMPLES.split(2):
                micro_step(rows)
        return [one.grad.clone() for one in model.parameters() if one.grad is not None], drawn

    (ours, drawn), (expected, expected_drawn) = trained(recovers=True), trained(recovers=False)
    assert drawn == expected_drawn
    assert len(ours) == 2
    assert all(map(torch.equal, ours, expected))
