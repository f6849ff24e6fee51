"""``AdaptiveTrainerMixin`` trains as the trainer that it extends, and recovers from out of memory."""

# pyright: reportMissingImports=false

import ast
import copy
import dataclasses
import importlib.util
import json
import logging
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

pytest.importorskip("trl", reason="`make integrations` runs this file")

from accelerate.utils import DistributedType
from torch import nn
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainerCallback,
)

from tests.integrations import trainers
from tests.integrations.trainers import (
    BATCH,
    KINDS,
    LIMITS,
    MeanOverTokens,
    comparisons,
    difference,
    make,
    trained,
    with_fault,
)
from tests.support import ranks
from tests.support.documents import DOCUMENTS, blocks
from tests.support.ranks import run_on_ranks
from torchtune_adaptive import InputError, NothingFitsError
from torchtune_adaptive.engine.search import throughput
from torchtune_adaptive.errors import CannotCutError
from torchtune_adaptive.integrations import checkpointing
from torchtune_adaptive.integrations import transformers as integration
from torchtune_adaptive.integrations.transformers import AdaptiveTrainerMixin

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]

CASES = [*((kind, 4) for kind in KINDS), ("sft", 1)]  # and the batches in an optimizer step
SHARDED_CASES = [("trainer", 4), ("dpo", 4), ("sft", 1)]  # not "lora", which is refused: see below
LOGGED = {"sft": "num_tokens", "lora": "entropy", "dpo": "rewards/margins", "reward": "max_reward"}


@pytest.fixture(scope="module", autouse=True)
def imported_once() -> None:
    ranks.IMPORTED_ONCE[:] = ["tests.integrations.trainers"]
    for kind in KINDS:
        trainers.saved_model(kind)


# ---- equal to the trainer


def assert_equal(found: dict[str, Any], kind: str) -> None:
    """All that ``comparisons`` has compared is equal, bit for bit."""
    assert (found["plain"], found["early"], found["late"]) == ((0.0, {}),) * 3, kind
    none, early, late = found["events"]
    assert none == []
    halved, grown = (BATCH, BATCH // 2), (BATCH // 2, BATCH)
    has_fitted = found["ranks"] > 1  # on the other one
    assert early == [(1, *halved), *([(2, *grown)] if has_fitted else [])]
    assert late == [(2, *halved), (3, *grown)]
    assert LOGGED.get(kind, "loss") in found["names"]


@pytest.mark.parametrize(("kind", "accumulation"), CASES)
def test_one_process_equals_the_plain_trainer_and_with_faults_a_told_run(kind: str, accumulation: int) -> None:
    assert_equal(comparisons(kind, accumulation), kind)


@pytest.mark.parametrize(
    ("sharding", "cases"),
    [("", CASES), ("load", SHARDED_CASES), ("accelerate", [("sft", 4)])],
    ids=["ddp", "fsdp2", "fsdp2 by accelerate"],
)
def test_two_ranks_equal_the_plain_trainer_and_with_faults_a_told_run(sharding: str, cases: list[Any]) -> None:
    """For accelerate, which refuses FSDP2 on CPUs, the machine has NPUs."""
    for of_rank in run_on_ranks(trainers.comparisons_on_rank, 2, sharding, cases):
        for case, found in of_rank.items():
            assert_equal(found, case[0])


@pytest.mark.parametrize("kind", KINDS)
def test_smaller_micro_batches_differ_by_rounding(kind: str) -> None:
    common: dict[str, Any] = {"accumulation": 2, "dropout": 0.0, "optim": "sgd"}
    small = trained(make(kind, options={"micro_batch_size": 1}, **common))
    plain = trained(make(kind, is_adaptive=False, **common))
    parameters, logs = difference(small, plain)
    means_of_means = {"entropy", "mean_token_accuracy", "min_reward", "max_reward", "logits/chosen", "logits/rejected"}
    assert parameters < 1e-6
    assert {name for name, size in logs.items() if size > 1e-4} <= means_of_means


@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_of_several_batches_differ_by_rounding(kind: str) -> None:
    """Rows of the second batch are padded to the length of the first one, or the other way round."""
    common: dict[str, Any] = {"accumulation": 3, "dropout": 0.0, "optim": "sgd"}
    trainer = make(kind, options={"micro_batch_size": 2 * BATCH + 1}, **common)
    cut, cuts = trainer._batches.cut, []

    def noted(batches: Any) -> Any:
        cuts.append(cut(batches))
        return cuts[-1]

    trainer._batches.cut = noted
    joined = trained(trainer)
    parameters, logs = difference(joined, trained(make(kind, is_adaptive=False, **common)))
    sizes = [[trainer._batches.num_samples(one.inputs) for one in parts] for parts in cuts]
    assert sizes == [[2 * BATCH, BATCH]] * trainers.STEPS
    assert parameters < 1e-6
    changed = {name for name, size in logs.items() if size > 1e-4}  # TRL's means are of micro-batches
    assert not changed & {"loss", "grad_norm", "num_tokens"}


def test_a_model_without_a_config_is_trained() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = trainers.model("trainer", dropout=0.0)

        def forward(self, input_ids: Any, attention_mask: Any, labels: Any) -> Any:
            return self.inner(input_ids=input_ids, attention_mask=attention_mask, labels=labels)

    assert not hasattr(Plain(), "config")
    ours = trained(make("trainer", options={"micro_batch_size": BATCH, "model": Plain()}, accumulation=2))
    plain = trained(make("trainer", is_adaptive=False, options={"model": Plain()}, accumulation=2))
    assert difference(ours, plain) == (0.0, {})


def test_batches_that_cannot_be_joined_stay_apart(caplog: pytest.LogCaptureFixture) -> None:
    """The mean of each batch over its tokens counts: a mean over those of two would be another."""
    options = {"base": MeanOverTokens, "accumulation": 2, "dropout": 0.0}
    with caplog.at_level(logging.INFO, logger="torchtune_adaptive.integrations"):
        ours = trained(make("trainer", options={"micro_batch_size": 2 * BATCH}, **options))
    assert caplog.messages[0].startswith("A micro-batch has samples of one batch only. ")
    assert difference(ours, trained(make("trainer", is_adaptive=False, **options))) == (0.0, {})


def test_the_last_steps_of_an_epoch_are_smaller() -> None:
    """15 rows: batches of 4, 4, 4 and 3; the second step has the last one only."""
    common: dict[str, Any] = {"accumulation": 3, "number_of_rows": 15, "max_steps": -1, "num_train_epochs": 2}
    for kind in ("sft", "reward"):
        plain = trained(make(kind, is_adaptive=False, **common))
        assert len(plain.logs) == 5
        assert difference(trained(make(kind, options={"micro_batch_size": BATCH}, **common)), plain) == (0.0, {})
        faulty = with_fault(
            make(kind, options={"micro_batch_size": 3}, **common), step=1, micro_step=0, place=9, rank=0
        )
        assert faulty.events == [(2, 3, 1), (3, 1, 2)]


def test_a_size_that_never_fitted_is_tried_again_in_the_next_epoch() -> None:
    options: dict[str, Any] = {"micro_batch_size": BATCH}
    trainer = make("trainer", options=options, number_of_rows=3 * BATCH, max_steps=-1, num_train_epochs=2)
    assert with_fault(trainer, step=0, micro_step=0, place=40, rank=0).events == [(1, BATCH, 2), (4, 2, BATCH)]


def test_metrics_of_the_last_batch_of_an_epoch_equal_the_plain_trainers_on_two_ranks() -> None:
    assert run_on_ranks(trainers.last_batch_on_rank, 2) == [(0.0, {})] * 2


def test_a_compiled_model_recovers_in_one_process() -> None:
    common: dict[str, Any] = {"torch_compile": True, "torch_compile_backend": "eager", "dropout": 0.0}
    plain = trained(make("trainer", is_adaptive=False, **common))
    assert difference(trained(make("trainer", options={"micro_batch_size": BATCH}, **common)), plain) == (0.0, {})
    faulty = with_fault(
        make("trainer", options={"micro_batch_size": BATCH}, **common), step=1, micro_step=0, place=60, rank=0
    )
    assert faulty.events == [(2, BATCH, BATCH // 2), (3, BATCH // 2, BATCH)]


class StopsWithin(TrainerCallback):
    """Ends training after the fifth batch that ends no optimizer step."""

    batches = 0

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.batches += 1
        control.should_training_stop = self.batches == 5


def test_training_stopped_within_an_accumulation_differs_in_the_mean_loss_only() -> None:
    found = []
    for is_adaptive in (False, True):
        options = {"callbacks": [StopsWithin()], **({"micro_batch_size": BATCH} if is_adaptive else {})}
        found.append(trained(make("trainer", is_adaptive=is_adaptive, accumulation=4, options=options)))
    parameters, logs = difference(found[1], found[0])
    assert (parameters, set(logs)) == (0.0, {"train_loss"})
    assert found[1].logs[-1]["train_loss"] == found[1].logs[0]["loss"]


def test_a_training_step_outside_of_train_is_the_plain_trainers() -> None:
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


def test_evaluation_and_checkpoints_between_steps(tmp_path: Path) -> None:
    """An event's size stays over evaluation; training resumed from a checkpoint continues with the same bits."""
    common: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "dropout": 0.0}
    more = {"eval_dataset": trainers.rows("sft", 8)}
    plain = trained(make("sft", is_adaptive=False, options=more, **common))
    options = {"micro_batch_size": BATCH, **more}
    first = make("sft", options=options, **common, save_strategy="steps", save_steps=2)
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


class TwoModes(torch.optim.SGD):
    """Trains other weights than it evaluates, as a schedule-free optimizer does."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.param_groups[0]["is_training"] = False

    def train(self) -> None:
        self._switch(is_training=True)

    def eval(self) -> None:
        self._switch(is_training=False)

    @torch.no_grad()
    def _switch(self, *, is_training: bool) -> None:
        for group in self.param_groups:
            if group.get("is_training", False) is not is_training:
                group["is_training"] = is_training
                for parameter in group["params"]:
                    parameter.mul_(2.0 if is_training else 0.5)


def test_an_optimizer_that_changes_weights_between_training_and_evaluation_can_be_tried() -> None:
    common: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "accumulation": 2}
    more = {"eval_dataset": trainers.rows("trainer", 8), "optimizer_cls_and_kwargs": (TwoModes, {"lr": 0.01})}
    plain = trained(make("trainer", is_adaptive=False, options=more, **common))
    ours = make("trainer", options={"micro_batch_size": BATCH, **more}, **common)
    found = with_fault(ours, step=1, micro_step=1, place=60, rank=0)
    assert found.events[0] == (2, BATCH, BATCH // 2)
    assert found.logs[:2] == plain.logs[:2]  # training and evaluation before the event
    told = make("trainer", options={"micro_batch_size": BATCH, **more}, **common)
    assert difference(trainers.without_memory(found), trainers.told(told, found.cuts)) == (0.0, {})


def test_trainings_of_one_trainer_are_independent() -> None:
    trainer = make("sft", base=integration.AdaptiveSFTTrainer)
    trainer._batches.size = 1  # as after an error near the end of a training
    first = trained(trainer)
    assert trainer.micro_batch_size == BATCH
    plain = make("sft", is_adaptive=False)
    assert difference(first, trained(plain)) == (0.0, {})
    trainer.args.per_device_train_batch_size = 2 * BATCH
    trainer.train()
    plain.train()
    assert trainer.micro_batch_size == 2 * BATCH
    assert len(trainer.state.log_history) == len(plain.state.log_history)


# ---- events, logs and errors


class Events(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def on_memory_event(self, args: Any, state: Any, control: Any, *, event: Any, **_: Any) -> None:
        self.seen.append((state.global_step, event.after))


def test_an_event_reaches_callbacks_logs_and_the_log(caplog: pytest.LogCaptureFixture) -> None:
    events = Events()
    trainer = make("sft", options={"micro_batch_size": BATCH, "callbacks": [events]})
    with caplog.at_level(logging.WARNING, logger="torchtune_adaptive.integrations"):
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


def test_a_failed_training_leaves_nothing_on_the_model() -> None:
    trainer = make("trainer", options={"micro_batch_size": 1})
    with pytest.raises(NothingFitsError, match="not even one row fits: in step 1 rank 0"):
        with_fault(trainer, step=0, micro_step=0, place=40, rank=0)
    assert not trainer.model._forward_hooks


def _mistaken_once() -> trainers.Around:
    """The user's own mistake in the second micro-step of a training."""
    mistakes = ["the user's own"]

    def around(number: int, run: Any) -> Any:
        if number and mistakes:
            raise KeyError(mistakes.pop())
        return run()

    return around


def test_a_training_after_an_error_of_ones_own_equals_a_new_one() -> None:
    """Also in its metrics: what the failed step has gathered is dropped."""
    common: dict[str, Any] = {"accumulation": 2, "dropout": 0.0}
    trainer = make("sft", options={"micro_batch_size": BATCH}, **common)
    with pytest.raises(KeyError):
        trainers.trained_around(trainer, _mistaken_once())
    parameters, logs = difference(trained(trainer), trained(make("sft", is_adaptive=False, **common)))
    assert parameters == 0
    assert {*logs} <= {"total_flos"}  # of both trainings


def test_a_step_that_the_caller_skips_leaves_no_late_values() -> None:
    trainer = make("sft", options={"micro_batch_size": BATCH}, accumulation=2)
    run_step, skipped = trainer.training_step, []

    def skipping(*args: Any) -> torch.Tensor:
        try:
            return run_step(*args)
        except KeyError as error:
            skipped.append(error)
            return torch.zeros(())

    trainer.training_step = skipping
    trainers.trained_around(trainer, _mistaken_once())
    assert len(skipped) == 1
    assert trainer.state.global_step == trainers.STEPS


def test_a_training_after_a_prediction_under_fsdp2_equals_the_plain_trainers() -> None:
    assert run_on_ranks(trainers.second_training_on_rank, 2) == [(0.0, {})] * 2


def test_errors_are_raised_on_all_ranks() -> None:
    one, other = run_on_ranks(trainers.errors_on_rank, 2)
    assert one == other
    assert [text[:60] for text in one] == [
        "InputError: A model that `DistributedConfig` has sharded can",
        "NothingFitsError: not even one row fits: in step 2 rank 1 ra",
        "CannotCutError: Samples must not be cut into micro-batches: ",
        "after step 1",
    ]


def test_gathers_in_losses_are_refused_on_all_ranks_and_metrics_equal_the_plain_trainers() -> None:
    one, other = run_on_ranks(trainers.gathers_on_rank, 2)
    assert one == other
    refusals, differs = one
    assert len(refusals) == len(trainers.GATHERS_IN_LOSS)
    assert all("but the loss depends on one: use this process's own" in text for text in refusals)
    assert differs == (0.0, {})


# ---- refusals


def test_trials_of_a_hyperparameter_search_equal_the_plain_trainers_on_two_ranks() -> None:
    """Each has another accelerator, and there is no model between them."""
    assert run_on_ranks(trainers.trials_on_rank, 2) == [(0.0, {})] * 2


def test_what_refusals_look_at_has_these_names() -> None:
    """Of what cannot be had on a CPU."""
    trainer = make("sft", is_adaptive=False)
    assert {"_is_vlm", "padding_free"} <= {*vars(trainer)}  # the second one makes batches flat
    assert "activation_offloading" in vars(trainer.args)
    assert {"DEEPSPEED", "MEGATRON_LM", "XLA"} <= {one.value for one in DistributedType}


# ---- losses


class Regression(Trainer):
    """A user's own trainer, whose loss is a mean over samples."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class Summed(Trainer):
    """A user's own trainer, whose loss is a sum over samples, of which transformers takes the mean over batches."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        return (model(**{**inputs, "labels": None}).logits.squeeze(1) - inputs["labels"]).square().sum() * 1e-3


def regression(*, options: dict[str, Any], **args: Any) -> Any:
    """A trainer on rows with one number each, whose loss does not depend on the number of labels."""

    def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
        batch = trainers.collate(samples)
        return {**batch, "labels": torch.tensor([float(len(sample["input_ids"])) for sample in samples])}

    model = LlamaForSequenceClassification.from_pretrained(trainers.saved_model("reward"), num_labels=1)
    model.config.problem_type = "regression"
    return make("trainer", options={"data_collator": collate, "model": model, **options}, **args)


def assert_trains_as_plain(make_trainer: Any, *, small: int = 1) -> None:
    """Whole batches train as the plain trainer's, bit for bit; smaller micro-batches differ by rounding."""
    common: dict[str, Any] = {"accumulation": 2, "dropout": 0.0, "optim": "sgd"}
    plain = trained(make_trainer(is_adaptive=False, options={}, **common))
    assert difference(trained(make_trainer(options={"micro_batch_size": BATCH}, **common)), plain) == (0.0, {})
    parameters, logs = difference(trained(make_trainer(options={"micro_batch_size": small}, **common)), plain)
    assert parameters < 1e-6
    assert max(logs.values(), default=0) < 1e-2


@pytest.mark.parametrize("accepts_num_items", [False, True])
@pytest.mark.parametrize("base", [Regression, Summed])
def test_losses_that_are_not_divided_by_labels_equal_the_plain_trainers(base: type, accepts_num_items: bool) -> None:
    def make_one(**options: Any) -> Any:
        trainer = regression(base=base, **{**options, "learning_rate": 1e-3})
        trainer.model_accepts_loss_kwargs = accepts_num_items
        return trainer

    assert_trains_as_plain(make_one, small=3)


class BackwardOfItsOwn(Regression):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        loss = self.compute_loss(model, inputs)
        loss.backward()
        return loss.detach()


MIXED = "must not be cut into micro-batches: the loss or a layer mixes the samples"
NO_SUM = "Results of micro-steps must add up"
BY_NAME = r"`loss_type` \['sft'\] mixes them"
A_MEAN = "the loss is a mean over the samples of a micro-batch"


def assert_needs_whole_batches(make_trainer: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Whole batches train as the plain trainer's, without recovery; smaller micro-batches are refused."""
    plain = trained(make_trainer(is_adaptive=False, options={}))
    whole = make_trainer(options={"micro_batch_size": BATCH})
    assert difference(trained(whole), plain) == (0.0, {})
    assert "An out-of-memory error will end the run" in caplog.text
    for size in (1, BATCH - 1):
        smaller = make_trainer(options={"micro_batch_size": size})
        before = {name: one.clone() for name, one in smaller.model.state_dict().items()}
        with pytest.raises(CannotCutError, match=f"{MIXED}|{NO_SUM}|{BY_NAME}|{A_MEAN}"):
            smaller.train()
        assert all(torch.equal(one, before[name]) for name, one in smaller.model.state_dict().items())


def test_a_mean_over_samples_that_cannot_be_scaled_needs_whole_batches(caplog: pytest.LogCaptureFixture) -> None:
    assert_needs_whole_batches(lambda **more: regression(base=BackwardOfItsOwn, **more), caplog)


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


@pytest.mark.parametrize(("weight", "dtype"), [(5e-4, torch.float32), (4e-3, torch.bfloat16)])
def test_a_term_of_the_loss_that_every_micro_batch_would_count_needs_whole_batches(
    weight: float, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    kind = type("Undivided", (Regularized,), {"is_divided": False, "weight": weight})

    def make_one(options: dict[str, Any], **more: Any) -> Any:
        return make("trainer", base=kind, options={"model": trainers.model("trainer").to(dtype), **options}, **more)

    assert_needs_whole_batches(make_one, caplog)


def test_a_term_divided_by_the_number_of_batches_equals_the_plain_trainers() -> None:
    kind = type("Divided", (Regularized,), {"weight": 0.1})
    assert_trains_as_plain(lambda **more: make("trainer", base=kind, **more))


def test_a_mean_over_tokens_needs_whole_batches(caplog: pytest.LogCaptureFixture) -> None:
    assert_needs_whole_batches(lambda **more: make("trainer", base=MeanOverTokens, **more), caplog)


def test_answers_outside_of_their_rows_need_whole_batches(caplog: pytest.LogCaptureFixture) -> None:
    """The loss is a mean over the samples whose answers are within their rows."""

    def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
        batch = trainers.collate(samples)
        del batch["labels"]
        starts = torch.tensor([90, *range(len(samples) - 1)])
        return {**batch, "start_positions": starts, "end_positions": starts + 1}

    def make_one(options: dict[str, Any], **more: Any) -> Any:
        sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
        torch.manual_seed(0)
        model = BertForQuestionAnswering(BertConfig(**sizes, num_hidden_layers=1))
        return make("trainer", options={"data_collator": collate, "model": model, **options}, **more)

    assert_needs_whole_batches(make_one, caplog)


class Masked(Regression):
    """Masks tokens with NumPy's random numbers, as speech models do in training."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        kept = torch.from_numpy(numpy.random.rand(*inputs["input_ids"].shape) < 0.7)
        return super().compute_loss(model, {**inputs, "input_ids": inputs["input_ids"] * kept}, *args, **kwargs)


def test_a_mean_with_random_numbers_that_cannot_be_fixed_needs_whole_batches(caplog: pytest.LogCaptureFixture) -> None:
    def make_one(**options: Any) -> Any:
        trainer = regression(base=Masked, **options)
        trainer.model_accepts_loss_kwargs = True  # so that the loss is not divided by the number of batches
        return trainer

    assert_needs_whole_batches(make_one, caplog)
    assert "a micro-step draws random numbers that cannot be fixed. Results of micro-steps must add up" in caplog.text


def rows_of(*lengths: int) -> list[dict[str, list[int]]]:
    chance = random.Random(0)
    return [{"input_ids": [chance.randint(3, 60) for _ in range(length)]} for length in lengths]


def test_a_mean_over_tokens_is_found_out_in_a_later_step_if_the_rows_of_the_first_are_equally_long() -> None:
    trainer = make(
        "trainer",
        base=MeanOverTokens,
        train_sampling_strategy="sequential",
        options={"train_dataset": rows_of(*[9] * BATCH, *range(3, 99)), "micro_batch_size": 2},
    )
    with pytest.raises(CannotCutError, match=MIXED):
        trainer.train()
    assert trainer.state.global_step == 1


class LastToken(Trainer):
    """A user's own trainer, whose loss looks at the last token, which is padding in joined batches."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        labels = inputs.pop("labels")
        return nn.functional.cross_entropy(model(**inputs).logits[:, -1], labels[:, -1].clamp(min=0))


class IgnoresZero(Trainer):
    """A user's own trainer, whose labels are padded with 0: -100 is no class."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        labels = inputs.pop("labels")
        logits = model(**inputs).logits[:, :-1]
        losses = nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
        return losses.view(len(labels), -1).sum(dim=1).mean()


def with_zeros(samples: list[Any]) -> dict[str, torch.Tensor]:
    batch = trainers.collate(samples)
    return {**batch, "labels": batch["labels"].clamp(min=0)}


def with_types(samples: list[Any]) -> dict[str, torch.Tensor]:
    """A column that only some batches have."""
    batch = trainers.collate(samples)
    is_long = batch["input_ids"].shape[1] > 10
    return {**batch, "token_type_ids": batch["input_ids"] % 2} if is_long else batch


class Types(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *_: Any, num_items_in_batch: Any = None, **__: Any) -> Any:
        scale = 1 + inputs.pop("token_type_ids", torch.zeros_like(inputs["input_ids"]))[..., None]
        embedded = model.get_input_embeddings()(inputs.pop("input_ids")) * scale
        return model(inputs_embeds=embedded, **inputs, num_items_in_batch=num_items_in_batch).loss


@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize(
    ("base", "collate"), [(LastToken, trainers.collate), (IgnoresZero, with_zeros), (Types, with_types)]
)
def test_batches_of_other_padding_or_columns_train_as_the_plain_trainers(
    base: type, collate: Any, is_reversed: bool
) -> None:
    """Those of the first step, or of the second, are equally long."""
    lengths = [8, 7, 5, 8, 8, 6, 8, 8, 30, 4, 3, 4, 5, 4, 3, 2]
    assert_joined_equals_plain(base, lengths[::-1] if is_reversed else lengths, data_collator=collate)


def assert_joined_equals_plain(base: type, lengths: list[int], *, tells_more: bool = True, **options: Any) -> None:
    common: dict[str, Any] = {"accumulation": 2, "dropout": 0.0, "optim": "sgd", "max_steps": 2}
    common |= {"base": base, "train_sampling_strategy": "sequential"}
    options |= {"train_dataset": rows_of(*lengths)}
    plain = trained(make("trainer", is_adaptive=False, options=options, **common))
    trainer = make("trainer", options={**options, "micro_batch_size": 2 * BATCH}, **common)
    if not tells_more:
        trainer._batches.tells_more = lambda _: False
    parameters, logs = difference(trained(trainer), plain)
    assert parameters < 1e-6
    assert max(logs.values(), default=0) < 1e-4


def test_rows_of_several_lengths_are_not_joined_while_no_trial_has_seen_padding() -> None:
    assert_joined_equals_plain(LastToken, [8] * 2 * BATCH + [30, 4, 3, 4, 5, 4, 3, 2], tells_more=False)


def test_a_training_resumed_before_a_short_step_searches_after_it(tmp_path: Path) -> None:
    """17 batches of one row: the third step of an epoch has one only."""

    class Stops(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == 2

    def make_one(callbacks: Any) -> Any:
        options = {"memory_limit": "64MiB", "train_dataset": rows_of(*range(3, 20)), "callbacks": callbacks}
        one = make("trainer", accumulation=8, options=options, max_steps=4, per_device_train_batch_size=1, save_steps=1)
        one.args.output_dir, one.args.save_strategy = str(tmp_path), "steps"
        return one

    make_one([Stops()]).train()
    resumed = make_one([])
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert (resumed.state.global_step, resumed.micro_batch_size) == (4, 8)


def test_a_preference_loss_that_is_no_mean_over_pairs_needs_whole_batches(caplog: pytest.LogCaptureFixture) -> None:
    assert_needs_whole_batches(lambda **more: make("dpo", loss_type=["sigmoid", "sft"], **more), caplog)
    assert "`loss_type` ['sft'] mixes them" in caplog.text  # whatever two samples show


def mixture_of_experts() -> Any:
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads, output_router_logits=True, router_aux_loss_coef=0.01))


def test_the_auxiliary_loss_of_experts_equals_trls_and_is_refused_where_nothing_divides_it() -> None:
    found = []
    for is_adaptive in (False, True):
        options = {"model": mixture_of_experts(), **({"micro_batch_size": BATCH} if is_adaptive else {})}
        found.append(trained(make("sft", is_adaptive=is_adaptive, accumulation=2, options=options)))
    assert "aux_loss" in found[0].logs[0]
    assert difference(*found) == (0.0, {})
    with pytest.raises(InputError, match=f"{MIXED}|{NO_SUM}"):
        make("trainer", options={"micro_batch_size": 2, "model": mixture_of_experts()}).train()


def loss_sum(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    logits = outputs["logits"][:, :-1].flatten(0, 1)
    return nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


@pytest.mark.parametrize(
    ("given", "args"), [({"compute_loss_func": loss_sum}, {}), ({}, {"label_smoothing_factor": 0.1})]
)
def test_a_loss_function_and_label_smoothing_equal_the_plain_trainers(
    given: dict[str, Any], args: dict[str, Any]
) -> None:
    assert_trains_as_plain(lambda options, **more: make("trainer", options={**given, **options}, **args, **more))


# ---- the search


@pytest.mark.parametrize("kind", ["trainer", "packed", "lora", "dpo"])
def test_a_search_leaves_no_trace(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    found: dict[str, Any] = {}
    trainer = make(kind, options={"memory_limit": LIMITS[kind]}, accumulation=2)
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
    with caplog.at_level(logging.INFO, logger="torchtune_adaptive.integrations"):
        ours = trained(trainer)
    assert found == {"is equal": True, "gradients": []}
    assert [record.message[:20] for record in caplog.records] == ["The micro-batch has "]
    told = make(kind, options={"micro_batch_size": trainer.micro_batch_size}, accumulation=2)
    assert 1 <= trainer.micro_batch_size <= BATCH
    assert difference(ours, trained(told)) == (0.0, {})


def timed(trainer: Any, monkeypatch: pytest.MonkeyPatch, *, of_layer: float) -> Any:
    """The trainer, whose micro-steps take a second of a fake clock, and more for each layer that is checkpointed."""
    now_s, micro_step = [0.0], trainer._micro_step
    monkeypatch.setattr(throughput, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))

    def with_clock(*args: Any) -> Any:
        checkpointed = sum(getattr(one, "gradient_checkpointing", False) for one in layers(trainer))
        now_s[0] += 1.0 + of_layer * checkpointed
        return micro_step(*args)

    trainer._micro_step = with_clock
    return trainer


def layers(trainer: Any) -> Any:
    return trainer.model.model.layers


@pytest.mark.parametrize(
    ("limit", "of_layer", "expected"),
    [
        ("64MiB", 0.3, (2 * BATCH, 0)),  # no checkpointing is faster, and fits
        ("64MiB", 0.0, (2 * BATCH, 2)),  # it is not faster: what the arguments say stays
        ("1MiB", 0.0, None),
    ],
)
def test_speed_chooses_size_and_checkpointing_and_trains_the_same(
    limit: str, of_layer: float, expected: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    common: dict[str, Any] = {"accumulation": 2, "dropout": 0.0, "gradient_checkpointing": True}
    used = []

    class Watch(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            used.append((trainer.micro_batch_size, sum(one.gradient_checkpointing for one in layers(trainer))))

    options = {"memory_limit": limit, "speed": "auto", "callbacks": [Watch()]}
    trainer = timed(make("trainer", options=options, **common), monkeypatch, of_layer=of_layer)
    with caplog.at_level(logging.INFO, logger="torchtune_adaptive.integrations"):
        ours = trained(trainer)
    size, checkpointed = used[0]
    assert used == [used[0]] * trainers.STEPS
    assert expected is None or used[0] == expected
    assert f"The fastest is {size} samples, " in caplog.text
    assert all(one.gradient_checkpointing for one in layers(trainer)), "as it was, after the training"
    usual = common | {"gradient_checkpointing": checkpointed > 0}
    told = trained(make("trainer", options={"micro_batch_size": size}, **usual))
    assert difference(ours, told) == (0.0, {}) or checkpointed == 1


def test_more_is_checkpointed_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes as long as it has micro-steps."""
    rows = [{"input_ids": [3 + number % 60 for number in range(60)]} for _ in range(32)]
    options = {"train_dataset": rows, "memory_limit": "1600KiB"}
    usual = make("trainer", options=options, accumulation=2)
    usual.train()
    trainer = timed(make("trainer", options=options | {"speed": "auto"}, accumulation=2), monkeypatch, of_layer=0.0)
    trainer.train()
    assert trainer.micro_batch_size > usual.micro_batch_size
    assert not any(one.gradient_checkpointing for one in layers(trainer)), "as it was, after the training"


def test_some_layers_stay_checkpointed_if_a_loss_switches_all_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """DPO switches checkpointing off for the reference, and then on in all layers."""
    alternatives, used = checkpointing.alternatives, []

    def one_in_four(model: Any) -> Any:
        (found,) = (one for one in alternatives(model) if one.words == "one layer in 4 checkpointed")
        return [dataclasses.replace(found, needs_less=False)]

    monkeypatch.setattr(checkpointing, "alternatives", one_in_four)
    trainer = make("dpo", options={"memory_limit": "64MiB", "speed": "auto"}, accumulation=2)

    def note(*_: Any) -> None:
        if torch.is_grad_enabled():
            used.append(sum(one.gradient_checkpointing for one in layers(trainer)))

    trainer.model.register_forward_pre_hook(note)
    trainer.train()
    assert {*used[used.index(1) :]} == {1}  # before that, the trial of batches that are joined


def test_more_is_checkpointed_where_not_one_row_fits_as_it_is() -> None:
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 8}
    rows = [{"input_ids": [3 + number % 60 for number in range(100)]} for _ in range(16)]

    def run(limit: str, **options: Any) -> Any:
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
        options |= {"model": model, "train_dataset": rows, "memory_limit": limit}
        trainer = make("trainer", options=options, optim="sgd")
        trainer.train()
        return trainer

    with pytest.raises(NothingFitsError):
        run("900KiB")
    trainer = run("900KiB", speed="auto")
    assert trainer.state.global_step == trainers.STEPS
    assert trainer.memory_events == []
    with pytest.raises(NothingFitsError, match="not even one row fits"):
        run("300KiB", speed="auto")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"memory_limit": "24G"}, "but is '24G' instead; did you mean `24GiB`"),
        ({"speed": "fast"}, "`speed` must be one of auto, but is 'fast' instead"),
        ({"speed": "auto", "micro_batch_size": 2}, "`speed` chooses the micro-batch itself"),
        ({"speed": "auto"}, "`speed` needs `memory_limit` on a cpu"),
    ],
)
def test_a_limit_and_a_speed_that_cannot_be_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        make("trainer", options=options).train()


def test_ranks_choose_the_same_by_speed() -> None:
    one, other = run_on_ranks(trainers.speed_on_rank, 2, "load")
    assert one == other
    assert one[0] in (BATCH, 2 * BATCH)
    assert one[2] == (0.0, {})


@pytest.mark.parametrize("sharding", ["", "load"])
def test_ranks_search_together_if_one_has_less_memory(sharding: str) -> None:
    one, other = run_on_ranks(trainers.searches_on_rank, 2, sharding)
    assert one == other
    assert [(events, differs) for _, events, differs in one] == [([], (0.0, {}))] * 2
    assert one[0][0] < BATCH


def test_ranks_search_together_if_they_have_found_different_numbers_of_batches() -> None:
    assert run_on_ranks(trainers.uneven_searches_on_rank, 2) == [(BATCH, [])] * 2


def test_ranks_find_the_same_size_if_their_batches_are_not_equally_large() -> None:
    assert run_on_ranks(trainers.unequal_batches_on_rank, 2) == [2 * BATCH] * 2


def test_a_cpu_without_a_limit_is_not_searched(caplog: pytest.LogCaptureFixture) -> None:
    trainer = make("trainer")
    with caplog.at_level(logging.INFO, logger="torchtune_adaptive.integrations"):
        trainer.train()
    assert [record.message for record in caplog.records] == [
        "The micro-batch is `per_device_train_batch_size` (4): a cpu needs `memory_limit` for a search."
    ]


class Shuffles:
    """A large object whose bound method collates, with a generator and a counter of its own."""

    def __init__(self) -> None:
        self.generator, self.batches = torch.Generator().manual_seed(1), 0

    def collate(self, samples: list[Any]) -> dict[str, torch.Tensor]:
        self.batches += 1
        batch = trainers.collate(samples)
        ignored = torch.rand(batch["labels"].shape, generator=self.generator) < 0.02 * self.batches
        return {**batch, "labels": batch["labels"].masked_fill(ignored, -100)}


def test_a_search_leaves_a_collator_with_state_and_persistent_workers_alone() -> None:
    args: dict[str, Any] = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    args["train_sampling_strategy"] = "group_by_length"

    def run(**options: Any) -> Any:
        options["data_collator"] = Shuffles().collate
        trainer = make("trainer", options=options, accumulation=2, **args)
        return trained(trainer), trainer.micro_batch_size

    searched, size = run(memory_limit="64MiB")
    told, _ = run(micro_batch_size=size)
    assert size == 2 * BATCH
    assert difference(searched, told) == (0.0, {})


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


def test_sizes_of_a_search_last_if_memory_follows_labels() -> None:
    lengths = [(4, 1)] + [(60, 4)] * 16 + [(48, 44)] * 15
    sizes: dict[str, Any] = {"vocab_size": 2000, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
    options = {**trainers.with_prompts(lengths), "model": model, "memory_limit": "10MiB"}
    args: dict[str, Any] = {"per_device_train_batch_size": 32, "remove_unused_columns": False}
    trainer = make("trainer", base=OnlyLabels, options=options, **args)
    assert trained(trainer).events == []
    assert 1 < trainer.micro_batch_size < 32


def test_each_training_searches_with_its_own_data() -> None:
    options = {**trainers.with_prompts([(40, 39)] * 32), "memory_limit": "900KiB"}
    trainer = make("trainer", options=options, remove_unused_columns=False, per_device_train_batch_size=16)
    sizes = []
    for rows in ([(40, 39)] * 32, [(8, 7)] * 32, [(8, 7)] * 3):
        trainer.train_dataset = trainers.with_prompts(rows)["train_dataset"]
        trainer.train()
        sizes.append(trainer.micro_batch_size)
    long, short, few = sizes
    assert long < short <= 16
    assert few == 3
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


# ---- names


def test_the_ready_made_classes_have_dotted_names() -> None:
    for name in ("AdaptiveTrainer", "AdaptiveSFTTrainer", "AdaptiveDPOTrainer", "AdaptiveRewardTrainer"):
        found = getattr(integration, name)
        assert found is getattr(integration, name)
        assert (found.__module__, found.__qualname__) == ("torchtune_adaptive.integrations.transformers", name)
        assert found.__mro__[2].__name__ == name.removeprefix("Adaptive")


def test_without_trl_its_classes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.delitem(vars(integration), "AdaptiveSFTTrainer", raising=False)
    with pytest.raises(ImportError, match="`AdaptiveSFTTrainer` needs the package `trl`, which is not installed"):
        integration.AdaptiveSFTTrainer  # noqa: B018


def needs_only_installed_packages(code: str) -> bool:
    modules = [one.module for one in ast.walk(ast.parse(code)) if isinstance(one, ast.ImportFrom) and one.module]
    return all(importlib.util.find_spec(name.split(".")[0]) for name in modules)


def test_the_code_of_the_documents_runs() -> None:
    like, sft = make("trainer", is_adaptive=False), make("sft", is_adaptive=False)
    names = {"model": trainers.model("trainer"), "args": like.args, "rows": like.train_dataset, "__name__": __name__}
    names |= {"collate": trainers.collate, "sft_args": sft.args, "texts": trainers.rows("sft", 32)}
    names |= {"tokenizer": trainers.tokenizer()}
    trained_steps = []
    for block in [block for document in DOCUMENTS for block in blocks(document, "py")]:
        if "integrations.transformers" in block.text and needs_only_installed_packages(block.text):
            found = dict(names)
            exec(compile(block.text, str(block), "exec"), found)
            trained_steps += [found["trainer"].state.global_step] if "trainer" in found else []
    assert trained_steps
    assert {*trained_steps} == {trainers.STEPS}
