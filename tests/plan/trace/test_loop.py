"""`trace_loop` follows a user's loop: peaks against the CPU's meter, code for CUDA without a GPU, and refusals."""

import gc
import inspect
import random
import sys
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from tests.support.toys import Prepared
from torchtune_adaptive.engine.memory.devices import meter_for
from torchtune_adaptive.engine.memory.phases import phases_by_hooks
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.plan.replay import exact
from torchtune_adaptive.plan.trace.as_cuda import computed_as_on_cuda
from torchtune_adaptive.plan.trace.events import Event
from torchtune_adaptive.plan.trace.fake_step import FakeStep, known_values
from torchtune_adaptive.plan.trace.loop import TracedLoop, trace_loop
from torchtune_adaptive.plan.trace.optimizer_stand_ins import BlockwiseOptimizer
from torchtune_adaptive.plan.trace.recorder import _Change, _in_order
from torchtune_adaptive.plan.trace.restored import fake_process_group

WIDTH = 8


class Block(nn.Module):
    """An MLP with a residual connection, recomputed in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + checkpoint(self._mlp, hidden, use_reentrant=False)

    def _mlp(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(hidden)))


def build_model() -> nn.Sequential:
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 3))


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([one for one in model.parameters() if one.requires_grad])


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> float:
    loss = model(batch).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def make_batch(num_samples: int) -> torch.Tensor:
    return torch.ones(num_samples, WIDTH)


def accumulating_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    """Gradients of the step before exist until its backward pass is over."""
    optimizer.zero_grad(set_to_none=False)
    for _ in range(3):
        model(batch).square().mean().backward()
    optimizer.step()


def traced(**changes: Any) -> TracedLoop:
    functions: dict[str, Any] = {"build_model": build_model, "build_optimizer": build_optimizer}
    functions |= {"train_step": train_step, "make_batch": make_batch}
    return trace_loop(**(functions | changes))


def metered(num_samples: int, step: Callable[..., object], optimizer_of: Callable[..., Any]) -> dict[str, int]:
    """The peak of each phase of a real step in steady state."""
    model = build_model()
    optimizer = optimizer_of(model)
    step(model, optimizer, make_batch(2))
    batch = make_batch(num_samples)
    meter = meter_for(torch.device("cpu"), model, [optimizer])
    meter.count(batch)
    gc.collect()
    meter.reset()
    meter.enter_phase("forward")
    with phases_by_hooks(model, [optimizer], meter.enter_phase), meter:
        step(model, optimizer, batch)
    return meter.phase_peak_bytes


def test_of_an_optimizer_in_a_trainers_wrapper_torchs_own_is_traced() -> None:
    wrapped = traced(build_optimizer=lambda model: Prepared(build_optimizer(model)))
    assert wrapped.lengths == traced().lengths


def selecting_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """A loss of the rows whose label is not -100, as trainers compute it."""
    rows, labels = batch
    is_counted = labels != -100
    of_counted = model(rows)[is_counted].sum(-1)
    torch.zeros(len(rows)).masked_scatter(is_counted, of_counted).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def labelled(num_samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of which every second one counts."""
    return torch.ones(2 * num_samples, WIDTH), torch.tensor([0, -100] * num_samples)


def test_rows_are_selected_by_values_that_are_the_same_in_all_batches() -> None:
    loop = traced(train_step=selecting_step, make_batch=labelled, values_are_fixed=True)
    for number in (2, 3):
        (selected,) = (one for one in loop.events(number) if one.operation == "aten.index.Tensor" and one.taken < 0)
        assert selected.num_bytes == number * 3 * 4  # of each sample one row of three outputs
    with pytest.raises(InputError, match="whose result has a size that depends on values"):
        traced(train_step=selecting_step, make_batch=labelled)


def test_cuda_takes_a_mask_of_dropout_before_its_result() -> None:
    def with_dropout() -> nn.Sequential:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))

    events = traced(build_model=with_dropout).events(2)
    taken = [one.num_bytes for one in events if one.operation == "aten.native_dropout.default" and one.taken < 0]
    assert taken == [2 * WIDTH, 4 * 2 * WIDTH]


def test_what_is_given_back_together_is_in_the_order_of_taking() -> None:
    """Autocast forgets the weights that it has cast in the order of addresses."""
    taken = [_Change(0, storage, 8, 0) for storage in (0, 1, 2)]
    given_back = [_Change(operation, storage, -8, 0) for operation, storage in ((1, 2), (1, 0), (2, 1))]
    expected = [*taken, given_back[1], given_back[0], given_back[2]]
    assert list(_in_order([*taken, *given_back])) == expected


@pytest.mark.parametrize(
    ("step", "optimizer_of"),
    [
        (train_step, build_optimizer),
        (accumulating_step, build_optimizer),
        (train_step, lambda model: torch.optim.SGD(model.parameters(), momentum=0.9, foreach=True)),
        (train_step, lambda model: torch.optim.AdamW(model.parameters(), fused=True)),
        (train_step, lambda model: torch.optim.Adafactor(model.parameters())),
    ],
)
def test_peaks_on_a_cpu_are_those_of_real_steps_to_the_byte(step: Any, optimizer_of: Any):
    loop = traced(train_step=step, build_optimizer=optimizer_of, like_cuda=False)
    for num_samples in (1, 2, 3, 50):
        phases = exact(loop.step.at(num_samples)).phases
        assert phases == metered(num_samples, step, optimizer_of), num_samples


def test_frozen_weights_are_parameters_and_only_trained_ones_have_gradients_and_state():
    def partly_frozen() -> nn.Module:
        model = build_model()
        model[:2].requires_grad_(False)
        return model

    loop = traced(build_model=partly_frozen, like_cuda=False)
    trained = WIDTH * 3 + 3
    kinds = exact(loop.step.at(2)).kinds("optimizer")
    assert loop.num_parameters == sum(one.numel() for one in build_model().parameters())
    assert kinds["parameters"] == 4 * loop.num_parameters
    assert kinds["gradients"] == 4 * trained
    assert kinds["optimizer state"] == 4 * (2 * trained + 2)  # two moments, and two counts of steps


class Keeping:
    """Functions of a loop that keeps moving averages of the model's parameters, which are made at a ``place`` in it."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._tensors: list[torch.Tensor] = []
        self._make("before", build_model())

    def _make(self, place: str, model: nn.Module) -> None:
        if place == self._place:
            self._tensors = [one.detach().clone() for one in model.parameters()]

    def build_model(self) -> nn.Module:
        self._make("build_model", build_model())
        return build_model()

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        self._make("build_optimizer", model)
        return build_optimizer(model)

    def train_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
        train_step(model, optimizer, batch)
        with torch.no_grad():
            for kept, parameter in zip(self._tensors, model.parameters(), strict=True):
                kept.lerp_(parameter, 0.1)


class TwoOptimizers(Keeping):
    def train_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
        self.second = getattr(self, "second", None) or torch.optim.SGD(model.parameters(), momentum=0.9)
        model(batch).square().mean().backward()
        self.second.step()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "loop",
    [*map(Keeping, ("before", "build_model", "build_optimizer")), TwoOptimizers("")],
    ids=["real tensors", "of another model", "of the model", "two optimizers"],
)
def test_tensors_beside_the_model_and_the_optimizer_are_counted(loop: Keeping):
    usual = traced(like_cuda=False)
    assert "other tensors" not in exact(usual.step.at(2)).kinds()
    kept = trace_loop(loop.build_model, loop.build_optimizer, loop.train_step, make_batch, like_cuda=False)
    num_bytes = 4 * usual.num_parameters
    for num_samples in (1, 2, 50):
        memory = exact(kept.step.at(num_samples))
        assert memory.kinds("backward")["other tensors"] == num_bytes
        assert memory.phases["backward"] == exact(usual.step.at(num_samples)).phases["backward"] + num_bytes


def test_what_a_step_leaves_behind_grows_with_its_batch():
    kept: dict[str, torch.Tensor] = {}

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
        train_step(model, optimizer, batch)
        kept["last"] = batch * 2

    found = traced(train_step=step, like_cuda=False).step
    for num_samples in (1, 2, 3, 50):
        assert exact(found.at(num_samples)).kinds("forward")["other tensors"] == 4 * num_samples * WIDTH


def test_sums_of_gradients_are_made_in_place_as_torch_does_without_a_mode():
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
        outputs = model.get_submodule("0")(batch)  # so that no hook of the model tells when the backward pass begins
        (outputs.sin().sum() + outputs.cos().sum()).backward()  # two gradients of the outputs
        optimizer.step()
        optimizer.zero_grad()

    added = [
        sum(event.num_bytes for event in traced(train_step=step, like_cuda=like_cuda).step.at(2) if is_sum(event))
        for like_cuda in (False, True)
    ]
    assert added[0] > added[1]


def test_gradients_of_selected_elements_are_made_in_place():
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
        outputs = model(batch)
        outputs[torch.arange(len(outputs))].sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    events = [traced(train_step=step, like_cuda=like_cuda).step.at(2) for like_cuda in (False, True)]
    made = [sum(event.operation == "aten.index_put.default" and event.num_bytes > 0 for event in one) for one in events]
    assert made == [1, 0]


def test_state_that_the_first_step_makes_is_there_before_gradients_are_given_back():
    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        return BlockwiseOptimizer(
            model.parameters(), lr=0.0, bits=8, paged=False, states=2, keeps_norm=False, min_8bit_size=0
        )

    events = traced(build_optimizer=optimizer_of).step.at(2)
    start = next(index for index, event in enumerate(events) if event.phase == "optimizer")
    given_back = [index for index, event in enumerate(events) if event.taken >= 0 and event.kind == "gradients"]
    assert given_back
    assert min(given_back) > start


def is_sum(event: Event) -> bool:
    return event.operation == "aten.add.Tensor"


def code_for_cuda(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> None:
    """What plain loops call. All of it fails without a GPU."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu", torch.cuda.current_device())
    assert device.type == "cuda"
    assert torch.cuda.is_bf16_supported()
    torch.set_default_device("cuda")
    scaler = torch.amp.GradScaler("cuda")
    inputs = batch["inputs"].pin_memory().cuda(non_blocking=True).to(device).to(device="cuda")
    total = torch.zeros(1, device="cuda") + torch.ones(1) + torch.arange(3, device=0).sum()
    with torch.autocast("cuda", dtype=torch.float16):
        outputs = model(inputs)
        assert outputs.dtype == torch.float16
        assert outputs.softmax(-1).dtype == torch.float32
        loss = outputs.sum() + total
    with torch.amp.autocast("cuda", enabled=False):
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    print(f"{loss.item():.3f} {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


def test_code_for_cuda_runs_without_a_gpu():
    def on_cuda() -> nn.Module:
        torch.cuda.set_device(0)
        return build_model().to("cuda").cuda()

    loop = traced(
        build_model=on_cuda,
        train_step=code_for_cuda,
        make_batch=lambda n: UserDict(inputs=torch.ones(n, WIDTH, device="cuda")),
    )
    assert exact(loop.step.at(1000)).allocated_bytes > exact(loop.step.at(1)).allocated_bytes > 0


def _kept_bytes_per_sample(layer: Callable[[], nn.Module]) -> float:
    """What grows with the batch in the forward pass through a layer whose inputs need gradients."""

    def with_layer() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), layer(), nn.Linear(WIDTH, WIDTH, bias=False))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
        model(batch).sum().backward()
        optimizer.step()

    found = traced(build_model=with_layer, train_step=step).step
    few, more = (exact(found.at(num_samples)).phases["forward"] for num_samples in (2, 3))
    return (more - few) / WIDTH


def test_dropout_and_rms_norm_keep_what_their_kernels_on_cuda_keep():
    nothing = _kept_bytes_per_sample(nn.Identity)
    assert _kept_bytes_per_sample(lambda: nn.Dropout(0.1)) == nothing + 1  # a mask of bytes
    assert (
        _kept_bytes_per_sample(lambda: nn.RMSNorm(WIDTH)) == nothing + 4 + 4 / WIDTH
    )  # its input, and a float per row


class Attention(nn.Module):
    """Causal attention of two heads, which may share keys and values, with dropout."""

    def __init__(self, *, is_grouped: bool = False) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.is_grouped = is_grouped

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        heads = [one.unflatten(-1, (2, -1)).transpose(1, 2) for one in self.project(hidden).chunk(3, dim=-1)]
        if self.is_grouped:
            heads[1:] = [one[:, :1] for one in heads[1:]]
        attended = nn.functional.scaled_dot_product_attention(
            *heads, dropout_p=0.1, is_causal=True, enable_gqa=self.is_grouped
        )
        return attended.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("is_grouped", [False, True])
def test_attention_takes_no_memory_for_its_matrix_but_for_sums_in_its_backward_pass(is_grouped: bool) -> None:
    num_tokens = 130
    loop = traced(
        build_model=lambda: Attention(is_grouped=is_grouped).bfloat16(),
        make_batch=lambda n: torch.ones(n, num_tokens, WIDTH, dtype=torch.bfloat16),
    )
    few, more = (exact(loop.step.at(num_samples)).phases["forward"] for num_samples in (2, 3))
    assert more - few < 4 * num_tokens * num_tokens  # one matrix of one head
    attention = [event for event in loop.step.at(2) if "attention" in event.operation and event.kind == "temporaries"]
    taken = [event.num_bytes for event in attention if event.num_bytes]
    of_each_head = [2 * 2 * num_tokens * WIDTH] * 2 * is_grouped  # gradients of keys and values, before they are summed
    # tokens and dimensions are rounded up to multiples
    assert taken == [4 * 2 * 2 * 256, 4 * 2 * 2 * 256 * 32, *of_each_head]
    assert len(attention) == 2 * len(taken)  # and given back


def test_a_matrix_of_all_pairs_of_samples_grows_with_their_square() -> None:
    """As in losses that tell the samples of a batch apart."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
        features = model(batch)
        (features @ features.T).logsumexp(-1).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    loop = traced(build_model=lambda: nn.Linear(WIDTH, WIDTH), train_step=step)
    for number in (1, 2, 4, 100):
        events = loop.step.at(number)
        products = [event.num_bytes for event in events if event.operation == "aten.mm.default" and event.num_bytes]
        assert products[0] == 4 * number * number


def test_a_loop_that_needs_several_samples_is_planned_from_two_on() -> None:
    layers = lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))  # noqa: E731
    loop = traced(build_model=layers)
    assert sorted(loop.step.traced) == [2, 3, 4]
    assert exact(loop.step.at(8)).phases["forward"] > exact(loop.step.at(4)).phases["forward"]


def _bytes_of_operation(name: str, function: Callable[[torch.Tensor], torch.Tensor]) -> list[int]:
    """Bytes that the operation takes in a step of 2 samples of 4 heads, 16 tokens and 8 dimensions."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
        function(model(batch).unflatten(-1, (4, 2)).transpose(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    loop = traced(
        build_model=lambda: nn.Linear(WIDTH, WIDTH), train_step=step, make_batch=lambda n: torch.ones(n, 16, WIDTH)
    )
    return [event.num_bytes for event in loop.step.at(2) if name in event.operation and event.num_bytes]


def test_the_gradient_of_a_softmax_is_computed_beside_a_product() -> None:
    taken = _bytes_of_operation("_softmax_backward_data", lambda hidden: hidden.softmax(-1))
    assert taken == [4 * 2 * 16 * WIDTH] * 2
    assert len(_bytes_of_operation("_softmax_backward_data", lambda hidden: hidden.log_softmax(-1))) == 1


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_heads_without_flash_attention_take_a_matrix_of_all_pairs_of_tokens(
    dtype: torch.dtype, is_masked: bool
) -> None:
    mask = torch.ones(16, 16, dtype=torch.bool) if is_masked else None

    def attended(hidden: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype, enabled=dtype is torch.bfloat16):
            return nn.functional.scaled_dot_product_attention(
                hidden, hidden[:, :1], hidden[:, :1], mask, is_causal=not is_masked, enable_gqa=True
            )

    matrices = _bytes_of_operation("_softmax", attended)
    assert bool(matrices) == (is_masked or dtype is torch.float32)
    if matrices:
        elements = 2 * 4 * 16 * 16
        # What the softmax is before rows that are masked whole are replaced, and which those are; the result; and in
        # the backward pass two more.
        assert matrices == [4 * elements, elements, *[4 * elements] * 3]


@pytest.mark.parametrize("takes_flash", [False, True])
def test_attention_that_takes_float32_or_a_mask_lays_out_its_tensors_by_tokens(takes_flash: bool) -> None:
    """Whatever the layout of its queries, as in ``nn.MultiheadAttention``: so they are copied before the next layer."""
    dtype = torch.bfloat16 if takes_flash else torch.float32
    with FakeTensorMode(), computed_as_on_cuda():
        query, key, value = (
            torch.empty(16, 2, 4, 8, dtype=dtype, requires_grad=True).permute(1, 2, 0, 3) for _ in range(3)
        )
        gradients: list[torch.Tensor] = []
        query.register_hook(gradients.append)  # pyright: ignore[reportArgumentType]
        found = nn.functional.scaled_dot_product_attention(query, key, value)
        found.backward(torch.empty_like(query))
    assert found.transpose(1, 2).is_contiguous() != takes_flash
    assert gradients[0].transpose(1, 2).is_contiguous()


def test_attention_without_heads_keeps_its_layout() -> None:
    """Its queries are [B, S, head_dim], which no fused kernel of CUDA takes."""
    gradients: list[torch.Tensor] = []
    with FakeTensorMode(), computed_as_on_cuda():
        query, key, value = (torch.empty(2, 16, 8, requires_grad=True) for _ in range(3))
        query.register_hook(gradients.append)  # pyright: ignore[reportArgumentType]
        nn.functional.scaled_dot_product_attention(query, key, value).sum().backward()
    assert gradients[0].is_contiguous()


def test_a_layer_adds_its_bias_in_place() -> None:
    """Also on inputs for which torch does not fuse both, which it shows out of place on fake tensors."""
    weight, bias = torch.ones(3, 2), torch.ones(3)
    taken = _bytes_of_operation("", lambda hidden: nn.functional.linear(hidden, weight, bias))
    assert taken.count(4 * 2 * 4 * 16 * 3) == 1


def test_values_that_follow_from_the_batch_are_read():
    seen: list[Any] = []

    def reading(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Any]) -> None:
        mask = batch["mask"].bool()
        positions = torch.arange(mask.shape[1])
        longest = int(mask.sum(1).max())
        seen.append((bool(mask.all()), positions.max().item(), longest, mask.tolist()[0], mask.numpy().shape))
        seen.append((torch.equal(mask, mask.clone()), torch.equal(model(batch["inputs"]), torch.ones(()))))
        train_step(model, optimizer, batch["inputs"][:, :longest])

    traced(
        train_step=reading,
        make_batch=lambda n: {"inputs": torch.ones(n, 5, WIDTH), "mask": torch.ones(n, 5, dtype=torch.long)},
    )
    assert seen[:2] == [(True, 4, 5, [True] * 5, (2, 5)), (True, False)]


def sharded(model: nn.Sequential | None = None) -> nn.Module:
    model = model or build_model()
    for module in (model[0], model[1], model):
        fully_shard(module)
    return model


@pytest.mark.parametrize(
    "large",
    [
        lambda places: places <= places[:, None],
        lambda places: places.repeat(2**20, 1),
        lambda places: places.new_zeros(2**20, 2**20),
    ],
    ids=["compared", "repeated", "new"],
)
def test_a_large_result_of_known_values_has_none_and_takes_no_memory(large: Callable[[torch.Tensor], torch.Tensor]):
    """As the attention mask of long rows in transformers: here 1 TiB and more."""
    with FakeStep(like_cuda=False).faking():
        places = torch.arange(2**20)
        assert known_values(large(places)) is None
        assert known_values(places) is not None


def test_fsdp2_takes_memory_in_several_streams_also_on_a_machine_with_a_gpu(monkeypatch: pytest.MonkeyPatch):
    usual = traced(build_model=sharded, ranks=2).step
    assert len({event.stream for event in usual.at(2)}) > 1
    monkeypatch.setattr(torch._C, "_get_accelerator", lambda *_: torch.device("cuda"))  # which FSDP2 would take
    assert traced(build_model=sharded, ranks=2).step == usual


def test_ranks_share_parameters_gradients_and_state_under_fsdp2():
    def wide() -> nn.Sequential:  # small tensors would be rounded up to whole blocks of memory
        return nn.Sequential(nn.Linear(WIDTH, 256), nn.Linear(256, 256), nn.Linear(256, WIDTH))

    alone, shared = traced(build_model=wide), traced(build_model=lambda: sharded(wide()), ranks=4)
    assert not dist.is_initialized()
    assert shared.num_parameters == alone.num_parameters
    whole, parts = (exact(loop.step.at(2)).kinds("optimizer") for loop in (alone, shared))
    for kind in ("parameters", "gradients", "optimizer state"):
        assert parts[kind] == pytest.approx(whole[kind] / 4, rel=0.1)
    assert exact(shared.step.at(2)).kinds("forward")["gathered parameters"] > 0


# What cannot be traced. The refusal names the line that ends in "# here".


@torch.library.custom_op("test_loop::doubled", mutates_args=())
def doubled(hidden: torch.Tensor) -> torch.Tensor:
    return hidden * 2


def takes_nonzero(model: nn.Module, optimizer: Any, batch: torch.Tensor) -> None:
    model(batch).nonzero()  # here


def indexes_by_booleans(model: nn.Module, optimizer: Any, batch: torch.Tensor) -> None:
    outputs = model(batch)
    outputs[outputs > 0].sum().backward()  # here


def calls_a_kernel(model: nn.Module, optimizer: Any, batch: torch.Tensor) -> None:
    doubled(model(batch))  # here


def converts_to_numpy(model: nn.Module, optimizer: Any, batch: torch.Tensor) -> None:
    model(batch).detach().numpy()  # here


def raises_by_a_value(model: nn.Module, optimizer: Any, batch: torch.Tensor) -> None:
    if not (model(batch) > 0).any():
        raise RuntimeError("no output is above zero")  # here


def takes_a_value_as_a_size(model: nn.Module, optimizer: Any, batch: torch.Tensor) -> None:
    longest = model(batch).argmax(-1).max().item()
    batch.new_zeros(2, longest)  # here


PLACES: list[tuple[Callable[..., None], str]] = [
    (takes_nonzero, "calls aten.nonzero.default, whose result has a size that depends on values"),
    (indexes_by_booleans, "calls aten.index.Tensor, whose result has a size that depends on values"),
    (
        calls_a_kernel,
        "calls test_loop::doubled, which has no fake implementation (`torch.library.register_fake`)",
    ),
    (converts_to_numpy, "converts a tensor by `numpy`"),
    (
        raises_by_a_value,
        "raised RuntimeError: no output is above zero, after values were read, which a trace does not have",
    ),
    (takes_a_value_as_a_size, "passes a tensor's value as `size` to aten.new_zeros.default"),
]


@pytest.mark.parametrize(("step", "what"), PLACES)
def test_a_step_that_needs_values_is_refused_with_its_line(
    step: Callable[..., None], what: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(Path(__file__).parent)
    lines, first = inspect.getsourcelines(step)
    place = next(number for number, line in enumerate(lines, start=first) if line.endswith("# here\n"))
    with pytest.raises(InputError) as refused:
        traced(train_step=step)
    where = f"{Path(__file__).name}:{place}"
    assert str(refused.value) == (
        f"`train_step` cannot be planned, which runs it on tensors without values: {where} {what}."
    )


def differs_by_size(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    loss = model(batch).square().mean()
    if len(batch) == 3:
        loss = loss + 1
    loss.backward()
    optimizer.step()


def does_not_step(model: nn.Module, optimizer: Any, batch: torch.Tensor) -> None:
    model(batch).sum().backward()


def on_the_cpu() -> nn.Module:
    with torch.device("cpu"):
        return nn.Linear(WIDTH, 3)


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"train_step": differs_by_size},
        "`train_step` must run the same operations at all batch sizes, but in backward is"
        " aten.ones_like.default with 2 samples and aten.add.Tensor with 3.",
    ),
    ({"train_step": does_not_step}, "`train_step` did not step the optimizer that it was given."),
    (
        {"build_model": on_the_cpu},
        "`build_model` is called on the meta device and must leave the model there, but `weight` is on 'cpu'.",
    ),
    ({"build_model": lambda: 3}, "`build_model` must return a module, but returned 3 instead."),
    ({"build_model": nn.Sequential}, "`build_model` returned a model without parameters."),
    ({"build_model": lambda: nn.GRU(WIDTH, WIDTH)}, "`torch.nn.GRU` is not planned: cuDNN computes it on a GPU"),
    (
        {"make_batch": lambda n: torch.ones(4, WIDTH)},
        "`make_batch(n)` must return n samples of one length, but its tensors have shapes"
        " (4, 8) for n=1; (4, 8) for n=2; (4, 8) for n=3; (4, 8) for n=4.",
    ),
    ({"make_batch": lambda n: torch.ones(n, WIDTH + n % 2)}, "`make_batch(n)` must return n samples of one length"),
    ({"make_batch": lambda n: [n]}, "`make_batch(n)` must return n samples of one length"),
    ({"build_optimizer": lambda model: None}, "`build_optimizer` must return an optimizer, but returned None instead."),
    (
        {"build_optimizer": lambda model: build_optimizer(build_model())},
        "`build_optimizer` returned an optimizer with 10 parameters that its model does not have.",
    ),
]


@pytest.mark.parametrize(("changes", "sentence"), REFUSED)
def test_what_is_no_loop_is_refused(changes: dict[str, Any], sentence: str):
    with pytest.raises(InputError) as refused:
        traced(**changes)
    assert str(refused.value).startswith(sentence)


@pytest.mark.usefixtures("group_of_one")
def test_several_ranks_are_refused_in_a_process_that_has_a_group():
    with pytest.raises(InputError) as refused:
        traced(ranks=2)
    assert dist.is_initialized()
    assert str(refused.value) == ("A plan starts a process group of its own, but this process is in one of size 1.")


def test_after_a_plan_tensors_are_not_on_its_mesh() -> None:
    """DTensor keeps what it has worked out for a mesh, also for later ones of the same shape."""
    meshes: list[DeviceMesh] = []

    def build_with_mesh() -> nn.Module:
        meshes.append(init_device_mesh("cpu", (2,)))
        return build_model()

    def total() -> Any:
        return distribute_tensor(torch.ones(4, WIDTH), meshes[-1], [Shard(0)]) + 1

    def step(*arguments: Any) -> float:
        total()
        return train_step(*arguments)

    traced(ranks=2, build_model=build_with_mesh, train_step=step)
    with fake_process_group(2):
        meshes.append(init_device_mesh("cpu", (2,)))
        assert total().device_mesh is meshes[-1]


def state_of_torch() -> list[Any]:
    """Everything that a trace may change."""
    half = torch.ones(2, 2, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        cast = [half.softmax(-1).dtype, torch.cat([half, half.float()]).dtype, torch.mm(half, half).dtype]
    torch_names = [
        torch.is_autocast_enabled,
        torch.set_autocast_dtype,
        torch.nn.functional.scaled_dot_product_attention,
    ]
    modules = ("torch.optim.optimizer", "torch.utils._foreach_utils")
    return [
        *cast,
        *torch_names,
        *(list(sys.modules[name]._foreach_supported_types) for name in modules),
        sys.modules["torch.optim.optimizer"]._get_foreach_kernels_supported_devices,
        {name: value for name, value in vars(torch.cuda).items() if callable(value)},
        dict(vars(torch._subclasses.FakeTensor)),
        dict(vars(torch.amp.GradScaler)),
        torch.distributed.device_mesh.DeviceMesh.__init__,
        torch.UntypedStorage.resize_,
        (torch.get_default_device(), torch.get_default_dtype(), torch.get_autocast_dtype("cpu")),
        (torch.is_grad_enabled(), dist.is_initialized(), gc.isenabled()),
        _get_current_dispatch_mode_stack(),
        [(type(mode), vars(mode)["device"]) for mode in torch.overrides._get_current_function_mode_stack()],
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state(legacy=False)["state"]["key"].tolist(),
        len(torch.nn.modules.module._global_forward_hooks),
        sys.excepthook,  # which a process group replaces
    ]


@pytest.mark.parametrize(("fails", "default"), [(False, None), (True, "meta")])
def test_nothing_stays_behind(fails: bool, default: str | None):
    def drawing_batch(num_samples: int) -> torch.Tensor:
        random.random()
        np.random.rand()
        return torch.rand(num_samples, WIDTH, device="cpu")

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
        torch.set_default_device("cuda")
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        torch.manual_seed(1)
        torch.set_grad_enabled(True)
        train_step(model, optimizer, batch)
        if fails:
            raise RuntimeError("on purpose")

    def sharded_in_float32() -> nn.Module:
        torch.set_default_dtype(torch.float32)
        return sharded()

    torch.set_default_device(default)
    try:
        with torch.device("cpu"):
            before = state_of_torch()
        refused = False
        try:
            traced(build_model=sharded_in_float32, train_step=step, make_batch=drawing_batch, ranks=2)
        except InputError:
            refused = True
        with torch.device("cpu"):
            after = state_of_torch()
    finally:
        torch.set_default_device(None)
    assert refused == fails
    assert after == before
