"""A training of a run: the trainer itself, on a model without weights.

transformers' Trainer and TRL's trainers are built as a user's script builds them, and run their own steps. What needs a
GPU or values has a stand-in: kernels of Triton, optimizers of bitsandbytes and torchao, copies to the host.
"""

import functools
import importlib
import io
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stderr, suppress
from dataclasses import fields
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from torch import nn

from torchtune_adaptive.errors import InputError
from torchtune_adaptive.output import quietly
from torchtune_adaptive.plan.hugging_face.liger import liger_as_on_cuda
from torchtune_adaptive.plan.hugging_face.quantized import unpacked
from torchtune_adaptive.plan.hugging_face.replicas import not_replicated
from torchtune_adaptive.plan.hugging_face.run import HuggingFaceRun
from torchtune_adaptive.plan.hugging_face.run_keys import NOT_OF_A_STEP, imported, refused
from torchtune_adaptive.plan.hugging_face.trl_stand_ins import trl_as_on_cuda
from torchtune_adaptive.plan.trace.fake_tensors import make_fake
from torchtune_adaptive.plan.trace.optimizer_stand_ins import stand_in_for_optimizer

_PREFERENCE: dict[str, list[str]] = {"prompt": ["a"], "chosen": ["b"], "rejected": ["c"]}
_REFUSALS = (ValueError, NotImplementedError, ImportError)  # of trainers


@contextmanager
def training_of(run: HuggingFaceRun, num_layers: int | None) -> Iterator["Training"]:
    """Context: what is global in accelerate, peft and TRL is that of a training with so many layers; None: all."""
    with ExitStack() as stack:
        stack.enter_context(trl_as_on_cuda())
        if run.run_keys.training.get("use_liger_kernel"):
            stack.enter_context(liger_as_on_cuda())
        stack.enter_context(_launched(run.ranks))
        stack.enter_context(quietly())
        with suppress(ImportError):  # the preparation of a dataset of one row shows no progress
            progress: Any = importlib.import_module("datasets.utils.logging")
            if progress.is_progress_bar_enabled():
                progress.disable_progress_bar()
                stack.callback(progress.enable_progress_bar)
        stack.enter_context(unpacked())
        stack.enter_context(without_torchao())
        folder = stack.enter_context(TemporaryDirectory())
        yield Training(run, num_layers, folder)


class Training:
    """The functions of a loop that runs the trainer's steps.

    Args:
        num_layers: of the model; None: all.
        folder: where the trainer may write.

    Attributes:
        keeps_on_host: parameters, gradients and optimizer state are in host memory between their uses,
            once the model is built.
        options_of_ddp: that DDP would be given, once the model is built; None if it is not used.
    """

    def __init__(self, run: HuggingFaceRun, num_layers: int | None, folder: str) -> None:
        self._run = run
        self._num_layers = num_layers
        self._folder = folder
        self.keeps_on_host = False
        self.options_of_ddp: dict[str, Any] | None = None
        self._precomputes = False
        self._reference: Any = None
        self._trainer: Any = None
        self._wrapped: Any = None
        self._stepped: Any = None

    def build_model(self) -> nn.Module:
        """The model as the trainer has it, sharded if it is to be."""
        run, model = self._run, self._run.model
        built = model.build(self._num_layers)
        model.require_row_length(built, run.seq_len)
        with torch.device("cpu"):
            arguments = self._arguments()
            fsdp: Any = arguments.fsdp_config or {}
            self.keeps_on_host = bool(arguments.fsdp and fsdp.get("cpu_offload"))
            options: dict[str, Any] = {}
            if run.trainer == "dpo":
                self._precomputes, arguments.precompute_ref_log_probs = arguments.precompute_ref_log_probs, False
                if not run.run_keys.model.use_peft:
                    with torch.device("meta"):
                        options["ref_model"] = self._reference = model.build(self._num_layers)
            self._trainer = self._built_trainer(built, arguments, options)
            if self._precomputes:  # before training
                self._reference = self._trainer.ref_model = None
                self._trainer.precompute_ref_logps = True
            with mock.patch.object(self._trainer, "_inner_training_loop", return_value=None):
                self._trainer.train()  # what it sets up before its loop, such as checkpointing
        accelerator = self._trainer.accelerator
        self._trainer.model.train()
        if self._trainer.is_fsdp_enabled:
            self._wrapped = _sharded(accelerator, self._trainer.model)
        else:
            with not_replicated() as options:
                self._wrapped = accelerator.prepare_model(self._trainer.model)
            self.options_of_ddp = options if run.ranks > 1 else None
        return self._trainer.model

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The trainer's optimizer of the fake model."""
        trainer = self._trainer
        if (quantized := self._run.model.quantized) is not None:
            quantized.pack(model)
        if self._reference is not None:
            make_fake(self._reference)
        trainer.get_optimizer_cls_and_kwargs = functools.partial(_optimizer_kind, trainer.get_optimizer_cls_and_kwargs)
        with refused(f"`optim={self._run.run_keys.training.get('optim')}` is not planned", *_REFUSALS):
            trainer.create_optimizer()
        self._stepped = trainer.accelerator.prepare_optimizer(trainer.optimizer)
        trainer.optimizer = self._stepped.optimizer
        return self._stepped.optimizer

    def train_step(self, _: nn.Module, __: torch.optim.Optimizer, batch: Mapping[str, Any]) -> None:
        """A whole step of the trainer, with at most two micro-steps: more need no more memory."""
        trainer, model = self._trainer, self._wrapped
        accelerator = trainer.accelerator
        micro_steps = min(2, trainer.args.gradient_accumulation_steps)
        trainer.current_gradient_accumulation_steps = micro_steps
        num_items = (batch["labels"] != -100).sum() if "labels" in batch else None
        for number in range(1, micro_steps + 1):
            is_last = number == micro_steps
            accelerator.gradient_state._set_sync_gradients(is_last)
            with nullcontext() if is_last else accelerator.no_sync(model):
                trainer.training_step(model, dict(batch), num_items)
        if trainer.args.max_grad_norm:
            accelerator.clip_grad_norm_(model.parameters(), trainer.args.max_grad_norm)
        self._stepped.step()
        model.zero_grad()

    def make_batch(self, size: int) -> Any:
        """``size`` rows, the first as long as any, as the trainer's own collator batches them."""
        run = self._run
        longest, usual = run.seq_len, run.usual_len
        if run.trainer == "transformers":
            tokens = torch.zeros(size, longest, dtype=torch.long)
            mask = torch.ones_like(tokens)
            mask[1:, usual:] = 0
            return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}
        row = dict(self._trainer.train_dataset[0])
        if run.trainer == "sft":
            short = {name: value[:usual] if isinstance(value, list) else value for name, value in row.items()}
            return dict(self._trainer.data_collator([row, *[short] * (size - 1)]))
        long, short = [0] * (longest - 1), [0] * max(1, usual - 1)
        row = {"prompt_ids": [0], "rejected_ids": short}
        if self._precomputes:
            row |= {"ref_chosen_logps": 0.0, "ref_rejected_logps": 0.0}
        return dict(self._trainer.data_collator([row | {"chosen_ids": one} for one in (long, *[short] * (size - 1))]))

    def _arguments(self) -> Any:
        """The trainer's arguments, parsed as its own commands parse them."""
        run, classes = self._run, self._run.classes
        parser = imported("transformers", needed_for="a Hugging Face model").HfArgumentParser(classes.arguments)
        known = {one.name for one in fields(classes.arguments)}
        unused = {key: value for key, value in NOT_OF_A_STEP.items() if key in known}
        keys = dict(run.run_keys.training) | unused | {"output_dir": self._folder}
        if run.trainer != "transformers" and keys.get("max_length", run.seq_len) is not None:  # null: nothing is cut
            keys["max_length"] = run.seq_len
        parser.set_defaults(**keys)
        printed = io.StringIO()
        refusal = f"{classes.arguments.__name__} refuses these keys"
        try:
            with redirect_stderr(printed), refused(refusal, ValueError, TypeError, ImportError):
                (arguments,) = parser.parse_args_into_dataclasses(args=[])
        except SystemExit as error:
            raise InputError(f"{refusal}: {printed.getvalue().rpartition('error: ')[2].strip()}") from error
        return arguments

    def _built_trainer(self, model: Any, arguments: Any, options: dict[str, Any]) -> Any:
        run = self._run
        with refused(f"{run.classes.title} refuses this run", *_REFUSALS):
            if run.trainer == "transformers":
                with torch.device("meta"):
                    model = run.with_adapters(model)
                if run.adapters is not None and arguments.gradient_checkpointing:
                    model.enable_input_require_grads()
                return run.classes.trainer(model=model, args=arguments, train_dataset=[{"input_ids": [0]}])
            datasets = imported("datasets", needed_for=run.classes.title)
            rows = {"input_ids": [[0] * run.seq_len]} if run.trainer == "sft" else _PREFERENCE
            with torch.device("meta"):
                return run.classes.trainer(
                    model=model,
                    args=arguments,
                    train_dataset=datasets.Dataset.from_dict(rows),
                    processing_class=tokenizer(),
                    peft_config=run.adapters,
                    **options,
                )


def tokenizer() -> Any:
    """A tokenizer that knows one word: the trainers of TRL ask for one."""
    tokenizers = imported("tokenizers", needed_for="a trainer of TRL")
    words = tokenizers.models.WordLevel({"a": 0}, unk_token="a")
    transformers = imported("transformers", needed_for="a Hugging Face model")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), unk_token="a", pad_token="a", eos_token="a"
    )


def _sharded(accelerator: Any, model: nn.Module) -> nn.Module:
    """The model sharded by FSDP2, as accelerate does when it prepares model and optimizer together."""
    plugin, utilities = accelerator.state.fsdp_plugin, imported("accelerate.utils.fsdp_utils", needed_for="FSDP2")
    plugin.cpu_offload = None  # tensors in host memory are marked by their kind
    plugin.set_auto_wrap_policy(model)
    if plugin.activation_checkpointing:
        model = utilities.fsdp2_apply_ac(accelerator, model)
    return utilities.fsdp2_prepare_model(accelerator, model)


def _optimizer_kind(
    chosen: Callable[..., tuple[Any, dict[str, Any]]], arguments: Any, model: nn.Module | None = None
) -> tuple[Any, dict[str, Any]]:
    """The trainer's optimizer class and its options, or a stand-in if its step cannot run on fake tensors."""
    kind, options = chosen(arguments, model)
    package = str(getattr(kind, "__module__", "")).partition(".")[0]
    if package not in ("bitsandbytes", "torchao"):
        return kind, options
    simple = {name: value for name, value in options.items() if isinstance(value, int | float | str)}
    component = f"{package}.optim.{kind.__name__}"
    stand_in = stand_in_for_optimizer({"_component_": component} | simple)
    module, _, name = str(stand_in.pop("_component_")).rpartition(".")
    if module.startswith(package):
        return kind, options
    if package == "bitsandbytes" and model is not None:
        embeddings = [one for one in model.modules() if isinstance(one, nn.Embedding)]
        stand_in["in_32_bits"] = [one.weight for one in embeddings]  # as the Trainer tells bitsandbytes
    return getattr(importlib.import_module(module), name), stand_in


@contextmanager
def _launched(ranks: int) -> Iterator[None]:
    """Context: the environment is that of rank 0 of so many, and accelerate knows no other."""
    launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    launched |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    state = imported("accelerate.state", needed_for="a trainer")

    def forget() -> None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
        for module in ("transformers.utils.import_utils", "accelerate.utils.imports"):
            for name, function in vars(importlib.import_module(module)).items():
                if name.startswith(("is_torch_", "is_cuda_", "is_bf16_")) and hasattr(function, "cache_clear"):
                    function.cache_clear()  # what it has found out of the machine

    with mock.patch.dict(os.environ, launched if ranks > 1 else {}):
        for name in () if ranks > 1 else launched:
            os.environ.pop(name, None)
        forget()
        try:
            yield
        finally:
            forget()


@contextmanager
def without_torchao() -> Iterator[None]:
    """peft refuses to run beside an old torchao, which a plan does not use."""
    with ExitStack() as stack:
        with suppress(ImportError):
            module = importlib.import_module("peft.tuners.lora.torchao")
            stack.enter_context(mock.patch.object(module, "is_torchao_available", return_value=False))
        yield
