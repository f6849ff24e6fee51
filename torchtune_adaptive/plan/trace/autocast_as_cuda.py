"""Autocast of CPU tensors that casts as autocast of CUDA tensors does. It needs torch alone.

Fake tensors are on the CPU, whose autocast has other lists of operations: softmax, norms and powers stay in bfloat16
there, and the whole cross entropy is cast to float32. The lists here are CUDA's, from ``aten/src/ATen/autocast_mode.h``
of torch 2.13. ``tests/plan/trace/test_autocast_as_cuda.py`` compares them with the kernels that torch registers.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.library import fallthrough_kernel
from torch.utils._pytree import tree_map_only

from torchtune_adaptive.plan.trace.fake_tensors import kernels_replaced

_CPU_KEY, _CUDA_KEY = "AutocastCPU", "AutocastCUDA"
_DISPATCH: Any = torch._C


def _names(text: str) -> set[str]:
    return set(text.split())


# All their inputs are cast to float32.
IN_FLOAT32 = _names(
    """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
    pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm
    nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss
    kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp
    upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d
    _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d
    upsample_bicubic2d _upsample_bicubic2d_aa
    """
)
# They compute a float32 result from inputs that are not cast.
TO_FLOAT32 = _names(
    """
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList
    """
)
# The same, by an overload that has a data type.
TO_FLOAT32_BY_OVERLOAD = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
# The same, for dimensions with names, which torch 2.9 has. They run as on a CPU.
_NAMED_DIMENSIONS = _names(
    """
    cumprod.dimname cumsum.dimname log_softmax.Dimname norm.names_ScalarOpt_dim prod.dim_Dimname softmax.Dimname
    sum.dim_DimnameList
    """
)
# All their inputs are cast to the widest of their types.
WIDEST = _names("addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add")


@contextmanager
def autocast_as_cuda() -> Iterator[None]:
    """Within the context, autocast casts CPU tensors as it casts CUDA tensors. Its settings for "cuda" are theirs."""
    with ExitStack() as stack:
        stack.callback(torch.set_autocast_dtype, "cpu", torch.get_autocast_dtype("cpu"))
        torch.set_autocast_dtype("cpu", torch.get_autocast_dtype("cuda"))
        stack.enter_context(kernels_replaced(_kernels(), _CPU_KEY))
        for name in ("is_autocast_enabled", "set_autocast_enabled", "get_autocast_dtype", "set_autocast_dtype"):
            stack.enter_context(mock.patch.object(torch, name, _for_the_cpu(getattr(torch, name))))
        yield


def in_lower_precision() -> list[str]:
    """The operations whose inputs CUDA's autocast casts to the lower precision: all others that it knows."""
    others = {*IN_FLOAT32, *TO_FLOAT32, *TO_FLOAT32_BY_OVERLOAD, *_NAMED_DIMENSIONS, *WIDEST}
    return sorted(_registered(_CUDA_KEY) - others - {"binary_cross_entropy"})  # the last only raises an error


def _kernels() -> Iterator[tuple[str, Callable[..., Any]]]:
    on_cpu = _registered(_CPU_KEY)
    for name in on_cpu - _registered(_CUDA_KEY):
        yield name, fallthrough_kernel
    for name in IN_FLOAT32 & _registered(_CUDA_KEY):  # torch 2.9 casts no `rms_norm`
        yield name, _casting(_operation(name), lambda _: torch.float32)
    for name in WIDEST:
        yield name, _casting(_operation(name), _widest)
    for name in TO_FLOAT32:
        yield name, _with_float32_result(_operation(name))
    for name, overload in TO_FLOAT32_BY_OVERLOAD.items():
        yield name, _by_overload(_operation(name), _operation(overload))
    for name in in_lower_precision():
        if name not in on_cpu:  # torch's own kernels cache the weights that they cast
            yield name, _casting(_operation(name), lambda _: torch.get_autocast_dtype("cpu"))


def _registered(key: str) -> set[str]:
    names = _DISPATCH._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")}


def _operation(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _without_autocast() -> Any:
    keys = _DISPATCH.DispatchKeySet(_DISPATCH.DispatchKey.AutocastCPU)
    return _DISPATCH._ExcludeDispatchKeyGuard(keys)


def _is_cast(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _casting(operation: Any, dtype_of: Callable[[Any], torch.dtype]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _without_autocast():
            dtype = dtype_of((args, kwargs))
            args, kwargs = tree_map_only(
                torch.Tensor, lambda value: value.to(dtype) if _is_cast(value) else value, (args, kwargs)
            )
            return operation(*args, **kwargs)

    return kernel


def _widest(inputs: Any) -> torch.dtype:
    dtypes: set[torch.dtype] = set()
    tree_map_only(torch.Tensor, lambda value: dtypes.add(value.dtype) if _is_cast(value) else None, inputs)
    return torch.float32 if torch.float32 in dtypes else torch.get_autocast_dtype("cpu")


def _with_float32_result(operation: Any) -> Callable[..., Any]:
    place = [argument.name for argument in operation._schema.arguments].index("dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _without_autocast():
            given = args[place] if len(args) > place else kwargs.get("dtype")
            if given is None and _is_cast(args[0]):
                args, kwargs = args[:place], {**kwargs, "dtype": torch.float32}
            return operation(*args, **kwargs)

    return kernel


def _by_overload(operation: Any, overload: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _without_autocast():
            if not _is_cast(args[0]):
                return operation(*args, **kwargs)
            defaults = [argument.default_value for argument in operation._schema.arguments]
            return overload(*args, *defaults[len(args) :], **kwargs, dtype=torch.float32)

    return kernel


def _for_the_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """``original`` of torch, applied to the CPU's settings where it is called for CUDA's, the default."""

    def called(*args: Any, device_type: str = "cuda", **kwargs: Any) -> Any:
        if args and isinstance(args[0], str):
            device_type, args = args[0], args[1:]
        return original("cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    return called
