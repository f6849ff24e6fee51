"""A trainer built from a recipe's parts searches and recovers without a recipe. `test_trainer` tests its loop."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler
from torchtune.modules.loss import ForwardKLLoss
from torchtune.training import create_optim_in_bwd_wrapper

from tests.support.recipe_parts import IGNORED, recipe_parts
from tests.support.recipe_runs import RecordingLogger
from tests.support.run_logs import events_in
from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.engine.memory.devices import meter_of_run
from torchtune_adaptive.engine.memory.phases import Phases
from torchtune_adaptive.errors import CannotCutError, InputError
from torchtune_adaptive.settings import AdaptiveSettings
from torchtune_adaptive.testing import Fault, wrap_micro_steps
from torchtune_adaptive.training import assembly
from torchtune_adaptive.training.assembly import build_trainer
from torchtune_adaptive.training.batch.row_format import Row
from torchtune_adaptive.training.checkpoints.folder import Checkpoint, CheckpointFolder, write_state
from torchtune_adaptive.training.distillation import Distillation
from torchtune_adaptive.training.objectives import NextToken
from torchtune_adaptive.training.optimizers import OptimizerInBackward, OptimizerPolicy, OptimizerStep
from torchtune_adaptive.training.run_state import AdaptiveState
from torchtune_adaptive.training.train_step import TrainStep
from torchtune_adaptive.training.trainer import Trainer

CPU = torch.device("cpu")
VOCAB, WIDTH = 32, 16
LENGTHS = [3, 8, 5, 2, 7, 4, 6, 8, 2, 3, 5, 8]
SEARCH: dict[str, Any] = {"use_maximum_batch_size": True, "memory_limit_bytes": 40_000, "margin": 0.0}


class TinyModel(nn.Module):
    max_seq_len = 8

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.output = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.output(self.embedding(tokens))


def collate(rows: Sequence[Row]) -> dict[str, torch.Tensor]:
    longest = max(len(row["tokens"]) for row in rows)
    padded = [row["tokens"] + [0] * (longest - len(row["tokens"])) for row in rows]
    labels = [row["labels"] + [IGNORED] * (longest - len(row["labels"])) for row in rows]
    return {"tokens": torch.tensor(padded), "labels": torch.tensor(labels)}


class Recipe:
    """The parts that a recipe would provide; it keeps the states that are saved."""

    def __init__(self, directory: Path, *, epochs: range = range(2)) -> None:
        (directory / "checkpoints").mkdir(parents=True, exist_ok=True)
        self.model, self.logger = TinyModel(), RecordingLogger()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.states: list[AdaptiveState] = []
        self.stop_requested: Callable[[], bool] = lambda: False
        generator = torch.Generator().manual_seed(0)
        tokens = [torch.randint(1, VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]
        self.parts = recipe_parts(
            directory / "output",
            self.step(OptimizerStep(self.model, [self.optimizer], ranks=1, max_grad_norm=1.0)),
            [{"tokens": row, "labels": row} for row in tokens],
            shuffle=True,
            scheduler=self.build_scheduler(12, -1),
            build_scheduler=self.build_scheduler,
            tokenizer_max_seq_len=8,
            epochs=epochs,
            metric_logger=self.logger,
            checkpoints=CheckpointFolder(directory / "checkpoints"),
            config={"optimizer._component_": "torch.optim.AdamW"},
            save=lambda epoch, state: self.states.append(state),
        )

    def step_in_backward(self) -> None:
        """Use an optimizer for each parameter, as torchtune's ``optimizer_in_bwd`` does."""
        wrapper = create_optim_in_bwd_wrapper(self.model, {one: AdamW([one]) for one in self.model.parameters()})
        step = self.step(OptimizerInBackward(self.model, wrapper, ranks=1, normalizes=True))
        why = "steps in backward"
        self.parts = replace(self.parts, step=step, scheduler=None, why_unrecoverable=why)

    def build_scheduler(self, num_training_steps: int, last_epoch: int) -> Any:
        return LambdaLR(self.optimizer, lambda step: 1 - step / num_training_steps, last_epoch)

    def step(self, policy: OptimizerPolicy, *, limit_bytes: int | None = None) -> TrainStep:
        objective = NextToken(
            self.model, nn.CrossEntropyLoss(ignore_index=IGNORED), nullcontext(), weight_depends_on_cut=False
        )
        meter = meter_of_run([self.model], policy.optimizers, CPU, limit_bytes)
        phases = Phases([self.model], meter)
        return TrainStep(
            [self.model],
            objective,
            policy,
            collate=collate,
            device=CPU,
            phases=phases,
            meter=meter,
            stop_requested=lambda: self.stop_requested(),
        )

    def trainer(self, **settings: Any) -> Trainer:
        checked = AdaptiveSettings(**settings)
        step = self.step(self.parts.step.policy, limit_bytes=checked.memory_limit_bytes)
        step = replace(step, objective=self.parts.step.objective)
        return build_trainer(replace(self.parts, step=step), checked, Consensus())


def train(recipe: Recipe, **settings: Any) -> list[dict[str, float]]:
    recipe.trainer(**settings).train()
    return recipe.logger.steps


def figures(steps: list[dict[str, float]], *names: str) -> list[tuple[float, ...]]:
    return [tuple(step[name] for name in names) for step in steps]


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


def history(directory: Path) -> list[dict[str, Any]]:
    return events_in(directory / "output", "sizes")


def test_what_a_step_takes_beside_weights_gradients_and_state_is_metered(tmp_path: Path) -> None:
    recipe = Recipe(tmp_path)
    steps = train(recipe, memory_limit_bytes=2**20)
    of_weights = sum(one.nbytes for one in recipe.model.parameters())
    assert all(step["peak_memory_bytes"] > 4 * of_weights for step in steps)


def test_a_known_leak_is_named_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(assembly, "leak_warning", lambda _: "steps leak")
    Recipe(tmp_path).trainer()
    assert "steps leak" in caplog.messages


def test_a_search_restores_all_state_and_training_uses_the_size_found(tmp_path: Path) -> None:
    searched, given = Recipe(tmp_path / "searched"), Recipe(tmp_path / "given")
    torch.manual_seed(1)
    random_state = torch.get_rng_state()
    trainer = searched.trainer(**SEARCH)
    assert torch.equal(torch.get_rng_state(), random_state)
    result = trainer.sizes.result
    assert result is not None
    assert 1 < result.batch_size < len(LENGTHS)
    assert same_weights(searched.model, TinyModel())
    assert trainer.sizes.seq_len == 8
    assert trainer.step.meter is not None
    assert trainer.step.meter.limit_bytes == SEARCH["memory_limit_bytes"]
    trainer.train()
    scheduler = given.build_scheduler(2 * len(LENGTHS) // result.batch_size, -1)
    given.parts = replace(given.parts, batch_size=result.batch_size, scheduler=scheduler)
    steps = train(given)
    names = ("step", "loss", "grad_norm", "batch_size")
    assert figures(searched.logger.steps, *names) == figures(steps, *names)
    assert same_weights(searched.model, given.model)
    sizes = {"batch_size": result.batch_size, "samples_per_step": result.batch_size, "samples_per_step_in_config": 2}
    entry = {"step": 1, "epoch": 0, "reason": "linear_extrapolation search"} | sizes
    assert history(tmp_path / "searched") == [entry]


@pytest.mark.parametrize(
    ("micro_steps", "rule", "advice"),
    [
        (1, "none", ": adaptive.global_batch_size=2 keeps 2, adaptive.lr_scaling adjusts the learning rate."),
        (3, "sqrt", ": adaptive.global_batch_size=6 keeps 6."),
        (1, "in backward", ", for which its learning rate was chosen."),
    ],
)
def test_a_search_that_changes_the_batch_says_how_to_keep_it(
    micro_steps: int, rule: Any, advice: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = Recipe(tmp_path)
    recipe.parts = replace(recipe.parts, micro_steps=micro_steps)
    if rule == "in backward":
        recipe.step_in_backward()
        rule = "none"
    found = recipe.trainer(**SEARCH, max_batch_size=4, lr_scaling=rule).loader.batch_size
    assert found > 2
    (message,) = (one for one in caplog.messages if " but had " in one)
    samples = f"An optimizer step has {found * micro_steps} samples, but had {2 * micro_steps} in the config"
    assert message == samples + advice


@pytest.mark.parametrize(
    "settings", [{"max_batch_size": 2}, {"global_batch_size": 6}], ids=["the config's size found", "a global batch"]
)
def test_a_search_that_keeps_the_batch_says_nothing_of_it(
    settings: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = Recipe(tmp_path)
    recipe.trainer(**SEARCH | settings)
    assert not any("in the config" in message for message in caplog.messages)
    assert "samples_per_step_in_config" not in history(tmp_path)[0]


def test_after_an_error_in_the_first_step_what_fitted_in_the_search_is_tried_again(tmp_path: Path) -> None:
    recipe = Recipe(tmp_path, epochs=range(1))
    trainer = recipe.trainer(**SEARCH)
    found = trainer.micro_batches.limit.size
    assert trainer.recoverable.backoff.largest_fitted >= found
    fault = Fault(5)

    def fails_once(number: int, run: Any) -> Any:
        with fault if not (fault.count or number) else nullcontext():
            return run()

    wrap_micro_steps(trainer.recoverable, fails_once)
    trainer.train()
    sizes = [event.after for event in trainer.recoverable.events]
    assert fault.has_struck
    assert sizes == [found // 2, found]


def test_the_peak_of_training_is_not_that_of_the_dry_run(tmp_path: Path) -> None:
    peaks = []
    for recovers in (True, False):
        recipe = Recipe(tmp_path / str(recovers), epochs=range(1))
        trainer = recipe.trainer(oom_recovery=recovers, memory_limit_bytes=2**30)
        assert trainer.step.meter is not None
        before = trainer.step.meter.peak_bytes
        trainer.train()
        assert before < trainer.step.meter.peak_bytes
        peaks.append(trainer.step.meter.peak_bytes)
    assert peaks[0] == peaks[1]


class RowMean(nn.Module):
    """A user's own loss: a mean over the tokens of all rows, or of a function of them."""

    ignore_index = IGNORED

    def __init__(self, power: int) -> None:
        super().__init__()
        self.power = power

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, labels, ignore_index=IGNORED) ** self.power


def with_own_loss(directory: Path, power: int, *, as_stock: bool) -> Recipe:
    """A recipe with a ``RowMean``, whose objective counts tokens ``as_stock`` or does not depend on the cut."""
    recipe = Recipe(directory)
    of_training, of_trial = (
        NextToken(recipe.model, RowMean(power), nullcontext(), weight_depends_on_cut=depends)
        for depends in (as_stock, False)
    )
    step = replace(recipe.parts.step, objective=of_training)
    recipe.parts = replace(recipe.parts, step=step, objective_to_try=of_trial)
    return recipe


@pytest.mark.parametrize("as_stock", [True, False])
def test_a_loss_of_the_users_own_that_adds_up_may_be_cut(as_stock: bool, tmp_path: Path) -> None:
    recipe = with_own_loss(tmp_path, power=1, as_stock=as_stock)
    trainer = recipe.trainer(global_batch_size=None if as_stock else 5)
    assert trainer.recoverable.recovers
    trainer.train()  # also with an objective that would not pass the trial
    assert trainer.step.objective is recipe.parts.step.objective


def test_a_loss_of_the_users_own_that_mixes_rows_is_never_cut(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(CannotCutError, match="the loss or a layer mixes the samples"):
        with_own_loss(tmp_path, power=2, as_stock=False).trainer(global_batch_size=5)
    trainer = with_own_loss(tmp_path, power=2, as_stock=True).trainer()
    assert not trainer.recoverable.recovers
    assert "the loss or a layer mixes the samples" in caplog.text
    trainer.train()


def test_distillation_by_torchtunes_keys_is_the_same_after_an_out_of_memory_error(tmp_path: Path) -> None:
    """torchtune sums means of micro-batches: each part of one counts by its tokens."""
    steps = {}
    for name in ("usual", "halved"):
        recipe = Recipe(tmp_path / name)
        teacher = TinyModel()
        rows = [[number + 1] * length for number, length in enumerate((8, 2, 3, 4))]
        dataset: Any = [{"tokens": row, "labels": row} for row in rows]
        losses = nn.CrossEntropyLoss(ignore_index=IGNORED), ForwardKLLoss(ignore_index=IGNORED)
        objective = Distillation(recipe.model, teacher, *losses, ratio=0.5, means_add_up=True)
        step = replace(recipe.parts.step, models=[recipe.model, teacher], objective=objective)
        sampler = StatefulDistributedSampler(dataset, num_replicas=1, rank=0, shuffle=False)
        recipe.parts = replace(recipe.parts, step=step, sampler=sampler, max_steps_per_epoch=1, epochs=range(1))
        trainer = recipe.trainer()
        if name == "halved":
            trainer.micro_batches.resize(1)
        trainer.train()
        (steps[name],) = recipe.logger.steps
    assert steps["halved"]["micro_batch_size"] == 1
    assert steps["halved"]["grad_norm"] == pytest.approx(steps["usual"]["grad_norm"], rel=1e-5)


class WithoutInit(AdamW):
    """Calls no ``__init__`` of torch's, as some optimizers of other packages, and so has no ``state``."""

    def __init__(self, parameters: Any) -> None:
        self.param_groups = [{"params": list(parameters), "lr": 0.1}]


@pytest.mark.parametrize("oom_recovery", [True, False])
def test_an_optimizer_without_a_state_is_refused_in_one_sentence(oom_recovery: bool, tmp_path: Path) -> None:
    recipe = Recipe(tmp_path)
    policy = OptimizerStep(recipe.model, [WithoutInit(recipe.model.parameters())], ranks=1, max_grad_norm=None)
    recipe.parts = replace(recipe.parts, step=recipe.step(policy))
    with pytest.raises(InputError, match="`WithoutInit` has no `state`"):
        recipe.trainer(oom_recovery=oom_recovery)


def test_with_optimizers_in_backward_a_resumed_batch_that_no_longer_fits_is_refused(tmp_path: Path) -> None:
    """Optimizers that step within backward would step once for each micro-batch."""
    directory = tmp_path / "run"
    first = Recipe(directory)
    config = {**first.parts.config, "use_maximum_batch_size": True}
    first.parts = replace(first.parts, epochs=range(1), config=config)
    assert train(first, **SEARCH)[-1]["batch_size"] == 4
    path = directory / "checkpoints" / "epoch_0"  # torchtune's, whose tensors the stock recipe loads
    write_state(path, first.states[0])

    def resume(**settings: Any) -> None:
        resumed = Recipe(directory, epochs=range(1, 2))
        resumed.parts = replace(resumed.parts, resumed=Checkpoint(path, 1, first.states[0], 1, path))
        resumed.step_in_backward()
        resumed.trainer(**SEARCH | settings)

    resume()
    with pytest.raises(InputError, match="of its 4 rows only 2 fit now"):
        resume(memory_limit_bytes=21_000)


def test_a_global_batch_is_cut_into_micro_batches_and_must_not_exceed_the_data(tmp_path: Path) -> None:
    steps = train(Recipe(tmp_path), global_batch_size=5)
    assert figures(steps, "global_batch_size", "micro_batch_size") == [(5, 2)] * 4
    assert "batch_size" not in steps[0]
    with pytest.raises(InputError, match=r"`dataset` has .* too few for one optimizer step"):
        Recipe(tmp_path).trainer(global_batch_size=13)


def test_a_bad_answer_of_the_growth_function_is_refused_before_the_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError) as refusal:
        Recipe(tmp_path).trainer(**SEARCH, batch_increase_function=lambda epoch, current_batch_size: -epoch)
    assert "returned -1 at epoch 1" in str(refusal.value)
    assert "probes" not in capsys.readouterr().err
