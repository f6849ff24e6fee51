"""Every n-th step is logged on rank 0 with all of its figures."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torchtune import training

from torchtune_adaptive.batch.growth import BatchGrowth
from torchtune_adaptive.batch.limits import MicroBatchLimit, RowLimit, TokenLimit
from torchtune_adaptive.batch.micro_batches import Cut, MicroBatcher
from torchtune_adaptive.batch.noise_scale import GradientNorms, gradient_noise_scale
from torchtune_adaptive.batch.row_format import TokenRows
from torchtune_adaptive.distributed.consensus import Consensus
from torchtune_adaptive.memory import resident
from torchtune_adaptive.memory.cpu_meter import CpuMeter
from torchtune_adaptive.memory.meter import MemoryMeter
from torchtune_adaptive.training import step_log
from torchtune_adaptive.training.journal import RunJournal
from torchtune_adaptive.training.run_events import RunEvents
from torchtune_adaptive.training.step_figures import StepResult
from torchtune_adaptive.training.step_log import StepLog

RESULT = StepResult(loss=0.5, weight=30.0, num_tokens=1200, metrics={}, grad_norm=None)
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
        schedule: Any = None,
    ) -> None:
        self.micro_batches = MicroBatcher(limit or RowLimit(8), TokenRows(-100), Consensus(), make_silent_row=dict)
        self.step: Any = SimpleNamespace(learning_rate=0.01, meter=meter)
        self.retry: Any = SimpleNamespace(micro_batches=self.micro_batches, retries=3, events=())
        self.loader: Any = SimpleNamespace(samples_per_step=64, is_global=is_global, batch_size=16)
        self.growth = BatchGrowth(schedule, total_epochs=1, consensus=Consensus())
        self.logger = Logger()
        self.journal = RunJournal("never begun", writes=False)

    def log(self, *, writes: bool = True, every_steps: int = 1, ranks: int = 1, memory_stats: bool = False) -> StepLog:
        return StepLog(
            self.logger if writes else None,
            self.step,
            self.retry,
            self.loader,
            self.growth,
            RunEvents(self.journal, self.retry, checkpoints=lambda: ()),
            every_steps=every_steps,
            device=torch.device("cpu"),
            ranks=ranks,
            with_memory_stats=memory_stats,
        )


def test_a_step_is_logged_with_every_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts()
    parts.micro_batches.reduce()
    parts.micro_batches.count_padding(Cut((), num_tokens=30, num_padded_tokens=40))
    monkeypatch.setattr(step_log, "anonymous_bytes", lambda: 123_456_789)
    parts.log(ranks=4).write(7, RESULT, epoch=0, seconds=1.5)
    assert parts.logger.steps == {
        7: {
            "loss": 0.5,
            "lr": 0.01,
            "tokens_per_second_per_gpu": 1200 / 1.5 / 4,
            "global_batch_size": 64,
            "batch_size": 16,
            "micro_batch_size": 4,
            "padding": 0.25,
            "oom_retries": 3,
            "host_memory_bytes": 123_456_789,
        }
    }


def test_host_memory_is_anonymous_memory_as_the_system_counts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = resident.anonymous_bytes()
    assert before is not None
    held = torch.ones(64 * 2**20, dtype=torch.uint8)
    after = resident.anonymous_bytes()
    assert after is not None
    assert 60 * 2**20 < after - before < 68 * 2**20
    del held
    monkeypatch.setattr(resident, "_PROC", Path("/no such folder"))
    assert resident.anonymous_bytes() is None


def test_host_memory_is_not_logged_where_the_system_does_not_report_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_log, "anonymous_bytes", lambda: None)
    parts = Parts()
    parts.log().write(1, RESULT, epoch=0, seconds=1.0)
    assert "host_memory_bytes" not in parts.logger.steps[1]


def test_a_global_batch_in_tokens_is_logged_by_its_own_names() -> None:
    parts = Parts(TokenLimit(4096), is_global=True)
    parts.log().write(1, RESULT, epoch=0, seconds=1.0)
    assert set(parts.logger.steps[1]) == ALWAYS | {"max_tokens_per_micro_batch"}
    assert parts.logger.steps[1]["max_tokens_per_micro_batch"] == 4096


def test_optional_figures_of_a_step_are_logged_where_it_has_them() -> None:
    schedule = gradient_noise_scale(min_measurements=1)
    schedule.observe(GradientNorms(small_samples=4, small_norm_squared=11.0, samples=8, norm_squared=6.0))
    parts = Parts(schedule=schedule)
    result = replace(RESULT, metrics={"accuracy": 0.75, "margin": 2.0}, grad_norm=0.0)
    parts.log().write(1, result, epoch=0, seconds=1.0)
    beside = {"accuracy": 0.75, "margin": 2.0, "grad_norm": 0.0, "gradient_noise_scale": 40.0}
    logged = parts.logger.steps[1]
    assert {name: logged[name] for name in logged.keys() - ALWAYS - {"batch_size", "micro_batch_size"}} == beside


def test_every_nth_step_is_logged_with_the_padding_of_all_steps_since_the_last() -> None:
    parts = Parts()
    log = parts.log(every_steps=3)
    for step, tokens in enumerate([10, 10, 40, 10, 20, 30], start=1):
        parts.micro_batches.count_padding(Cut((), num_tokens=tokens, num_padded_tokens=40))
        log.write(step, RESULT, epoch=0, seconds=1.0)
    assert {step: logged["padding"] for step, logged in parts.logger.steps.items()} == {3: 0.5, 6: 0.5}


def test_other_ranks_log_nothing() -> None:
    parts = Parts()
    silent = parts.log(writes=False)
    silent.write(1, RESULT, epoch=0, seconds=1.0)
    assert (silent.writes, parts.log().writes) == (False, True)
    assert parts.logger.steps == {}


def test_a_meters_peak_is_the_highest_so_far() -> None:
    meter = CpuMeter()
    parts = Parts(meter=meter)
    log = parts.log(every_steps=2)
    live = torch.empty(100, dtype=torch.uint8)
    meter.count(live)
    for step, size in enumerate([5000, 900, 800, 700], start=1):
        with meter:
            torch.empty(size, dtype=torch.uint8)
        log.write(step, RESULT, epoch=0, seconds=1.0)
    assert {step: logged["peak_memory_bytes"] for step, logged in parts.logger.steps.items()} == {2: 5100, 4: 5100}
    assert (log.totals.steps, log.totals.peak_bytes) == (4, 5100)


@pytest.mark.parametrize("asked_for", [True, False])
def test_the_devices_own_memory_statistics_are_logged_if_asked_for(
    monkeypatch: pytest.MonkeyPatch, asked_for: bool
) -> None:
    def get_memory_stats(device: torch.device, reset_stats: bool = True) -> dict[str, str]:
        assert not reset_stats
        return {"peak_memory_active": f"of {device}"}

    monkeypatch.setattr(training, "get_memory_stats", get_memory_stats)
    parts = Parts()
    parts.log(memory_stats=asked_for).write(1, RESULT, epoch=0, seconds=1.0)
    assert parts.logger.steps[1].get("peak_memory_active") == ("of cpu" if asked_for else None)
