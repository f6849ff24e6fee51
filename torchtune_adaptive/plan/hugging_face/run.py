"""A run of a Hugging Face model: the trainer itself, on a model without weights, traced for the plan of any loop.

transformers' Trainer and TRL's trainers are built as a user's script builds them, and run their own steps. What needs a
GPU or values has a stand-in: kernels of Triton, optimizers of bitsandbytes and torchao, copies to the host.
"""

import functools
import importlib
import io
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stderr, suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch
from torch import nn

from torchtune_adaptive.engine.search.strategies import SMALL_BATCH_SIZES
from torchtune_adaptive.errors import InputError, reason_of, require_integer
from torchtune_adaptive.output import quietly
from torchtune_adaptive.plan.hugging_face.kernels import tokens_of_a_tile, trl_as_on_cuda
from torchtune_adaptive.plan.hugging_face.keys import NOT_OF_A_STEP, Arguments, RunKeys, TrainerClasses, imported
from torchtune_adaptive.plan.hugging_face.model import LanguageModel, unpacked
from torchtune_adaptive.plan.hugging_face.replicas import not_replicated, setup_of_replicas
from torchtune_adaptive.plan.trace.events import Events, extended, with_bytes_of
from torchtune_adaptive.plan.trace.fake_tensors import make_fake
from torchtune_adaptive.plan.trace.loop import TracedLoop, trace_loop
from torchtune_adaptive.plan.trace.optimizer_stand_ins import stand_in_for_optimizer

# Of reserved bytes. 0.9 % was the worst in benchmarks/results/trainer_accuracy_simulated.md; no real GPU was measured.
UNCERTAINTY = 0.03
_OFFLOADED_BYTES = 1024  # of the smallest tensor that TRL offloads (trl/models/activation_offloading.py)
# `max_length` of TRL's trainers by default; transformers' Trainer has none.
_USUAL_LENGTHS = MappingProxyType({"sft": 1024, "dpo": 1024, "transformers": 4096})


@dataclass(frozen=True, kw_only=True)
class HuggingFaceRun:
    """A trainer of a causal language model, with rows of ``seq_len`` tokens.

    Attributes:
        path: a folder with a ``config.json``, or a name on the Hub, which is downloaded.
        trainer: "sft" or "dpo" of TRL, or "transformers" for the Trainer of transformers.
        keys: of the trainer's arguments and of the model, as in a file for ``trl sft --config``.
        ranks: ranks that train together: by DDP, or by FSDP2 if the keys say so.

    Raises:
        InputError: a value is out of its range, or a key is unknown or not planned.
    """

    path: str
    seq_len: int
    trainer: str = "sft"
    keys: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1

    def __post_init__(self) -> None:
        for name in ("seq_len", "ranks"):
            require_integer(name, getattr(self, name), minimum=1)
        fsdp: Any = self.run_keys.training.get("fsdp_config") or {}
        if str(fsdp.get("version", fsdp.get("fsdp_version", 2))) != "2":
            raise InputError("FSDP1 is not planned: `fsdp_config.version` must be 2.")
        if self.run_keys.training.get("fsdp") and self.run_keys.model.load_in_4bit:
            raise InputError("`load_in_4bit` is not planned together with `fsdp`.")
        if self.run_keys.training.get("fsdp") and self.ranks == 1:
            raise InputError("`fsdp` needs several ranks: `--nproc_per_node` is 1.")

    @classmethod
    def of(cls, path: str, *, trainer: str, keys: dict[str, Any], seq_len: int | None, ranks: int) -> "HuggingFaceRun":
        """The run with rows as long as ``seq_len`` says, or else its keys, or else the trainer.

        Raises:
            InputError: as the class.
        """
        given = seq_len or keys.get("max_length")
        run = cls(path=path, trainer=trainer, keys=keys, seq_len=given or _USUAL_LENGTHS[trainer], ranks=ranks)
        longest = None if given else run.model.longest_row
        return run if longest is None else replace(run, seq_len=min(run.seq_len, longest))

    @cached_property
    def classes(self) -> TrainerClasses:
        """The trainer's class and that of its arguments."""
        return TrainerClasses.named(self.trainer)

    @cached_property
    def run_keys(self) -> RunKeys:
        """The keys by what they configure."""
        keys = RunKeys.of(self.keys, Arguments.of(self.trainer))
        if self.trainer == "transformers" and keys.model.dtype is None:
            keys = replace(keys, model=replace(keys.model, dtype="auto"))
        return keys

    @cached_property
    def model(self) -> LanguageModel:
        """The model that is trained."""
        return LanguageModel(self.path, self.run_keys.model)

    @property
    def assumptions(self) -> str:
        """What the plan assumes about the run, as one sentence."""
        keys, training = self.run_keys.model, self.run_keys.training
        weights = (
            "weights in 4 bits" if keys.load_in_4bit else f"weights loaded in {self.model.dtype}".replace("torch.", "")
        )
        parts = [self.classes.title, weights]
        if keys.use_peft:
            parts.append(f"{'DoRA' if keys.use_dora else 'LoRA'} of rank {keys.lora_r}")
        if "paged" in str(training.get("optim")):
            parts.append("paged optimizer state not counted, as it can move to the host")
        if self.ranks > 1:
            parts.append(
                "each layer sharded by FSDP2" if training.get("fsdp") else "a copy of the model on each rank (DDP)"
            )
        return f"Assumed: {'; '.join(parts)}; all else as its arguments say, and rows of {self.seq_len} tokens."

    @property
    def checkpoints(self) -> bool:
        """Whether activations are recomputed: by default of TRL's trainers, not of the Trainer."""
        keys = self.run_keys.training
        chosen = keys.get("activation_checkpointing", keys.get("gradient_checkpointing"))
        return self.trainer != "transformers" if chosen is None else bool(chosen)

    def trace(self) -> TracedLoop:
        """Trace a step, with few of the model's layers if the whole model's events follow from theirs.

        Raises:
            InputError: the run cannot be planned; the message says why.
        """
        counts, found = self._few_layers(), None
        with suppress(InputError):  # a model may not be built with few layers; whole it may be
            found = None if counts is None else self._traced_with(*counts)
        whole = self.model.num_layers
        if found is None:
            found = replace(self._traced(None, sizes=self._sizes()), traced_layers=(whole,) if whole else ())
        return replace(found, num_layers=whole, num_parameters=self._whole_parameters)  # those of a trace may be packed

    def _traced_with(self, first: int, second: int, third: int) -> TracedLoop | None:
        """The step, from models of these numbers of layers; None if the whole model's does not follow from theirs."""
        whole = self.model.num_layers
        periods = (whole - first) // (second - first)
        one, two = self._num_parameters(first), self._num_parameters(second)
        # Layers beyond the third model may differ, as in a mixture of experts whose last layers are dense.
        if self._whole_parameters != one + periods * (two - one):
            return None
        small, *others = self._sizes()
        few, more, most = (
            self._traced(first, sizes=(small, *others)),
            self._traced(second, sizes=(small, 1)),
            self._traced(third, sizes=(small,)),
        )
        if extended(few.events(small), more.events(small), 2) != most.events(small):
            return None
        steps = {1: (few.events(1), more.events(1)), small: (few.events(small), more.events(small))}
        alike = {size: with_bytes_of(few.events(size), few.events(small), more.events(small)) for size in others}
        unlike = [size for size, events in alike.items() if events is None and size not in steps]
        apart = self._traced(second, sizes=(small, *unlike)) if unlike else more
        for size in others:
            steps.setdefault(size, (few.events(size), alike[size] or apart.events(size)))
        step = replace(few.step, traced=dict(sorted(steps.items())), periods=periods)
        if not (step.follows(1) and step.follows(max(steps) + 1)):
            return None
        return replace(few, lengths=(step,), traced_layers=(first, second))

    @cached_property
    def _whole_parameters(self) -> int:
        """Parameters of the whole model."""
        return self._num_parameters(None)

    def _num_parameters(self, num_layers: int | None) -> int:
        """Parameters of the model with so many layers, adapters included."""
        return sum(one.numel() for one in self._built(num_layers).parameters())

    def _built(self, num_layers: int | None) -> nn.Module:
        """The model with so many layers and its adapters, without memory. Weights of 4 bits are not packed."""
        with quietly(), unpacked(), _without_torchao(), torch.device("meta"):
            return self.with_adapters(self.model.build(num_layers))

    @cached_property
    def _whole_packed(self) -> nn.Module:
        """The whole model, with weights of 4 bits packed."""
        model = self._built(None)
        self.model.pack_without_scales(model)
        return model

    @cached_property
    def _loads(self) -> list[Events]:
        with quietly(), torch.device("meta"):
            return self.model.loads()

    @property
    def adapters(self) -> Any:
        """The configuration of peft; None if all weights are trained."""
        keys = self.run_keys.model
        if not keys.use_peft:
            return None
        return imported("peft", needed_for="LoRA").LoraConfig(
            task_type="CAUSAL_LM",
            r=keys.lora_r,
            target_modules=keys.lora_target_modules,
            lora_alpha=keys.lora_alpha,
            lora_dropout=keys.lora_dropout,
            use_rslora=keys.use_rslora,
            use_dora=keys.use_dora,
            modules_to_save=keys.lora_modules_to_save,
        )

    def with_adapters(self, model: Any) -> Any:
        """The model with the adapters of the keys, if they have any.

        Raises:
            InputError: peft cannot add them.
        """
        adapters = self.adapters
        if adapters is None:
            return model
        try:
            return imported("peft", needed_for="LoRA").get_peft_model(model, adapters)
        except ValueError as error:
            modules = self.run_keys.model.lora_target_modules
            raise InputError(f"`lora_target_modules={modules}` is refused by peft: {reason_of(error)}.") from error

    def _sizes(self) -> list[int]:
        """Numbers of samples to trace: the first two fill a tile of TRL's loss, whose size then grows no more.

        The others are smaller. If activations are offloaded, all tensors of two of them are large enough for that.
        """
        tokens = (self.seq_len - 1) * (2 if self.trainer == "dpo" else 1)
        tile = 0 if self.trainer == "transformers" else tokens_of_a_tile()
        offloaded = _OFFLOADED_BYTES if self.run_keys.training.get("activation_offloading") else 0
        small, least = (max(SMALL_BATCH_SIZES[0], fewest // max(1, tokens) + 1) for fewest in (tile, offloaded))
        return [small, small + 1, *range(1, min(small, least + 2))]

    def _traced(self, num_layers: int | None, *, sizes: Sequence[int]) -> TracedLoop:
        with self._training(num_layers) as training:
            traced = trace_loop(
                training.build_model,
                training.build_optimizer,
                training.train_step,
                training.make_batch,
                ranks=self.ranks,
                sizes=sizes,
                values_are_fixed=True,
                keeps_on_host=training.keeps_on_host,
                shows_progress=True,
            )
        replicas = training.options_of_ddp
        setup = () if replicas is None else setup_of_replicas(self._whole_packed, replicas)
        step = replace(
            traced.step,
            state_exists=False,  # a trainer's first step makes the state
            setup=setup,
            loads=(self._loads,),
        )
        return replace(traced, lengths=(step,))

    @contextmanager
    def _training(self, num_layers: int | None) -> Iterator["_Training"]:
        """Context: what is global in accelerate, peft and TRL is that of a training with so many layers."""
        with ExitStack() as stack:
            stack.enter_context(trl_as_on_cuda())
            stack.enter_context(_launched(self.ranks))
            stack.enter_context(quietly())
            stack.enter_context(_without_progress())
            stack.enter_context(unpacked())
            stack.enter_context(_without_torchao())
            folder = stack.enter_context(TemporaryDirectory())
            yield _Training(self, num_layers, folder)

    def _few_layers(self) -> tuple[int, int, int] | None:
        """Numbers of layers from which the whole model may follow; None if it has too few to be worth it.

        None with TRL's offloading too: what it keeps of earlier layers follows no pattern of layers.
        """
        whole = self.model.num_layers
        if not whole or self.run_keys.training.get("activation_offloading"):
            return None
        kinds = self.model.kinds_of_layers
        period = next(length for length in range(1, whole + 1) if kinds[length:] == kinds[: len(kinds) - length])
        period = math.lcm(2, period)
        first = max(4, 2 * period) + whole % period
        counts = first, first + period, first + 2 * period
        return counts if counts[2] < whole else None


class _Training:
    """The functions of a loop that runs the trainer's steps.

    Args:
        num_layers: of the model; None: all.
        folder: where the trainer may write.

    Attributes:
        keeps_on_host: parameters, gradients and optimizer state are in host memory between their uses.
        options_of_ddp: that DDP would be given, once the model is built; None if it is not used.
    """

    def __init__(self, run: HuggingFaceRun, num_layers: int | None, folder: str) -> None:
        self._run = run
        self._num_layers = num_layers
        self._folder = folder
        fsdp: Any = run.run_keys.training.get("fsdp_config") or {}
        self.keeps_on_host = bool(fsdp.get("cpu_offload", fsdp.get("fsdp_cpu_offload")))
        self.options_of_ddp: dict[str, Any] | None = None
        self._precomputes = False
        self._reference: Any = None
        self._trainer: Any = None
        self._wrapped: Any = None
        self._stepped: Any = None
        with suppress(ImportError):  # once a trace pretends to have a GPU, importing it fails
            importlib.import_module("bitsandbytes")

    def build_model(self) -> nn.Module:
        """The model as the trainer has it, sharded if it is to be."""
        run, model = self._run, self._run.model
        built = model.build(self._num_layers)
        model.require_row_length(built, run.seq_len)
        with torch.device("cpu"):
            arguments = self._arguments()
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
        self._run.model.pack(model)
        if self._reference is not None:
            make_fake(self._reference)
        trainer.get_optimizer_cls_and_kwargs = functools.partial(_optimizer_kind, trainer.get_optimizer_cls_and_kwargs)
        try:
            trainer.create_optimizer()
        except InputError:
            raise
        except (ValueError, NotImplementedError, ImportError) as error:
            name = self._run.run_keys.training.get("optim")
            raise InputError(f"`optim={name}` is not planned: {reason_of(error)}.") from error
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
        """``size`` full rows, as the trainer's own collator batches them."""
        length = self._run.seq_len
        if self._run.trainer == "transformers":
            tokens = torch.zeros(size, length, dtype=torch.long)
            return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.clone()}
        row = self._trainer.train_dataset[0]
        if self._run.trainer == "dpo":
            tokens = [0] * (length - 1)
            row = {"prompt_ids": [0], "chosen_ids": tokens, "rejected_ids": tokens}
            if self._precomputes:
                row |= {"ref_chosen_logps": 0.0, "ref_rejected_logps": 0.0}
        return dict(self._trainer.data_collator([row] * size))

    def _arguments(self) -> Any:
        """The trainer's arguments, parsed as its own commands parse them."""
        run, classes = self._run, self._run.classes
        parser = imported("transformers", needed_for="a Hugging Face model").HfArgumentParser(classes.arguments)
        known = {one.name for one in fields(classes.arguments)}
        unused = {key: value for key, value in NOT_OF_A_STEP.items() if key in known}
        keys = dict(run.run_keys.training) | unused | {"output_dir": self._folder}
        if run.trainer != "transformers":
            keys["max_length"] = run.seq_len
        parser.set_defaults(**keys)
        printed = io.StringIO()
        try:
            with redirect_stderr(printed):
                (arguments,) = parser.parse_args_into_dataclasses(args=[])
        except SystemExit as error:
            told = printed.getvalue().rpartition("error: ")[2].strip()
            raise InputError(f"{classes.arguments.__name__} refuses these keys: {told}") from error
        except (ValueError, TypeError, ImportError) as error:
            raise InputError(f"{classes.arguments.__name__} refuses these keys: {reason_of(error)}.") from error
        return arguments

    def _built_trainer(self, model: Any, arguments: Any, options: dict[str, Any]) -> Any:
        run = self._run
        try:
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
                    processing_class=_tokenizer(),
                    peft_config=run.adapters,
                    **options,
                )
        except InputError:
            raise
        except (ValueError, NotImplementedError, ImportError) as error:
            raise InputError(f"{run.classes.title} refuses this run: {reason_of(error)}.") from error


_PREFERENCE: dict[str, list[str]] = {"prompt": ["a"], "chosen": ["b"], "rejected": ["c"]}


def _tokenizer() -> Any:
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
def _without_progress() -> Iterator[None]:
    """Context: the preparation of a dataset of one row shows no progress."""
    datasets: Any
    try:
        datasets = importlib.import_module("datasets.utils.logging")
    except ImportError:
        yield
        return
    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bar()


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
