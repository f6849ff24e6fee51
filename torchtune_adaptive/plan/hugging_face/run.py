"""A run of a Hugging Face model: which trainer, which model, which rows, as its keys say."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from torchtune_adaptive.errors import InputError, require_integer
from torchtune_adaptive.plan.hugging_face.model import LanguageModel
from torchtune_adaptive.plan.hugging_face.run_keys import Arguments, RunKeys, TrainerClasses, imported, refused

# Of reserved bytes. 0.7 % was the worst in benchmarks/results/trainer_accuracy_simulated.md; no real GPU was measured.
UNCERTAINTY = 0.03
_LONGEST_ROW = 2**24  # tokens; a plan makes such a row
# `max_length` of TRL's trainers by default; transformers' Trainer has none.
_DEFAULT_LENGTHS = MappingProxyType({"sft": 1024, "dpo": 1024, "transformers": 4096})


@dataclass(frozen=True, kw_only=True)
class HuggingFaceRun:
    """A trainer of a causal language model, with rows of up to ``seq_len`` tokens.

    Attributes:
        path: a folder with a ``config.json``, or a name on the Hub, which is downloaded.
        trainer: "sft" or "dpo" of TRL, or "transformers" for the Trainer of transformers.
        keys: of the trainer's arguments and of the model, as in a file for ``trl sft --config``.
        ranks: ranks that train together: by DDP, or by FSDP2 if the keys say so.
        mean_len: tokens of all rows of a batch but the first. None: one less than ``seq_len`` where a batch is padded,
            as rows of equal length need no mask of padding and so less memory; ``seq_len`` where it is not.

    Raises:
        InputError: a value is out of its range, or a key is unknown or not planned.
    """

    path: str
    seq_len: int
    trainer: str = "sft"
    keys: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1
    mean_len: int | None = None

    def __post_init__(self) -> None:
        for name in ("seq_len", "ranks"):
            require_integer(name, getattr(self, name), minimum=1)
        if self.seq_len > _LONGEST_ROW:
            raise InputError(f"A plan takes rows of up to {_LONGEST_ROW} tokens, but they have {self.seq_len}.")
        for name in ("gradient_accumulation_steps", "ddp_bucket_cap_mb"):
            if (value := self.run_keys.training.get(name)) is not None:
                require_integer(name, value, minimum=1)
        if self.mean_len is not None and self.mean_len > self.seq_len:
            raise InputError(
                f"`--mean-len` must be at most {self.seq_len}, the tokens of the longest row, but is {self.mean_len}"
                " instead."
            )
        if self.mean_len not in (None, self.seq_len) and self.run_keys.training.get("packing"):
            raise InputError(f"`--mean-len` is {self.mean_len}, but packed rows have {self.seq_len} tokens each.")
        if self.run_keys.training.get("fsdp"):  # without it the Trainer does not read `fsdp_config`
            fsdp: Any = self.run_keys.training.get("fsdp_config") or {}
            if str(fsdp.get("version", fsdp.get("fsdp_version", 2))) != "2":
                raise InputError("FSDP1 is not planned: `fsdp_config.version` must be 2.")
            if self.run_keys.model.is_quantized:
                raise InputError("`load_in_4bit` and `load_in_8bit` are not planned together with `fsdp`.")
            if self.ranks == 1:
                raise InputError("`fsdp` needs several ranks: `--nproc_per_node` is 1.")

    @classmethod
    def of(
        cls,
        path: str,
        *,
        trainer: str,
        keys: dict[str, Any],
        seq_len: int | None = None,
        mean_len: int | None = None,
        ranks: int = 1,
    ) -> "HuggingFaceRun":
        """The run with rows as long as ``seq_len`` says, or else its keys, or else the trainer.

        Raises:
            InputError: as the class.
        """
        given, of_keys = seq_len, RunKeys.of(keys, Arguments.of(trainer)).training.get("max_length")
        if given is None and of_keys is not None:
            given = require_integer("max_length", of_keys, minimum=1)
        length = given or _DEFAULT_LENGTHS[trainer]
        run = cls(path=path, trainer=trainer, keys=keys, seq_len=length, ranks=ranks, mean_len=mean_len)
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
        weights = f"weights loaded in {self.model.dtype}".replace("torch.", "")
        if keys.is_quantized:
            weights = "weights in 4 bits" if keys.load_in_4bit else "weights in 8 bits, no outliers"
        parts = [self.classes.title, weights]
        if keys.use_peft:
            parts.append(f"{'DoRA' if keys.use_dora else 'LoRA'} of rank {keys.lora_r}")
        if "paged" in str(training.get("optim")):
            parts.append("paged optimizer state not counted, as it can move to the host")
        if self.ranks > 1:
            parts.append(
                "each layer sharded by FSDP2" if training.get("fsdp") else "a copy of the model on each rank (DDP)"
            )
        is_shorter = self.usual_len < self.seq_len
        up_to = "up to " if is_shorter and self.mean_len is None else ""
        rows = f"rows of {up_to}{self.mean_len or self.seq_len} tokens"
        if is_shorter:
            rows += ", " + ("one after the other" if self.is_joined else "padded to the longest of a batch")
        return f"Assumed: {'; '.join(parts)}; all else as its arguments say, and {rows}."

    @property
    def usual_len(self) -> int:
        """Tokens of all rows of a batch but the first, which has ``seq_len``."""
        if self.mean_len is not None:
            return self.mean_len
        return self.seq_len if self.is_joined else max(1, self.seq_len - 1)

    @property
    def is_joined(self) -> bool:
        """Whether a batch has its rows one after the other, without padding."""
        return bool(self.run_keys.training.get("packing") or self.run_keys.training.get("padding_free"))

    @property
    def checkpoints(self) -> bool:
        """Whether activations are recomputed: by default of TRL's trainers, not of the Trainer."""
        keys = self.run_keys.training
        chosen = keys.get("activation_checkpointing", keys.get("gradient_checkpointing"))
        return self.trainer != "transformers" if chosen is None else bool(chosen)

    @property
    def adapters(self) -> Any:
        """The configuration of peft; None if all weights are trained."""
        keys = self.run_keys.model
        if not keys.use_peft:
            return None
        modules = keys.lora_target_modules
        return imported("peft", needed_for="LoRA").LoraConfig(
            task_type="CAUSAL_LM",
            r=keys.lora_r,
            target_modules=modules[0] if isinstance(modules, list) and len(modules) == 1 else modules,  # as TRL does
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
        with refused("peft refuses what the `lora_` keys say", Exception):  # unexpected values may fail in any way
            adapters = self.adapters
            return model if adapters is None else imported("peft", needed_for="LoRA").get_peft_model(model, adapters)
