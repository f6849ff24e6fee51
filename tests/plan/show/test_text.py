"""A plan as text."""

import dataclasses
from typing import Any

import pytest

from tests.support.plans import GIB, cfg_of, planned, rows_of, some_plan, step_of, tables
from torchtune_adaptive.plan.decide import Plan, PlannedChange
from torchtune_adaptive.plan.host_memory import CUDA_PROCESS_BYTES, PROCESS_BYTES, HostFigures, HostPlan, pinned_bytes
from torchtune_adaptive.plan.show.text import change_text, plan_text, verdict
from torchtune_adaptive.text import format_bytes


def _of_device(plan: Plan) -> str:
    return next(line for line in plan_text(plan).splitlines() if "a search keeps" in line)


def test_the_text_says_how_much_the_card_or_a_memory_limit_allows_a_process() -> None:
    step = step_of(rows_of(64, held_bytes=1, bytes_per_row=1))
    usual = "8 ranks of 80.0 GiB; a search keeps 5 % of what torch's allocator may use free (3.9 GiB)"
    assert _of_device(some_plan()) == usual
    limited = planned(cfg_of(memory_limit="30GiB", margin=0.1), step)
    of_allocator = "a search keeps 10 % of what torch's allocator may use free (3.0 GiB)"
    assert _of_device(limited) == f"1 rank of 80.0 GiB, limited to 31.0 GiB; {of_allocator}"
    assert limited.device.usable_bytes == 27 * GIB + limited.device.outside_bytes


@pytest.mark.parametrize(
    ("figures", "line"),
    [
        ({}, "any: 8.03 B parameters in 32 layers, extrapolated from models of 4 and 6 layers"),
        (
            {"num_parameters": 9_270_000_000, "num_frozen_parameters": 8_030_000_000, "traced_layers": (32,)},
            "any: 1.24 B parameters in 32 layers; 8.03 B in a frozen model",
        ),
        (
            {"num_parameters": 494_030_000, "num_layers": 2, "traced_layers": (2,)},
            "any: 494.03 M parameters in 2 layers",
        ),
    ],
)
def test_the_text_counts_parameters_and_names_smaller_models_only_if_they_were_traced(
    figures: dict[str, Any], line: str
) -> None:
    assert plan_text(some_plan(**figures)).splitlines()[0] == line


def test_the_table_of_sizes_has_the_figures_of_each_length_of_rows() -> None:
    found = some_plan()
    header, fits, not_one = tables(plan_text(found))[0]
    assert header[:5] == ["tokens per row", "largest batch", "safe batch", "used", "tokens per step"]
    assert header[5:] == ["allocated", "reserved", "process", "uncertainty"]
    short, long = found.lengths
    assert fits[:5] == [
        "2048",
        str(short.largest_batch_size),
        str(short.safe_batch_size),
        str(short.used.batch_size),
        f"{short.tokens_per_step:,}",
    ]
    assert not_one[:5] == ["8192", "0", "0", "(1)", f"{8192 * 8:,}"]
    for row, length in ((fits, short), (not_one, long)):
        used = length.used
        figures = [used.allocated_bytes, used.reserved_bytes, used.process_bytes]
        for cell, num_bytes in zip(row[5:], [*figures, used.uncertainty_bytes], strict=True):
            assert cell == format_bytes(num_bytes)


def test_two_tables_have_the_peak_of_each_phase_and_what_the_highest_holds() -> None:
    found = some_plan()
    _, phases, kinds, _ = tables(plan_text(found))
    assert phases[0] == ["tokens per row", "batch", "backward", "optimizer"]
    assert kinds[0] == ["tokens per row", "batch", "parameters", "activations", "workspaces"]
    for table, figures in ((phases, "phases"), (kinds, "kinds")):
        for row, length in zip(table[1:], found.lengths, strict=True):
            in_gib = [f"{num_bytes / GIB:.2f}" for num_bytes in getattr(length.used, figures).values()]
            assert row == [str(length.seq_len), str(length.used.batch_size), *in_gib]


def test_a_table_has_the_host_memory_of_a_machine_by_what_a_run_does() -> None:
    host = HostFigures(weights=16 * GIB, load_copies=GIB, trained=2 * GIB, state=4 * GIB)
    text = plan_text(some_plan(host=host))
    header, *rows = tables(text)[-1]
    of_one = (PROCESS_BYTES + CUDA_PROCESS_BYTES) / GIB
    assert header == ["while the run is", "tensors", f"with {of_one:.1f} GiB per process"]
    assert [row[:2] for row in rows] == [
        ["loading the checkpoint", "8.00"],
        ["searching for the batch size", "16.00"],
        ["searching again", "48.00"],
        ["training", "0.00"],
        ["saving a checkpoint", "16.00"],
    ]
    assert [row[2] for row in rows] == [f"{8 * of_one + float(held):.2f}" for _, held, _ in rows]
    assert "Host memory of a machine with 8 ranks, in GiB:" in text
    assert f"Peak: {8 * of_one + 48:.1f} GiB. " in text
    assert "\nCheckpoint files (16.0 GiB) are not counted: " in text


def test_the_text_has_notes_on_what_is_elsewhere() -> None:
    def text_of(*, device: str = "cuda", **figures: Any) -> str:
        step = step_of(rows_of(64, held_bytes=1, bytes_per_row=1), host=HostFigures(**figures))
        return plan_text(planned(cfg_of(device=device), step))

    disk = "\nA search needs up to 6.0 GiB of disk space in TMPDIR for its copies.\n"
    assert disk in text_of(device="cpu", trained=2 * GIB, state=4 * GIB)
    assert "A CPU has no overhead" in text_of(device="cpu")
    assert "\nBeside tensors, a process has on the GPU 608.0 MiB to 1.3 GiB of CUDA and NCCL" in text_of()
    assert "TMPDIR" not in text_of(trained=2 * GIB, state=4 * GIB)
    on_host = "\nParameters, gradients and optimizer state are in host memory."
    offloaded: dict[str, Any] = {"offloaded_weights": GIB, "offloaded": 4 * GIB}
    assert f"{on_host} With one rank, their copies on the GPU are not counted.\n" in text_of(**offloaded)
    assert f"{on_host}\n" in plan_text(some_plan(host=HostFigures(**offloaded)))
    assert on_host not in text_of(offloaded=GIB)  # paged optimizer state alone
    paged = "Not counted: 3.0 GiB of optimizer state in paged memory, which can move to the host."
    assert plan_text(some_plan(paged_bytes=3 * GIB)).splitlines()[-1] == paged
    assert "paged" not in plan_text(some_plan())


def host_of(plan: Plan) -> HostPlan:
    assert plan.host is not None
    return plan.host


def test_host_memory_is_that_of_the_batch_to_use_or_the_largest_asked_for() -> None:
    step = step_of(rows_of(64, held_bytes=GIB, bytes_per_row=GIB), sequences=2, host=HostFigures(activations={"8": 1}))
    fits = planned(cfg_of(), step)
    tokens = fits.lengths[0].used.batch_size * 2 * 64
    assert host_of(fits).tensor_bytes["training"] == pinned_bytes(8 * tokens)
    asked = planned(cfg_of(), step, batch_sizes=[1, 2])
    assert host_of(asked).tensor_bytes["training"] == pinned_bytes(8 * 2 * 2 * 64) < pinned_bytes(8 * tokens)
    on_cpu = planned(cfg_of(device="cpu"), step, batch_sizes=[1, 2])
    assert host_of(on_cpu).tensor_bytes["training"] == 3 * GIB


def test_the_tables_are_those_of_the_batches_asked_for() -> None:
    step = step_of(rows_of(2048, held_bytes=10 * GIB, bytes_per_row=5 * GIB))
    first, second, phases, kinds, _ = tables(plan_text(planned(cfg_of(), step, batch_sizes=[2, 90])))
    assert first[0][1] == "largest batch"
    assert [row[:3] for row in second] == [
        ["tokens per row", "batch", "fits"],
        ["2048", "2", "fits"],
        ["2048", "90", "does not fit"],
    ]
    assert [row[3] for row in second[1:]] == ["20.1 GiB", "460.1 GiB"]  # with workspaces
    assert [row[:3] for row in phases[1:]] == [["2048", "2", "20.06"], ["2048", "90", "460.06"]]
    assert [row[1] for row in kinds[1:]] == ["2", "90"]


# ---- the verdict


def _plan_of(*, held_gib: int, row_gib: int = 1, **adaptive: Any) -> Plan:
    step = step_of(rows_of(2048, held_bytes=held_gib * GIB, bytes_per_row=row_gib * GIB))
    return planned(cfg_of(margin=0, **adaptive), step, batch_sizes=[1])


WAYS = [
    PlannedChange("checkpointing", _plan_of(held_gib=100).lengths[0]),
    PlannedChange("2 ranks", _plan_of(held_gib=10).lengths[0]),
]


FIXED: dict[str, Any] = {"use_maximum_batch_size": False}
MISSING = "1 row of 2048 tokens does not fit: 22.0 GiB are missing."


@pytest.mark.parametrize(
    ("plan", "ways", "first", "second"),
    [
        (
            _plan_of(held_gib=10, batch_size=69, **FIXED),
            [],
            "69 rows of 2048 tokens may fit: 80.0 GiB, give or take 1.1 GiB.",
            "At most 68 rows of 2048 tokens fit; 67 are safe.",
        ),
        (
            _plan_of(held_gib=77),
            [],
            "1 row of 2048 tokens may fit: 79.0 GiB, give or take 1.1 GiB.",
            "At most 1 row of 2048 tokens may fit; none is safe.",
        ),
        (
            _plan_of(held_gib=78),
            [],
            "1 row of 2048 tokens may fit: 80.0 GiB, give or take 1.1 GiB.",
            "Not even one is likely to fit.",
        ),
        (_plan_of(held_gib=100), WAYS[:1], MISSING, "Not even one fits, nor with any of the changes below."),
        (_plan_of(held_gib=100), WAYS, MISSING, "Nearest way: 2 ranks: at most 68 rows of 2048 tokens."),
    ],
    ids=["may fit", "one may fit", "one is unlikely", "no way", "a way"],
)
def test_two_lines_say_what_fits_and_what_to_do(plan: Plan, ways: list[PlannedChange], first: str, second: str) -> None:
    assert verdict(plan, ways) == [first, second]
    text = plan_text(plan, ways=ways, command="tune run x").splitlines()
    assert text[1:3] == [first, second]
    assert text[-2:] == ["To run it:", "  tune run x"]
    assert [line for line in text if line.startswith(("- checkpointing", "- 2 ranks"))] == [
        f"- {change_text(way)}" for way in ways
    ]


def test_the_verdict_names_every_length_and_advises_on_the_longest() -> None:
    first, second, *_ = verdict(some_plan())
    assert first == (
        "8 rows of 2048 tokens fit, with 24.8 GiB to spare. 1 row of 8192 tokens does not fit: 25.2 GiB are missing."
    )
    assert second == "Not even one fits."
    without_end = dataclasses.replace(some_plan().lengths[0], largest_batch_size=None, safe_batch_size=None)
    _, advice, *_ = verdict(dataclasses.replace(some_plan(), lengths=(without_end,)))
    assert advice == "At least 1,048,576 rows of 2048 tokens fit."


def test_the_verdict_has_the_host_memory_of_a_machine_only_if_it_is_much() -> None:
    small, large = (some_plan(host=HostFigures(weights=size * GIB)) for size in (20, 140))
    assert len(verdict(small)) == 2
    assert verdict(large)[2] == "A machine needs 151.3 GiB of host memory, while it is saving a checkpoint."


def test_a_change_says_in_one_line_what_it_brings() -> None:
    fits, _ = some_plan().lengths
    largest = f"2 ranks: at most {fits.largest_batch_size} rows of 2048 tokens"
    assert change_text(PlannedChange("2 ranks", fits)) == largest
    step = step_of(rows_of(8192, held_bytes=10 * GIB, bytes_per_row=90 * GIB))
    (not_one,) = planned(cfg_of(batch_size=4, use_maximum_batch_size=False), step, batch_sizes=[1]).lengths
    assert change_text(PlannedChange("2 ranks", not_one)) == (
        f"2 ranks: does not fit either; 1 row of 8192 tokens needs {not_one.asked[0].process_bytes / GIB:.1f} GiB"
    )
    assert change_text(PlannedChange("2 ranks", None, "`x` is wrong.")) == "2 ranks: not planned, `x` is wrong."
    without_end = dataclasses.replace(fits, largest_batch_size=None)
    assert change_text(PlannedChange("2 ranks", without_end)) == "2 ranks: at most any number of rows of 2048 tokens"
