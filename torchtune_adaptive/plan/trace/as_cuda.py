"""Code for CUDA that runs on fake CPU tensors, and takes the memory that it takes on CUDA. It needs torch alone.

Devices named "cuda" are mapped to another one, ``torch.cuda`` and ``torch.accelerator`` answer as on a machine with a
GPU, autocast casts as on CUDA, and operations that torch composes differently on the two devices are composed as on
CUDA. torch may have been built for CUDA or not.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.utils._device as device_module
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from torchtune_adaptive.plan.trace.autocast_as_cuda import autocast_as_cuda
from torchtune_adaptive.plan.trace.fake_tensors import kernels_replaced, optimizers_choose_as_on_cuda

_GIB = 2**30
_attention: Any = torch.nn.functional.scaled_dot_product_attention
_OF_FLASH = (torch.float16, torch.bfloat16)


@contextmanager
def as_cuda(ranks: int) -> Iterator[None]:
    """Code for CUDA on one of ``ranks`` devices runs on fake CPU tensors. Afterwards everything is as before."""
    with ExitStack() as stack:
        stack.enter_context(computed_as_on_cuda())
        stack.enter_context(autocast_as_cuda())
        for module in (torch.cuda, torch.accelerator):
            for name, answer in _answers(ranks).items():
                if hasattr(module, name) and (module, name) != (torch.accelerator, "get_device_capability"):  # a dict
                    stack.enter_context(mock.patch.object(module, name, answer))
        stack.enter_context(mock.patch.object(torch.amp.GradScaler, "_maybe_opt_step", _step_always))
        stack.enter_context(mock.patch.object(DeviceMesh, "__init__", _mesh_on_cpu(DeviceMesh.__init__)))
        yield


@contextmanager
def computed_as_on_cuda(*, compiles: bool = False) -> Iterator[None]:
    """Optimizers, layers and attention take the memory that they take on CUDA.

    CUDA has kernels for dropout and for RMS norm, which keep less for the backward pass than what a CPU runs.

    Args:
        compiles: whether layers are compiled, see ``compiled_code``: compiled code composes RMS norm and linear layers
            itself.
    """
    kernels: dict[str, Callable[..., Any]] = {"dropout": _dropout}
    if not compiles:
        kernels |= {"linear": _linear, "rms_norm": _rms_norm}
    attention = mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", _by_cudas_kernel)
    composed = kernels_replaced(kernels.items(), "CompositeImplicitAutograd")
    with optimizers_choose_as_on_cuda(), composed, attention:
        yield


class DevicesMapped(TorchFunctionMode):
    """Context: the device "cuda" is ``target``. Tensors on the meta device stay there if they are moved."""

    def __init__(self, target: str) -> None:
        super().__init__()
        self._target = torch.device(target)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is _attention:
            func = _by_cudas_kernel
        elif func is torch.Tensor.to:
            args, kwargs = self._moved(args, kwargs)
        elif is_cuda(kwargs.get("device")) or _takes_default_cuda(func, kwargs):
            kwargs = {**kwargs, "device": self._target}
        return func(*args, **kwargs)

    def _moved(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of ``Tensor.to`` with the tensor's own device instead of "cuda"."""
        here = args[0].device
        if len(args) > 1 and _is_moved(here, args[1]):
            args = (args[0], here, *args[2:])
        if _is_moved(here, kwargs.get("device")):
            kwargs = {**kwargs, "device": here}
        return args, kwargs


def is_cuda(device: Any) -> bool:
    """Whether ``device`` names a CUDA device, as torch's functions take it. A number is one."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.partition(":")[0] == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def _takes_default_cuda(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether ``func`` makes a tensor on the default device, and this is a CUDA device."""
    makes_tensor = func in device_module._device_constructors() and kwargs.get("device") is None
    return makes_tensor and is_cuda(device_module.CURRENT_DEVICE)


def _is_moved(here: torch.device, device: Any) -> bool:
    names_device = isinstance(device, torch.device | str)
    return is_cuda(device) or (here.type == "meta" and names_device)


def _answers(ranks: int) -> dict[str, Callable[..., Any]]:
    """What ``torch.cuda`` or ``torch.accelerator`` answers, by the function's name. Figures of memory are 0."""
    gpu = SimpleNamespace(
        name="GPU", major=9, minor=0, total_memory=80 * _GIB, multi_processor_count=132, gcnArchName="", warp_size=32
    )
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "is_current_stream_capturing": False,
        "device_count": ranks,
        "current_device": 0,
        "get_device_name": gpu.name,
        "get_device_capability": (gpu.major, gpu.minor),
        "current_accelerator": torch.device("cuda"),
        "current_device_index": 0,
        "current_stream": SimpleNamespace(is_capturing=lambda: False),
        "get_device_properties": gpu,
        "mem_get_info": (gpu.total_memory, gpu.total_memory),
        "memory_summary": "",
        "memory_stats": defaultdict(int),
    }
    figures = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "utilization")
    answers |= dict.fromkeys(figures, 0)
    resets = ("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_accumulated_memory_stats")
    actions = ("init", "set_device", "set_device_index", "synchronize", "empty_cache", "ipc_collect")
    answers |= dict.fromkeys((*resets, *actions, "manual_seed", "manual_seed_all"), None)
    return {name: lambda *_, _answer=answer, **__: _answer for name, answer in answers.items()}


def _step_always(_: Any, optimizer: torch.optim.Optimizer, __: Any, *args: Any, **kwargs: Any) -> Any:
    """``GradScaler._maybe_opt_step`` with gradients that are finite."""
    return optimizer.step(*args, **kwargs)


def _mesh_on_cpu(init: Callable[..., None]) -> Callable[..., None]:
    def on_cpu(self: DeviceMesh, device_type: str, *args: Any, **kwargs: Any) -> None:
        init(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    return on_cpu


def _by_cudas_kernel(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> Any:
    """Attention by the kernel that CUDA has for it.

    Dropout takes no memory there: CUDA's kernels keep a seed, a CPU's a mask of all pairs of tokens. Flash attention
    takes no float32 and no mask. Memory-efficient attention does, but knows nothing of grouped heads, which are then
    computed as products of matrices.
    """
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query.dtype
    if attn_mask is None and dtype in _OF_FLASH:
        return _attention(query, key, value, attn_mask, 0.0, is_causal, **kwargs)
    if query.dim() > 2 and query.shape[-3] != key.shape[-3]:
        with sdpa_kernel(SDPBackend.MATH):
            return _attention(query, key, value, attn_mask, dropout_p, is_causal, **kwargs)
    if query.dim() != 4:
        return _attention(query, key, value, attn_mask, 0.0, is_causal, **kwargs)
    query, key, value = (_ByTokens.apply(one) for one in (query, key, value))
    return _ByTokens.apply(_attention(query, key, value, attn_mask, 0.0, is_causal, **kwargs))


class _ByTokens(torch.autograd.Function):
    """Has its tensor [B, heads, S, head_dim] and the gradient in memory as [B, S, heads, head_dim].

    So are results and gradients of memory-efficient attention (attention.cu, attention_backward.cu). Flash attention,
    and that of a CPU, lay them out as the queries, which in ``nn.MultiheadAttention`` have the tokens first.
    """

    @staticmethod
    def forward(_: Any, tensor: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        # Where tensors overlap or have gaps, results are laid out by tokens in any case.
        if torch.empty_like(tensor, device="meta").stride() == tensor.stride():
            _, heads, tokens, head_dim = tensor.shape
            strides = heads * tokens * head_dim, head_dim, heads * head_dim, 1
            return tensor.as_strided(tensor.shape, strides)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(_: Any, grad: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad.transpose(1, 2).contiguous().transpose(1, 2)


def _linear(tensor: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
    """A product to which the bias is added in place; on fake tensors torch adds that of some shapes out of place."""
    if bias is None:
        return tensor.matmul(weight.t())
    product = torch.addmm(bias, tensor.reshape(-1, tensor.shape[-1]), weight.t())
    return torch.ops.aten._unsafe_view.default(product, [*tensor.shape[:-1], weight.shape[0]])


def _dropout(tensor: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if not train or p == 0 or tensor.numel() == 0:
        return tensor
    if p == 1:
        return tensor.mul(torch.zeros((), dtype=tensor.dtype))
    return torch.ops.aten.native_dropout.default(tensor, p, train)[0]


def _rms_norm(tensor: torch.Tensor, normalized_shape: Any, weight: Any = None, eps: Any = None) -> torch.Tensor:
    if weight is None or weight.dtype == tensor.dtype:
        return _FusedRMSNorm.apply(tensor, weight, len(normalized_shape))
    # As ``rms_norm_composite`` in aten/src/ATen/native/layer_norm.cpp: the kernel takes equal types alone.
    wide = tensor.float()
    dims = tuple(range(-len(normalized_shape), 0))
    squares = wide.pow(2)  # in C++ it lives until the end of the statement
    inverse = squares.mean(dims, keepdim=True).add_(eps or 0.0).rsqrt()
    del squares
    return (wide * inverse * weight).type_as(tensor)


class _FusedRMSNorm(torch.autograd.Function):
    """The tensors of CUDA's kernel (torch 2.9 and later): it keeps its input, its weight and a float32 per row."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, weight: Any, num_dims: int) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        rows = tensor.shape[: tensor.dim() - num_dims]
        ctx.save_for_backward(tensor, weight, torch.empty(rows, dtype=torch.float32))
        return torch.empty_like(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        tensor, weight, _ = ctx.saved_tensors
        needs_tensor, needs_weight, _ = ctx.needs_input_grad
        return (
            torch.empty_like(tensor) if needs_tensor else None,
            torch.empty_like(weight) if needs_weight else None,
            None,
        )
