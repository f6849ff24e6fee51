"""``AdaptiveTrainerMixin`` trains as the trainer that it extends, and recovers from out of memory."""

# pyright: reportMissingImports=false

import copy
import json
import logging
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

pytest.importorskip("trl", reason="`make integrations` runs this file")

import trl
from accelerate.utils import DistributedType
from datasets import Dataset
from torch import nn
from torch.utils.data import IterableDataset
from transformers import (
    DataCollatorForLanguageModeling,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainerCallback,
)

from tests.integrations import trainers
from tests.integrations.trainers import BATCH, HOSTS, LIMITS, comparisons, difference, make, trained, with_fault
from tests.support import ranks
from tests.support.documents import blocks
from tests.support.ranks import run_on_ranks
from torchtune_adaptive import InputError, NothingFitsError, RecoverableStep
from torchtune_adaptive.errors import CannotCutError
from torchtune_adaptive.integrations import transformers as hosts
from torchtune_adaptive.integrations.batches import TrainerBatch, TrainerBatches
from torchtune_adaptive.integrations.known_trainers import samples_are_pairs, why_refused
from torchtune_adaptive.integrations.transformers import AdaptiveTrainerMixin
from torchtune_adaptive.testing import out_of_memory

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]

CASES = [(host, accumulation) for host in HOSTS for accumulation in (1, 4)]
SHARDED_CASES = [(host, accumulation) for host, accumulation in CASES if host != "lora"]  # refused: see below
LOGGED = {"sft": "num_tokens", "lora": "entropy", "dpo": "rewards/margins", "reward": "max_reward"}


@pytest.fixture(scope="module", autouse=True)
def imported_once() -> None:
    ranks.IMPORTED_ONCE[:] = ["tests.integrations.trainers"]
    for host in HOSTS:
        trainers.saved_model(host)


def assert_equal(found: dict[str, Any], host: str) -> None:
    """All that ``comparisons`` has compared is equal, bit for bit."""
    assert (found["plain"], found["early"], found["late"]) == ((0.0, {}),) * 3
    none, early, late = found["events"]
    assert none == []
    cut, halved = (BATCH, BATCH), (BATCH, BATCH // 2)  # only micro-batches as large are cut, or all are halved
    assert early == [(1, *(cut if found["ranks"] > 1 else halved))]  # on the other rank it fits
    assert late == ([(2, *cut)] if found["learns late"] else [(2, *halved), (3, BATCH // 2, BATCH)])
    assert LOGGED.get(host, "loss") in found["names"]


@pytest.mark.parametrize(("host", "accumulation"), CASES)
def test_one_process_equals_the_host_and_with_faults_a_told_run(host: str, accumulation: int) -> None:
    assert_equal(comparisons(host, accumulation), host)


@pytest.fixture(scope="module")
def in_ddp() -> list[Any]:
    return run_on_ranks(trainers.comparisons_on_rank, 2, "", CASES)


@pytest.fixture(scope="module")
def in_fsdp2() -> list[Any]:
    return run_on_ranks(trainers.comparisons_on_rank, 2, "load", SHARDED_CASES)


@pytest.mark.parametrize("case", CASES)
def test_ddp_equals_the_host_and_with_faults_a_told_run(in_ddp: list[Any], case: tuple[str, int]) -> None:
    for of_rank in in_ddp:
        assert_equal(of_rank[case], case[0])


@pytest.mark.parametrize("case", SHARDED_CASES)
def test_fsdp2_equals_the_host_and_with_faults_a_told_run(in_fsdp2: list[Any], case: tuple[str, int]) -> None:
    for of_rank in in_fsdp2:
        assert_equal(of_rank[case], case[0])


def test_fsdp2_by_accelerate_equals_the_host_and_with_faults_a_told_run() -> None:
    """On a machine of which accelerate believes that it has NPUs: it refuses FSDP2 on CPUs."""
    for of_rank in run_on_ranks(trainers.comparisons_on_rank, 2, "accelerate", [("sft", 4)]):
        assert_equal(of_rank["sft", 4], "sft")


@pytest.mark.parametrize("host", HOSTS)
def test_smaller_micro_batches_differ_by_rounding(host: str) -> None:
    common: dict[str, Any] = {"accumulation": 2, "dropout": 0.0, "optim": "sgd"}
    small = trained(make(host, options={"micro_batch_size": 1}, **common))
    plain = trained(make(host, is_adaptive=False, **common))
    parameters, logs = difference(small, plain)
    means_of_means = {"entropy", "mean_token_accuracy", "min_reward", "max_reward", "logits/chosen", "logits/rejected"}
    assert parameters < 1e-6
    assert {name for name, size in logs.items() if size > 1e-4} <= means_of_means


def test_the_last_steps_of_an_epoch_are_smaller() -> None:
    """15 rows: batches of 4, 4, 4 and 3; the second step has the last one only."""
    common: dict[str, Any] = {"accumulation": 3, "number_of_rows": 15, "max_steps": -1, "num_train_epochs": 2}
    for host in ("sft", "reward"):
        plain = trained(make(host, is_adaptive=False, **common))
        assert len(plain.logs) == 5
        assert difference(trained(make(host, options={"micro_batch_size": BATCH}, **common)), plain) == (0.0, {})
        faulty = with_fault(
            make(host, options={"micro_batch_size": 3}, **common), step=1, micro_step=0, place=9, rank=0
        )
        assert faulty.events == [(2, 3, 1), (3, 1, 2)]


def test_metrics_of_the_last_batch_of_an_epoch_equal_the_host_on_two_ranks() -> None:
    assert run_on_ranks(trainers.last_batch_on_rank, 2) == [(0.0, {})] * 2


def test_metrics_keep_their_names_if_ranks_cut_their_batches_differently() -> None:
    (pairs, *figures), (others, *same_figures) = run_on_ranks(trainers.uneven_cuts_on_rank, 2)
    assert any(sorted(one) == sorted(other) and one != other for one, other in zip(pairs, others, strict=True))
    tokens, rewards = figures
    assert figures == same_figures
    assert set(tokens) == {0}
    assert max(rewards) < 0.1


def test_a_dry_run_that_fails_leaves_nothing_on_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing_fits(*_: Any) -> None:
        raise NothingFitsError("not even one row fits.")

    monkeypatch.setattr(RecoverableStep, "dry_run", nothing_fits)
    trainer = make("trainer", options={"micro_batch_size": 1})
    for _ in range(2):
        with pytest.raises(NothingFitsError):
            trainer.train()
        assert not trainer.model._forward_hooks


def test_evaluation_and_checkpoints_between_steps(tmp_path: Any) -> None:
    """An event's size stays over evaluation; training resumed from a checkpoint continues with the same bits."""
    common: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "dropout": 0.0}
    more = {"eval_dataset": trainers.rows("sft", 8)}
    plain = trained(make("sft", is_adaptive=False, options=more, **common))
    options = {"micro_batch_size": BATCH, **more}
    saved: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    first = make("sft", options=options, **common, **saved)
    first.args.output_dir = str(tmp_path)
    found = trained(first)
    assert difference(found, plain) == (0.0, {})
    assert "eval_loss" in found.logs[1]
    resumed = make("sft", options=options, **common)
    resumed.train(resume_from_checkpoint=f"{tmp_path}/checkpoint-2")
    assert difference(trainers.outcome(resumed)._replace(logs=[]), plain._replace(logs=[])) == (0.0, {})
    smaller = make("sft", options=options, **common)
    faulty = with_fault(smaller, step=0, micro_step=0, place=40, rank=0)
    assert smaller.micro_batch_size == BATCH // 2
    assert faulty.events == [(1, BATCH, BATCH // 2)]


class Events(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def on_memory_event(self, args: Any, state: Any, control: Any, *, event: Any, **_: Any) -> None:
        self.seen.append((state.global_step, event.after))


def test_an_event_reaches_callbacks_logs_and_the_log(caplog: pytest.LogCaptureFixture) -> None:
    events = Events()
    trainer = make("sft", options={"micro_batch_size": BATCH, "callbacks": [events]})
    with caplog.at_level(logging.WARNING, logger=hosts.log.name):
        found = with_fault(trainer, step=1, micro_step=0, place=40, rank=0)
    assert events.seen == [(1, 2), (2, 4)]
    memory = [{name: log[name] for name in log if name.startswith("memory/")} for log in found.logs]
    logged = [{"memory/micro_batch_size": size, "memory/retries": retries} for size, retries in ((2, 1), (4, 0))]
    assert memory == [{}, *logged, {}]
    assert "num_tokens" in found.logs[1]
    assert [record.message[:33] for record in caplog.records] == ["micro-batch 4 -> 2 samples: in st"]


class Logs(Trainer):
    """A user's own trainer, whose loss logs."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        gathered: Any = self.accelerator.gather(loss.detach())
        self.log({"own": gathered.mean().item(), "rows": len(inputs["input_ids"])})
        return (loss, outputs) if return_outputs else loss


def test_a_loss_can_log_and_checkpoints_have_its_numbers(tmp_path: Path) -> None:
    common: dict[str, Any] = {"base": Logs, "accumulation": 2, "save_strategy": "steps", "save_steps": 1}
    found = []
    for is_adaptive, options in ((False, {}), (True, {"micro_batch_size": BATCH})):
        trainer = make("trainer", is_adaptive=is_adaptive, options=options, **common)
        trainer.args.output_dir = str(tmp_path / str(is_adaptive))
        found.append(trained(trainer))
    assert difference(*found) == (0.0, {})
    saved = json.loads((tmp_path / "True" / "checkpoint-2" / "trainer_state.json").read_text())["log_history"]
    assert [log.get("own") for log in saved] == [log.get("own") for log in found[0].logs][: len(saved)]
    assert sum("own" in log for log in saved) == 4


def test_what_a_loss_logs_in_a_search_or_a_failed_attempt_is_dropped() -> None:
    def rows(trainer: Any) -> list[int]:
        return [log["rows"] for log in trainer.state.log_history if "own" in log]

    searched = make("trainer", base=Logs, options={"memory_limit": "64MiB"})
    searched.train()
    assert rows(searched) == [BATCH] * trainers.STEPS
    failed = make("trainer", base=Logs, accumulation=2, options={"micro_batch_size": BATCH})
    outcome = with_fault(failed, step=1, micro_step=1, place=60, rank=0)
    assert outcome.events[0] == (2, BATCH, BATCH // 2)
    assert rows(failed)[:7] == [BATCH, BATCH, *[BATCH // 2] * 4, BATCH]


def test_a_single_sample_that_does_not_fit_ends_training() -> None:
    trainer = make("trainer", options={"micro_batch_size": 1})
    with pytest.raises(NothingFitsError, match="a single row per micro-step must fit, but in step 1 rank 0"):
        with_fault(trainer, step=0, micro_step=0, place=40, rank=0)


@pytest.mark.parametrize("host", HOSTS)
def test_a_search_leaves_no_trace(host: str, caplog: pytest.LogCaptureFixture) -> None:
    found: dict[str, Any] = {}
    trainer = make(host, options={"memory_limit": LIMITS[host]}, accumulation=2)
    search = trainer._search

    def searched(*args: Any) -> None:
        def everything() -> Any:
            counters = copy.deepcopy({name: getattr(trainer, name, None) for name in trainer.counters})
            state = copy.deepcopy((trainer.state, trainer.lr_scheduler.state_dict(), trainer.optimizer.state_dict()))
            parameters = [one.detach().clone() for one in trainer.model.parameters()]
            own = trainer.current_gradient_accumulation_steps, vars(trainer.accelerator).keys(), trainer.control
            return [*parameters, torch.get_rng_state()], random.getstate(), counters, str(state), str(own)

        before = everything()
        search(*args)
        after = everything()
        found["is equal"] = before[1:] == after[1:] and all(map(torch.equal, before[0], after[0]))
        found["gradients"] = [one for one in trainer.model.parameters() if one.grad is not None]

    trainer._search = searched
    with caplog.at_level(logging.INFO, logger=hosts.log.name):
        ours = trained(trainer)
    assert found == {"is equal": True, "gradients": []}
    assert [record.message[:20] for record in caplog.records] == ["The micro-batch has "]
    told = make(host, options={"micro_batch_size": trainer.micro_batch_size}, accumulation=2)
    assert 1 <= trainer.micro_batch_size <= BATCH
    assert difference(ours, trained(told)) == (0.0, {})


def test_a_search_whose_last_probe_fails_leaves_no_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make("sft", options={"memory_limit": LIMITS["sft"]})

    def fails_at_last(train_step: Any, make_batch: Any, *, model: nn.Module, optimizer: Any, **_: Any) -> Any:
        with monkeypatch.context() as patches:
            patches.setattr(optimizer, "step", out_of_memory)
            with pytest.raises(torch.OutOfMemoryError):
                train_step(make_batch(1))
        model.zero_grad()
        return SimpleNamespace(batch_size=1)

    def searched(*args: Any) -> None:
        before = copy.deepcopy([getattr(trainer, name) for name in trainer.counters])
        search(*args)
        assert [getattr(trainer, name) for name in trainer.counters] == before

    search, trainer._search = trainer._search, searched
    monkeypatch.setattr(hosts, "find_max_batch_size", fails_at_last)
    trainer.train()
    assert trainer.micro_batch_size == 1


@pytest.mark.parametrize("sharding", ["", "load"])
def test_ranks_search_together_if_one_has_less_memory(sharding: str) -> None:
    one, other = run_on_ranks(trainers.searches_on_rank, 2, sharding)
    assert one == other
    assert [(events, differs) for _, events, differs in one] == [([], (0.0, {}))] * 2
    assert one[0][0] < BATCH


def test_errors_are_raised_on_all_ranks() -> None:
    one, other = run_on_ranks(trainers.errors_on_rank, 2)
    assert one == other
    assert [text[:60] for text in one] == [
        "InputError: Every trained parameter must be sharded, but ada",
        "NothingFitsError: a single row per micro-step must fit, but ",
    ]
    assert "in step 2 rank 1 ran out of memory" in one[1]


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        yield from trainers.rows("trainer", 96)


def test_a_search_uses_the_batches_at_hand_if_the_data_cannot_be_indexed(caplog: pytest.LogCaptureFixture) -> None:
    trainer = make("trainer", options={"memory_limit": LIMITS["trainer"], "train_dataset": Stream()})
    with caplog.at_level(logging.INFO, logger="torchtune_adaptive.integrations"):
        trainer.train()
    texts = [record.message for record in caplog.records]
    assert texts[0] == "The search uses the heaviest rows of the first step, because the data cannot be indexed."
    assert texts[1].startswith("The micro-batch has ")


def test_a_cpu_without_a_limit_is_not_searched(caplog: pytest.LogCaptureFixture) -> None:
    trainer = make("trainer")
    with caplog.at_level(logging.INFO, logger=hosts.log.name):
        trainer.train()
    assert [record.message for record in caplog.records] == [
        "The micro-batch is `per_device_train_batch_size` (4): a cpu needs `memory_limit` for a search."
    ]


# ---- refusals


@pytest.mark.parametrize(
    ("host", "args", "text"),
    [
        ("trainer", {"auto_find_batch_size": True}, "`auto_find_batch_size` must be False: it restarts training"),
        ("trainer", {"optim": "adalomo"}, "`optim` must not step in the backward pass, which may run again, but is"),
        ("sft", {"padding_free": True, "max_length": None}, "documents in one row cannot be cut apart"),
        ("sft", {"packing": True}, "documents in one row cannot be cut apart"),
        ("dpo", {"loss_type": ["sigmoid", "aot"]}, "`loss_type` must not sort samples, which needs whole batches, but"),
    ],
)
def test_arguments_that_do_not_allow_recovery_are_refused(host: str, args: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError) as refused:
        make(host, **args)
    assert text in str(refused.value)


@pytest.mark.parametrize("size", [0, 2.5])
def test_a_micro_batch_size_must_be_a_positive_integer(size: Any) -> None:
    with pytest.raises(InputError, match="`micro_batch_size` must be"):
        make("trainer", options={"micro_batch_size": size})


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("n_gpu", 2, "A process must train on one device, but has 2 instead: start it by `torchrun`."),
        ("scaler", object(), "`fp16` must be False, because its gradient scaler has not been tried: use `bf16`."),
        ("is_model_parallel", True, "The model must be on one device per process, but its `device_map` has several."),
        ("_is_vlm", True, "Batches must be of text only, but the model takes images."),
        ("activation_offloading", True, "`activation_offloading` must be False, because what it keeps"),
        ("tp_size", 2, "Tensor, context and sequence parallelism must be off, but their sizes are (2, 1, 1)."),
        ("fsdp_version", 1, "`fsdp_version` must be 2, but is 1 instead."),
        ("DEEPSPEED", None, "must be connected by DistributedDataParallel or FSDP2, but are by DEEPSPEED instead."),
        ("even_batches", False, "`even_batches` of `accelerator_config` must be True, but is False instead: a process"),
        ("torch_compile", True, "`torch_compile` must be False with several processes, because it compiles"),
    ],
)
def test_what_cannot_be_had_on_a_cpu_is_refused(
    name: str, value: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make("sft", is_adaptive=False)
    args = SimpleNamespace(**{**vars(trainer.args), "n_gpu": 1, "torch_compile": False})
    accelerator = SimpleNamespace(
        scaler=None,
        num_processes=2,
        even_batches=True,
        distributed_type=DistributedType.MULTI_CPU,
        state=SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=2)),
    )
    monkeypatch.setattr(trainer, "args", args)
    monkeypatch.setattr(trainer, "accelerator", accelerator)
    monkeypatch.setattr(trainer, "get_tp_size", lambda: 1)
    assert why_refused(trainer) == ""
    if name == "tp_size":
        monkeypatch.setattr(trainer, "get_tp_size", lambda: value)
    elif name == "DEEPSPEED":
        accelerator.distributed_type = DistributedType.DEEPSPEED
    elif name == "fsdp_version":
        accelerator.state.fsdp_plugin.fsdp_version = value
    else:
        owner = next((one for one in (args, accelerator, trainer) if name in vars(one)), trainer)
        monkeypatch.setattr(owner, name, value, raising=False)
    assert text in why_refused(trainer)


@pytest.mark.parametrize(("drops_last", "processes"), [(True, 2), (False, 1)])
def test_uneven_batches_are_allowed_if_they_are_dropped_or_there_is_one_process(
    drops_last: bool, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"dataloader_drop_last": drops_last, "accelerator_config": {"even_batches": False}}
    trainer = make("trainer", is_adaptive=False, **options)
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", processes)
    assert why_refused(trainer) == ""


@pytest.mark.parametrize("name", ["KTOTrainer", "GRPOTrainer", "RLOOTrainer"])
def test_trainers_of_trl_that_are_not_known_are_refused_by_name(name: str) -> None:
    unknown = type("Mine", (AdaptiveTrainerMixin, getattr(trl, name)), {})
    with pytest.raises(InputError, match=f"but is {name} instead: declare its batches by the class attribute"):
        unknown(model=None)


def test_an_unknown_subclass_in_trl_of_a_known_trainer_is_refused() -> None:
    from trl.experimental.gkd import GKDTrainer  # warns

    with pytest.raises(InputError, match="but is GKDTrainer instead"):
        type("Mine", (AdaptiveTrainerMixin, GKDTrainer), {})(model=None)


def test_an_unknown_trainer_can_be_declared() -> None:
    assert samples_are_pairs(type("Mine", (AdaptiveTrainerMixin, trl.KTOTrainer), {"samples_are_pairs": True}))


class Regression(Trainer):
    """A user's own trainer, whose loss is a mean over samples."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def regression(**options: Any) -> Any:
    """A trainer on rows with one number each, whose loss does not depend on the number of labels."""

    def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
        batch = trainers.collate(samples)
        return {**batch, "labels": torch.tensor([float(len(sample["input_ids"])) for sample in samples])}

    model = LlamaForSequenceClassification.from_pretrained(trainers.saved_model("reward"), num_labels=1)
    model.config.problem_type = "regression"
    return make("trainer", options={"data_collator": collate, "model": model, **options.pop("options", {})}, **options)


class Summed(Trainer):
    """A user's own trainer, whose loss is a sum over samples, of which transformers takes the mean over batches."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        return (model(**{**inputs, "labels": None}).logits.squeeze(1) - inputs["labels"]).square().sum() * 1e-3


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("size", [1, 3, BATCH])
@pytest.mark.parametrize("accepts_num_items", [False, True])
@pytest.mark.parametrize("base", [Regression, Summed])
def test_losses_that_are_not_divided_by_labels_equal_the_host_without_a_declaration(
    base: type, accepts_num_items: bool, size: int, accumulation: int
) -> None:
    found = []
    for is_adaptive in (False, True):
        common: dict[str, Any] = {"base": base, "accumulation": accumulation, "optim": "sgd", "learning_rate": 1e-3}
        trainer = regression(
            is_adaptive=is_adaptive, options={"micro_batch_size": size} if is_adaptive else {}, **common
        )
        trainer.model_accepts_loss_kwargs = accepts_num_items
        found.append(trained(trainer))
    parameters, logs = difference(*found)
    if size == BATCH:
        assert (parameters, logs) == (0.0, {})
    assert parameters < 1e-6
    assert max(logs.values(), default=0) < 1e-2


@pytest.mark.parametrize(("base", "is_mean"), [(Regression, True), (Summed, False)])
def test_an_attribute_that_contradicts_the_loss_is_refused(base: type, is_mean: bool) -> None:
    kind = type("Declared", (AdaptiveTrainerMixin, base), {"loss_is_mean_over_samples": not is_mean})
    with pytest.raises(InputError, match=f"`loss_is_mean_over_samples` must not be {not is_mean}, because the loss of"):
        regression(base=kind, options={"micro_batch_size": 2}).train()


MIXED = "must not be cut into micro-batches: the loss or a layer mixes the samples"
NO_SUM = "Losses and other results of micro-steps must add up"


def assert_needs_whole_batches(make_trainer: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Whole batches train as the host's, without recovery; smaller micro-batches are refused."""
    plain = trained(make_trainer(is_adaptive=False, options={}))
    whole = make_trainer(options={"micro_batch_size": BATCH})
    assert difference(trained(whole), plain) == (0.0, {})
    assert MIXED in caplog.text
    for size in (1, BATCH - 1):
        smaller = make_trainer(options={"micro_batch_size": size})
        before = {name: one.clone() for name, one in smaller.model.state_dict().items()}
        with pytest.raises(CannotCutError, match=MIXED):
            smaller.train()
        assert all(torch.equal(one, before[name]) for name, one in smaller.model.state_dict().items())


class Regularized(Trainer):
    """A user's own trainer, whose loss has a term that does not depend on the items."""

    weight = 0.0
    is_divided = True

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        term = self.weight * sum(one.square().sum() for one in model.parameters())
        loss = loss + term / (self.current_gradient_accumulation_steps if self.is_divided else 1)
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize(("weight", "dtype"), [(5e-4, torch.float32), (4e-3, torch.float32), (4e-3, torch.bfloat16)])
def test_a_term_of_the_loss_that_every_micro_batch_would_count_needs_whole_batches(
    weight: float, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    kind = type("Undivided", (Regularized,), {"is_divided": False, "weight": weight})

    def make_one(options: dict[str, Any], **more: Any) -> Any:
        return make("trainer", base=kind, options={"model": trainers.model("trainer").to(dtype), **options}, **more)

    with pytest.raises(CannotCutError, match=f"{MIXED}|{NO_SUM}"):
        make_one({"micro_batch_size": 2}).train()
    whole, plain = trained(make_one({"micro_batch_size": BATCH})), trained(make_one({}, is_adaptive=False))
    assert difference(whole, plain) == (0.0, {})
    assert "An out-of-memory error will end the run" in caplog.text


@pytest.mark.parametrize("weight", [1e-3, 0.1])
def test_a_term_divided_by_the_number_of_batches_equals_the_host(weight: float) -> None:
    kind = type("Divided", (Regularized,), {"weight": weight})
    common: dict[str, Any] = {"base": kind, "accumulation": 2, "dropout": 0.0, "optim": "sgd"}
    plain = trained(make("trainer", is_adaptive=False, **common))
    assert difference(trained(make("trainer", options={"micro_batch_size": BATCH}, **common)), plain) == (0.0, {})
    assert difference(trained(make("trainer", options={"micro_batch_size": 1}, **common)), plain)[0] < 1e-6


class MeanOverTokens(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        return model(**inputs).loss / self.current_gradient_accumulation_steps


@pytest.mark.parametrize("seed", [3, 4, 5, 6])
def test_a_mean_over_tokens_needs_whole_batches(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    assert_needs_whole_batches(lambda **more: make("trainer", base=MeanOverTokens, seed=seed, **more), caplog)


def test_a_preference_loss_that_is_no_mean_over_pairs_needs_whole_batches(caplog: pytest.LogCaptureFixture) -> None:
    assert_needs_whole_batches(lambda **more: make("dpo", loss_type=["sigmoid", "sft"], **more), caplog)


def mixture_of_experts() -> Any:
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads, output_router_logits=True, router_aux_loss_coef=0.01))


def test_a_model_that_adds_the_auxiliary_loss_of_its_experts_is_not_cut() -> None:
    with pytest.raises(InputError, match=f"{MIXED}|{NO_SUM}"):
        make("trainer", options={"micro_batch_size": 2, "model": mixture_of_experts()}).train()


def test_the_auxiliary_loss_of_experts_in_trl_equals_the_host() -> None:
    found = []
    for is_adaptive in (False, True):
        options = {"model": mixture_of_experts(), **({"micro_batch_size": BATCH} if is_adaptive else {})}
        found.append(trained(make("sft", is_adaptive=is_adaptive, accumulation=2, options=options)))
    assert "aux_loss" in found[0].logs[0]
    assert difference(*found) == (0.0, {})


def test_a_loss_function_and_label_smoothing_equal_the_host() -> None:
    def loss_sum(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        logits = outputs["logits"][:, :-1].flatten(0, 1)
        return nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch

    for options, args in (({"compute_loss_func": loss_sum}, {}), ({}, {"label_smoothing_factor": 0.1})):
        common: dict[str, Any] = {"accumulation": 2, "dropout": 0.0, "optim": "sgd", **args}
        plain = trained(make("trainer", is_adaptive=False, options=options, **common))
        whole = trained(make("trainer", options={"micro_batch_size": BATCH, **options}, **common))
        small = trained(make("trainer", options={"micro_batch_size": 1, **options}, **common))
        assert difference(whole, plain) == (0.0, {})
        assert difference(small, plain)[0] < 1e-6


def test_a_compiled_model_recovers_in_one_process() -> None:
    common: dict[str, Any] = {"torch_compile": True, "torch_compile_backend": "eager", "dropout": 0.0}
    plain = trained(make("trainer", is_adaptive=False, **common))
    assert difference(trained(make("trainer", options={"micro_batch_size": BATCH}, **common)), plain) == (0.0, {})
    faulty = with_fault(
        make("trainer", options={"micro_batch_size": BATCH}, **common), step=1, micro_step=0, place=60, rank=0
    )
    assert faulty.events == [(2, BATCH, BATCH // 2), (3, BATCH // 2, BATCH)]


# ---- names


@pytest.mark.parametrize(
    "name", ["AdaptiveTrainer", "AdaptiveSFTTrainer", "AdaptiveDPOTrainer", "AdaptiveRewardTrainer"]
)
def test_the_ready_made_classes_have_dotted_names(name: str) -> None:
    found = getattr(hosts, name)
    assert found is getattr(hosts, name)
    assert (found.__module__, found.__qualname__) == ("torchtune_adaptive.integrations.transformers", name)
    assert found.__mro__[2].__name__ == name.removeprefix("Adaptive")


def test_without_trl_its_classes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.delitem(vars(hosts), "AdaptiveSFTTrainer", raising=False)
    with pytest.raises(ImportError, match="`AdaptiveSFTTrainer` needs the package `trl`, which is not installed"):
        hosts.AdaptiveSFTTrainer  # noqa: B018


def test_training_ready_made_and_twice() -> None:
    trainer = make("sft", base=hosts.AdaptiveSFTTrainer, options={"micro_batch_size": 2})
    once = trained(trainer)
    assert difference(once, trained(make("sft", options={"micro_batch_size": 2}))) == (0.0, {})
    plain = make("sft", is_adaptive=False)
    plain.train()
    trainer.train()
    plain.train()
    assert len(trainer.state.log_history) == len(plain.state.log_history)


def test_a_second_training_starts_with_the_whole_micro_batch() -> None:
    trainer = make("trainer", options={"micro_batch_size": 2})
    trainer._batches.size = 1  # after an error near the end of the first one
    trainer.train()
    assert trainer.micro_batch_size == 2


def test_a_changed_batch_is_the_micro_batch_of_the_next_training() -> None:
    trainer = make("trainer")
    trainer.train()
    assert trainer.micro_batch_size == BATCH
    trainer.args.per_device_train_batch_size = 2 * BATCH
    trainer.train()
    assert trainer.micro_batch_size == 2 * BATCH
    told = make("trainer", options={"micro_batch_size": BATCH})
    told.args.per_device_train_batch_size = 2 * BATCH
    told.train()
    assert told.micro_batch_size == BATCH


# ---- private names of the hosts: what breaks if one is gone


def test_accelerate_says_with_which_batch_an_optimizer_step_ends() -> None:
    """Otherwise batches would never be run. ``plugin_kwargs`` decides how FSDP2 reduces."""
    trainer = make("trainer", is_adaptive=False)
    assert trainer.accelerator.sync_gradients is True
    trainer.accelerator.gradient_state._set_sync_gradients(False)
    assert trainer.accelerator.sync_gradients is False
    trainer.accelerator.gradient_state._set_sync_gradients(True)
    assert not trainer.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)


def test_transformers_divides_means_by_current_gradient_accumulation_steps() -> None:
    """Otherwise the parts of a batch whose loss is a mean would have too much weight."""
    code = Trainer.training_step.__code__
    assert {"current_gradient_accumulation_steps", "loss_is_scaled_for_ga", "model_accepts_loss_kwargs"} <= {
        *code.co_names
    }


@pytest.mark.parametrize("host", ["sft", "dpo", "reward"])
def test_trl_keeps_its_counters_where_they_are_restored(host: str) -> None:
    """Otherwise tokens and metrics of a step that ran again would count twice."""
    trainer = make(host, is_adaptive=False, max_steps=1)
    before = {
        name: copy.deepcopy(value) for name, value in vars(trainer).items() if isinstance(value, dict | int | list)
    }
    trainer.log = lambda *_: None
    trainer.train()
    assert trainer._total_train_tokens > 0
    assert trainer._metrics["train"]
    changed = {name for name, value in before.items() if vars(trainer)[name] != value}
    assert changed - {
        "_created_lr_scheduler",
        "_initial_global_step",
        "_globalstep_last_logged",
        "_loggers_initialized",
        "is_in_train",
        "current_flos",
        "_initial_num_input_tokens_seen",
    } == {*AdaptiveTrainerMixin.counters}


def test_transformers_marks_adapters_on_a_model_sharded_when_loaded() -> None:
    """Otherwise their gradients' all-reduce would be refused in the dry run, or hang a search."""
    assert "_replicated_grad_hook_registered" in Trainer._sync_replicated_trainable_parameters.__code__.co_consts


def test_the_parts_of_pairs_stay_together() -> None:
    ids = torch.arange(8).reshape(8, 1)  # chosen 0 to 3, rejected 4 to 7
    batch = TrainerBatch({"input_ids": ids, "margin": torch.arange(4), "names": list("abcd")}, None, 1)
    parts = TrainerBatches(3, rows_per_sample=2).cut([batch])
    assert [part.inputs["input_ids"].flatten().tolist() for part in parts] == [[0, 1, 2, 4, 5, 6], [3, 7]]
    assert [part.inputs["margin"].tolist() for part in parts] == [[0, 1, 2], [3]]
    assert [part.inputs["names"] for part in parts] == [["a", "b", "c"], ["d"]]


def test_a_batch_with_other_rows_is_refused() -> None:
    batch = TrainerBatch({"input_ids": torch.zeros(4, 2), "pixels": torch.zeros(9, 2)}, None, 1)
    with pytest.raises(InputError, match=r"one row per sample, but has .'input_ids': 4, 'pixels': 9. instead"):
        TrainerBatches(2).cut([batch])


def test_the_code_of_the_document_runs() -> None:
    document = Path(__file__).parents[2] / "docs" / "hosts.md"
    like, sft = make("trainer", is_adaptive=False), make("sft", is_adaptive=False)
    names = {"model": trainers.model("trainer"), "args": like.args, "rows": like.train_dataset}
    names |= {"collate": trainers.collate, "sft_args": sft.args, "texts": trainers.rows("sft", 32)}
    names |= {"tokenizer": trainers.tokenizer(), "__name__": __name__}
    for block in blocks(document, "py"):
        is_installed = not re.search("import.*(Axolotl|Seq2Seq)Trainer", block.text)
        if "integrations.transformers" not in block.text or not is_installed:
            continue
        exec(compile(block.text, str(document), "exec"), names)
        assert names["trainer"].state.global_step == names["args"].max_steps
    assert type(names["trainer"]).__name__ == "MyTrainer"


# ---- what a search sees of the data, and what it leaves alone


class Crops:
    """Random parts of rows, cut by generators of the data set's own."""

    def __init__(self) -> None:
        self.numbers, self.texts = numpy.random.default_rng(1), trainers.rows("trainer", 24)

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, number: int) -> dict[str, list[int]]:
        ids = self.texts[number]["input_ids"]
        return {"input_ids": ids[self.numbers.integers(len(ids) - 1) :]}


class Shuffles:
    """A large object whose bound method collates, with a generator and a counter of its own."""

    def __init__(self) -> None:
        self.generator, self.batches = torch.Generator().manual_seed(1), 0

    def collate(self, samples: list[Any]) -> dict[str, torch.Tensor]:
        self.batches += 1
        batch = trainers.collate(samples)
        ignored = torch.rand(batch["labels"].shape, generator=self.generator) < 0.02 * self.batches
        return {**batch, "labels": batch["labels"].masked_fill(ignored, -100)}


def masked_tokens() -> Any:
    tokenizer = trainers.tokenizer()
    tokenizer.mask_token = "w63"
    return DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.4, seed=7)


def crops_by_datasets() -> Any:
    data, chance = Dataset.from_list(trainers.rows("trainer", 24)), random.Random(5)

    def crop(batch: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        return {"input_ids": [ids[chance.randrange(len(ids) - 1) :] for ids in batch["input_ids"]]}

    data.set_transform(crop)
    return data


STATEFUL = {
    "crops of a data set": lambda: ({"train_dataset": Crops()}, {}),
    "crops by datasets": lambda: ({"train_dataset": crops_by_datasets()}, {"remove_unused_columns": False}),
    "a bound method that collates": lambda: ({"data_collator": Shuffles().collate}, {}),
    "transformers' masked tokens": lambda: ({"data_collator": masked_tokens()}, {}),
    "a stream": lambda: ({"train_dataset": Dataset.from_list(trainers.rows("trainer", 24)).to_iterable_dataset()}, {}),
    "persistent workers": lambda: (
        {"data_collator": Shuffles().collate},
        {
            "dataloader_num_workers": 1,
            "dataloader_persistent_workers": True,
            "train_sampling_strategy": "group_by_length",
        },
    ),
}


@pytest.mark.parametrize("stateful", STATEFUL.values(), ids=STATEFUL)
def test_a_search_leaves_data_and_collators_with_state_alone(stateful: Any) -> None:
    """``make`` shows that training depends on the state: two trainings with one object differ."""

    def run(**options: Any) -> Any:
        more, args = stateful()
        trainer = make("trainer", options={**more, **options}, accumulation=2, **args)
        return trained(trainer), trainer.micro_batch_size

    searched, size = run(memory_limit="64MiB")
    told, _ = run(micro_batch_size=BATCH)
    assert size == BATCH
    assert difference(searched, told) == (0.0, {})


def test_a_search_survives_broken_samples_and_collators_that_need_several() -> None:
    data = [None if number % 7 == 2 else one for number, one in enumerate(trainers.rows("trainer", 24))]

    def filtering(samples: list[Any]) -> dict[str, torch.Tensor]:
        return trainers.collate([one for one in samples if one is not None])

    def mixing(samples: list[Any]) -> dict[str, torch.Tensor]:
        assert len(samples) > 1
        return trainers.collate(samples)

    for more in ({"train_dataset": data, "data_collator": filtering}, {"data_collator": mixing}):
        common: dict[str, Any] = {"remove_unused_columns": False, "dropout": 0.0, "optim": "sgd"}
        plain = trained(make("trainer", is_adaptive=False, options=more, **common))
        searched = make("trainer", options={**more, "memory_limit": "64MiB"}, **common)
        found = trained(searched)
        assert searched.micro_batch_size > 1
        assert difference(found, plain)[0] < 1e-6


class OnlyLabels(Trainer):
    """Computes logits of the tokens with labels only, as fused losses do."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")[:, 1:]
        hidden = model.model(**inputs).last_hidden_state[:, :-1]
        logits = model.lm_head(hidden[labels != -100])
        loss = nn.functional.cross_entropy(logits, labels[labels != -100], reduction="sum") / num_items_in_batch
        return (loss, logits) if return_outputs else loss


@pytest.mark.parametrize(
    "lengths",
    [
        [(4, 4)] + [(48, 48)] * 31,
        [(4, 2), (60, 1)] + [(40, 39)] * 30,
        [(4, 1)] + [(60, 4)] * 16 + [(48, 44)] * 15,
    ],
)
def test_sizes_of_a_search_last_if_memory_follows_labels(lengths: list[tuple[int, int]]) -> None:
    sizes: dict[str, Any] = {"vocab_size": 2000, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
    options = {**trainers.with_prompts(lengths), "model": model, "memory_limit": "10MiB"}
    args: dict[str, Any] = {"per_device_train_batch_size": 32, "remove_unused_columns": False}
    trainer = make("trainer", base=OnlyLabels, options=options, **args)
    assert trained(trainer).events == []
    assert 1 < trainer.micro_batch_size < 32


def test_each_training_searches_with_its_own_data_and_batch() -> None:
    options = {**trainers.with_prompts([(40, 39)] * 32), "memory_limit": "900KiB"}
    trainer = make("trainer", options=options, remove_unused_columns=False)
    sizes = []
    for rows, batch in (([(40, 39)] * 32, 16), ([(8, 7)] * 32, 16), ([(8, 7)] * 32, 2), ([(8, 7)] * 3, 16)):
        trainer.train_dataset = trainers.with_prompts(rows)["train_dataset"]
        trainer.args.per_device_train_batch_size = batch
        trainer.train()
        sizes.append(trainer.micro_batch_size)
    long, short, *others = sizes
    assert long < short <= 16
    assert others == [2, 3]
    assert trainer.memory_events == []


def test_a_data_loader_of_ones_own_is_searched_by_its_batches(caplog: pytest.LogCaptureFixture) -> None:
    class Own(AdaptiveTrainerMixin, Trainer):
        def get_train_dataloader(self) -> Any:
            rows = trainers.rows("trainer", 24)
            return [trainers.collate(rows[start : start + BATCH]) for start in range(0, 24, BATCH)]

    with caplog.at_level(logging.INFO, logger="torchtune_adaptive.integrations"):
        trainer = make("trainer", base=Own, options={"memory_limit": "64MiB"})
        trainer.train()
    assert trainer.micro_batch_size == BATCH
    assert "because the data cannot be indexed" in caplog.text


def test_a_collator_that_tokenizes_can_be_tried_beforehand(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer, texts = trainers.tokenizer(), [trainers.text(seed) for seed in range(24)]
    tokenizer(texts)  # its threads are there now

    def collate_texts(samples: list[Any]) -> Any:
        batch = tokenizer([one["text"] for one in samples], padding=True, return_tensors="pt")
        return {**batch, "labels": batch["input_ids"]}

    options = {"train_dataset": [{"text": one} for one in texts], "data_collator": collate_texts}
    with caplog.at_level(logging.INFO, logger="torchtune_adaptive.integrations"):
        make("trainer", options={**options, "memory_limit": "64MiB"}, remove_unused_columns=False).train()
    assert [record.message[:20] for record in caplog.records] == ["The micro-batch has "]
    assert "forked" not in capfd.readouterr().err


# ---- a trainer's own code


def test_a_training_step_outside_of_train_is_the_hosts() -> None:
    found = []
    for is_adaptive in (False, True):
        trainer = make("trainer", is_adaptive=is_adaptive, dropout=0.0)
        for when in ("before", "after"):
            trainer.current_gradient_accumulation_steps = 1
            batch = trainers.collate(trainers.rows("trainer", BATCH))
            found.append((trainer.training_step(trainer.model, batch, torch.tensor(20)).item(), when))
            found.append(trainer.model.lm_head.weight.grad.norm().item())
            trainer.model.zero_grad()
            trainer.train()
    assert found[: len(found) // 2] == found[len(found) // 2 :]


@pytest.mark.parametrize("use", trainers.GATHERS_IN_LOSS)
def test_a_loss_that_depends_on_other_processes_is_refused(use: str) -> None:
    trainer = trainers.gathering(use)
    with pytest.raises(InputError, match="but the loss depends on one: use this process's own values there"):
        trainer.train()


def test_gathers_in_losses_are_refused_on_all_ranks_and_metrics_equal_the_host() -> None:
    one, other = run_on_ranks(trainers.gathers_on_rank, 2)
    assert one == other
    refusals, differs = one
    assert set(refusals) == {"InputError: but the loss depends on one"}
    assert len(refusals) == len(trainers.GATHERS_IN_LOSS)
    assert differs == (0.0, {})


def test_ranks_search_together_if_they_have_found_different_numbers_of_batches() -> None:
    assert run_on_ranks(trainers.uneven_searches_on_rank, 2) == [(BATCH, [])] * 2


class StopsWithin(TrainerCallback):
    """Ends training after the fifth batch that ends no optimizer step."""

    batches = 0

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.batches += 1
        control.should_training_stop = self.batches == 5


def test_training_stopped_within_an_accumulation_equals_the_host_but_for_the_mean_loss() -> None:
    found = []
    for is_adaptive in (False, True):
        options = {"callbacks": [StopsWithin()], **({"micro_batch_size": BATCH} if is_adaptive else {})}
        found.append(trained(make("trainer", is_adaptive=is_adaptive, accumulation=4, options=options)))
    parameters, logs = difference(found[1], found[0])
    assert (parameters, set(logs)) == (0.0, {"train_loss"})
    assert found[1].logs[-1]["train_loss"] == found[1].logs[0]["loss"]
