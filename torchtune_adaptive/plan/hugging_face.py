"""A finetuning run of a Hugging Face model, as its Trainer and TRL would do it, for the plan of any loop.

It needs ``transformers``, and ``peft`` for LoRA. Nothing but the model's ``config.json`` is read.
"""

import copy
import importlib
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from types import ModuleType
from typing import Any, Literal
from unittest import mock

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from torchtune_adaptive.engine.search.strategies import SMALL_BATCH_SIZES
from torchtune_adaptive.errors import InputError, quote, reason_of, require_fraction, require_integer, require_one_of
from torchtune_adaptive.plan.trace.events import extended, with_bytes_of
from torchtune_adaptive.plan.trace.loop import TRACED_SIZES, TracedLoop, trace_loop
from torchtune_adaptive.plan.trace.step_events import StepEvents

Dtype = Literal["bf16", "fp32", "mixed"]
_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "adafactor")  # names of the Trainer's `optim`
_LOSSES = ("full", "chunked")
_POSITIONS = re.compile(r"(^|\.)(wpe|\w*position\w*)(\.weight)?$")  # names of tables of positions in transformers
_CHUNKS = 8  # of a chunked loss, as in torchtune
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "mixed": torch.float32}


@dataclass(frozen=True, kw_only=True)
class HuggingFaceRun:
    """The functions of a loop that trains a causal language model on packed rows of ``seq_len`` tokens.

    Attributes:
        path: a folder with a ``config.json``, or a name on the Hub, which is downloaded.
        dtype: "bf16" and "fp32": of weights and computation; "mixed": float32 weights, computed in bfloat16.
        lora_rank: train LoRA adapters of this rank, in float32 on one rank; None: train all weights.
        lora_modules: names of layers with adapters, or "all-linear"; empty: those that peft chooses for the model.
        lora_dropout: probability with which adapters drop a value of their input.
        checkpointing: recompute each layer in the backward pass.
        optimizer: as the Trainer's `optim`.
        loss: "full": over all logits at once; "chunked": over 8 parts of the tokens.
        micro_steps: gradient accumulation steps.
        ranks: ranks over which FSDP2 shards each layer.
        num_layers: build only this many layers; None: all.

    Raises:
        InputError: a value is out of its range.
    """

    path: str
    seq_len: int
    dtype: Dtype = "bf16"
    lora_rank: int | None = None
    lora_modules: tuple[str, ...] = ()
    lora_dropout: float = 0.0
    checkpointing: bool = True
    optimizer: str = "adamw_torch_fused"
    loss: str = "full"
    micro_steps: int = 1
    ranks: int = 1
    num_layers: int | None = None

    def __post_init__(self) -> None:
        for name in ("seq_len", "micro_steps", "ranks"):
            require_integer(name, getattr(self, name), minimum=1)
        if self.lora_rank is not None:
            require_integer("lora", self.lora_rank, minimum=1)
        require_fraction("lora_dropout", self.lora_dropout)
        require_one_of("dtype", self.dtype, tuple(_DTYPES))
        require_one_of("optimizer", self.optimizer, _OPTIMIZERS)
        require_one_of("loss", self.loss, _LOSSES)
        if self.lora_rank is not None or self.optimizer == "adafactor":
            with suppress(ImportError):  # peft and Adafactor import it, which fails once a trace pretends to have a GPU
                importlib.import_module("bitsandbytes")

    def build_model(self) -> nn.Module:
        """The model with random weights, sharded if there are several ranks.

        Raises:
            InputError: there is no such model, or a package is missing.
        """
        transformers, config, attention = _transformers(), copy.deepcopy(self._config), self._attention
        config.use_cache = False
        if self.num_layers is not None:
            _limit_layers(config.get_text_config(), self.num_layers)
        with _model_errors_explained(self.path):
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=_DTYPES[self.dtype], attn_implementation=attention
            )
        longest = self.longest_row
        if longest is not None and self.seq_len > longest and _has_embeddings_of_positions(model, longest):
            raise InputError(
                f"`--seq-len` must be at most {longest}, the number of positions that {quote(self.path)} has embeddings"
                f" for, but is {self.seq_len} instead."
            )
        layers = [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())]
        if self.loss == "chunked":
            _chunk_loss(model)
        if self.lora_rank is not None:
            model = self._with_adapters(model)
        if self.checkpointing:
            name = "activation_checkpointing_enable"  # its name in newer releases of transformers
            enable = getattr(model, name, None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        model.train()
        if self.ranks > 1:
            computed = torch.bfloat16 if self.dtype == "mixed" else None
            for module in (*layers, model):
                fully_shard(module, mp_policy=MixedPrecisionPolicy(computed, computed))
        return model

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of all parameters that are trained: those with weight decay, then norms and biases."""
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        decayed, others = ([one for one in parameters if (one.dim() > 1) == is_decayed] for is_decayed in (True, False))
        trained = [{"params": decayed}, {"params": others, "weight_decay": 0.0}] if others else decayed
        if self.optimizer == "sgd":
            return torch.optim.SGD(trained, lr=1e-5)
        if self.optimizer == "adafactor":
            transformers = _imported("transformers.optimization", needed_for="Adafactor")
            return transformers.Adafactor(trained, lr=1e-5, scale_parameter=False, relative_step=False)
        return torch.optim.AdamW(trained, lr=1e-5, fused=True if self.optimizer.endswith("fused") else None)

    def train_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> None:
        """A whole step on ``tokens`` [B, S], with at most two micro-steps: more need no more memory."""
        for _ in range(min(2, self.micro_steps)):
            with torch.autocast("cuda", torch.bfloat16, enabled=self.dtype == "mixed"):
                loss = model(input_ids=tokens, labels=tokens).loss
            (loss / self.micro_steps).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()

    def make_batch(self, size: int) -> torch.Tensor:
        """``size`` rows of tokens [B, S]."""
        return torch.zeros(size, self.seq_len, dtype=torch.long)

    def trace(self) -> TracedLoop:
        """Trace a step, with few of the model's layers if the whole model's events follow from theirs.

        Raises:
            InputError: the run cannot be planned; the message says why.
        """
        counts = self._few_layers()
        with suppress(InputError):  # a model may not be built with few layers; whole it may be
            if counts is not None and (found := self._traced_with(*counts)) is not None:
                return found
        whole = self._num_layers
        return replace(self._traced(None), num_layers=whole, traced_layers=(whole,) if whole else ())

    def _traced_with(self, first: int, second: int, third: int) -> TracedLoop | None:
        """The step, from models of these numbers of layers; None if the whole model's does not follow from theirs."""
        small, large = SMALL_BATCH_SIZES
        few, more, most = (
            self._traced(first),
            self._traced(second, sizes=(small, 1)),
            self._traced(third, sizes=(small,)),
        )
        larger = with_bytes_of(few.events(large), few.events(small), more.events(small))
        if larger is None or extended(few.events(small), more.events(small), 2) != most.events(small):
            return None
        periods = (self._num_layers - first) // (second - first)
        steps = {size: (few.events(size), more.events(size)) for size in (1, small)}
        step = StepEvents(0, steps | {large: (few.events(large), larger)}, periods)
        num_parameters = few.num_parameters + periods * (more.num_parameters - few.num_parameters)
        # Layers beyond the third model may differ, as in a mixture of experts whose last layers are dense.
        if not (step.follows(1) and step.follows(large + 1)) or num_parameters != self._num_parameters():
            return None
        return replace(
            few,
            step=step,
            num_parameters=num_parameters,
            num_trainable=few.num_trainable + periods * (more.num_trainable - few.num_trainable),
            num_layers=self._num_layers,
            traced_layers=(first, second),
        )

    def _num_parameters(self) -> int:
        """Parameters of the whole model, adapters included."""
        with torch.device("meta"):
            model = replace(self, ranks=1).build_model()
        return sum(parameter.numel() for parameter in model.parameters())

    def _traced(self, num_layers: int | None, *, sizes: Sequence[int] = TRACED_SIZES) -> TracedLoop:
        run = replace(self, num_layers=num_layers)
        functions = run.build_model, run.build_optimizer, run.train_step, run.make_batch
        return trace_loop(*functions, ranks=self.ranks, sizes=sizes, shows_progress=True)

    def _few_layers(self) -> tuple[int, int, int] | None:
        """Numbers of layers from which the whole model may follow; None if it has too few to be worth it."""
        whole = self._num_layers
        if not whole:
            return None
        kinds = list(zip(*_by_layer(self._config.get_text_config(), whole).values(), strict=True))
        period = next(length for length in range(1, whole + 1) if kinds[length:] == kinds[: len(kinds) - length])
        period = math.lcm(2, period)
        first = max(4, 2 * period) + whole % period
        counts = first, first + period, first + 2 * period
        return counts if counts[2] < whole else None

    @property
    def _num_layers(self) -> int:
        """The layers of the whole model; 0 if its config does not say."""
        return getattr(self._config.get_text_config(), "num_hidden_layers", None) or 0

    @property
    def assumptions(self) -> str:
        """What the plan assumes about the run, as one sentence."""
        weights = {
            "bf16": "weights and computation in bfloat16",
            "fp32": "weights and computation in float32",
            "mixed": "weights in float32, computation in bfloat16",
        }
        modules = ", ".join(self.lora_modules) or "peft's choice of layers"
        dropout = f"dropout {self.lora_dropout:g}" if self.lora_dropout else "no dropout"
        adapters = f"LoRA of rank {self.lora_rank} on {modules} with {dropout}"
        parts = [
            weights[self.dtype],
            "every layer recomputed in the backward pass" if self.checkpointing else "no activation checkpointing",
            "all weights trained" if self.lora_rank is None else adapters,
            f"optimizer {self.optimizer}",
            "loss over all logits at once" if self.loss == "full" else f"loss over {_CHUNKS} parts of the tokens",
            "flash attention without a padding mask"
            if self._attention == "sdpa"
            else "eager attention, as the model has no other in transformers",
            "gradients clipped",
        ]
        if self.ranks > 1:
            parts.append("each layer sharded by FSDP2")
        return f"Assumed: {'; '.join(parts)}."

    @property
    def longest_row(self) -> int | None:
        """The most tokens that the model is made for, by its config; None if that does not say."""
        longest = getattr(self._config.get_text_config(), "max_position_embeddings", None)
        return longest if longest is not None and longest > 0 else None  # -1: it has no bound

    @cached_property
    def _config(self) -> Any:
        transformers = _transformers()
        with _model_errors_explained(self.path):
            config = transformers.AutoConfig.from_pretrained(self.path, trust_remote_code=False)
        if (quantized := getattr(config, "quantization_config", None)) is not None:
            raise InputError(
                f"Quantized weights are not planned, but {quote(self.path)} has the `quantization_config`"
                f" {quote(quantized)}."
            )
        return config

    @property
    def _attention(self) -> str:
        """What transformers chooses for the model, as its name of an implementation."""
        model = _transformers().MODEL_FOR_CAUSAL_LM_MAPPING.get(type(self._config), None)
        return "sdpa" if getattr(model, "_supports_sdpa", True) else "eager"

    def _with_adapters(self, model: Any) -> Any:
        peft = _imported("peft", needed_for="LoRA")
        modules: Any = list(self.lora_modules) or None
        options = peft.LoraConfig(
            r=self.lora_rank,
            target_modules="all-linear" if self.lora_modules == ("all-linear",) else modules,
            lora_dropout=self.lora_dropout,
        )
        try:
            with _without_torchao():
                model = peft.get_peft_model(model, options, autocast_adapter_dtype=False)
        except ValueError as error:
            raise InputError(
                f"The model has no adapters for `--lora-modules {','.join(self.lora_modules)}`: {reason_of(error)}."
            ) from error
        if self.ranks == 1:  # peft's default; FSDP2 needs one data type in a layer
            for parameter in (one for one in model.parameters() if one.requires_grad):
                parameter.data = parameter.data.float()
        if self.checkpointing:
            model.enable_input_require_grads()
        return model


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


def _chunk_loss(model: Any) -> None:
    """Let the model compute its logits and its loss part by part of the tokens."""
    head = model.get_output_embeddings()
    model.add_module("chunked_head", head)
    model.set_output_embeddings(nn.Identity())

    def loss(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(head(hidden).float(), labels, reduction="sum")

    def loss_function(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: object) -> torch.Tensor:
        hidden_TD, labels_T = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        parts = zip(hidden_TD.chunk(_CHUNKS), labels_T.chunk(_CHUNKS), strict=True)
        sums: list[Any] = [checkpoint(loss, hidden, of_part, use_reentrant=False) for hidden, of_part in parts]
        return torch.stack(sums).sum() / labels_T.numel()

    model.loss_function = loss_function


def _transformers() -> Any:
    return _imported("transformers", needed_for="a Hugging Face model")


@contextmanager
def _model_errors_explained(path: str) -> Iterator[None]:
    """Context: an error of transformers means that there is no model at ``path``."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise InputError(
            f"`--hf` {quote(path)} is no causal language model:"
            f" {reason_of(error).partition('. ')[0]}."  # a list of all models may follow
        ) from error


@contextmanager
def _without_torchao() -> Iterator[None]:
    """peft refuses to run beside an old torchao, which a plan does not use."""
    try:
        module = importlib.import_module("peft.tuners.lora.torchao")
    except ImportError:
        yield
        return
    with mock.patch.object(module, "is_torchao_available", return_value=False):
        yield


def _imported(name: str, *, needed_for: str) -> Any:
    try:
        module: ModuleType = importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise InputError(f"A plan of {needed_for} needs {package}: `pip install {package}` installs it.") from error
    return module
