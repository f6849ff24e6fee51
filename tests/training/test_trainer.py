"""The loop: epochs with growth between them, every figure that is logged, what is saved, and a resumed run.

The toy: the model is one weight w, the loss of a row w * x where x is its first token. So the gradient of a step is the
mean x of its rows, whatever w is, and all numbers are easy to calculate.
"""

import itertools
import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from tests.support import growth_functions
from tests.support.faults import under
from tests.support.ranks import run_on_ranks
from tests.support.recipe_parts import recipe_parts
from tests.support.run_logs import events_in
from tests.support.toys import CachingMeter, search_result
from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.engine.memory.cpu_meter import CpuMeter
from torchtune_adaptive.engine.memory.phases import Phases
from torchtune_adaptive.engine.recovery import watch
from torchtune_adaptive.errors import NothingFitsError, RunEnded
from torchtune_adaptive.schedule import GradientNorms
from torchtune_adaptive.settings import AdaptiveSettings
from torchtune_adaptive.testing import Fault, out_of_memory, wrap_micro_steps
from torchtune_adaptive.training import assembly, step_log
from torchtune_adaptive.training import trainer as trainer_module
from torchtune_adaptive.training.assembly import build_trainer
from torchtune_adaptive.training.batch.limits import RowLimit
from torchtune_adaptive.training.batch.row_format import Row
from torchtune_adaptive.training.checkpoints.folder import Checkpoint
from torchtune_adaptive.training.checkpoints.steps import StepCheckpoints
from torchtune_adaptive.training.objectives import Loss
from torchtune_adaptive.training.optimizers import OptimizerStep
from torchtune_adaptive.training.profiling import StepProfiler
from torchtune_adaptive.training.run_state import AdaptiveState
from torchtune_adaptive.training.sizes import Sizes
from torchtune_adaptive.training.train_step import TrainStep

CPU = torch.device("cpu")
W, LR = 2.0, 0.25


def rows_of(*xs: float, lengths: Sequence[int] = ()) -> list[Row]:
    rows = [[x] * length for x, length in zip(xs, lengths or [1] * len(xs), strict=True)]
    return [{"tokens": row, "labels": row} for row in rows]


TWELVE = rows_of(*range(12))


def decisions(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The logged messages without the final summary."""
    return [message for message in caplog.messages if "Run complete" not in message]


class Recording(growth_functions.Recording):
    """Records the norms of every second step, and saves their number."""

    every_steps = 2

    def state_dict(self) -> dict[str, Any]:
        return {"seen": len(self.seen)}


def adds_two_in_epoch_one(epoch: int, current_batch_size: int) -> int:
    return 2 if epoch == 1 else 0


class KeptSteps(StepCheckpoints):
    """Replaces checkpoints of steps: keeps each state to be saved, and the weight at that time, by step."""

    def __init__(self, weight: torch.Tensor, events: list[str], *, every_steps: int | None, succeeds: bool) -> None:
        self.states: dict[int, AdaptiveState] = {}
        self.weights: dict[int, float] = {}
        self._weight = weight
        self._events = events
        self._every_steps = every_steps
        self._succeeds = succeeds

    def save(self, state: AdaptiveState, *, at_once: bool = False) -> bool:
        step = state.global_step
        self._events.append(f"save step {step}" + (" at once" if at_once else ""))
        self.states[step], self.weights[step] = as_read(state), self._weight.item()
        return self._succeeds

    def wait(self) -> None:
        self._events.append("wait")

    def load(self, checkpoint: Checkpoint | None, *, config: object) -> AdaptiveState | None:
        return None if checkpoint is None else checkpoint.state

    def options(self) -> dict[str, Any]:
        return {"groups": [[{"momentum": 0}]], "numbers": {}}


def as_read(state: AdaptiveState) -> AdaptiveState:
    """The state as it is read from a file."""
    values = json.loads(json.dumps(asdict(replace(state, rank_states=[]))))
    return replace(AdaptiveState.from_json(values), rank_states=state.rank_states)


@dataclass
class Toy:
    """A trainer over ``dataset``; no recipe, no config, no process group, no search.

    Attributes:
        sizes: what a search would have found.
        events: what was called, in order, with the argument.
        cuts: the rows of each micro-batch.
        logged: the figures of each step.
        states: the states saved after epochs, by the number of epochs done.
        draws: a random number of each step, as dropout draws them.
        stop_after: the optimizer step, from 1, in which a signal comes.
    """

    directory: Path
    dataset: list[Row] = field(default_factory=lambda: TWELVE)
    batch_size: int = 2
    micro_steps: int = 1
    shuffle: bool = False
    function: Any = None
    maximum: int = 100
    lr_scaling: Any = "none"
    sizes: Sizes = field(default_factory=Sizes)
    epochs: range = range(2)
    saved: AdaptiveState | None = None
    max_grad_norm: float | None = None
    decays: bool = False
    ranks: int = 1
    meter: CpuMeter | None = None
    recovers: bool = False
    why_unrecoverable: str = ""
    optimizer_class: Any = torch.optim.SGD
    capacity: float = math.inf  # tokens of a micro-batch with padding
    events: list[str] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)
    logged: dict[int, dict[str, float]] = field(default_factory=dict)
    on_before_step: Callable[[int], object] = lambda step: None
    on_log: Callable[[], object] = lambda: None
    on_save: Callable[[int], object] = lambda epoch: None
    save_every_steps: int | None = None
    saves_succeed: bool = True
    stop_after: int | None = None
    config: dict[str, Any] = field(default_factory=dict)
    states: dict[int, AdaptiveState] = field(default_factory=dict)
    draws: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.model.weight, W)
        self.optimizer: torch.optim.Optimizer = self.optimizer_class(self.model.parameters(), lr=LR)
        self.steps = KeptSteps(
            self.model.weight, self.events, every_steps=self.save_every_steps, succeeds=self.saves_succeed
        )
        profiler = SimpleNamespace(**{name: partial(self.events.append, name) for name in ("start", "step", "stop")})
        saved = self.saved
        parts = recipe_parts(
            self.directory,
            TrainStep(
                [self.model],
                self._objective,
                OptimizerStep(self.model, [self.optimizer], ranks=1, max_grad_norm=self.max_grad_norm),
                collate=self._collate,
                device=CPU,
                phases=Phases([self.model], self.meter),
                meter=self.meter,
                stop_requested=lambda: self.trainer.global_step + 1 == self.stop_after,
            ),
            self.dataset,
            shuffle=self.shuffle,
            scheduler=self._build_scheduler(
                self.epochs.stop * (len(self.dataset) // (self.batch_size * self.micro_steps)), -1
            ),
            build_scheduler=self._build_scheduler,
            batch_size=self.batch_size,
            micro_steps=self.micro_steps,
            epochs=self.epochs,
            ranks=self.ranks,
            metric_logger=SimpleNamespace(log_dict=self._log),
            profiler=StepProfiler(profiler, memory_steps=None),
            resumed=None if saved is None else Checkpoint(self.directory / "saved", 1, saved, saved.epochs_run),
            config=self.config,
            why_unrecoverable=self.why_unrecoverable,
            before_step=self._before_step,
            save=self._save,
        )
        settings = AdaptiveSettings(
            batch_increase_function=self.function,
            growth_limit=self.maximum,
            lr_scaling=self.lr_scaling,
            oom_recovery=self.recovers,
        )
        found = {"_find_sizes": lambda *_: self.sizes, "StepCheckpoints": lambda *_: self.steps}
        with mock.patch.multiple(assembly, **found):
            self.trainer = build_trainer(parts, settings, Consensus())
        self.loader, self.micro_batches = self.trainer.loader, self.trainer.micro_batches
        self.recoverable, self.saver = self.trainer.recoverable, self.trainer.saver
        self.cuts.clear()

    def failing_at(self, number: int) -> "Toy":
        """Return this toy; the micro-step of this number in its first step will run out of memory."""
        wrap_micro_steps(self.recoverable, partial(under, {number: Fault(0)}))
        return self

    def train(self) -> "Toy":
        self.trainer.train()
        return self

    def state(self) -> AdaptiveState:
        """The state as it would be saved now."""
        return self.saver.state(epochs_run=self.trainer.epochs_run, step=self.trainer.global_step)

    @property
    def weight(self) -> float:
        return self.model.weight.item()

    def figures(self, name: str) -> list[float]:
        """The logged figure of each step."""
        return [figures[name] for figures in self.logged.values()]

    def history(self) -> list[dict[str, Any]]:
        """The decisions in the log on disk."""
        return events_in(self.directory, "sizes")

    def _collate(self, rows: Sequence[Row]) -> torch.Tensor:
        self.cuts.append(len(rows))
        return torch.tensor([[float(row["tokens"][0]), len(row["tokens"])] for row in rows])

    def _objective(self, batch: torch.Tensor) -> Loss:
        xs, lengths = batch[:, :1], batch[:, 1]  # [B, 1], [B]
        if len(batch) * lengths.max() > self.capacity:
            out_of_memory()
        metrics = {"twice_x": 2 * xs.sum()}
        return Loss(self.model(xs).sum(), torch.tensor(len(batch)), lengths.sum(), metrics)

    def _build_scheduler(self, steps: int, last: int) -> Any:
        return LambdaLR(self.optimizer, lambda step: 1 - step / steps, last_epoch=last) if self.decays else None

    def _log(self, payload: dict[str, float], step: int) -> None:
        self.logged[step] = payload
        self.on_log()

    def _before_step(self, step: int) -> None:
        self.events.append(f"before {step}")
        self.draws.append(torch.rand(()).item())
        self.on_before_step(step)

    def _save(self, epoch: int, state: AdaptiveState) -> None:
        self.events.append(f"save {epoch}")
        self.states[epoch + 1] = as_read(state)
        self.on_save(epoch)


# ---- the figures of a step


@pytest.fixture(autouse=True)
def steady_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that are compared log the same host memory."""
    monkeypatch.setattr(step_log, "anonymous_bytes", lambda: 1234)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that advances by a second whenever the loop reads it, twice in a step."""
    seconds = itertools.count()
    monkeypatch.setattr(trainer_module, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))


@pytest.mark.usefixtures("clock")
def test_every_figure_that_is_logged_is_right(tmp_path: Path) -> None:
    """Three steps of 4 rows in micro-batches of 2; the last one has a row of three tokens beside one of one."""

    class Peak(CpuMeter):
        @property
        def peak_bytes(self) -> int:
            return 4321

    toy = Toy(
        tmp_path,
        rows_of(*range(12), lengths=[1] * 11 + [3]),
        micro_steps=2,
        epochs=range(1),
        max_grad_norm=4.0,
        ranks=5,
        decays=True,
        meter=Peak(),
    )
    toy.model.weight.grad = torch.full((1, 1), 1e6)  # a gradient left by a search is not used
    toy.train()
    always = {"global_batch_size": 4, "batch_size": 2, "micro_batch_size": 2, "oom_retries": 0}
    always |= {"peak_memory_bytes": 4321, "host_memory_bytes": 1234}
    weights = [W, W - LR * 1.5, W - LR * 1.5 - LR * 2 / 3 * 4.0]  # the second and third gradient are clipped to 4
    assert toy.logged == {
        step: always
        | {
            "loss": pytest.approx(weight * mean_x),
            "lr": pytest.approx(LR * (1 - step / 3)),  # of the next step, as torchtune logs it
            "tokens_per_second_per_gpu": pytest.approx(tokens / (2 * 5)),
            "padding": pytest.approx(padding),
            "grad_norm": pytest.approx(mean_x),
            "twice_x": pytest.approx(2 * mean_x),
        }
        for step, weight, mean_x, tokens, padding in (
            (1, weights[0], 1.5, 4, 0.0),
            (2, weights[1], 5.5, 4, 0.0),
            (3, weights[2], 9.5, 6, 1 - 6 / 8),
        )
    }
    assert toy.weight == pytest.approx(weights[2] - LR * 1 / 3 * 4.0)


def test_only_steps_and_the_wait_for_their_samples_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A step takes 2 s, and the wait for its samples 1 s; the log, the profiler and saving take very long."""
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(trainer_module, "time", SimpleNamespace(perf_counter=lambda: now.seconds))

    def pass_time(seconds: float, *_: object) -> None:
        now.seconds += seconds

    def steps(epoch: int) -> Iterator[Any]:
        for samples in samples_of(epoch):
            pass_time(1.0)
            yield samples

    def profile(name: str, epoch: int, step: int) -> None:
        profiled.append((name, epoch, step))
        pass_time(1e5)

    profiled: list[tuple[str, int, int]] = []
    toy = Toy(
        tmp_path,
        batch_size=4,
        save_every_steps=1,
        on_before_step=partial(pass_time, 2.0),
        on_log=partial(pass_time, 1e3),
        on_save=partial(pass_time, 1e4),
    )
    samples_of = toy.loader.steps
    monkeypatch.setattr(toy.loader, "steps", steps)
    monkeypatch.setattr(toy.saver, "after_step", lambda **_: pass_time(1e7))
    for name in ("begin_step", "end_step"):
        monkeypatch.setattr(toy.trainer.profiler, name, partial(profile, name))
    toy.train()
    assert toy.figures("tokens_per_second_per_gpu") == [4 / 3] * 6
    assert ", mean of 6 steps in 18.0 s\n" in caplog.text
    places = itertools.product(range(2), range(1, 4), ("begin_step", "end_step"))
    assert profiled == [(name, *place) for *place, name in places]


# ---- epochs


def test_the_batch_grows_between_epochs_and_all_that_depends_on_it_follows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = Sizes(result=search_result(exact_batch_size=3, batch_size=2), fitting_rows=2)
    options: dict[str, Any] = {"epochs": range(3), "decays": True, "lr_scaling": "linear"}
    toy = Toy(tmp_path, function=adds_two_in_epoch_one, sizes=sizes, **options).train()
    assert toy.figures("batch_size") == [2] * 6 + [4] * 3 + [4] * 3
    assert toy.figures("global_batch_size") == [2] * 6 + [4] * 6
    assert toy.figures("micro_batch_size") == [2] * 12  # 4 rows do not fit
    # Logged after the scheduler's step: the rate of the next step, scaled by the samples of this one.
    assert toy.figures("lr") == pytest.approx(
        [LR * (1 - step / 18) for step in (1, 2, 3, 4, 5, 6)]
        + [2 * LR * (1 - step / 18) for step in (8, 10, 12, 14, 16, 18)]
    )
    reason = "epoch 1: increase of 2 granted, batch_size 2 -> 4"
    entry = {"step": 7, "epoch": 1, "batch_size": 4, "samples_per_step": 4, "reason": reason}
    assert toy.history() == [
        entry | {"step": 1, "epoch": 0, "batch_size": 2, "samples_per_step": 2, "reason": "config"},
        entry,
    ]
    assert decisions(caplog)[2:] == [
        reason,
        "learning rate * 2: linear scaling to 4 samples per optimizer step, from the config's 2",
        f"batch_size 4 ({reason}): 4 rows * 1 micro-step * 1 rank = 4 samples per optimizer step,"
        " in micro-steps of at most 2 rows per rank",
    ]


def test_an_increase_that_is_refused_is_logged_and_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    toy = Toy(tmp_path, function=adds_two_in_epoch_one, maximum=3).train()
    assert toy.figures("batch_size") == [2] * 12
    assert [entry["reason"] for entry in toy.history()] == ["config"]
    assert decisions(caplog)[1:] == ["epoch 1: increase of 2 refused, 2 + 2 = 4 is above the maximum of 3"]


# ---- gradient noise


@pytest.mark.parametrize("fails_at", [None, 0, 1])
def test_measured_steps_reach_the_schedule_with_the_norms_of_mean_gradients(
    fails_at: int | None, tmp_path: Path
) -> None:
    schedule = Recording()
    toy = Toy(tmp_path, function=schedule, batch_size=4, epochs=range(1), recovers=True)
    if fails_at is not None:
        toy.failing_at(fails_at)
    toy.train()
    assert toy.recoverable.retries == (fails_at is not None)
    assert schedule.seen == [
        GradientNorms(2, pytest.approx(0.5**2), 4, pytest.approx(1.5**2)),  # pyright: ignore[reportArgumentType]
        GradientNorms(2, pytest.approx(8.5**2), 4, pytest.approx(9.5**2)),  # pyright: ignore[reportArgumentType]
    ]
    assert toy.figures("seen") == [1, 1, 2]


# ---- out of memory


def test_a_step_that_runs_out_of_memory_is_noted_and_trains_the_same(tmp_path: Path) -> None:
    """The third step of each epoch has a long row. It runs again in halves, the next one in whole micro-batches."""

    def trained(directory: Path, capacity: float) -> Toy:
        dataset = rows_of(*range(12), lengths=[*[1] * 8, 5, 1, 1, 1])
        return Toy(directory, dataset, batch_size=4, recovers=True, capacity=capacity).train()

    toy = trained(tmp_path, capacity=12)
    assert toy.weight == trained(tmp_path / "enough", capacity=100).weight
    assert toy.figures("oom_retries") == [0, 0, 1, 1, 1, 2]
    assert toy.figures("micro_batch_size") == [4, 4, 2, 4, 4, 2]
    padding = pytest.approx(1 - 8 / (2 * 5 + 2))
    assert toy.figures("padding") == [0, 0, padding, 0, 0, padding]
    reasons = [entry.pop("reason") for entry in toy.history()]
    assert reasons[0].startswith("micro-batch 4 -> 2 rows: in step 3 rank 0 ran out of memory in forward (not metered")
    assert reasons[1] == "micro-batch 2 -> 4 rows: fits again in step 4"
    assert [(one["step"], one["epoch"], one["batch_size"], one["micro_batch_size"]) for one in toy.history()] == [
        *((3, 0, 4, 2), (4, 1, 4, 4), (6, 1, 4, 2)),
    ]
    assert [line["step"] for line in events_in(tmp_path, "out of memory")] == [3, 6]


@pytest.mark.parametrize(
    ("function", "sizes"),
    [(None, [1, 1, 1, 2, 2, 4]), (adds_two_in_epoch_one, [1, 1, 1, 2, 2])],
    ids=["same batch", "grown batch"],
)
def test_larger_micro_batches_are_tried_again_at_an_epochs_start(
    tmp_path: Path, function: Any, sizes: list[int]
) -> None:
    toy = Toy(tmp_path, batch_size=4, function=function, recovers=True)
    toy.on_save = lambda epoch: toy.micro_batches.resize(1) or toy.recoverable.backoff.failed(4, step=10**6)
    toy.micro_batches.resize(1)
    toy.train()
    assert toy.figures("micro_batch_size") == sizes


def test_an_error_that_ends_the_run_is_in_its_log(tmp_path: Path) -> None:
    toy = Toy(tmp_path, rows_of(*range(4), lengths=[4] * 4), recovers=True)
    toy.capacity = 3
    with pytest.raises(NothingFitsError):
        toy.train()
    (event,) = events_in(tmp_path, "out of memory")
    assert (event["step"], event["before"], event["after"]) == (1, 2, 1)


NCCL = torch.distributed.DistBackendError("NCCL error: Cuda failure 2 'out of memory'")


@pytest.mark.parametrize(
    ("phase", "owner", "name", "error"),
    [
        ("clip", torch.nn.utils, "clip_grad_norm_", NCCL),
        ("optimizer", torch.optim.SGD, "step", torch.OutOfMemoryError("CUDA out of memory")),
    ],
)
def test_a_run_out_of_memory_after_its_micro_steps_ends_with_what_to_do(
    phase: str, owner: Any, name: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = Toy(tmp_path, max_grad_norm=1.0, recovers=True)
    monkeypatch.setattr(owner, name, mock.Mock(side_effect=error))
    with pytest.raises(RuntimeError) as caught:
        toy.train()
    assert caught.value.__cause__ is error
    assert str(caught.value) == (
        f"out of memory in phase {phase!r}: parameters and optimizer state may be half updated, so the run ends;"
        " resume from the last checkpoint. An 8-bit optimizer, LoRA or more ranks need less"
    )
    assert (toy.trainer.global_step, toy.weight) == (0, W)


def test_another_error_of_the_optimizer_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.optim.SGD, "step", mock.Mock(side_effect=ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):
        Toy(tmp_path, recovers=True).train()


@pytest.mark.parametrize("why", ["", "of a reason"], ids=["not wanted", "not possible"])
def test_without_recovery_steps_are_the_same_and_an_error_passes(
    why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def make(name: str, **options: Any) -> Toy:
        dataset = rows_of(*range(12), lengths=[1, 3, 2] * 4)
        return Toy(tmp_path / name, dataset, batch_size=4, optimizer_class=torch.optim.AdamW, **options)

    recovering, without = make("recovering", recovers=True), make("without", recovers=bool(why), why_unrecoverable=why)
    assert (recovering.recoverable.recovers, without.recoverable.recovers) == (True, False)
    assert len(recovering.optimizer.state) == len(without.optimizer.state) == 1  # before the first step
    assert caplog.messages == [f"An out-of-memory error in training will end the run: {why}."] * bool(why)
    assert recovering.train().weight == without.train().weight
    assert recovering.figures("padding") == without.figures("padding")
    with pytest.raises(torch.OutOfMemoryError, match="on purpose"):
        make("failing").failing_at(0).train()


@pytest.mark.parametrize("fails", [False, True])
def test_a_first_step_may_have_small_micro_batches_whose_error_does_not_reduce_later_ones(
    fails: bool, tmp_path: Path
) -> None:
    toy = Toy(tmp_path, batch_size=4, epochs=range(1), recovers=True)
    toy.micro_batches.start_small()
    if fails:
        toy.failing_at(0)
    toy.train()
    assert toy.cuts == ([2, 1, 1, 1, 1] if fails else [2, 2]) + [4, 4]


def test_single_rows_stay_although_they_are_slow_which_is_an_event_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def free_cache(step: int) -> None:
        meter.retries += step > 5
        meter.now_ns += 10**9 * (1 + (step > 5))

    meter = CachingMeter()
    monkeypatch.setattr(watch, "perf_counter_ns", lambda: meter.now_ns)
    toy = Toy(tmp_path, batch_size=1, recovers=True, meter=meter, on_before_step=free_cache).train()
    assert toy.micro_batches.limit == RowLimit(1)
    (event,) = toy.recoverable.events
    assert str(event).startswith("micro-batch stays at 1 row, although rank 0 had to free")


# ---- a resumed run


def going_on(directory: Path, epochs: range, **options: Any) -> Toy:
    """A run with a growing batch, samples left over, and a decaying rate."""
    options |= {"micro_steps": 2, "function": adds_two_in_epoch_one, "decays": True, "epochs": epochs}
    return Toy(directory, rows_of(*range(11)), shuffle=True, **options)


def resumed_from(saved: AdaptiveState, weight: float, directory: Path, **options: Any) -> Toy:
    resumed = going_on(directory, range(saved.epochs_run, 4), saved=saved, **options)
    nn.init.constant_(resumed.model.weight, weight)
    assert resumed.state() == saved
    return resumed


@pytest.mark.usefixtures("clock")
def test_a_run_resumed_after_any_step_or_epoch_continues_as_if_it_had_never_ended(tmp_path: Path) -> None:
    """With a growing batch, samples left over, a decaying rate, and a reduced micro-batch that grows again."""

    def reduce(toy: Toy) -> Toy:
        def before_step(step: int) -> None:
            if step == 2:
                toy.micro_batches.resize(1)
                toy.recoverable.backoff.load_state_dict({"backoff": waiting})

        waiting = {"next_trial": 5, "last_failure": 3, "wait_steps": 2, "largest_fitted": 4}
        toy.on_before_step = before_step
        return toy

    whole = reduce(going_on(tmp_path / "whole", range(4), save_every_steps=1, recovers=True))
    weights: list[float] = []
    whole.on_save = lambda epoch: weights.append(whole.weight)
    whole.train()
    assert [state.epoch_samples for state in whole.steps.states.values()] == [4, 8, 8, 8, 8]
    assert whole.figures("micro_batch_size") == [2, 2, 1, 2, 4]
    saved = [(state, whole.steps.weights[step]) for step, state in whole.steps.states.items()]
    saved += [(whole.states[epochs_run], weights[epochs_run - 1]) for epochs_run in (1, 2, 3)]
    for state, weight in saved:
        directory = Path(shutil.copytree(whole.directory, tmp_path / "resumed", dirs_exist_ok=True))  # with its log
        torch.manual_seed(99)
        resumed = reduce(resumed_from(state, weight, directory, recovers=True)).train()
        assert resumed.draws == whole.draws[state.global_step :]
        assert resumed.logged == {step: figures for step, figures in whole.logged.items() if step > state.global_step}
        assert resumed.weight == whole.weight
        assert resumed.state() == whole.state()
        (event,) = events_in(directory, "resumed")
        assert (event["step"], event["checkpoint"]) == (state.global_step, str(directory / "saved"))
        assert resumed.trainer.step_log.resumed == (directory / "saved", state.global_step)
        assert [one for one in resumed.history() if ", resumed at" not in one["reason"]] == whole.history()


def test_changes_since_the_checkpoint_are_logged_and_noted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved = Toy(tmp_path, epochs=range(1), config={"seed": 1}).train().state()
    caplog.clear()
    toy = Toy(tmp_path, rows_of(*range(15)), batch_size=3, epochs=range(1, 2), saved=saved, config={"seed": 2})
    seed = "seed 1 -> 2, but random numbers continue as saved"
    reason = f"resumed with changes: samples in the data set 12 -> 15; samples per optimizer step 2 -> 3; {seed}"
    assert decisions(caplog) == [reason]
    assert toy.history() == [{"step": 7, "epoch": 1, "batch_size": 3, "reason": reason}]
    assert Toy(tmp_path, epochs=range(1, 2), saved=saved, config={"seed": 1}).history() == []


def resumed_with(config: dict[str, Any], directory: Path, *, before: dict[str, Any]) -> tuple[list[str], Any]:
    """What has changed, and the micro-batches, where the search of the resumed run finds another size."""
    sizes = [Sizes(result=search_result(exact_batch_size=rows, batch_size=rows), fitting_rows=rows) for rows in (2, 3)]
    saved = Toy(directory, batch_size=4, sizes=sizes[0], epochs=range(1), config=before).train().state()
    toy = Toy(directory, batch_size=4, sizes=sizes[1], epochs=range(1, 2), saved=saved, config=config)
    return [one["reason"] for one in toy.history()], toy.micro_batches.largest


def test_micro_batches_are_cut_as_before_unless_something_has_changed(tmp_path: Path) -> None:
    before = {"seed": 1}
    assert resumed_with(before, tmp_path, before=before) == ([], RowLimit(2))
    changes, limit = resumed_with({"seed": 2}, tmp_path, before=before)
    assert (len(changes), limit) == (1, RowLimit(3))


def _resumed_on_a_node(rank: int, directory: Path) -> tuple[list[str], Any]:
    before, own = ({"tokenizer.path": f"/node_{node}/tokenizer"} for node in (0, rank))
    return resumed_with(own, directory / str(rank), before=before)


def test_ranks_agree_on_what_has_changed_where_their_paths_differ(tmp_path: Path) -> None:
    assert run_on_ranks(_resumed_on_a_node, 2, tmp_path) == [([], RowLimit(2))] * 2


# ---- checkpoints of steps


def test_every_nth_step_is_saved_over_epochs_and_the_run_continues(tmp_path: Path) -> None:
    toy = Toy(tmp_path, batch_size=4, save_every_steps=2).train()
    steps = [f"before {step}" for step in range(6)]
    assert toy.events == [
        *("start", steps[0], "step", steps[1], "step", "save step 2", steps[2], "step", "wait", "save 0"),
        *(steps[3], "step", "save step 4", steps[4], "step", steps[5], "step", "save step 6", "wait", "save 1"),
        "stop",
    ]
    assert [(one.epochs_run, one.epoch_samples) for one in toy.steps.states.values()] == [(0, 8), (1, 4), (1, 12)]


def test_a_checkpoint_that_cannot_be_saved_does_not_end_the_run(tmp_path: Path) -> None:
    toy = Toy(tmp_path, batch_size=4, save_every_steps=1, saves_succeed=False).train()
    assert list(toy.logged) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("save_every_steps", [None, 1], ids=["only then", "each"])
def test_a_signal_ends_the_run_after_its_step_which_is_saved_at_once(
    tmp_path: Path, save_every_steps: int | None
) -> None:
    toy = Toy(tmp_path, batch_size=4, stop_after=5, save_every_steps=save_every_steps)
    with pytest.raises(RunEnded) as end:
        toy.train()
    assert end.value.status == 75
    assert str(end.value) == (
        "a signal ended the run after step 5, and a checkpoint is saved:"
        " run the same command with `resume_from_checkpoint=True` to resume."
    )
    assert list(toy.logged) == [1, 2, 3, 4, 5]  # the figures of the step are logged first
    assert toy.events[-3:] == ["step", "save step 5 at once", "stop"]
    assert toy.events.count("save step 5") == 0
    assert (toy.steps.states[5].epochs_run, toy.steps.states[5].epoch_samples) == (1, 8)
    assert toy.steps.weights[5] == toy.weight == pytest.approx(W - LR * (1.5 + 5.5 + 9.5 + 1.5 + 5.5))


def test_within_an_epoch_no_increase_is_asked_for_again_and_no_size_is_tried(tmp_path: Path) -> None:
    """Even if its steps are larger now, of which none is done yet."""
    asked: list[int] = []

    def grows(epoch: int, current_batch_size: int) -> int:
        asked.append(epoch)
        return 2

    options: dict[str, Any] = {"batch_size": 4, "function": grows, "maximum": 6, "recovers": True}
    whole = Toy(tmp_path, epochs=range(2), save_every_steps=1, **options)
    asked.clear()  # in advance, for all epochs
    whole.train()
    assert asked == [0, 1]
    saved = whole.steps.states[1]
    assert saved.batch_size == 6
    resumed = Toy(tmp_path, epochs=range(2), micro_steps=2, saved=saved, **options)
    asked.clear()
    resumed.micro_batches.resize(1)
    resumed.recoverable.backoff.failed(6, step=10**6)
    resumed.train()
    assert asked == [1]
    assert resumed.figures("micro_batch_size") == [1, 2]
