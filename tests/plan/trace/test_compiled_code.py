"""Memory of compiled code is predicted without compiling it: what it saves for backward, and its buffers."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torchtune.models.llama3_2 import llama3_2, lora_llama3_2
from torchtune.modules.loss import CEWithChunkedOutputLoss, ForwardKLWithChunkedOutputLoss

from tests.support.allocator import rises_by_events
from torchtune_adaptive.plan.replay import exact
from torchtune_adaptive.plan.trace import compiled_code
from torchtune_adaptive.plan.trace.compiled_code import compile_layers, compile_loss
from torchtune_adaptive.plan.trace.events import Event
from torchtune_adaptive.plan.trace.fake_tensors import fake_like, make_fake
from torchtune_adaptive.plan.trace.fused_kernels import Kernel, Part, fused
from torchtune_adaptive.plan.trace.recorder import StepTrace

ROWS, TOKENS, DIM, HIDDEN, HEADS, KV_HEADS = 4, 32, 64, 144, 4, 2
ALL_TOKENS = ROWS * TOKENS
SIZES: dict[str, Any] = {"vocab_size": 50, "num_layers": 1, "num_heads": HEADS, "num_kv_heads": KV_HEADS}
SIZES |= {"embed_dim": DIM, "max_seq_len": TOKENS, "intermediate_dim": HIDDEN}


# ---- kernels


def kernel(order: int, read: set[int], made: set[int], elements: int | None = 8) -> Kernel:
    return Kernel((Part(order, frozenset(read), frozenset(made)),), elements)


def orders(kernels: list[Kernel]) -> list[list[int]]:
    return [[part.order for part in one.parts] for one in kernels]


def test_kernels_that_share_a_buffer_become_one_at_the_first_place() -> None:
    kernels = [kernel(0, {0}, {2}), kernel(1, {1}, {3}, None), kernel(2, {0}, {4}), kernel(3, {2}, {5})]
    assert orders(fused(kernels, [1] * 6)) == [[0, 2, 3], [1]]


def test_kernels_of_other_lengths_or_without_a_common_buffer_stay_apart() -> None:
    assert orders(fused([kernel(0, {0}, {2}), kernel(1, {0}, {3}, 9)], [1] * 4)) == [[0], [1]]
    assert orders(fused([kernel(0, {0}, {2}), kernel(1, {1}, {3})], [1] * 4)) == [[0], [1]]
    assert orders(fused([kernel(0, {0}, {2}, None), kernel(1, {0}, {3}, None)], [1] * 4)) == [[0], [1]]


def test_a_kernel_that_reads_from_one_and_writes_for_another_keeps_them_apart() -> None:
    kernels = [kernel(0, {0}, {1}), kernel(1, {1}, {2}, None), kernel(2, {0, 2}, {3})]
    assert orders(fused(kernels, [1] * 4)) == [[0], [1], [2]]


def test_a_kernel_that_only_reads_what_a_fused_one_makes_comes_after_it() -> None:
    kernels = [kernel(0, {0}, {2}), kernel(1, {2}, {3}, None), kernel(2, {1}, {4}, None), kernel(3, {0, 4}, {5})]
    assert orders(fused(kernels, [1] * 6)) == [[2], [0, 3], [1]]


def test_kernels_that_share_the_most_bytes_are_fused_first() -> None:
    kernels = [kernel(0, {0, 1}, {2}), kernel(1, {2, 4}, {3}, None), kernel(2, {0}, {4}), kernel(3, {1, 3}, {5})]
    assert orders(fused(kernels, [9, 1, 1, 1, 1, 1])) == [[0, 2], [1], [3]]


# ---- code


class Code(nn.Module):
    """A module whose forward torchtune would compile."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.function(*inputs)


def rises(module: nn.Module, *inputs: torch.Tensor) -> tuple[int, int, int]:
    """The bytes by which forward rises to its peak, those that it leaves, and the rise to the peak of backward."""
    with FakeTensorMode():
        make_fake(module)
        fakes = [fake_like(one).requires_grad_(one.requires_grad) for one in inputs]
        trace = StepTrace()
        trace.mark([fakes, list(module.parameters()), list(module.buffers())], "parameters")
        with trace:
            trace.enter_phase("forward")
            output = module(*fakes)
            trace.enter_phase("backward")
            output.backward(torch.empty_like(output))
    forward, backward = (
        [live for event, live in live_activations(trace) if event.phase == phase] for phase in ("forward", "backward")
    )
    return max(forward), forward[-1], max(backward) - output.nbytes  # without the gradient passed to backward


def live_activations(trace: StepTrace) -> list[tuple[Event, int]]:
    """Each event with the bytes of activations after it."""
    memory = exact(trace.events())
    changes = [
        change if event.kind == "activations" else 0
        for event, change in zip(memory.events, memory.changes, strict=True)
    ]
    return list(zip(memory.events, accumulate(changes), strict=True))


def compiled(function: Callable[..., torch.Tensor]) -> nn.Module:
    """``function`` as a loss that is compiled as a whole."""
    return compile_loss(Code(function))


def test_a_chain_of_element_wise_operations_makes_its_output_only() -> None:
    x = torch.zeros(8, 100, requires_grad=True)

    def chain(x: torch.Tensor) -> torch.Tensor:
        return (x.exp() + 1).sin() * 2

    assert rises(compiled(chain), x) == (x.nbytes, x.nbytes, 2 * x.nbytes)
    assert rises(Code(chain), x)[0] > 2 * x.nbytes


def test_an_input_of_a_matrix_product_has_a_buffer() -> None:
    x, w = torch.zeros(8, 100, requires_grad=True), torch.zeros(100, 30, requires_grad=True)
    peak, left, backward = rises(compiled(lambda x, w: x.exp() @ w), x, w)
    output = 8 * 30 * 4
    assert (peak, left) == (x.nbytes + output, x.nbytes + output)
    # exp(x), which is saved; the gradient of w; then that of exp(x), whose memory the gradient of x reuses
    assert backward == left + w.nbytes + x.nbytes


def test_cross_entropy_of_bf16_logits_holds_no_fp32_logits() -> None:
    logits = torch.zeros(16, 5000, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(16, dtype=torch.long)

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.float(), labels)

    few = 16 * 64
    peak, left, backward = rises(compiled(loss), logits, labels)
    assert 0 < left <= peak < few
    assert logits.nbytes < backward < logits.nbytes + few
    assert rises(Code(loss), logits, labels)[2] > 4 * logits.nbytes


def layer_of(*, lora: bool = False) -> nn.Module:
    if not lora:
        return llama3_2(**SIZES).layers[0]
    return lora_llama3_2(["q_proj", "v_proj"], apply_lora_to_mlp=True, lora_rank=4, lora_alpha=8, **SIZES).layers[0]


@pytest.mark.slow
def test_a_layer_saves_what_the_partitioner_chooses() -> None:
    layer = layer_of()
    compile_layers(layer)
    _, left, _ = rises(layer, torch.zeros(ROWS, TOKENS, DIM, requires_grad=True))
    # Per token: its output, seven tensors of its width (both norms, query, key, value, attention and its projection),
    # three of the MLP's, the logarithm of each head's sum, and the scale of each norm.
    assert left == 4 * ALL_TOKENS * (8 * DIM + 3 * HIDDEN + HEADS + 2)


@pytest.mark.slow
def test_equal_layers_are_compiled_once_for_each_shape() -> None:
    sizes: dict[str, Any] = SIZES | {"num_layers": 3, "max_seq_len": TOKENS + 1}  # sizes that no other test uses
    model = llama3_2(**sizes)
    compile_layers(model)
    with FakeTensorMode(), mock.patch.object(compiled_code, "_compile", wraps=compiled_code._compile) as compiles:
        make_fake(model)
        for rows in (2, 2, 3):
            model(torch.zeros(rows, TOKENS, dtype=torch.long))
        with torch.no_grad():
            model(torch.zeros(2, TOKENS, dtype=torch.long))
    assert compiles.call_count == 3


def test_the_part_of_a_chunked_loss_for_one_chunk_is_compiled() -> None:
    cross_entropy, divergence, plain = (
        CEWithChunkedOutputLoss(),
        ForwardKLWithChunkedOutputLoss(),
        nn.CrossEntropyLoss(),
    )
    losses = [compile_loss(loss) for loss in (cross_entropy, divergence, plain)]
    assert losses[:2] == [cross_entropy, divergence]
    assert "forward" in vars(losses[2])
    assert "compute_cross_entropy" in vars(cross_entropy)
    assert "forward" in vars(divergence.fkl_loss)
    assert all("forward" not in vars(loss) for loss in (cross_entropy, divergence, plain))


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # by Inductor itself
@pytest.mark.exhaustive  # Inductor takes 10 s for a layer
@pytest.mark.parametrize("lora", [False, True])
def test_a_layer_needs_the_same_bytes_as_with_inductors_code(lora: bool) -> None:
    x = torch.zeros(ROWS, TOKENS, DIM, requires_grad=True)
    layer = layer_of(lora=lora)
    compile_layers(layer)
    predicted = rises(layer, x)
    real = layer_of(lora=lora)
    real.compile()
    gradient = torch.zeros_like(x)
    for _ in range(2):
        real(x).backward(gradient)
        real.zero_grad()
        x.grad = None
    output, forward = rises_by_events(lambda: real(x))
    _, backward = rises_by_events(lambda: output.backward(gradient))
    assert predicted == (max(forward), forward[-1], forward[-1] + max(backward))
