"""Weights in 4 or 8 bits: bitsandbytes' own layers, whose weights are packed once they are fake."""

import importlib
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from torchtune_adaptive.plan.hugging_face.run_keys import ModelKeys, imported
from torchtune_adaptive.plan.trace.events import Events
from torchtune_adaptive.plan.trace.loading import load

_NEEDED_FOR = "quantized weights"
_BLOCK = 64  # values of a weight in 4 bits that have one scale (bitsandbytes.functional.quantize_4bit)


class QuantizedWeights:
    """How bitsandbytes keeps the weights of linear layers, and how transformers loads them.

    Args:
        dtype: of weights that are not quantized, and of those that are before that.
    """

    def __init__(self, keys: ModelKeys, dtype: torch.dtype) -> None:
        self._keys, self._dtype = keys, dtype

    @property
    def config(self) -> Any:
        """The ``BitsAndBytesConfig``, as TRL's trainers make it of the keys."""
        keys, transformers = self._keys, imported("transformers", needed_for=_NEEDED_FOR)
        if keys.load_in_8bit:
            return transformers.BitsAndBytesConfig(load_in_8bit=True)
        return transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_compute_dtype=self._dtype,
            bnb_4bit_quant_type=keys.bnb_4bit_quant_type,
            bnb_4bit_use_double_quant=keys.use_bnb_nested_quant,
            bnb_4bit_quant_storage=keys.bnb_4bit_quant_storage,
        )

    def replace_layers(self, model: Any) -> None:
        """Let bitsandbytes' layers take the place of linear ones. ``pack`` packs their weights."""
        imported("bitsandbytes", needed_for=_NEEDED_FOR)
        quantizer = imported("transformers.quantizers", needed_for=_NEEDED_FOR).AutoHfQuantizer.from_config(self.config)
        quantizer.preprocess_model(model=model, device_map=None)
        quantizer.postprocess_model(model)
        model.hf_quantizer = quantizer

    def pack(self, model: nn.Module) -> None:
        """Pack the weights, once they are fake. Call it in the mode."""
        for layer in self._layers(model):
            layer.weight = self._packed_in_8_bits(layer) if self._keys.load_in_8bit else self._packed_in_4_bits(layer)

    def pack_without_scales(self, model: nn.Module) -> None:
        """Give the weights the size of packed ones, on the meta device."""
        for layer in self._layers(model):
            shape = tuple(layer.weight.shape)
            if not self._keys.load_in_8bit:
                shape = -(-layer.weight.numel() // (2 * self._packed_dtype.itemsize)), 1
            packed = torch.empty(shape, dtype=self._packed_dtype, device="meta")
            layer.weight = nn.Parameter(packed, requires_grad=False)

    def loads(self, model: nn.Module) -> list[Events]:
        """How transformers loads the weights of ``model``, which is on the meta device and not packed, onto a GPU.

        First it takes, at once, all that the packed weights will need (`caching_allocator_warmup`). Then it loads them
        in the order of their names, and packs each.
        """
        names = {layer: name for name, layer in model.named_modules()}
        shapes = {f"{names[layer]}.weight": layer.weight.shape for layer in self._layers(model)}
        self.pack_without_scales(model)
        weights = sorted(model.named_parameters(), key=lambda one: _natural(one[0]))
        at_once = load([], temporary=[sum(weight.nbytes for _, weight in weights)])
        return [at_once, *(self._load(weight.nbytes, shapes.get(name)) for name, weight in weights)]

    def _load(self, num_bytes: int, shape: torch.Size | None) -> Events:
        """How a weight is loaded, which is quantized if it has the ``shape`` [out, in] before."""
        if shape is None:
            return load([num_bytes])
        unpacked = shape.numel() * self._dtype.itemsize
        if self._keys.load_in_8bit:  # from a copy in float16; each row has a scale in float32
            return load([4 * shape[0], num_bytes], temporary=[unpacked, 2 * shape.numel()])
        blocks = -(-shape.numel() // _BLOCK)  # each has a scale in float32, which may be quantized, too
        if self._keys.use_bnb_nested_quant:
            return load([num_bytes, blocks], temporary=[unpacked, 4 * blocks])
        return load([4 * blocks, num_bytes], temporary=[unpacked])

    def _layers(self, model: nn.Module) -> list[Any]:
        layers: Any = imported("bitsandbytes.nn", needed_for=_NEEDED_FOR)
        kind = layers.Linear8bitLt if self._keys.load_in_8bit else layers.Linear4bit
        return [one for one in model.modules() if isinstance(one, kind)]

    @property
    def _packed_dtype(self) -> torch.dtype:
        """The type of tensors that hold packed weights."""
        if self._keys.load_in_8bit:
            return torch.int8
        return getattr(torch, self._keys.bnb_4bit_quant_storage or "uint8")

    def _packed_in_4_bits(self, layer: Any) -> nn.Parameter:
        functional: Any = imported("bitsandbytes.functional", needed_for=_NEEDED_FOR)
        with _disable_current_modes():
            functional.name2qmap.setdefault("dynamic", functional.create_dynamic_map())  # it reads values
        packed, state = functional.quantize_4bit(
            torch.empty(layer.out_features, layer.in_features, dtype=self._dtype),
            compress_statistics=self._keys.use_bnb_nested_quant,
            quant_type=self._keys.bnb_4bit_quant_type,
            quant_storage=self._packed_dtype,
        )
        weight: Any = nn.Parameter(packed, requires_grad=False)
        weight.quant_state = layer.quant_state = state
        return weight

    def _packed_in_8_bits(self, layer: Any) -> nn.Parameter:
        scales = torch.empty(layer.out_features)
        packed = torch.empty(layer.out_features, layer.in_features, dtype=self._packed_dtype)
        weight: Any = nn.Parameter(packed, requires_grad=False)
        weight.CB, weight.SCB = packed, scales  # the layer takes them in its first forward pass
        return weight


@contextmanager
def unpacked() -> Iterator[None]:
    """Context: bitsandbytes leaves weights as they are when a model is moved; ``QuantizedWeights.pack`` packs them.

    Its layers compute as on CUDA: those of 4 bits as with more than 1536 tokens, those of 8 bits as without outliers,
    whose number depends on values.
    """
    try:  # before a trace pretends to have a GPU: then importing it fails
        layers: Any = importlib.import_module("bitsandbytes.nn")
        functions: Any = importlib.import_module("bitsandbytes.autograd._functions")
    except ImportError:
        yield
        return
    stand_ins = {
        "gemm_4bit": SimpleNamespace(default=_product_in_4_bits),
        "int8_vectorwise_quant": SimpleNamespace(default=_quantized_rows),
        "int8_mixed_scaled_mm": _product_in_8_bits,
    }
    with ExitStack() as stack:
        for kind in (layers.Params4bit, layers.Int8Params):
            stack.enter_context(mock.patch.object(kind, "_quantize", lambda weight, *_: weight))
        for name, stand_in in stand_ins.items():
            stack.enter_context(mock.patch.object(torch.ops.bitsandbytes, name, stand_in))
        # The layer of a CPU, on which fake tensors are, unpacks its weights.
        stack.enter_context(mock.patch.object(functions, "MatMul8bitFp", functions.MatMul8bitLt))
        yield


def _product_in_4_bits(
    values: torch.Tensor,
    packed: torch.Tensor,
    shape: Sequence[int],
    scales: torch.Tensor,
    block_size: int,
    kind: str,
    bias: torch.Tensor | None = None,
    absmax_8bit: torch.Tensor | None = None,
    absmax_code: torch.Tensor | None = None,
    absmax_offset: torch.Tensor | None = None,
) -> torch.Tensor:
    """What `gemm_4bit` of bitsandbytes computes, by operations that a trace sees: the weight is unpacked first."""
    if absmax_8bit is not None:
        nested = torch.ops.bitsandbytes.dequantize_blockwise(absmax_8bit, scales, absmax_code, 256, torch.float32)
        scales = nested + absmax_offset
    weight = torch.ops.bitsandbytes.dequantize_4bit(packed, scales, block_size, kind, shape, values.dtype)
    return F.linear(values, weight, bias)


def _quantized_rows(
    values: torch.Tensor, threshold: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """What `int8_vectorwise_quant` takes on CUDA (bitsandbytes/backends/cuda/ops.py): rows, their scales, outliers."""
    scales = torch.empty(values.shape[0], dtype=torch.float32)
    quantized = torch.empty(values.shape, dtype=torch.int8)
    if threshold <= 0:
        return quantized, scales, None
    outliers = values.abs() >= threshold
    outliers.any()
    return quantized, scales, torch.empty(0, dtype=torch.int64)


def _product_in_8_bits(
    values: torch.Tensor,
    quantized: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    packed_scales: torch.Tensor,
    outliers: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `int8_mixed_scaled_mm` takes on CUDA: sums in int32, and the result in float16 before its own type."""
    no_outliers = torch.empty(0, dtype=values.dtype)
    sums = torch.empty(len(quantized), len(packed), dtype=torch.int32)
    result = torch.empty_like(sums, dtype=torch.float16)
    if bias is not None and bias.dtype != result.dtype:
        result.add_(bias)
    return result.to(values.dtype), no_outliers


def _natural(name: str) -> list[str | int]:
    """A key by which names are sorted as people sort them: layer 2 before layer 10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
