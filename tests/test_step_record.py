"""The journal has a line for each logged step and event, is cut where a run resumes, and never ends a run."""

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from omegaconf import DictConfig, OmegaConf

from tests.test_assembly import Recipe, train
from tests.test_step_log import RESULT, Parts
from torchtune_adaptive.errors import RunEnded
from torchtune_adaptive.recovery.attempts import MemoryPressure
from torchtune_adaptive.recovery.events import MemoryEvent
from torchtune_adaptive.report.read import read_run
from torchtune_adaptive.training import journal as journal_module
from torchtune_adaptive.training.file_names import JOURNAL_NAME
from torchtune_adaptive.training.journal import RunJournal
from torchtune_adaptive.training.run_events import RunEvents

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # by torchdata 0.11

EVENT = MemoryEvent(7, MemoryPressure.OUT_OF_MEMORY, (1, 3), "backward", "peak 1 B, limit 2 B", "error", 8, 4, "rows")


def lines_in(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / JOURNAL_NAME).read_text().splitlines()]


def begun(directory: Path, *, step: int = 0, **values: Any) -> RunJournal:
    journal = RunJournal(directory, writes=True)
    journal.begin(step=step, **values)
    return journal


# ---- the file


def test_each_line_is_written_at_once_and_a_number_that_is_not_finite_is_null(tmp_path: Path) -> None:
    journal = begun(tmp_path / "new", ranks=2)
    journal.append(step=1, loss=float("nan"), grad_norm=float("inf"), lr=0.5)
    journal.event("checkpoint", step=1, path="x")
    assert lines_in(tmp_path / "new") == [
        {"event": "started", "step": 0, "ranks": 2},
        {"step": 1, "loss": None, "grad_norm": None, "lr": 0.5},
        {"event": "checkpoint", "step": 1, "path": "x"},
    ]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    journal = RunJournal(tmp_path, writes=False)
    journal.begin(step=0)
    journal.append(step=1)
    assert not journal.is_open
    assert list(tmp_path.iterdir()) == []


def test_a_new_run_begins_a_new_file(tmp_path: Path) -> None:
    begun(tmp_path).append(step=1)
    begun(tmp_path).append(step=1, again=True)
    assert [line.get("again", False) for line in lines_in(tmp_path)] == [False, True]


def test_a_resumed_run_has_no_step_twice_and_drops_a_truncated_line(tmp_path: Path) -> None:
    first = begun(tmp_path)
    for step in range(1, 8):
        first.append(step=step)
    first.event("out of memory", step=6)
    with (tmp_path / JOURNAL_NAME).open("a") as file:
        file.write('{"step":8,"lo')
    second = begun(tmp_path, step=5, checkpoint="step_5")
    for step in range(6, 9):
        second.append(step=step)
    lines = lines_in(tmp_path)
    assert [line["step"] for line in lines if "event" not in line] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [(line["event"], line["step"]) for line in lines if "event" in line] == [("started", 0), ("resumed", 5)]


@pytest.mark.parametrize("blocked", ["folder", "file"])
def test_a_file_that_cannot_be_created_is_logged_once(
    blocked: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if blocked == "folder":
        (tmp_path / "run").write_text("")
    else:
        (tmp_path / "run" / JOURNAL_NAME).mkdir(parents=True)
    journal = begun(tmp_path / "run")
    journal.append(step=1)
    journal.append(step=2)
    assert [one.levelname for one in caplog.records] == ["WARNING"]
    assert caplog.messages[0].startswith(f"Steps are no longer recorded in {tmp_path}/run/{JOURNAL_NAME}: ")


def test_a_full_disk_is_logged_once_and_the_run_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = begun(tmp_path)
    write = os.write
    monkeypatch.setattr(journal_module.os, "write", lambda descriptor, line: write(descriptor, line[:5]))
    journal.append(step=1)
    monkeypatch.undo()
    journal.append(step=2)
    assert [one.levelname for one in caplog.records] == ["WARNING"]
    assert "5 of 11 bytes written" in caplog.messages[0]
    assert (tmp_path / JOURNAL_NAME).read_text().splitlines()[1:] == ['{"ste']


# ---- what is written


def test_events_are_written_once_each_with_the_figures_of_the_shortage(tmp_path: Path) -> None:
    retry: Any = SimpleNamespace(events=(EVENT,))
    finished = [(Path("x/step_3"), 3)]
    events = RunEvents(begun(tmp_path), retry, checkpoints=lambda: finished)
    events.look()
    events.look()
    finished += [(Path("x/step_9"), 9), (Path("x/epoch_0"), 9)]
    retry.events += (replace(EVENT, step=10, pressure=MemoryPressure.THRASHING, error=None),)
    events.look()
    lines = lines_in(tmp_path)[1:]
    assert [(line["event"], line["step"]) for line in lines] == [
        ("out of memory", 7),
        ("checkpoint", 3),
        ("thrashing", 10),
        ("checkpoint", 9),
        ("checkpoint", 9),
    ]
    assert lines[0] == {
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
    assert events.checkpoint == Path("x/epoch_0")


def test_a_logged_step_has_the_names_of_the_metrics_and_its_epoch(tmp_path: Path) -> None:
    parts = Parts()
    parts.journal = begun(tmp_path)
    log = parts.log(every_steps=2)
    log.write(1, RESULT, epoch=0, seconds=1.0)
    log.write(2, RESULT, epoch=1, seconds=3.0)
    assert lines_in(tmp_path)[1:] == [{"step": 2, "epoch": 1, "seconds": 3.0} | parts.logger.steps[2]]
    assert (log.totals.steps, log.totals.num_tokens, log.totals.seconds) == (2, 2400, 4.0)


# ---- whole runs


def test_a_run_is_recorded_from_start_to_end_with_the_figures_that_it_logged(tmp_path: Path) -> None:
    recipe = Recipe(tmp_path)
    logged = train(recipe)
    first, *steps, last = lines_in(tmp_path / "output")
    assert (first["event"], first["step"], first["searched"]) == ("started", 0, False)
    assert [(line["step"], line["loss"], line["lr"]) for line in steps] == [
        (one["step"], one["loss"], one["lr"]) for one in logged
    ]
    assert [line["epoch"] for line in steps] == [0] * 6 + [1] * 6
    assert (last["event"], last["step"], last["how"]) == ("ended", 12, "complete")


def test_a_summary_says_what_was_done_and_where_the_files_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recipe = Recipe(tmp_path)
    cfg = OmegaConf.merge(recipe.parts.cfg, {"metric_logger": {"log_dir": "/logs"}})
    recipe.parts = replace(recipe.parts, cfg=cast(DictConfig, cfg))
    train(recipe, use_maximum_batch_size=True, memory_limit_bytes=2**20, max_batch_size=3, power_of_two=False)
    title, *rows = caplog.messages[-1].splitlines()
    found = {row[2:19].strip(): row[19:] for row in rows}
    output = tmp_path / "output"
    assert title == "Run complete: 8 optimizer steps, 2 epochs"
    assert len(rows) <= 11
    throughput, peak = found.pop("throughput"), found.pop("peak memory")
    assert throughput.split(" ", 1)[1].startswith("tokens/s per rank, mean of 8 steps in ")
    assert peak.endswith(" of 1.0 MiB on rank 0")
    assert found == {
        "batch_size": "3, 3 samples per optimizer step",
        "micro-batch": "at most 3 rows per rank (found 3, used 3, by linear_extrapolation)",
        "out of memory": "never",
        "last checkpoint": "none",
        "metrics": "/logs",
        "report": f"{output}/adaptive_batch.json, {output}/adaptive_steps.jsonl",
        "picture": f"tune-adaptive report {output}",
    }


def test_a_run_that_a_signal_ends_has_a_summary_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recipe = Recipe(tmp_path)
    recipe.parts = replace(recipe.parts, stop_requested=lambda: True)
    trainer = recipe.trainer()
    with pytest.raises(RunEnded):
        trainer.train()
    (summary,) = (message for message in caplog.messages if message.startswith("Run "))
    assert summary.startswith("Run ended by a signal: 1 optimizer step, 0 epochs\n")
    assert f"last checkpoint  {tmp_path}/checkpoints/step_1\n" in summary
    assert "peak memory      not measured (no limit)\n" in summary
    *_, saved, last = lines_in(tmp_path / "output")
    assert (saved["event"], saved["path"]) == ("checkpoint", str(tmp_path / "checkpoints" / "step_1"))
    assert (last["event"], last["how"]) == ("ended", "ended by a signal")


def test_a_resumed_run_continues_the_file_after_its_checkpoint(tmp_path: Path) -> None:
    first = Recipe(tmp_path)
    steps_done: list[int] = []
    first.parts = replace(first.parts, before_step=steps_done.append, stop_requested=lambda: len(steps_done) == 3)
    with pytest.raises(RunEnded):
        first.trainer().train()
    lost = tmp_path / "output" / JOURNAL_NAME
    lost.write_text(lost.read_text() + '{"step":4,"epoch":0}\n')  # a step after the last checkpoint
    second = Recipe(tmp_path)
    (checkpoint,) = second.parts.checkpoints.checkpoints()
    second.parts = replace(second.parts, resumed=checkpoint, epochs=range(2))
    second.trainer().train()
    lines = lines_in(tmp_path / "output")
    assert [line["step"] for line in lines if "event" not in line] == list(range(1, 13))
    assert [(line["event"], line["step"]) for line in lines if "event" in line] == [
        ("started", 0),
        ("checkpoint", 3),
        ("ended", 3),
        ("resumed", 3),
        ("ended", 12),
    ]
    run = read_run(tmp_path / "output")
    assert run.of_kind("resumed")[0].values["checkpoint"] == str(tmp_path / "checkpoints" / "step_3")
