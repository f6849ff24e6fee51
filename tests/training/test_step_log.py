"""Every n-th step is logged on rank 0 with all of its figures, and the first odd one is named."""

import math
import mmap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torchtune import training

from tests.support.run_logs import events_in, lines_in
from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.engine.memory import resident
from torchtune_adaptive.engine.memory.cpu_meter import CpuMeter
from torchtune_adaptive.engine.memory.meter import MemoryMeter
from torchtune_adaptive.engine.recovery.watch import MemoryEvent, MemoryPressure
from torchtune_adaptive.training import step_log
from torchtune_adaptive.training.batch.growth import BatchGrowth
from torchtune_adaptive.training.batch.limits import MicroBatchLimit, RowLimit, TokenLimit
from torchtune_adaptive.training.batch.micro_batches import MicroBatcher
from torchtune_adaptive.training.batch.row_format import TokenRows
from torchtune_adaptive.training.run_log import RunLog
from torchtune_adaptive.training.step_log import StepLog
from torchtune_adaptive.training.train_step import StepResult
from torchtune_adaptive.training.utilisation import Utilisation

RESULT = StepResult(loss=0.5, weight=30.0, num_tokens=1200, metrics={}, grad_norm=None)
EVENT = MemoryEvent(7, MemoryPressure.OUT_OF_MEMORY, (1, 3), "backward", "peak 1 B, limit 2 B", "error", 8, 4, "rows")
ALWAYS = {"loss", "lr", "tokens_per_second_per_gpu", "global_batch_size", "padding", "oom_retries", "host_memory_bytes"}


class Logger:
    """Keeps what is logged, by step."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, float]] = {}

    def log_dict(self, payload: dict[str, float], step: int) -> None:
        self.steps[step] = payload


class Parts:
    """The parts that the log reads: the step, the retry with its micro-batches, the loader and the growth."""

    def __init__(
        self,
        limit: MicroBatchLimit | None = None,
        *,
        is_global: bool = False,
        meter: MemoryMeter | None = None,
    ) -> None:
        self.micro_batches = MicroBatcher(limit or RowLimit(8), TokenRows(-100), Consensus(), [])
        self.utilisation = Utilisation(self.micro_batches, peak=None)
        self.step: Any = SimpleNamespace(
            policy=SimpleNamespace(optimizers=[SimpleNamespace(param_groups=[{"lr": 0.01}])]), meter=meter
        )
        self.recoverable: Any = SimpleNamespace(retries=3, events=())
        self.loader: Any = SimpleNamespace(samples_per_step=64, is_global=is_global, batch_size=16, key="batch_size")
        self.growth = BatchGrowth(None, total_epochs=1, samples_per_unit=1, consensus=Consensus())
        self.logger = Logger()
        self.run_log = RunLog("never begun", writes=False)
        self.finished: list[tuple[Path, int]] = []

    def set_padding(self, num_tokens: int) -> None:
        """A step of ``num_tokens`` in 40 with padding."""
        before, padded = self.micro_batches.state_dict()["padding"]
        state = self.micro_batches.state_dict()
        self.micro_batches.load_state_dict(state | {"padding": (before + num_tokens, padded + 40)})

    def log(self, *, writes: bool = True, **options: Any) -> StepLog:
        return StepLog(
            self.logger if writes else None,
            self.run_log,
            self.step,
            self.recoverable,
            self.micro_batches,
            self.utilisation,
            self.loader,
            self.growth,
            checkpoints=self.finished,
            **options,
        )


def test_host_memory_is_anonymous_memory_as_the_system_counts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = resident.anonymous_bytes()
    assert before is not None
    # Pages of its own: a tensor could be put where the C library keeps freed pages of this process.
    with mmap.mmap(-1, 64 * 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
        for page in range(0, len(held), mmap.PAGESIZE):
            held[page] = 1
        after = resident.anonymous_bytes()
    assert after is not None
    assert 60 * 2**20 < after - before < 68 * 2**20
    monkeypatch.setattr(resident, "_PROC", Path("/no such folder"))
    assert resident.anonymous_bytes() is None


def test_host_memory_is_not_logged_where_the_system_does_not_report_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_log, "anonymous_bytes", lambda: None)
    parts = Parts()
    parts.log().write(1, RESULT, samples=4, epoch=0, seconds=1.0)
    assert "host_memory_bytes" not in parts.logger.steps[1]


def test_a_global_batch_in_tokens_is_logged_by_its_own_names() -> None:
    parts = Parts(TokenLimit(4096), is_global=True)
    parts.log().write(1, RESULT, samples=4, epoch=0, seconds=1.0)
    assert set(parts.logger.steps[1]) == ALWAYS | {"max_tokens_per_micro_batch"}
    assert parts.logger.steps[1]["max_tokens_per_micro_batch"] == 4096


def test_every_nth_step_is_logged_with_its_own_samples_and_the_padding_of_all_steps_since_the_last() -> None:
    parts = Parts()
    log = parts.log(every_steps=3)
    for step, tokens in enumerate([10, 10, 40, 10, 20, 30], start=1):
        parts.set_padding(tokens)
        log.write(step, RESULT, samples=64 + step, epoch=0, seconds=1.0)
    assert {step: logged["global_batch_size"] for step, logged in parts.logger.steps.items()} == {3: 67, 6: 70}
    assert {step: logged["padding"] for step, logged in parts.logger.steps.items()} == {3: 0.5, 6: 0.5}


def test_utilisation_is_that_of_the_tokens_that_are_no_padding(caplog: pytest.LogCaptureFixture) -> None:
    parts = Parts()
    parts.utilisation = Utilisation(parts.micro_batches, peak=100e12, flops_per_token=6e9)
    log = parts.log(every_steps=2)
    for step, (tokens, seconds) in enumerate([(1000, 1.0), (5000, 1.0)], start=1):
        parts.micro_batches.step_tokens = (tokens, 8000)
        log.write(step, RESULT, samples=4, epoch=0, seconds=seconds)
    assert parts.logger.steps[2]["mfu"] == pytest.approx(0.3)
    log.finish("complete", step=2, epochs_run=1)
    assert "18.0% of the card's 100 TFLOPS" in caplog.text


def test_other_ranks_log_nothing_and_name_no_odd_step(caplog: pytest.LogCaptureFixture) -> None:
    parts = Parts()
    silent = parts.log(writes=False)
    silent.write(1, replace(RESULT, loss=math.nan, weight=0.0), samples=4, epoch=0, seconds=1.0)
    assert (silent.writes, parts.log().writes) == (False, True)
    assert (parts.logger.steps, caplog.messages) == ({}, [])


def test_a_meters_peak_is_the_highest_so_far() -> None:
    meter = CpuMeter()
    parts = Parts(meter=meter)
    log = parts.log(every_steps=2)
    live = torch.empty(100, dtype=torch.uint8)
    meter.count(live)
    for step, size in enumerate([5000, 900, 800, 700], start=1):
        with meter:
            torch.empty(size, dtype=torch.uint8)
        log.write(step, RESULT, samples=4, epoch=0, seconds=1.0)
    assert {step: logged["peak_memory_bytes"] for step, logged in parts.logger.steps.items()} == {2: 5100, 4: 5100}


def test_the_devices_own_memory_statistics_are_logged_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_memory_stats(device: torch.device, reset_stats: bool = True) -> dict[str, str]:
        assert not reset_stats
        return {"peak_memory_active": f"of {device}"}

    monkeypatch.setattr(training, "get_memory_stats", get_memory_stats)
    parts = Parts()
    parts.log(device=torch.device("cpu")).write(1, RESULT, samples=4, epoch=0, seconds=1.0)
    assert parts.logger.steps[1]["peak_memory_active"] == "of cpu"


def test_events_are_written_once_each_with_the_figures_of_the_shortage(tmp_path: Path) -> None:
    parts = Parts()
    parts.run_log = RunLog(tmp_path, writes=True)
    parts.run_log.begin(step=0)
    parts.recoverable.events = (EVENT,)
    parts.finished += [(Path("x/step_3"), 3)]
    log = parts.log(every_steps=100)
    for step in (7, 8):
        log.write(step, RESULT, samples=4, epoch=0, seconds=1.0)
    parts.finished += [(Path("x/step_9"), 9), (Path("x/epoch_0"), 9)]
    parts.recoverable.events += (replace(EVENT, step=10, pressure=MemoryPressure.THRASHING, error=None),)
    log.write(9, RESULT, samples=4, epoch=0, seconds=1.0)
    _, first, *others = lines_in(tmp_path)
    assert first == {
        "event": "out of memory",
        "ranks": [1, 3],
        "step": 7,
        "phase": "backward",
        "figures": "peak 1 B, limit 2 B",
        "error": "error",
        "before": 8,
        "after": 4,
        "unit": "rows",
    }
    assert [(line["event"], line["step"]) for line in others] == [
        ("checkpoint", 3),
        ("thrashing", 10),
        ("checkpoint", 9),
        ("checkpoint", 9),
    ]


# ---- odd steps


def odd_run(parts: Parts, results: dict[int, StepResult], folder: Path, **options: Any) -> None:
    """Log six steps, of which those in ``results`` are odd, and save a checkpoint after each."""
    parts.run_log = RunLog(folder, writes=True)
    parts.run_log.begin(step=0)
    log = parts.log(every_steps=100, **options)
    for step in range(1, 7):
        log.write(step, results.get(step, RESULT), samples=4, epoch=0, seconds=1.0)
        (folder / f"step_{step}").mkdir(exist_ok=True)
        parts.finished.append((folder / f"step_{step}", step))


@pytest.mark.parametrize(
    ("odd", "figures", "good"),
    [
        ({"loss": math.nan}, "loss nan", 2),  # nothing shows that the weights after step 3 are good
        ({"loss": -math.inf, "grad_norm": math.nan}, "loss -inf, gradient norm nan", 2),
        ({"grad_norm": math.inf}, "gradient norm inf", 3),
    ],
)
def test_the_first_figure_that_is_not_finite_is_named_once_with_the_last_good_checkpoint(
    odd: dict[str, float], figures: str, good: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result = replace(RESULT, **odd)
    odd_run(Parts(), {4: result, 5: result}, tmp_path)
    path = tmp_path / f"step_{good}"
    assert caplog.messages == [
        f"Step 4: {figures}, the first that is not finite. Training continues."
        f" The last checkpoint known to give a finite loss is {path} (step {good})."
    ]
    assert events_in(tmp_path, "not finite") == [{"step": 4, "figures": figures, "checkpoint": str(path)}]


def test_a_checkpoint_that_a_run_resumed_from_may_be_the_last_good_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result = replace(RESULT, loss=math.nan)
    (tmp_path / "before").mkdir()
    odd_run(Parts(), {2: result}, tmp_path, resumed=(tmp_path / "before", 0))
    assert caplog.messages[-1].endswith(f"loss is {tmp_path / 'before'} (step 0).")
    odd_run(Parts(), {1: result}, tmp_path, resumed=(tmp_path / "before", 0))  # its first loss is not finite
    odd_run(Parts(), {2: result}, tmp_path, resumed=(tmp_path / "removed", 0))
    odd_run(Parts(), {1: result}, tmp_path)
    assert len(caplog.messages) == 4
    assert all(one.endswith(" No checkpoint is known to give a finite loss.") for one in caplog.messages[1:])
    assert events_in(tmp_path, "not finite") == [{"step": 1, "figures": "loss nan", "checkpoint": None}]


def test_the_first_step_without_a_target_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nothing = replace(RESULT, loss=0.0, weight=0.0)
    odd_run(Parts(), {2: nothing, 5: nothing}, tmp_path)
    (said,) = caplog.messages
    assert said.startswith("Step 2 has no target: all labels are masked.")
    assert events_in(tmp_path, "no target") == [{"step": 2}]
