"""A causal language model of transformers, built from its config.json alone, on the meta device."""

import copy
import importlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from torchtune_adaptive.errors import InputError, quote, reason_of
from torchtune_adaptive.plan.hugging_face.keys import ModelKeys, imported
from torchtune_adaptive.plan.trace.events import Events
from torchtune_adaptive.plan.trace.loading import load

_POSITIONS = re.compile(r"(^|\.)(wpe|\w*position\w*)(\.weight)?$")  # names of tables of positions in transformers
_BLOCK = 64  # values of a weight in 4 bits that have one scale (bitsandbytes.functional.quantize_4bit)
_FLASH = "packed_rows"  # what transformers knows flash attention by in a trace


@dataclass(frozen=True)
class LanguageModel:
    """A model without weights.

    Attributes:
        path: a folder with a ``config.json``, or a name on the Hub, which is downloaded.
    """

    path: str
    keys: ModelKeys

    def build(self, num_layers: int | None = None) -> Any:
        """The model on the default device, with its first ``num_layers`` layers (None: all).

        Raises:
            InputError: there is no such model.
        """
        transformers, config = _transformers(), copy.deepcopy(self.config)
        config.use_cache = False
        if num_layers is not None:
            _limit_layers(config.get_text_config(), num_layers)
        dtype, attention = self.dtype, self._attention
        with _errors_explained(self.path):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
        if self.keys.load_in_4bit:
            self._quantize(model)
        return model

    def require_row_length(self, model: nn.Module, seq_len: int) -> None:
        """Check that the model takes rows of this length.

        Raises:
            InputError: it does not.
        """
        longest = self.longest_row
        if longest is not None and seq_len > longest and _has_embeddings_of_positions(model, longest):
            raise InputError(
                f"`--seq-len` must be at most {longest}, the number of positions that {quote(self.path)} has embeddings"
                f" for, but is {seq_len} instead."
            )

    @property
    def dtype(self) -> torch.dtype:
        """The type of weights.

        Raises:
            InputError: torch has no such type.
        """
        name = self.keys.dtype or "float32"
        if name == "auto":
            return getattr(self.config, "dtype", None) or torch.float32
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise InputError(f"`dtype` must be auto or a type of torch such as bfloat16, but is {quote(name)} instead.")
        return dtype

    @property
    def num_layers(self) -> int:
        """The layers of the whole model; 0 if its config does not say."""
        return getattr(self.config.get_text_config(), "num_hidden_layers", None) or 0

    @property
    def kinds_of_layers(self) -> list[Any]:
        """For each layer what the config says of it alone, such as its kind of attention."""
        return list(zip(*_by_layer(self.config.get_text_config(), self.num_layers).values(), strict=True))

    @property
    def longest_row(self) -> int | None:
        """The most tokens that the model is made for, by its config; None if that does not say."""
        longest = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return longest if longest is not None and longest > 0 else None  # -1: it has no bound

    @cached_property
    def config(self) -> Any:
        """The config of transformers.

        Raises:
            InputError: there is no such model, or its weights are quantized.
        """
        transformers = _transformers()
        if self.path.startswith(("/", "./", "../")) and not Path(self.path).is_dir():
            raise InputError(f"`--hf` {quote(self.path)} is no folder.")
        with _errors_explained(self.path):
            config = transformers.AutoConfig.from_pretrained(self.path, trust_remote_code=False)
        if (quantized := getattr(config, "quantization_config", None)) is not None:
            raise InputError(
                f"Weights that are quantized on disk are not planned, but {quote(self.path)} has the"
                f" `quantization_config` {quote(quantized)}."
            )
        return config

    @property
    def _attention(self) -> str | None:
        """The name of transformers for the attention. Flash attention need not be installed."""
        name = self.keys.attn_implementation
        if name is None or "flash" not in name:
            return name
        transformers = _transformers()
        transformers.AttentionInterface.register(_FLASH, _flash_attention)
        transformers.AttentionMaskInterface.register(_FLASH, lambda *_, **__: None)
        return _FLASH

    def pack(self, model: nn.Module) -> None:
        """Pack the weights of bitsandbytes' layers by its own operations, once they are fake. Call it in the mode."""
        if not self.keys.load_in_4bit:
            return
        functional: Any = imported("bitsandbytes.functional", needed_for="weights in 4 bits")
        with _disable_current_modes():
            functional.name2qmap.setdefault("dynamic", functional.create_dynamic_map())  # it reads values
        for quantized in _layers_in_4_bits(model):
            packed, state = functional.quantize_4bit(
                torch.empty(quantized.out_features, quantized.in_features, dtype=self.dtype),
                compress_statistics=self.keys.use_bnb_nested_quant,
                quant_type=self.keys.bnb_4bit_quant_type,
                quant_storage=self._packed_dtype,
            )
            weight: Any = nn.Parameter(packed, requires_grad=False)
            weight.quant_state = quantized.quant_state = state
            quantized.weight = weight

    def pack_without_scales(self, model: nn.Module) -> None:
        """Give the weights of bitsandbytes' layers the size of packed ones, on the meta device."""
        if not self.keys.load_in_4bit:
            return
        for quantized in _layers_in_4_bits(model):
            num_values = -(-quantized.weight.numel() // (2 * self._packed_dtype.itemsize))
            packed = torch.empty(num_values, 1, dtype=self._packed_dtype, device="meta")
            quantized.weight = nn.Parameter(packed, requires_grad=False)

    def loads(self) -> list[Events]:
        """How transformers loads weights in 4 bits onto a GPU. Others are loaded in host memory.

        First it takes, at once, all that the packed weights will need (`caching_allocator_warmup`). Then it loads them
        in the order of their names, and packs each.
        """
        if not self.keys.load_in_4bit:
            return []
        model = self.build()
        in_4_bits = {*_layers_in_4_bits(model)}
        values = {f"{name}.weight": one.weight.numel() for name, one in model.named_modules() if one in in_4_bits}
        self.pack_without_scales(model)
        weights = sorted(model.named_parameters(), key=lambda one: _natural(one[0]))
        at_once = load([], temporary=[sum(weight.nbytes for _, weight in weights)])
        return [at_once, *(self._load(weight.nbytes, values.get(name, 0)) for name, weight in weights)]

    def _load(self, num_bytes: int, values_in_4_bits: int) -> Events:
        """How a weight is loaded. In 4 bits, each of its blocks has a scale in float32, which may be quantized, too."""
        if not values_in_4_bits:
            return load([num_bytes])
        blocks, unpacked = -(-values_in_4_bits // _BLOCK), values_in_4_bits * self.dtype.itemsize
        scales = 4 * blocks
        if self.keys.use_bnb_nested_quant:
            return load([num_bytes, blocks], temporary=[unpacked, scales])
        return load([scales, num_bytes], temporary=[unpacked])

    @property
    def _packed_dtype(self) -> torch.dtype:
        """The type of tensors that hold weights of 4 bits."""
        return getattr(torch, self.keys.bnb_4bit_quant_storage or "uint8")

    @property
    def quantization(self) -> Any:
        """The ``BitsAndBytesConfig`` of weights in 4 bits, as the keys say."""
        keys = self.keys
        return _transformers().BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_compute_dtype=self.dtype,
            bnb_4bit_quant_type=keys.bnb_4bit_quant_type,
            bnb_4bit_use_double_quant=keys.use_bnb_nested_quant,
            bnb_4bit_quant_storage=keys.bnb_4bit_quant_storage,
        )

    def _quantize(self, model: Any) -> None:
        """Let bitsandbytes' layers take the place of linear ones. ``pack`` packs their weights."""
        imported("bitsandbytes", needed_for="weights in 4 bits")
        quantizers = imported("transformers.quantizers", needed_for="weights in 4 bits")
        quantizer = quantizers.AutoHfQuantizer.from_config(self.quantization)
        quantizer.preprocess_model(model=model, device_map=None)
        quantizer.postprocess_model(model)
        model.hf_quantizer = quantizer


def _natural(name: str) -> list[str | int]:
    """A key by which names are sorted as people sort them: layer 2 before layer 10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _layers_in_4_bits(model: nn.Module) -> list[Any]:
    kind: Any = imported("bitsandbytes.nn", needed_for="weights in 4 bits").Linear4bit
    return [one for one in model.modules() if isinstance(one, kind)]


@contextmanager
def unpacked() -> Iterator[None]:
    """Context: bitsandbytes leaves weights as they are when a model is moved; ``LanguageModel.pack`` packs them.

    Its layers then unpack their weights in the forward pass, as on CUDA with more than 1536 tokens.
    """
    try:
        layers: Any = importlib.import_module("bitsandbytes.nn")
    except ImportError:
        yield
        return
    linear = SimpleNamespace(default=_linear_in_4_bits)
    with (
        mock.patch.object(layers.Params4bit, "_quantize", lambda weight, *_: weight),
        mock.patch.object(torch.ops.bitsandbytes, "gemm_4bit", linear),
    ):
        yield


def _linear_in_4_bits(
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


def _flash_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """Attention of packed rows without a matrix of masks, as the kernels of flash attention compute it."""
    attended = F.scaled_dot_product_attention(
        query, key, value, is_causal=query.shape[2] > 1, scale=options.get("scaling"), enable_gqa=True
    )
    return attended.transpose(1, 2).contiguous(), None


def _limit_layers(config: Any, num_layers: int) -> None:
    """Let the model of a transformers config have only so many layers, the first ones."""
    by_layer = _by_layer(config, config.num_hidden_layers)
    config.num_hidden_layers = num_layers
    for name, values in by_layer.items():
        setattr(config, name, values[:num_layers])


def _by_layer(config: Any, num_layers: int) -> dict[str, list[Any]]:
    """What a config says of each layer, such as `layer_types`: its lists of so many values."""
    return {name: value for name, value in vars(config).items() if isinstance(value, list) and len(value) == num_layers}


def _has_embeddings_of_positions(model: nn.Module, number: int) -> bool:
    """Whether positions are rows of a table. Rotary positions and the like are computed, for rows of any length."""
    return any(
        _POSITIONS.search(name) and tensor.dim() == 2 and len(tensor) >= number
        for tensors in (model.named_parameters(), model.named_buffers())
        for name, tensor in tensors
    )


def _transformers() -> Any:
    return imported("transformers", needed_for="a Hugging Face model")


@contextmanager
def _errors_explained(path: str) -> Iterator[None]:
    """Context: an error of transformers means that there is no model at ``path``."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise InputError(
            f"`--hf` {quote(path)} is no causal language model:"
            f" {reason_of(error).partition('. ')[0]}."  # a list of all models may follow
        ) from error
