"""The CPU meter agrees with the allocator, runs out of memory deterministically, and does not change results."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torchtune.models.llama3_2 import llama3_2, lora_llama3_2
from torchtune.modules import TransformerSelfAttentionLayer
from torchtune.training import set_activation_checkpointing

from tests.support.allocator import rises_by_events
from torchtune_adaptive.engine.memory.cpu_meter import CpuMeter
from torchtune_adaptive.engine.memory.devices import meter_for
from torchtune_adaptive.engine.memory.meter import device_memory_bytes
from torchtune_adaptive.engine.memory.out_of_memory import free_memory
from torchtune_adaptive.engine.memory.timeline import Forecast, Timeline
from torchtune_adaptive.errors import InputError

CPU = torch.device("cpu")
VOCAB, LENGTH = 320, 32
SIZES: dict[str, Any] = {"vocab_size": VOCAB, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 64}
SIZES |= {"max_seq_len": LENGTH, "intermediate_dim": 128}


class Trainee:
    """A small Llama whose optimizer has its state, as in a probe after the warm-up step."""

    def __init__(self, *, checkpointing: bool = False, lora: bool = False, **optimizer_options: Any) -> None:
        torch.manual_seed(0)
        if lora:
            self.model: nn.Module = lora_llama3_2(["q_proj", "v_proj"], lora_rank=4, lora_alpha=8, **SIZES)
        else:
            self.model = llama3_2(**SIZES)
        if checkpointing:
            set_activation_checkpointing(self.model, auto_wrap_policy={TransformerSelfAttentionLayer})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, **optimizer_options)
        self.step(self.batch(1))

    @staticmethod
    def batch(batch_size: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(batch_size)
        return torch.randint(0, VOCAB, (batch_size, LENGTH), generator=generator)

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(tokens).reshape(-1, VOCAB), tokens.reshape(-1))

    def step(self, tokens: torch.Tensor, enter_phase: Callable[[str], None] = lambda _: None) -> None:
        enter_phase("forward")
        loss = self.loss(tokens)
        enter_phase("backward")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        enter_phase("optimizer")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def meter(self, *counted: torch.Tensor) -> CpuMeter:
        """A meter that counts the tensors of the trainee, and ``counted``."""
        meter = meter_for(CPU, self.model, [self.optimizer])
        assert isinstance(meter, CpuMeter)
        meter.count(counted)
        meter.reset()
        return meter

    def timeline(self, batch_size: int) -> tuple[Timeline, int]:
        """The timeline of a step, and its peak by the meter."""
        tokens = self.batch(batch_size)
        meter = self.meter(tokens)
        meter.start_timeline()
        with meter:
            self.step(tokens)
        return meter.stop_timeline(batch_size), meter.peak_bytes


TRAINEES: dict[str, dict[str, Any]] = {
    "full": {},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "checkpointing": {"checkpointing": True},
    "lora": {"lora": True},
}


@pytest.fixture(scope="module", params=TRAINEES.values(), ids=list(TRAINEES))
def trainee(request: pytest.FixtureRequest) -> Trainee:
    return Trainee(**request.param)


# ---- what is counted


def test_the_peak_agrees_with_the_allocators_own_events_and_live_bytes_return_to_their_start(trainee: Trainee) -> None:
    tokens = trainee.batch(4)
    meter = trainee.meter(tokens)
    before = meter.live_bytes
    with meter:
        trainee.step(tokens)
        trainee.step(tokens)
    assert meter.live_bytes == before
    _, rises = rises_by_events(lambda: trainee.step(tokens))
    assert meter.peak_bytes - before == pytest.approx(max(rises), rel=1e-3)


def test_what_model_and_optimizer_hold_is_counted_once() -> None:
    trainee = Trainee()
    trainee.loss(trainee.batch(1)).backward()
    parameters = list(trainee.model.parameters())
    held = [*parameters, *trainee.model.buffers(), *(p.grad for p in parameters if p.grad is not None)]
    held += [value for values in trainee.optimizer.state.values() for value in values.values()]
    sizes = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in held}
    meter = trainee.meter()
    assert meter.live_bytes == sum(sizes.values())
    meter.count([held, {"again": tuple(held)}])
    assert meter.live_bytes == sum(sizes.values())


def test_a_storage_freed_by_another_thread_at_the_same_time_is_no_longer_counted() -> None:
    """The threads of gloo release the tensors of a collective while the step continues."""

    class OtherThreadsTurn(dict[int, Any]):
        def pop(self, *args: Any) -> Any:
            found = super().pop(*args)
            elsewhere.clear()
            return found

    meter = CpuMeter()
    here, elsewhere = [torch.zeros(10)], [torch.zeros(10)]
    meter.count([here, elsewhere])
    meter._storages._seen = OtherThreadsTurn(meter._storages._seen)
    here.clear()
    assert (elsewhere, meter.live_bytes) == ([], 0)


def test_a_tensor_made_outside_is_counted_once_however_many_views_of_it_operations_return() -> None:
    meter = CpuMeter()
    outside = torch.zeros(250)
    with meter:
        outside.sum()
        assert meter.live_bytes == 0
        views = outside.view(25, 10)[0], outside.detach(), outside.expand(5, 250), outside.add_(1)
    assert meter.live_bytes == 1000  # the whole storage, once
    del outside, views
    assert meter.live_bytes == 0
    assert meter.peak_bytes == 1000
    meter.reset()
    assert (meter.peak_bytes, meter.phase_peak_bytes) == (0, {})


def test_each_phase_has_its_own_peak_in_the_order_they_were_entered() -> None:
    meter = CpuMeter()
    with meter:
        meter.enter_phase("forward")
        kept = torch.zeros(100)
        torch.zeros(1000)
        meter.enter_phase("backward")
        torch.zeros(50)
        meter.enter_phase("idle")
        meter.enter_phase("forward")
        torch.zeros(500)
    assert meter.phase_peak_bytes == {"forward": 4400, "backward": 600, "idle": 400}
    assert list(meter.phase_peak_bytes) == ["forward", "backward", "idle"]
    assert meter.live_bytes == kept.nbytes


# ---- resizing


def test_a_storage_that_is_resized_is_counted_at_its_new_size() -> None:
    meter = CpuMeter()
    with meter:
        tensor = torch.zeros(100)
        tensor.untyped_storage().resize_(1000)
        assert meter.live_bytes == 1000
        tensor.untyped_storage().resize_(0)
        assert meter.live_bytes == 0
    assert meter.peak_bytes == 1000
    tensor.untyped_storage().resize_(2000)
    with meter:
        pass
    assert meter.live_bytes == 2000  # a resize outside is counted on entry


def test_a_resize_above_the_limit_runs_out_of_memory_and_removes_the_patch() -> None:
    resize_outside = torch.UntypedStorage.resize_
    meter = CpuMeter()
    meter.limit_bytes = 1000
    tensor = torch.zeros(100)
    meter.count(tensor)
    with pytest.raises(torch.OutOfMemoryError, match="resize_"), meter:
        tensor.untyped_storage().resize_(1001)
    assert torch.UntypedStorage.resize_ is resize_outside


# ---- the limit


def run_until_out_of_memory(trainee: Trainee, limit_bytes: int) -> tuple[str, int]:
    """The error's text and the number of operations until it. Afterwards live bytes are as before."""
    tokens = trainee.batch(3)
    meter = trainee.meter(tokens)
    before = meter.live_bytes
    meter.limit_bytes = limit_bytes
    meter.start_timeline()
    text = ""
    try:
        with meter:
            trainee.step(tokens, meter.enter_phase)
    except torch.OutOfMemoryError as error:
        text = str(error)
    trainee.optimizer.zero_grad(set_to_none=True)
    free_memory(CPU)
    assert meter.live_bytes == before
    return text, len(meter.stop_timeline(3).operations)


def test_the_limit_is_crossed_at_the_same_operation_in_every_run() -> None:
    trainee = Trainee()
    first, last = trainee.meter().live_bytes, trainee.timeline(3)[1]
    for limit_bytes in range(first, last, (last - first) // 4):
        text, operations = run_until_out_of_memory(trainee, limit_bytes)
        assert "CPU meter out of memory" in text
        assert run_until_out_of_memory(trainee, limit_bytes) == (text, operations)
    assert run_until_out_of_memory(trainee, last - 1)[0] != ""
    assert run_until_out_of_memory(trainee, last)[0] == ""


def test_the_error_names_the_operation_the_phase_and_the_bytes() -> None:
    meter = CpuMeter()
    meter.limit_bytes = 1024
    meter.enter_phase("forward")
    with pytest.raises(torch.OutOfMemoryError) as caught, meter:
        torch.zeros(512)
    assert str(caught.value) == (
        "CPU meter out of memory: 2.0 KiB live after aten.zeros.default in phase 'forward', limit 1.0 KiB"
    )


def test_in_training_an_allocation_that_fails_is_no_part_of_the_peak() -> None:
    """As on a GPU. A probe shows by its peak that the size was too large: see the search for one row."""
    meter = CpuMeter(exact=False)
    meter.limit_bytes = 1024
    with meter:
        torch.zeros(100)
    with pytest.raises(torch.OutOfMemoryError), meter:
        torch.zeros(512)
    assert meter.peak_bytes == 400


@pytest.mark.parametrize("exact", [False, True])
def test_exactly_restores_limit_and_exactness_after_running_out_of_memory(
    exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    naps: list[float] = []
    monkeypatch.setattr("torchtune_adaptive.engine.memory.cpu_meter.time.sleep", naps.append)
    meter = CpuMeter(exact=exact)
    meter.limit_bytes = None

    def run_out_of_memory() -> None:
        with meter.exactly(), meter:
            meter.limit_bytes = 10
            torch.zeros(1000)

    with pytest.raises(torch.OutOfMemoryError, match="CPU meter out of memory"):
        run_out_of_memory()
    assert meter.limit_bytes is None
    naps.clear()
    with meter:
        meter.after_operation(torch.ops.c10d.allreduce_.default, (), ())
        torch.zeros(1000)
    assert len(naps) == exact  # only an exact meter waits for the thread of a collective


# ---- timelines


def test_two_small_steps_forecast_the_peak_of_a_larger_one_exactly(trainee: Trainee) -> None:
    (small, _), (large, _), (_, peak_bytes) = (trainee.timeline(size) for size in (2, 3, 7))
    assert small.operations == large.operations
    forecast = Forecast.along_lines(small, large)
    assert forecast is not None
    assert forecast.peak_bytes(7) == peak_bytes
    assert forecast.largest_batch_size(peak_bytes, fitted=3) == 7
    assert forecast.largest_batch_size(peak_bytes - 1, fitted=3) == 6


def test_a_timeline_has_live_bytes_after_every_operation() -> None:
    meter = CpuMeter()
    torch.zeros(5)
    meter.start_timeline()
    with meter:
        kept = torch.zeros(10)
        kept.add_(1)
        torch.cat([kept, kept])
    timeline = meter.stop_timeline(4)
    assert timeline == Timeline(4, ("aten.zeros.default", "aten.add_.Tensor", "aten.cat.default"), (40, 40, 120))
    assert meter.stop_timeline(4) == Timeline(4, (), ())


# ---- tensors that are not plain


class Named(torch.Tensor):
    """A subclass without a dispatch of its own."""


def test_tensors_inside_a_wrapper_and_those_of_a_subclass_are_counted() -> None:
    meter, again = CpuMeter(), CpuMeter()
    with meter:
        wrapper = TwoTensor(torch.ones(10), torch.ones(10))
        doubled = wrapper * 2
        assert meter.live_bytes == 4 * 40
        named = torch.ones(10).as_subclass(Named) * 2
    assert isinstance(doubled, TwoTensor)
    assert isinstance(named, Named)
    assert meter.live_bytes == 5 * 40
    again.count([wrapper])
    assert again.live_bytes == 2 * 40


def test_only_dense_tensors_on_the_cpu_are_counted() -> None:
    meter = CpuMeter()
    with meter:
        on_meta = torch.zeros(1000, device="meta") + 1
        with FakeTensorMode():
            torch.zeros(1000).add_(1)
    assert meter.peak_bytes == 0
    dense = torch.zeros(10)
    sparse = torch.eye(10).to_sparse()  # has no storage of its own
    meter.count([dense, on_meta, sparse])
    assert meter.live_bytes == dense.nbytes


# ---- no effect on results


def test_metering_changes_no_bit_of_loss_or_gradients(trainee: Trainee) -> None:
    def loss_and_gradients() -> list[torch.Tensor]:
        trainee.optimizer.zero_grad(set_to_none=True)
        loss = trainee.loss(tokens)
        loss.backward()
        return [loss.detach(), *(p.grad for p in trainee.model.parameters() if p.grad is not None)]

    tokens = trainee.batch(3)
    without = loss_and_gradients()
    with trainee.meter():
        metered = loss_and_gradients()
    trainee.optimizer.zero_grad(set_to_none=True)
    assert len(metered) == len(without) > 1
    assert all(torch.equal(one, other) for one, other in zip(metered, without, strict=True))


# ---- which meter


def test_a_device_that_is_neither_cpu_nor_cuda_has_no_meter() -> None:
    meta = torch.device("meta")
    model = nn.Linear(2, 2, device=meta)
    sentence = "`device` must be the CPU or CUDA, but is 'meta' instead"
    with pytest.raises(InputError, match=sentence):
        meter_for(meta, model, [torch.optim.SGD(model.parameters())])
    with pytest.raises(InputError, match=sentence):
        device_memory_bytes(meta)


def test_the_cpu_has_the_memory_of_the_machine() -> None:
    with open("/proc/meminfo") as meminfo:
        total_kib = int(next(line for line in meminfo if line.startswith("MemTotal")).split()[1])
    assert device_memory_bytes(CPU) == pytest.approx(total_kib * 1024, rel=0.02)
    assert CpuMeter().available_bytes == device_memory_bytes(CPU)
