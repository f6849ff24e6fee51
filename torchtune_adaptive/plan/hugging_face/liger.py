"""Liger's kernels on fake tensors: they take the memory that they take on CUDA."""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.nn import functional as F

from torchtune_adaptive.plan.hugging_face.run_keys import imported
from torchtune_adaptive.plan.hugging_face.trl_stand_ins import NoKernel

_IGNORED = -100  # the label of a token that is not learnt


@contextmanager
def liger_as_on_cuda() -> Iterator[None]:
    """Context: Liger takes on fake tensors what it takes on CUDA. What it replaces in transformers is restored.

    Raises:
        InputError: it is missing.
    """
    with mock.patch.object(torch.cuda, "is_available", return_value=True):  # it looks for a GPU once
        losses = _of_liger("liger_kernel.ops.fused_linear_cross_entropy")
    with ExitStack() as stack:
        stack.enter_context(triton_does_nothing())
        stack.enter_context(_transformers_restored())
        stack.enter_context(mock.patch.object(losses, "fused_linear_cross_entropy_forward", _loss_by_chunks))
        yield


def triton_does_nothing() -> AbstractContextManager[Any]:
    """Context: all kernels of Triton do nothing.

    Raises:
        InputError: Triton is missing.
    """
    kernels: Any = _of_liger("triton.runtime.jit").KernelInterface
    return mock.patch.object(kernels, "__getitem__", NoKernel.__getitem__)


def _of_liger(module: str) -> Any:
    return imported(module, needed_for="Liger's kernels", package="liger-kernel")


@contextmanager
def _transformers_restored() -> Iterator[None]:
    """Context: Liger replaces classes and functions of models in their modules, which are loaded, and torch's loss."""
    before = {
        name: dict(vars(module)) for name, module in sys.modules.items() if name.startswith("transformers.models.")
    }
    loss = F.cross_entropy
    try:
        yield
    finally:
        F.cross_entropy = loss
        for name, attributes in before.items():
            vars(sys.modules[name]).update(attributes)


def _loss_by_chunks(
    _input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    accum_dtype: torch.dtype | None = None,
    chunk_mem_const: int = 1,
    **__: Any,
) -> tuple[torch.Tensor | None, ...]:
    """What the fused loss of Liger 0.8.5 takes on CUDA, with one or two chunks of logits: all take the same memory.

    The number of tokens of a chunk is a power of two there. Here it is the most that it may be, so that it grows with
    the batch: up to twice as many.

    Args:
        _input: [tokens, width].
        weight: [vocabulary, width].
    """
    num_tokens, width = _input.shape
    vocabulary = len(weight)
    chunk = min(num_tokens, -(-2 * num_tokens // -(-vocabulary // (chunk_mem_const * width))))
    grad_input = torch.zeros_like(_input)
    is_learnt = weight.requires_grad and _input.requires_grad
    grad_weight = torch.zeros_like(weight, dtype=accum_dtype or weight.dtype) if is_learnt else None
    grad_bias = None if bias is None else torch.zeros_like(bias, dtype=accum_dtype or bias.dtype)
    losses = torch.zeros(num_tokens, dtype=torch.float32)
    (target != _IGNORED).sum()
    is_cast = torch.is_autocast_enabled() and torch.get_autocast_dtype("cuda") != _input.dtype
    if is_cast or _input.dtype != weight.dtype:
        for _ in range(1 if chunk == num_tokens else 2):  # autocast keeps a copy of the weight from the first one on
            rows = _input[:chunk]
            logits = rows @ weight.t()
            grad_input[:chunk] = logits @ weight
            if grad_weight is not None:
                rows = rows.to(logits.dtype)
            del logits, rows
    else:
        logits = torch.empty(chunk, vocabulary, dtype=_input.dtype)
        torch.mm(_input[:chunk], weight.t(), out=logits)
        torch.mm(logits, weight, out=grad_input[:chunk])
        del logits
    loss = losses.sum()
    return loss, None, None, None, grad_input, None if grad_weight is None else grad_weight.to(weight.dtype), grad_bias
