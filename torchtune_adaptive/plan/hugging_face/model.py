"""A causal language model of transformers, built from its config.json alone, on the meta device."""

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from torchtune_adaptive.errors import InputError, quote, reason_of, require_integer
from torchtune_adaptive.plan.hugging_face.quantized import QuantizedWeights
from torchtune_adaptive.plan.hugging_face.run_keys import ModelKeys, imported

_POSITIONS = re.compile(r"(^|\.)(wpe|\w*position\w*)(\.weight)?$")  # names of tables of positions in transformers
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
        if (quantized := self.quantized) is not None:
            quantized.replace_layers(model)
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
        number = getattr(self.config.get_text_config(), "num_hidden_layers", None) or 0
        return require_integer("num_hidden_layers", number, minimum=0)

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
        transformers.AttentionMaskInterface.register(_FLASH, _mask_of_padding)
        return _FLASH

    @property
    def quantized(self) -> QuantizedWeights | None:
        """How the weights are quantized; None if they are not."""
        return QuantizedWeights(self.keys, self.dtype) if self.keys.is_quantized else None


def _mask_of_padding(*_: Any, attention_mask: torch.Tensor | None = None, **__: Any) -> torch.Tensor | None:
    return None if attention_mask is None or attention_mask.all() else attention_mask


def _flash_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention without a matrix of masks, as transformers does it with the kernels of flash attention.

    Padding is taken out before, and put back after.

    Args:
        query, key, value: [rows, heads, tokens, features].
        mask: [rows, tokens], 0 where there is padding; None if there is none.

    Returns:
        [rows, tokens, heads, features], and no weights.
    """
    rows, _, length, _ = query.shape
    places = None
    if mask is not None:
        places = mask.flatten().nonzero().flatten()
        query, key, value = (
            one.transpose(1, 2).flatten(0, 1)[places].transpose(0, 1).unsqueeze(0) for one in (query, key, value)
        )
    attended = F.scaled_dot_product_attention(
        query, key, value, is_causal=length > 1, scale=options.get("scaling"), enable_gqa=True
    )
    attended = attended.transpose(1, 2)
    if places is None:
        return attended.contiguous(), None
    padded = attended.new_zeros(rows * length, *attended.shape[2:])
    padded[places] = attended[0]
    return padded.unflatten(0, (rows, length)), None


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
    """Context: errors of transformers say that there is no model at ``path``, or that its config is wrong."""
    try:
        yield
    except (OSError, ValueError) as error:
        what = "cannot be found" if isinstance(error, OSError) else "is no causal language model"
        reason = reason_of(error).partition(". ")[0]  # a list of all models may follow
        raise InputError(f"`--hf` {quote(path)} {what}: {reason}.") from error
    except Exception as error:  # the code of any model may fail in any way with values that it does not expect
        raise InputError(f"`--hf` {quote(path)} cannot be built from its config: {reason_of(error)}.") from error
