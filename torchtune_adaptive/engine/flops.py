"""How far a training is from the peak of its card: the utilisation of a model's floating point operations (MFU)."""

import re
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from torchtune_adaptive.engine.memory.operations import OperationMode

# The dense peak of matrix products in bfloat16, in 1e12 operations per second, by a part of the name that CUDA gives
# the card; the first that is in it counts. From the vendors' data sheets, halved where these count sparse matrices.
_PEAK_TFLOPS = {
    "B200": 2250,
    "H200 NVL": 835,
    "H200": 989,
    "H100 NVL": 835,
    "H100 PCIe": 756,
    "H100": 989,
    "A100": 312,
    "A10": 125,
    "L40S": 362,
    "L4": 121,
    "RTX 4090": 165,
    "MI300X": 1307,
}
_CPU_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """The published dense peak of a card for ``dtype`` in operations per second; None if it is not known."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    name = torch.cuda.get_device_name(device)
    return next((1e12 * peak for part, peak in _PEAK_TFLOPS.items() if re.search(rf"\b{part}\b", name)), None)


class MatrixProducts(OperationMode):
    """Context: counts the floating point operations of matrix products, convolutions and attention of this rank.

    What is computed again for the backward pass, because of activation checkpointing, does not count. A causal mask
    does not make attention cheaper. Kernels that a compiler has written itself are not seen, as flex attention's.

    Attributes:
        flops: the number so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0.0

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if not _is_recomputing():
            self.flops += _flops(getattr(func, "overloadpacket", func), args, kwargs, result)
        return result


def _is_recomputing() -> bool:
    """Whether activation checkpointing computes a forward pass again: it alone stores tensors in a backward pass."""
    in_backward = torch._C._current_graph_task_id() >= 0
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore[reportAttributeAccessIssue]
    return in_backward and (hooks is not None or torch.is_grad_enabled())


def _flops(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
    name, formula = getattr(operation, "__name__", ""), flop_registry.get(operation)
    is_attention_backward = name.endswith("attention_backward") or name == _CPU_ATTENTION + "_backward"
    if formula is not None:
        flops = formula(*args, **kwargs, out_val=result)
    elif name.startswith(_CPU_ATTENTION):  # which torch's table lacks
        shapes = [one.shape for one in args if isinstance(one, torch.Tensor)]
        flops = sdpa_backward_flop_count(*shapes[:4]) if is_attention_backward else sdpa_flop_count(*shapes[:3])
    else:
        return 0
    return 0.8 * flops if is_attention_backward else flops  # of its five products one is that of the forward pass
