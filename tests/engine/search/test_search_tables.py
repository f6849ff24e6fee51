"""The tables and the summary of a search: columns align, missing figures are blank, and conditions are named."""

from dataclasses import replace

from tests.support.toys import search_result
from torchtune_adaptive.engine.search.strategies import Probe
from torchtune_adaptive.engine.search.tables import failures_text, length_table, probe_table, summary

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
FOUND = search_result(
    exact_batch_size=2, batch_size=2, bound=4096, memory_limit_bytes=100 * 2**20, world_size=2, probes=PROBES
)


# ---- probes


def test_the_table_has_a_column_for_each_phase_and_the_figures_of_each_probe() -> None:
    header, _, first, failed = (line.split() for line in probe_table(FOUND).splitlines())
    assert header == ["batch_size", "forward", "backward", "optimizer", "peak", "usable", "fits", "seconds"]
    assert first == ["2", "1.0", "MiB", "3.0", "MiB", "2.0", "MiB", "3.0", "MiB", "95.0", "MiB", "yes", "0.25"]
    assert failed == ["1000", "123.0", "MiB", "123.0", "MiB", "95.0", "MiB", "no", "12.00"]  # and blank cells
    failed_first = probe_table(replace(FOUND, probes=PROBES[::-1]))
    assert failed_first.splitlines()[0].split() == header


# ---- lengths


def test_the_table_of_lengths_has_a_line_for_each_probe_with_its_tokens() -> None:
    header, _, *rows = length_table([(256, PROBES[0]), (16, PROBES[1])]).splitlines()
    assert header.split() == ["rows", "of", "rows", "tokens", "peak", "fits", "seconds"]
    assert [row.split() for row in rows] == [
        ["256", "2", "512", "3.0", "MiB", "yes", "0.25"],
        ["16", "1000", "16000", "123.0", "MiB", "no", "12.00"],
    ]


def test_a_probe_that_ran_but_took_too_much_has_its_own_word() -> None:
    ran = [replace(PROBES[1], failure=failure) for failure in ("allocator retried", "above the limit", "out of memory")]
    verdicts = [
        line.split("MiB")[-1].split("12.00")[0] for line in probe_table(replace(FOUND, probes=ran)).splitlines()
    ]
    assert [verdict.strip() for verdict in verdicts[2:]] == ["no, allocator retried", "no, above the limit", "no"]
    assert failures_text([*ran, ran[0], PROBES[0]]) == "1 out of memory, 1 above the limit, 2 allocator retried"
    assert failures_text([PROBES[1]]) == "1 out of memory"  # as in logs of earlier versions
    assert failures_text([PROBES[0]]) == "0 out of memory"


# ---- the summary


def test_the_summary_says_in_one_line_what_was_found_under_which_conditions() -> None:
    assert summary(FOUND, 128) == (
        "binary_search: largest batch_size that fits: 2 (rows of 128 tokens, limit 100.0 MiB per rank,"
        " margin 0.05, 2 ranks, 2 probes, 1 out of memory)"
    )
    assert "fits: 2, the largest size allowed (rows" in summary(replace(FOUND, bound=2), 128)
    assert "fits: 3, rounded down to 2 (rows" in summary(replace(FOUND, exact_batch_size=3), 128)
