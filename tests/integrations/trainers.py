"""Tiny trainers on the CPU, with and without ``AdaptiveTrainerMixin``, and what their trainings give."""

# pyright: reportMissingImports=false, reportArgumentType=false, reportCallIssue=false, reportPrivateImportUsage=false
# The types of transformers do not hold.

import contextlib
import multiprocessing
import os
import random
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)
from transformers.distributed import DistributedConfig
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from torchtune_adaptive import InputError
from torchtune_adaptive.integrations.transformers import AdaptiveTrainerMixin
from torchtune_adaptive.testing import Fault, wrap_micro_steps

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()

KINDS = ("trainer", "sft", "packed", "lora", "dpo", "reward")
BATCH, STEPS = 4, 3
LIMITS = {
    "trainer": "650KiB",
    "sft": "4MiB",
    "packed": "8MiB",
    "lora": "4MiB",
    "dpo": "16MiB",
    "reward": "1200KiB",
}  # of a search
_BASES = {
    "trainer": Trainer,
    "sft": SFTTrainer,
    "packed": SFTTrainer,
    "lora": SFTTrainer,
    "dpo": DPOTrainer,
    "reward": RewardTrainer,
}
_NOT_TRAINING = ("runtime", "per_second")  # in names of what is logged


Around = Callable[[int, Callable[[], Any]], Any]
Cuts = dict[int, int]  # samples of a micro-batch in each step


class Outcome(NamedTuple):
    """What a training gives: trained parameters, all that it has logged but for times, and its events."""

    parameters: dict[str, torch.Tensor]
    logs: list[dict[str, float]]
    events: list[tuple[int, int, int]]  # step, size before and after
    operations: int  # of a counted micro-step
    cuts: Cuts  # noted if micro-steps are run around something


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<unk>": 1, "<eos>": 2, **{f"w{number}": number for number in range(3, 64)}}
    one = Tokenizer(models.WordLevel(words, "<unk>"))
    one.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=one, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>")


def saved_model(kind: str) -> str:
    """The folder of a tiny model, the same for every process of the tests."""
    folder = f"{os.environ['FOLDER_OF_TRAINERS']}/{'classifier' if kind == 'reward' else 'causal'}"
    if not os.path.exists(folder):
        made = tempfile.mkdtemp(dir=os.path.dirname(folder))
        torch.manual_seed(0)
        sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        tokens = {"pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 2}
        config = LlamaConfig(**sizes, **tokens, num_attention_heads=2, num_labels=1 if kind == "reward" else 2)
        architecture = LlamaForSequenceClassification if kind == "reward" else LlamaForCausalLM
        architecture(config).save_pretrained(made)
        tokenizer().save_pretrained(made)
        with contextlib.suppress(OSError):  # another rank was faster
            os.rename(made, folder)
    return folder


def model(kind: str, *, is_sharded: bool = False, dropout: float = 0.1) -> Any:
    architecture = LlamaForSequenceClassification if kind == "reward" else LlamaForCausalLM
    sharded = {"distributed_config": DistributedConfig(fsdp_size=2)} if is_sharded else {}
    labels = {"num_labels": 1} if kind == "reward" else {}
    options = {"attention_dropout": dropout, "dtype": torch.float32, **sharded, **labels}
    return architecture.from_pretrained(saved_model(kind), **options)


def text(seed: int, longest: int = 14) -> str:
    chance = random.Random(seed)
    return " ".join(f"w{chance.randint(3, 63)}" for _ in range(chance.randint(2, longest)))


def rows(kind: str, number: int) -> Any:
    if kind in ("sft", "packed", "lora"):
        return Dataset.from_list([{"text": text(seed)} for seed in range(number)])
    if kind in ("dpo", "reward"):
        both = ({"chosen": f" {text(1000 + seed)}", "rejected": f" {text(2000 + seed)}"} for seed in range(number))
        return Dataset.from_list([{"prompt": text(seed), **one} for seed, one in enumerate(both)])
    return [{"input_ids": [int(word[1:]) for word in text(seed).split()]} for seed in range(number)]


def collate(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    ids = [sample["input_ids"] for sample in samples]
    tokens = torch.tensor([one + [-100] * (max(map(len, ids)) - len(one)) for one in ids])
    return {"input_ids": tokens.clamp(min=0), "attention_mask": (tokens >= 0).long(), "labels": tokens}


def with_prompts(lengths: list[tuple[int, int]]) -> dict[str, Any]:
    """Options of a trainer: rows of so many tokens, of which so many at the end have labels."""

    def collate_both(samples: list[Any]) -> dict[str, torch.Tensor]:
        batch = collate([{"input_ids": one["input_ids"]} for one in samples])
        for labels, one in zip(batch["labels"], samples, strict=True):
            labels[: len(one["input_ids"]) - one["answer"]] = -100
        return batch

    rows = [
        {"input_ids": [3 + number % 60 for number in range(tokens)], "answer": answer} for tokens, answer in lengths
    ]
    return {"train_dataset": rows, "data_collator": collate_both}


def make(
    kind: str,
    *,
    is_adaptive: bool = True,
    base: type | None = None,
    accumulation: int = 1,
    sharding: str = "",
    dropout: float = 0.1,
    number_of_rows: int = 96,
    options: dict[str, Any] | None = None,
    **args: Any,
) -> Any:
    """A trainer; ``options`` are those of its constructor, ``args`` those of its arguments.

    ``sharding``: by FSDP2, when the model is loaded ("load") or by accelerate ("accelerate"); "" is not at all.
    """
    common: dict[str, Any] = {
        "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": accumulation,
        "max_steps": STEPS,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "learning_rate": 0.01,
        "disable_tqdm": True,
        "log_level": "error",
        "seed": 3,
        **args,
    }
    if sharding == "accelerate":
        layers = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
        common |= {"fsdp": True, "fsdp_config": {"fsdp_version": 2, "state_dict_type": "SHARDED_STATE_DICT", **layers}}
    folder = saved_model(kind)
    texts_in_a_row = 2 if kind == "packed" else 1  # about
    more: dict[str, Any] = {"train_dataset": rows(kind, texts_in_a_row * number_of_rows)}
    if kind == "trainer":
        arguments = TrainingArguments(folder, **common)
        more["data_collator"] = collate
    else:
        more["processing_class"] = tokenizer()
        common = {"gradient_checkpointing": kind == "lora", **common}
        if kind == "dpo":
            arguments = DPOConfig(folder, **{"max_length": 32, "beta": 0.5, **common})
        elif kind == "reward":
            arguments = RewardConfig(folder, **{"max_length": 32, "disable_dropout": False, **common})
        else:
            arguments = SFTConfig(folder, **{"max_length": 16, "packing": kind == "packed", **common})
    if kind == "lora":
        more["peft_config"] = LoraConfig(r=4, target_modules="all-linear", lora_dropout=dropout)
    trainer = base or _BASES[kind]
    if is_adaptive and not issubclass(trainer, AdaptiveTrainerMixin):
        trainer = type(f"Adaptive{trainer.__name__}", (AdaptiveTrainerMixin, trainer), {})
    transformers.set_seed(3)
    torch.manual_seed(5)
    one = model(kind, is_sharded=sharding == "load", dropout=dropout)
    if sharding == "accelerate":  # which refuses FSDP2 on CPUs
        AcceleratorState._reset_state()
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_NPU
    return trainer(args=arguments, **{"model": one, **more, **(options or {})})


def outcome(trainer: Any, operations: int = 0) -> Outcome:
    trained = {name: one for name, one in trainer.model.named_parameters() if one.requires_grad}
    whole = {name: one.full_tensor() if hasattr(one, "full_tensor") else one for name, one in trained.items()}
    logs = [
        {name: value for name, value in entry.items() if not name.endswith(_NOT_TRAINING)}
        for entry in trainer.state.log_history
    ]
    events = [(event.step, event.before, event.after) for event in getattr(trainer, "memory_events", [])]
    return Outcome({name: one.detach().clone() for name, one in whole.items()}, logs, events, operations, {})


def trained(trainer: Any) -> Outcome:
    trainer.train()
    return outcome(trainer)


def trained_with(trainer: Any, change: Callable[[Any], None]) -> Outcome:
    """Train with a step that ``change`` has changed before it is used."""
    make_step = trainer._make_step

    def make_changed(*args: Any) -> Any:
        step = make_step(*args)
        change(step)
        return step

    trainer._make_step = make_changed
    return trained(trainer)


def trained_around(trainer: Any, around: Around) -> Outcome:
    """Train with every micro-step run by ``around``."""
    cuts: Cuts = {}

    def change(step: Any) -> None:
        def noted(number: int, micro_step: Callable[[], Any]) -> Any:
            cuts[step._number] = trainer._batches.size
            return around(number, micro_step)

        wrap_micro_steps(step, noted)

    return trained_with(trainer, change)._replace(cuts=cuts)


def told(trainer: Any, cuts: Cuts) -> Outcome:
    """Train with the micro-batches of another training: what ``Outcome.cuts`` says of each of its steps."""

    def change(step: Any) -> None:
        cut = partial(type(step._cutter).cut, step._cutter)  # which other steps of the training share

        def as_told(samples: Any) -> Any:
            trainer._batches.size = cuts[step._number]
            return cut(samples)

        step._cutter.cut = as_told

    return without_memory(trained_with(trainer, change))  # a larger size than in the step before is an event


def counted(trainer: Any) -> Outcome:
    """Train, and count the operations of the first micro-step."""
    fault = Fault(None)

    def around(number: int, micro_step: Callable[[], Any]) -> Any:
        with contextlib.nullcontext() if fault.count or number else fault:
            return micro_step()

    found = trained_around(trainer, around)
    return found._replace(operations=fault.count)


def with_fault(trainer: Any, *, step: int, micro_step: int, place: int, rank: int) -> Outcome:
    """Train with an out-of-memory error in a micro-step; steps and micro-steps count from 0."""
    fault = Fault(place, ranks=[rank])

    def around(number: int, run: Callable[[], Any]) -> Any:
        is_there = (trainer.state.global_step, number) == (step, micro_step) and not fault.count
        with fault if is_there else contextlib.nullcontext():
            return run()

    found = trained_around(trainer, around)
    here = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    assert fault.has_struck == (here == rank)
    return found


def difference(one: Outcome, other: Outcome) -> tuple[float, dict[str, float]]:
    """The largest difference of parameters, and of each logged value that is not equal."""
    assert one.parameters.keys() == other.parameters.keys()
    assert [log.keys() for log in one.logs] == [log.keys() for log in other.logs], (one.logs, other.logs)
    parameters = max((one.parameters[name] - other.parameters[name]).abs().max().item() for name in one.parameters)
    logs: dict[str, float] = {}
    for mine, its in zip(one.logs, other.logs, strict=True):
        for name in mine:
            if mine[name] != its[name]:
                logs[name] = max(logs.get(name, 0.0), abs(mine[name] - its[name]))
    return parameters, logs


def without_memory(one: Outcome) -> Outcome:
    """Without what events add to the logs."""
    logs = [{name: value for name, value in log.items() if not name.startswith("memory/")} for log in one.logs]
    return one._replace(logs=logs)


def comparisons(kind: str, accumulation: int, *, sharding: str = "", rank: int = 0) -> dict[str, Any]:
    """How trainings with faults and without differ from those that they must equal."""
    common = {"accumulation": accumulation, "sharding": sharding}

    def ours(size: int) -> Any:
        return make(kind, options={"micro_batch_size": size}, **common)

    trainer = make(kind, is_adaptive=False, **common)
    plain = trained(trainer)
    assert any(isinstance(one, DTensor) for one in trainer.model.parameters()) == bool(sharding)
    whole = counted(ours(BATCH))
    places = whole.operations
    early = with_fault(ours(BATCH), step=0, micro_step=0, place=places // 4, rank=rank)
    late = with_fault(ours(BATCH), step=1, micro_step=accumulation - 1, place=places * 3 // 4, rank=rank)
    return {
        "plain": difference(whole, plain),
        "early": difference(without_memory(early), told(ours(BATCH), early.cuts)),
        "late": difference(without_memory(late), told(ours(BATCH), late.cuts)),
        "events": (whole.events, early.events, late.events),
        "ranks": torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1,
        "names": sorted({name for log in plain.logs for name in log}),
    }


def comparisons_on_rank(rank: int, sharding: str, cases: list[tuple[str, int]]) -> dict[tuple[str, int], Any]:
    """``comparisons`` of all cases on this rank of two, with faults on the last one."""
    on_rank(rank)
    return {case: comparisons(*case, sharding=sharding, rank=1) for case in cases}


def speed_on_rank(rank: int, sharding: str) -> tuple[int, int, tuple[float, dict[str, float]]]:
    """The size and the checkpointed layers that were chosen, and how training differs from one that is told these."""
    on_rank(rank)
    common: dict[str, Any] = {"accumulation": 2, "sharding": sharding, "dropout": 0.0}
    checkpointed = []

    class Watch(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            checkpointed.append(sum(getattr(one, "gradient_checkpointing", False) for one in trainer.model.modules()))

    options = {"memory_limit": "64MiB", "speed": "auto", "callbacks": [Watch()]}
    trainer = make("trainer", options=options, gradient_checkpointing=True, **common)
    ours = trained(trainer)
    usual = common | {"gradient_checkpointing": checkpointed[0] > 0}
    told = make("trainer", options={"micro_batch_size": trainer.micro_batch_size}, **usual)
    return trainer.micro_batch_size, checkpointed[0], difference(ours, trained(told))


def searches_on_rank(rank: int, sharding: str) -> list[tuple[int, list[Any], Any]]:
    """The sizes that searches find if the last rank has little memory, events, and what differs from told runs."""
    on_rank(rank)
    found = []
    for kind, limit in (("trainer", "550KiB" if sharding else "600KiB"), ("dpo", LIMITS["dpo"])):
        common: dict[str, Any] = {"accumulation": 2, "sharding": sharding}
        searched = make(kind, options={"memory_limit": limit if rank else "64MiB"}, **common)
        ours, size = trained(searched), searched.micro_batch_size
        found.append(
            (size, ours.events, difference(ours, trained(make(kind, options={"micro_batch_size": size}, **common))))
        )
    return found


class ReadByRankZero:
    """Rows with prompts, which no other process may read on other ranks than the first."""

    def __init__(self, rank: int) -> None:
        self.rank, self.process = rank, os.getpid()
        self.lengths = [(12, 12)] * (2 * BATCH * STEPS - 2) + [(40, 2), (20, 19)]  # in no batch of the first step

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> dict[str, Any]:
        if self.rank and os.getpid() != self.process:
            os._exit(1)
        return with_prompts(self.lengths[number : number + 1])["train_dataset"][0]


def uneven_searches_on_rank(rank: int) -> tuple[int, list[Any]]:
    """The size and events of a search in which ranks have found different numbers of batches to try."""
    on_rank(rank)
    options = {**with_prompts([]), "train_dataset": ReadByRankZero(rank), "memory_limit": "64MiB"}
    args = {"remove_unused_columns": False, "train_sampling_strategy": "sequential"}
    trainer = make("trainer", sharding="load", options=options, **args)
    return trainer.micro_batch_size if trainer.train() else 0, trainer.memory_events


class UnequalBatches(AdaptiveTrainerMixin, Trainer):
    """Has batches of one sample less on the second rank."""

    def get_train_dataloader(self) -> Any:
        size = BATCH - torch.distributed.get_rank()
        return torch.utils.data.DataLoader(self.train_dataset, batch_size=size, collate_fn=collate)


def unequal_batches_on_rank(rank: int) -> int:
    """The size that a search finds, rounded down to whole batches, which are not equal on all ranks."""
    on_rank(rank)
    trainer = make("trainer", base=UnequalBatches, accumulation=2, options={"memory_limit": "64MiB"})
    trainer.train()
    return trainer.micro_batch_size


def last_batch_on_rank(rank: int) -> Any:
    """What differs from the plain trainer if only the first rank has samples in the last batch of an epoch."""
    on_rank(rank)
    common: dict[str, Any] = {"number_of_rows": 2 * BATCH + 1, "max_steps": -1, "num_train_epochs": 1}
    ours = trained(make("sft", options={"micro_batch_size": BATCH}, **common))
    return difference(ours, trained(make("sft", is_adaptive=False, **common)))


def second_training_on_rank(rank: int) -> Any:
    """What differs from the plain trainer in a training after a prediction, which leaves parameters of FSDP2 whole."""
    on_rank(rank)

    def run(**options: Any) -> Outcome:
        trainer = make("trainer", is_adaptive=bool(options), sharding="load", accumulation=2, options=options)
        trainer.train()
        trainer.predict([{"input_ids": [*range(5, 12)]}] * 6)
        return trained(trainer)

    return difference(run(micro_batch_size=BATCH), run())


class MeanOverTokens(Trainer):
    """A user's own trainer, whose loss is a mean over the tokens of a batch."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        return model(**inputs).loss / self.current_gradient_accumulation_steps


def errors_on_rank(rank: int) -> list[str]:
    """The errors of adapters on a model that was sharded when it was loaded, and of a sample that does not fit.

    And of a mean over tokens, if only rank 1 has rows of several lengths, and only after its first step.
    """
    on_rank(rank)
    found = []
    steps = 0

    def collate_all(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        nonlocal steps
        steps += 1
        differs = rank == 1 and steps > 1
        rows = [[5 + place, *range(10, 18 - 2 * place * differs)] for place in range(len(samples))]
        return collate([{"input_ids": row} for row in rows])

    mean = make("trainer", base=MeanOverTokens, options={"micro_batch_size": 2, "data_collator": collate_all})
    adapters = make("lora", sharding="load", options={"micro_batch_size": 1})
    too_large = make("sft", options={"micro_batch_size": 1})
    for run in (
        adapters.train,
        lambda: with_fault(too_large, step=1, micro_step=2, place=40, rank=1),
        mean.train,
    ):
        try:
            run()
        except InputError as error:
            found.append(f"{type(error).__name__}: {error}")
    return [*found, f"after step {mean.state.global_step}"]


class Gathers(Trainer):
    """Has a value of all processes in its loss, or only in what it logs."""

    use = ""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        logits: torch.Tensor = outputs["logits"]
        counted = (inputs["labels"] != -100).sum()
        if self.use:
            loss = GATHERS_IN_LOSS[self.use](self.accelerator, loss, logits, counted)
        else:
            gathered: Any = self.accelerator.gather(torch.stack([loss.detach(), counted.float()]))
            means = self.accelerator.reduce({"mean": loss.detach(), "most": counted.float()}, reduction="mean")
            largest = torch.maximum(gathered[1::2], torch.ones(1)).max()
            self.log({"largest": largest.item(), **{name: round(one.item(), 3) for name, one in means.items()}})
        return (loss, outputs) if return_outputs else loss


GATHERS_IN_LOSS: dict[str, Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], Any]] = {
    "count": lambda accelerator, loss, logits, counted: loss / accelerator.gather(counted).sum(),
    "negatives": lambda accelerator, loss, logits, counted: nn.functional.cross_entropy(
        logits.mean(1) @ accelerator.gather(logits.mean(1)).t(), torch.arange(len(logits))
    ),
    "reduce": lambda accelerator, loss, logits, counted: loss / accelerator.reduce(counted, reduction="sum"),
}


def gathers_on_rank(rank: int) -> tuple[list[str], Any]:
    """The refusals of losses that depend on other ranks, and what differs from the plain trainer if only logs do."""
    on_rank(rank)
    refusals, options = [], {"micro_batch_size": BATCH}
    for use in GATHERS_IN_LOSS:
        try:
            make("trainer", base=type("Gathering", (Gathers,), {"use": use}), options=options).train()
        except InputError as error:
            refusals.append(str(error))
    ours = trained(make("trainer", base=Gathers, accumulation=2, options=options))
    return refusals, difference(ours, trained(make("trainer", is_adaptive=False, base=Gathers, accumulation=2)))


def trials_on_rank(rank: int) -> Any:
    """What differs from the plain trainer in the second trial of a hyperparameter search, by optuna."""
    on_rank(rank)

    def second_trial(**options: Any) -> Outcome:
        common = {"model": None, "model_init": lambda: model("trainer")}
        one = make("trainer", base=Gathers, is_adaptive=bool(options), options={**common, **options})
        found: list[Outcome] = []
        for _ in range(2):
            one.create_accelerator_and_postprocess()  # as `_hp_search_setup` does
            one.train()
            found.append(outcome(one))
            one.model = one.model_wrapped = None
        return found[-1]

    return difference(second_trial(micro_batch_size=BATCH), second_trial())


def on_rank(rank: int) -> None:
    """Tell ``accelerate`` that this process is one of two, whose process group exists."""
    torch.set_num_threads(1)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": 0}
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="localhost")
    vars(multiprocessing.current_process())["_config"]["daemon"] = False  # as of torchrun: it may start processes
