"""The report is complete, never half written, and its table can be read."""

import json
from pathlib import Path
from typing import Any

import pytest

from torchtune_adaptive.search.strategies import Probe, SearchResult
from torchtune_adaptive.training.report import REPORT_NAME, AdaptiveReport, probe_table, rate_table, summary

KEYS = {
    "strategy",
    "exact_batch_size",
    "batch_size",
    "memory_limit_bytes",
    "margin",
    "seq_len",
    "world_size",
    "probes",
    "history",
}
PROBE_KEYS = {"batch_size", "fits", "peak_bytes", "phase_peak_bytes", "seconds"}
HISTORY_KEYS = {"epoch", "batch_size", "reason"}

PROBES = (
    Probe(
        batch_size=2,
        fits=True,
        peak_bytes=3 * 2**20,
        phase_peak_bytes={"": 10, "forward": 2**20, "backward": 3 * 2**20, "optimizer": 2**21},
        seconds=0.25,
    ),
    Probe(
        batch_size=1000,
        fits=False,
        peak_bytes=123 * 2**20,
        phase_peak_bytes={"": 10, "forward": 123 * 2**20},
        seconds=12.0,
    ),
)


def result_of(**changes: Any) -> SearchResult:
    figures: dict[str, Any] = {
        "strategy": "binary_search",
        "exact_batch_size": 2,
        "batch_size": 2,
        "bound": 4096,
        "memory_limit_bytes": 100 * 2**20,
        "margin": 0.05,
        "world_size": 2,
        "probes": PROBES,
    }
    return SearchResult(**(figures | changes))


@pytest.fixture
def report() -> AdaptiveReport:
    made = AdaptiveReport(result_of(), seq_len=128)
    made.decided(epoch=0, batch_size=2, reason="binary_search search")
    made.decided(epoch=3, batch_size=4, reason="grew")
    return made


# ---- the file


def test_the_file_has_every_key_that_is_promised(report: AdaptiveReport, tmp_path: Path) -> None:
    content = json.loads(report.write(tmp_path).read_text())
    assert set(content) >= KEYS
    assert all(set(probe) >= PROBE_KEYS for probe in content["probes"])
    assert all(set(entry) == HISTORY_KEYS for entry in content["history"])
    assert {key: content[key] for key in ("strategy", "exact_batch_size", "batch_size", "seq_len", "world_size")} == {
        "strategy": "binary_search",
        "exact_batch_size": 2,
        "batch_size": 2,
        "seq_len": 128,
        "world_size": 2,
    }
    assert (content["memory_limit_bytes"], content["margin"]) == (100 * 2**20, 0.05)


def test_probes_and_decisions_are_in_the_order_in_which_they_were_made(report: AdaptiveReport, tmp_path: Path) -> None:
    content = json.loads(report.write(tmp_path).read_text())
    assert [(probe["batch_size"], probe["fits"]) for probe in content["probes"]] == [(2, True), (1000, False)]
    assert [probe["phase_peak_bytes"] for probe in content["probes"]] == [probe.phase_peak_bytes for probe in PROBES]
    assert content["history"] == [
        {"epoch": 0, "batch_size": 2, "reason": "binary_search search"},
        {"epoch": 3, "batch_size": 4, "reason": "grew"},
    ]


def test_the_file_lies_where_it_is_promised_in_a_directory_made_for_it(report: AdaptiveReport, tmp_path: Path) -> None:
    path = report.write(str(tmp_path / "new" / "run"))
    assert path == tmp_path / "new" / "run" / "adaptive_batch.json"
    assert REPORT_NAME == "adaptive_batch.json"


def test_what_was_not_looked_for_is_not_in_the_file_and_what_was_is(tmp_path: Path) -> None:
    assert set(json.loads(AdaptiveReport().write(tmp_path).read_text())) == {"history"}
    report = AdaptiveReport(result_of(), seq_len=128, token_budget=1920, tokens_per_second={2: 99.5, 1: 60.0})
    report.decided(epoch=0, batch_size=64, reason="config", samples_per_step=64)
    content = json.loads(report.write(tmp_path).read_text())
    assert set(content) >= KEYS
    assert (content["token_budget"], content["tokens_per_second"]) == (1920, {"2": 99.5, "1": 60.0})
    assert content["history"] == [{"epoch": 0, "batch_size": 64, "samples_per_step": 64, "reason": "config"}]


# ---- the table


def test_the_columns_of_the_table_align() -> None:
    header, rule, *rows = probe_table(result_of()).splitlines()
    assert len(rows) == len(PROBES)
    assert {len(line) for line in (header, rule, *rows)} == {len(header)}
    ends = [index for index, (mark, following) in enumerate(zip(rule, rule[1:] + " ", strict=True)) if mark > following]
    assert len(ends) == 8
    for line in (header, *rows):
        assert all(line[index + 1 : index + 3].strip() == "" for index in ends[:-1])  # the gap after each column
    assert all(header[index] != " " for index in ends)  # right-aligned


def test_the_table_has_a_column_for_each_phase_and_the_figures_of_each_probe() -> None:
    header, _, first, _ = (line.split() for line in probe_table(result_of()).splitlines())
    assert header == ["batch_size", "forward", "backward", "optimizer", "peak", "may", "use", "fits", "seconds"]
    assert first == ["2", "1.0", "MiB", "3.0", "MiB", "2.0", "MiB", "3.0", "MiB", "95.0", "MiB", "yes", "0.25"]


def test_a_phase_that_was_not_reached_is_a_blank_cell() -> None:
    header, _, _, failed = probe_table(result_of()).splitlines()
    for phase in ("backward", "optimizer"):
        end = header.index(phase) + len(phase)
        assert failed[end - 9 : end].strip() == ""
    assert failed.split() == ["1000", "123.0", "MiB", "123.0", "MiB", "95.0", "MiB", "no", "12.00"]


def test_a_phase_that_only_a_later_probe_reached_has_its_column() -> None:
    table = probe_table(result_of(probes=PROBES[::-1]))
    header, _, first, second = table.splitlines()
    assert header.split()[:4] == ["batch_size", "forward", "backward", "optimizer"]
    assert [first.split()[0], second.split()[0]] == ["1000", "2"]


def test_a_table_without_probes_is_its_header() -> None:
    header, rule = probe_table(result_of(probes=())).splitlines()
    assert header.split() == ["batch_size", "peak", "may", "use", "fits", "seconds"]
    assert len(header) == len(rule)


def test_the_table_of_rates_has_a_line_for_each_size_by_size_and_marks_the_one_chosen() -> None:
    header, _, *rows = rate_table({16: 1000.0, 4: 600.4, 8: 985.6}, chosen=8).splitlines()
    assert header.split() == ["batch_size", "tokens/s", "of", "best", "chosen"]
    assert [row.split() for row in rows] == [
        ["4", "600", "60.0%", "-"],
        ["8", "986", "98.6%", "yes"],
        ["16", "1000", "100.0%", "-"],
    ]


# ---- the summary


def test_the_summary_says_in_one_line_what_was_found_and_from_what() -> None:
    assert summary(result_of(), 128) == (
        "binary_search: largest batch_size that fits 2, used 2 (rows of 128 tokens, limit 100.0 MiB per rank,"
        " margin 0.05, 2 ranks, 2 probes, 1 out of memory)"
    )


def test_the_summary_says_if_the_search_was_stopped_by_its_bound() -> None:
    assert "fits 2, all that may be tried, used 2" in summary(result_of(bound=2), 128)
