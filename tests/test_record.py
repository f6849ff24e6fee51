"""The report on disk is complete after each decision, rank 0 alone writes, and a full disk does not end the run."""

import json
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.toys import search_result
from torchtune_adaptive.search.sizes import Sizes
from torchtune_adaptive.search.strategies import Probe
from torchtune_adaptive.training.file_names import REPORT_NAME
from torchtune_adaptive.training.record import RunRecord

KEYS = {
    "strategy",
    "exact_batch_size",
    "batch_size",
    "bound",
    "memory_limit_bytes",
    "margin",
    "seq_len",
    "world_size",
    "probes",
    "forecast_rows",
    "forecast",
    "reused",
    "history",
}
PROBE_KEYS = {"batch_size", "fits", "peak_bytes", "phase_peak_bytes", "seconds"}
PROBES = (
    Probe(batch_size=2, fits=True, peak_bytes=300, phase_peak_bytes={"": 10, "forward": 300}, seconds=0.25),
    Probe(batch_size=1000, fits=False, peak_bytes=9000, phase_peak_bytes={"": 10, "forward": 9000}, seconds=12.0),
)
RESULT = search_result(
    exact_batch_size=3,
    batch_size=2,
    bound=4096,
    world_size=2,
    probes=PROBES,
    forecast_rows=3.5,
    forecast=((2, 300),),
)
SEARCHED = Sizes(result=RESULT, probe_row={"tokens": [1]}, seq_len=128, fitting_rows=2)


def record_in(directory: Path, sizes: Sizes = SEARCHED, *, writes: bool = True) -> RunRecord:
    return RunRecord(directory, sizes, memory_limit_bytes=1000, writes=writes)


def report_in(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "adaptive_batch.json").read_text())


# ---- the report


def test_the_report_has_every_key_that_is_promised(tmp_path: Path) -> None:
    record_in(tmp_path).note("config", epoch=0, batch_size=2)
    report = report_in(tmp_path)
    assert REPORT_NAME == "adaptive_batch.json"
    assert set(report) == KEYS
    assert {name: report[name] for name in KEYS - {"probes", "history", "seq_len", "forecast"}} == {
        "strategy": "binary_search",
        "exact_batch_size": 3,
        "batch_size": 2,
        "bound": 4096,
        "memory_limit_bytes": 1000,
        "margin": 0.05,
        "world_size": 2,
        "forecast_rows": 3.5,
        "reused": False,
    }
    assert (report["seq_len"], report["forecast"]) == (128, [[2, 300]])
    assert [set(probe) for probe in report["probes"]] == [PROBE_KEYS, PROBE_KEYS]
    assert report["probes"] == [asdict(probe) for probe in PROBES]  # in the order in which sizes were tried


def test_every_decision_is_in_the_report_at_once_in_order_and_with_its_figures(tmp_path: Path) -> None:
    record = record_in(tmp_path)
    record.note("binary_search search", epoch=0, batch_size=2, samples_per_step=16)
    first = {"epoch": 0, "batch_size": 2, "samples_per_step": 16, "reason": "binary_search search"}
    assert report_in(tmp_path)["history"] == [first]
    record.note("micro-batch 2 -> 1 rows", epoch=3, batch_size=2, step=7, micro_batch_size=1)
    second = {"epoch": 3, "batch_size": 2, "step": 7, "micro_batch_size": 1, "reason": "micro-batch 2 -> 1 rows"}
    assert report_in(tmp_path)["history"] == [first, second]
    assert record.history == [first, second]


def test_the_report_has_the_results_of_only_those_searches_that_ran(tmp_path: Path) -> None:
    record_in(tmp_path, Sizes()).note("config", epoch=0, batch_size=64)
    assert set(report_in(tmp_path)) == {"history"}
    record_in(tmp_path, Sizes(token_budget=512)).note("config", epoch=0, batch_size=64)
    assert set(report_in(tmp_path)) == {"history"}  # the config's own budget is not the result of a search
    sizes = Sizes(result=RESULT, seq_len=128, token_budget=1920, tokens_per_second={2: 99.5, 1: 60.0})
    record_in(tmp_path, sizes).note("config", epoch=0, batch_size=64)
    report = report_in(tmp_path)
    assert set(report) == KEYS | {"token_budget", "tokens_per_second"}
    assert (report["token_budget"], report["tokens_per_second"]) == (1920, {"2": 99.5, "1": 60.0})


def test_the_report_of_a_run_that_ends_after_its_search_says_so(tmp_path: Path) -> None:
    record = RunRecord(tmp_path, SEARCHED, memory_limit_bytes=1000, writes=True, search_only=True)
    record.note("binary_search search", epoch=0, batch_size=2)
    report = report_in(tmp_path)
    assert set(report) == KEYS | {"search_only_at"}
    assert 0 <= time.time() - report["search_only_at"] < 600


def test_the_report_is_written_into_a_directory_made_for_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    record = RunRecord(str(tmp_path / "new" / "run"), Sizes(), memory_limit_bytes=None, writes=True)
    record.note("config", epoch=0, batch_size=2)
    assert set(report_in(tmp_path / "new" / "run")) == {"history"}
    assert caplog.messages == [f"Report written to {tmp_path}/new/run/adaptive_batch.json"]


# ---- which rank writes, and errors of writing


def test_other_ranks_keep_the_history_and_write_nothing(tmp_path: Path) -> None:
    record = record_in(tmp_path, writes=False)
    record.note("config", epoch=0, batch_size=2)
    assert list(tmp_path.iterdir()) == []
    assert record.history == [{"epoch": 0, "batch_size": 2, "reason": "config"}]


def test_a_report_that_cannot_be_written_is_logged_and_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    record = RunRecord(tmp_path / "file", Sizes(), memory_limit_bytes=None, writes=True)
    record.note("config", epoch=0, batch_size=2)
    assert [one.levelname for one in caplog.records] == ["WARNING"]
    assert [message.partition(":")[0] for message in caplog.messages] == ["Report not written"]
    assert record.history == [{"epoch": 0, "batch_size": 2, "reason": "config"}]


@pytest.mark.parametrize("was_there", [True, False])
def test_a_directory_that_has_vanished_is_not_made_again(
    was_there: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another run may use the path by now, because the lock of this run was in the directory."""
    if was_there:
        (tmp_path / "run").mkdir()
    record = record_in(tmp_path / "run")
    if not was_there:
        record.note("config", epoch=0, batch_size=2)
    shutil.rmtree(tmp_path / "run")
    caplog.clear()
    record.note("micro-batch 2 -> 1 rows", epoch=3, batch_size=2)
    (message,) = caplog.messages
    path = tmp_path / "run" / "adaptive_batch.json"
    assert message.startswith(f"Report not written: FileNotFoundError: [Errno 2] No such file or directory: '{path}.")
    assert list(tmp_path.iterdir()) == []


# ---- a resumed run


def test_a_resumed_run_continues_the_history(tmp_path: Path) -> None:
    record = record_in(tmp_path)
    record.note("config", epoch=0, batch_size=2)
    state = record.state_dict()
    assert state == {"history": [{"epoch": 0, "batch_size": 2, "reason": "config"}], "memory_limit_bytes": 1000}
    resumed = record_in(tmp_path)
    resumed.load_state_dict(state)
    resumed.note("config, resumed at epoch 1", epoch=1, batch_size=2)
    assert [entry["epoch"] for entry in report_in(tmp_path)["history"]] == [0, 1]
    assert [entry["epoch"] for entry in state["history"]] == [0]


def test_the_history_given_out_is_a_copy(tmp_path: Path) -> None:
    record = record_in(tmp_path)
    record.note("config", epoch=0, batch_size=2)
    record.history.clear()
    assert len(record.history) == 1
