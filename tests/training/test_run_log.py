"""The log has a line for each decision, logged step and event, is cut where a run resumes, and never ends a run."""

import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.run_logs import events_in, lines_in
from tests.support.toys import search_result
from tests.training.test_assembly import Recipe, train
from torchtune_adaptive.engine.search.strategies import Probe
from torchtune_adaptive.engine.search.timing import Timing
from torchtune_adaptive.errors import RunEnded
from torchtune_adaptive.report.read import read_run
from torchtune_adaptive.training import run_log as module
from torchtune_adaptive.training.run_log import LOG_NAME, RunLog

PROBES = (
    Probe(batch_size=2, fits=True, peak_bytes=300, phase_peak_bytes={"": 10, "forward": 300}, seconds=0.25),
    Probe(batch_size=1000, fits=False, peak_bytes=9000, phase_peak_bytes={"": 10, "forward": 9000}, seconds=12.0),
)
RESULT = search_result(exact_batch_size=3, batch_size=2, world_size=2, probes=PROBES, forecast=((2, 300),))


def begun(directory: Path, *, step: int = 0, **values: Any) -> RunLog:
    run_log = RunLog(directory, writes=True)
    run_log.begin(step=step, **values)
    return run_log


def names_in(directory: Path) -> list[tuple[str | None, int]]:
    return [(line.get("event"), line["step"]) for line in lines_in(directory)]


# ---- the file


def test_each_line_is_written_at_once_and_a_number_that_is_not_finite_is_null(tmp_path: Path) -> None:
    run_log = begun(tmp_path / "new", ranks=2)
    run_log.append(step=1, loss=float("nan"), grad_norm=float("inf"), lr=0.5)
    run_log.append(event="checkpoint", step=1, path="x")
    assert lines_in(tmp_path / "new") == [
        {"event": "started", "step": 0, "run": "", "ranks": 2},
        {"step": 1, "loss": None, "grad_norm": None, "lr": 0.5},
        {"event": "checkpoint", "step": 1, "path": "x"},
    ]


def test_a_new_run_begins_a_new_file_and_lines_of_another_run_are_dropped(tmp_path: Path) -> None:
    begun(tmp_path, run="a").append(step=1, loss=0.5)
    begun(tmp_path, run="a", step=1).append(step=2, loss=0.25)
    assert names_in(tmp_path) == [("started", 0), (None, 1), ("resumed", 1), (None, 2)]
    begun(tmp_path, run="b", step=2).note("old", step=3, epoch=0, batch_size=1)
    assert names_in(tmp_path) == [("resumed", 2), ("sizes", 3)]
    assert begun(tmp_path, run="b").history == []
    assert lines_in(tmp_path) == [{"event": "started", "step": 0, "run": "b"}]


def test_a_search_is_written_with_everything_that_it_found(tmp_path: Path) -> None:
    run_log = begun(tmp_path)
    timings = {"1 row": Timing((1.5, 1.0), 60), "2 rows": Timing((0.5,), 99)}
    run_log.search(RESULT, step=0, seq_len=128, chosen={"token_budget": 1920}, timings=timings)
    run_log.search(RESULT, step=0, seq_len=None, of="trained")
    whole, bare = read_run(tmp_path).searches
    assert whole.result == bare.result == RESULT
    assert (whole.of, whole.seq_len) == ("", 128)
    assert (whole.chosen, whole.timings) == ({"token_budget": 1920}, timings)
    assert (bare.of, bare.seq_len, bare.chosen, bare.timings) == ("trained", None, {}, {})
    assert events_in(tmp_path, "search")[0]["probes"] == [asdict(probe) for probe in PROBES]  # as they were tried


def test_other_ranks_keep_the_history_and_write_nothing(tmp_path: Path) -> None:
    run_log = RunLog(tmp_path, writes=False)
    run_log.begin(step=0)
    run_log.append(step=1)
    run_log.note("config", step=1, epoch=0, batch_size=2)
    assert not run_log.is_open
    assert list(tmp_path.iterdir()) == []
    assert [entry["reason"] for entry in run_log.history] == ["config"]


def test_a_resumed_run_has_no_step_or_decision_twice_and_drops_a_truncated_line(tmp_path: Path) -> None:
    first = begun(tmp_path)
    first.note("config", step=1, epoch=0, batch_size=2)
    for step in range(1, 8):
        first.append(step=step)
    first.append(event="out of memory", step=6)
    first.note("growth", step=6, epoch=1, batch_size=4)
    with (tmp_path / LOG_NAME).open("a") as file:
        file.write('{"event":"sizes","step":1}\n{"step":8,"lo')  # no decision: it has no size
    second = begun(tmp_path, step=5, checkpoint="step_5")
    assert [entry["reason"] for entry in second.history] == ["config"]
    second.note("growth", step=6, epoch=1, batch_size=4)
    for step in range(6, 9):
        second.append(step=step)
    assert [step for name, step in names_in(tmp_path) if name is None] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [one for one in names_in(tmp_path) if one[0] is not None] == [
        *(("started", 0), ("sizes", 1), ("sizes", 1), ("resumed", 5), ("sizes", 6)),
    ]
    assert [entry["reason"] for entry in second.history] == ["config", "growth"]


def test_a_search_without_training_keeps_the_run_before_it_which_can_resume(tmp_path: Path) -> None:
    begun(tmp_path).append(step=1)
    for _ in range(2):
        only = begun(tmp_path, search_only=True)
        only.search(RESULT, step=0, seq_len=128)
        only.note("binary_search search", step=1, epoch=0, batch_size=2)
        assert len(only.history) == 1
    searched = [("search only", 0), ("search", 0), ("sizes", 1)]
    assert names_in(tmp_path) == [("started", 0), (None, 1), *searched]
    begun(tmp_path, step=1)
    assert names_in(tmp_path) == [("started", 0), (None, 1), ("resumed", 1)]


def test_a_run_from_the_beginning_keeps_the_search_before_it(tmp_path: Path) -> None:
    for _ in range(2):
        begun(tmp_path, search_only=True).search(RESULT, step=0, seq_len=128)
    for _ in range(2):  # the second, because the first was killed before its first checkpoint
        begun(tmp_path).append(step=1)
        assert names_in(tmp_path) == [("started", 0), ("search", 0), (None, 1)]
        (search,) = read_run(tmp_path).searches
        assert search.is_before
        assert search.result == RESULT
    begun(tmp_path, step=1)
    assert names_in(tmp_path) == [("started", 0), ("search", 0), (None, 1), ("resumed", 1)]
    begun(tmp_path).search(RESULT, step=0, seq_len=64)  # a run that searches itself
    (search,) = read_run(tmp_path).searches
    assert not search.is_before


def test_a_file_that_cannot_be_created_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "run").write_text("a file where the folder should be")
    run_log = begun(tmp_path / "run")
    run_log.append(step=1)
    run_log.append(step=2)
    assert [one.levelname for one in caplog.records] == ["WARNING"]
    assert caplog.messages[0].startswith(f"The run is no longer recorded in {tmp_path}/run/{LOG_NAME}: ")


def test_a_full_disk_is_logged_once_and_the_run_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_log = begun(tmp_path)
    write = os.write
    monkeypatch.setattr(module.os, "write", lambda descriptor, line: write(descriptor, line[:5]))
    run_log.append(step=1)
    monkeypatch.undo()
    run_log.append(step=2)
    assert [one.levelname for one in caplog.records] == ["WARNING"]
    assert "5 of 11 bytes written" in caplog.messages[0]
    assert (tmp_path / LOG_NAME).read_text().splitlines()[1:] == ['{"ste']


def test_a_folder_that_has_vanished_is_not_made_again(tmp_path: Path) -> None:
    """Another run may use the path by now, because the lock of this run was in the folder."""
    run_log = begun(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    run_log.append(step=1)
    assert list(tmp_path.iterdir()) == []


# ---- whole runs


def test_a_run_is_recorded_from_start_to_end_with_the_figures_that_it_logged(tmp_path: Path) -> None:
    logged = train(Recipe(tmp_path))
    first, *steps, last = lines_in(tmp_path / "output")
    assert (first["event"], first["step"], first["epochs"]) == ("started", 0, 2)
    assert [(line["step"], line["loss"], line["lr"]) for line in steps] == [
        (one["step"], one["loss"], one["lr"]) for one in logged
    ]
    assert [line["epoch"] for line in steps] == [0] * 6 + [1] * 6
    assert (last["event"], last["step"], last["how"]) == ("ended", 12, "complete")


def test_a_summary_says_what_was_done_and_where_the_files_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recipe = Recipe(tmp_path / "my runs")
    recipe.parts = replace(recipe.parts, config={**recipe.parts.config, "metric_logger.log_dir": "/logs"})
    train(recipe, use_maximum_batch_size=True, memory_limit_bytes=2**20, max_batch_size=3, power_of_two=False)
    title, *rows = caplog.messages[-1].splitlines()
    found = {row[2:19].strip(): row[19:] for row in rows}
    output = tmp_path / "my runs" / "output"
    assert title == "Run complete: 8 optimizer steps, 2 epochs"
    throughput, peak = found.pop("throughput"), found.pop("peak memory")
    assert throughput.split(" ", 1)[1].startswith("tokens/s per rank, mean of 8 steps in ")
    assert peak.endswith(" of 1.0 MiB on rank 0")
    assert found == {
        "batch_size": "3, 3 samples per optimizer step",
        "micro-batch": "at most 3 rows per rank (found 3, by linear_extrapolation)",
        "out of memory": "never",
        "last checkpoint": "none",
        "metrics": "/logs",
        "log": f"{output}/{LOG_NAME}",
        "report": f"tune-adaptive report '{output}'",
    }


def test_a_run_that_a_signal_ends_has_a_summary_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recipe = Recipe(tmp_path)
    recipe.stop_requested = lambda: True
    trainer = recipe.trainer()
    with pytest.raises(RunEnded):
        trainer.train()
    (summary,) = (message for message in caplog.messages if message.startswith("Run "))
    assert summary.startswith("Run ended by a signal: 1 optimizer step, 0 epochs\n")
    assert f"last checkpoint  {tmp_path}/checkpoints/step_1\n" in summary
    assert "peak memory      not measured (no limit)\n" in summary
    assert "metrics" not in summary  # which are nowhere that the config says
    *_, saved, last = lines_in(tmp_path / "output")
    assert (saved["event"], saved["path"]) == ("checkpoint", str(tmp_path / "checkpoints" / "step_1"))
    assert (last["event"], last["how"]) == ("ended", "ended by a signal")
