"""`tune-adaptive report`: what a run left on disk, in words and pictures, and what is refused."""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.support.program import Program
from tests.support.toys import search_result
from torchtune_adaptive.cli import main
from torchtune_adaptive.engine.search.strategies import Probe
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.report.pictures import pictures
from torchtune_adaptive.report.read import Run, read_run
from torchtune_adaptive.report.story import story, story_text
from torchtune_adaptive.training.run_log import LOG_NAME

GIB = 2**30
FITS = Probe(
    batch_size=4, fits=True, peak_bytes=GIB, phase_peak_bytes={"": 9, "forward": GIB, "clip": GIB // 2}, seconds=1.5
)
TOO_LARGE = Probe(batch_size=9, fits=False, peak_bytes=2 * GIB, phase_peak_bytes={"": 9, "forward": GIB}, seconds=0.5)
RESULT = search_result(
    exact_batch_size=5,
    batch_size=4,
    memory_limit_bytes=2 * GIB,
    probes=(FITS, TOO_LARGE),
    forecast=((4, GIB), (6, 2 * GIB)),
)
SEARCH: dict[str, Any] = asdict(RESULT) | {"event": "search", "step": 0, "seq_len": 1024}
SEARCH |= {"of": "", "chosen": {}, "timings": {}}
CONFIG = {"event": "sizes", "step": 1, "epoch": 0, "batch_size": 4, "samples_per_step": 8, "reason": "by search"}
GROWTH = CONFIG | {"step": 4, "epoch": 1, "samples_per_step": 16, "reason": "epoch 1: increase of 4 granted"}
REDUCED = {"event": "sizes", "step": 2, "epoch": 0, "batch_size": 4, "reason": "micro-batch 4 -> 2 rows: in step 2 ..."}
RAISED = REDUCED | {"step": 4, "reason": "micro-batch 2 -> 4 rows: fits again"}
START: dict[str, Any] = {"event": "started", "step": 0, "memory_limit_bytes": 2 * GIB, "log_every_n_steps": 1}
SHORTAGE: dict[str, Any] = {
    "event": "out of memory",
    "step": 2,
    "ranks": [0, 3],
    "phase": "backward",
    "figures": "peak 1.9 GiB, limit 2.0 GiB",
    "error": "CUDA out of memory",
    "before": 4,
    "after": 2,
    "unit": "rows",
}
END: dict[str, Any] = {"event": "ended", "step": 5, "how": "complete"}


def step(number: int, **figures: Any) -> dict[str, Any]:
    usual = {"loss": 6.0 - number, "lr": 0.1, "tokens_per_second_per_gpu": 100.0 * number, "padding": 0.25}
    sizes = {"global_batch_size": 8, "micro_batch_size": 4, "peak_memory_bytes": GIB + number}
    return {"step": number, "epoch": number // 4, "seconds": 1.0} | usual | sizes | figures


STEPS = [step(number) for number in range(1, 6)]
SAVED = {"event": "checkpoint", "step": 3, "path": "/out/step_3"}
RESUMED = START | {"event": "resumed", "step": 3, "checkpoint": "/out/step_3"}
LINES = [START, SEARCH, CONFIG, STEPS[0], REDUCED, SHORTAGE, STEPS[1], STEPS[2], SAVED]
LINES += [RESUMED, GROWTH, RAISED, STEPS[3], STEPS[4], END]


def run_in(directory: Path, lines: Sequence[Mapping[str, Any]]) -> Path:
    """A folder with the log of a run."""
    directory.mkdir(exist_ok=True)
    (directory / LOG_NAME).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return directory


def run_of(tmp_path: Path, *lines: Mapping[str, Any]) -> Run:
    return read_run(run_in(tmp_path / "run", lines))


def section(run: Run, title: str) -> list[str]:
    (found,) = (one for one in story(run) if one.title == title)
    return list(found.lines)


# ---- the story


def test_the_story_tells_search_sizes_shortages_training_and_checkpoints(tmp_path: Path) -> None:
    run = run_of(tmp_path, *LINES)
    assert section(run, "Search") == [
        "binary_search: the largest batch size that fits is 5, rounded down to 4. Probes had rows of 1,024 tokens.",
        "2.0 GiB per rank, of which 5% is kept free; 1 rank.",
        "2 probes in 2.0 s, 1 out of memory. Figures are those of rank 0.",
    ]
    assert section(run, "Batch and micro-batch") == [
        "epoch 0: 8 samples per optimizer step: by search",
        "epoch 1: 16 samples per optimizer step: increase of 4 granted",
        "step 4: micro-batch 2 -> 4 rows: fits again",
    ]
    assert section(run, "Out of memory") == [
        "step 2: ranks 0, 3 ran out of memory in backward (peak 1.9 GiB, limit 2.0 GiB); micro-batch 4 -> 2 rows"
    ]
    assert section(run, "Training") == [
        "The run is complete: 5 optimizer steps; each is logged.",
        "Loss 5 in step 1, 1 in step 5.",
        "300 tokens per second per rank on average, 100 to 500 in logged steps.",
        "25.0% of the tokens were padding on average.",
        "Peak memory 1.0 GiB of 2.0 GiB on rank 0, in step 5.",
    ]
    assert section(run, "Checkpoints and resumptions") == [
        "step 3: resumed from /out/step_3",
        "1 checkpoint saved: step_3.",
    ]
    header = next(line for line in story_text(run).splitlines() if line.startswith("  batch_size"))
    assert header.split() == ["batch_size", "forward", "clip", "peak", "usable", "fits", "seconds"]


def test_throughput_weighs_each_step_by_its_time(tmp_path: Path) -> None:
    slow = step(1, seconds=3.0, tokens_per_second_per_gpu=100.0)
    quick = step(2, seconds=1.0, tokens_per_second_per_gpu=500.0)
    run = run_of(tmp_path, START, slow, quick)
    assert "200 tokens per second per rank on average, 100 to 500 in logged steps." in section(run, "Training")


def test_an_unfinished_run_is_described_so_far(tmp_path: Path) -> None:
    directory = run_in(tmp_path / "run", [START | {"log_every_n_steps": 5}, step(5, loss=None)])
    with (directory / LOG_NAME).open("a") as file:
        file.write('{"step":10,"epo')
    run = read_run(directory)
    assert section(run, "Search") == ["No search for a batch size is recorded."]
    assert section(run, "Training")[:2] == [
        "No end is recorded: the run is still going, or was stopped. 5 optimizer steps; one in 5 is logged.",
        "The loss was not finite in 1 logged step.",
    ]
    assert section(run, "Out of memory") == ["No shortage is recorded."]
    assert list(pictures(run)) == ["report_steps"]


def test_a_run_without_steps_is_described_by_its_search(tmp_path: Path) -> None:
    run = run_of(tmp_path, SEARCH)
    assert section(run, "Training") == ["Training is not recorded.", "No step is recorded."]
    assert section(run, "Out of memory") == ["It is not recorded."]
    assert list(pictures(run)) == ["report_search"]


def test_both_searches_of_reinforcement_learning_are_described(tmp_path: Path) -> None:
    generated = SEARCH | {"of": "generated", "chosen": {"forward_batch_size": 4}}
    trained = SEARCH | {"of": "trained", "chosen": {"gradient_accumulation_steps": 2}}
    run = run_of(tmp_path, START, generated, trained, END)
    assert [one.title for one in story(run)][:2] == ["Search: generated", "Search: trained"]
    assert list(pictures(run)) == ["report_search_generated", "report_search_trained"]
    assert section(run, "Search: generated")[-1] == "forward_batch_size: 4"
    assert section(run, "Training") == ["The run is complete: 5 optimizer steps.", "No step is recorded."]


def test_timings_and_other_sizes_found_are_listed(tmp_path: Path) -> None:
    found = SEARCH | {
        "timings": {"2 rows": {"seconds": [1, 2], "num_tokens": 120}, "4 rows": {"seconds": [0.1], "num_tokens": 99}},
        "chosen": {"token_budget": 4096},
    }
    lines = section(run_of(tmp_path, found), "Search")
    assert lines[-2:] == ["token_budget: 4096", "Tokens per second by micro-batch: 80 at 2 rows, 990 at 4 rows."]


def test_of_many_sentences_and_checkpoints_only_the_first_and_last_are_listed(tmp_path: Path) -> None:
    many = [SHORTAGE | {"step": number} for number in range(1, 41)]
    saved = [SAVED | {"step": number, "path": f"/out/step_{number}"} for number in range(1, 41)]
    run = run_of(tmp_path, START, *many, *saved)
    told = section(run, "Out of memory")
    assert [line.partition(":")[0] for line in (told[0], told[-1])] == ["step 1", "step 40"]
    assert told[6] == "... 28 more ..."
    assert section(run, "Checkpoints and resumptions") == [
        "40 checkpoints saved: ..., step_33, step_34, step_35, step_36, step_37, step_38, step_39, step_40."
    ]


def test_after_a_search_without_training_the_run_before_it_is_not_described(tmp_path: Path) -> None:
    only = {"event": "search only", "step": 0}
    run = run_of(tmp_path, START, SEARCH | {"seq_len": 7}, *STEPS, END, only, SEARCH, CONFIG)
    assert [one.title for one in story(run)] == ["Search", "Training"]
    assert "rows of 1,024 tokens" in section(run, "Search")[0]
    assert section(run, "Training") == ["None: the run ended after its search."]
    assert list(pictures(run)) == ["report_search"]


# ---- what is refused


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("[]\n", "AttributeError"),
        (json.dumps(SEARCH | {"probes": [{"batch_size": 2}]}) + "\n", "missing 4 required"),
        ('{"step": 1, "epoch": 0}\nnonsense\n{"step": 2, "epoch": 0}\n', "line 2, JSONDecodeError"),
        ('{"loss": 2.0}\n', "KeyError: 'step'"),
        ('{"step": "first"}\n', "step is 'first'"),
        ("one word", "no whole line"),
        (json.dumps({"event": "out of memory", "step": 1}) + "\n", "KeyError: 'before'"),
        (json.dumps(SEARCH | {"memory_limit_bytes": None}) + "\n", "TypeError"),
    ],
)
def test_a_file_that_no_run_wrote_is_refused_with_its_path(
    content: str, reason: str, tmp_path: Path, program: Program
) -> None:
    (tmp_path / LOG_NAME).write_text(content)
    ended = program("report", str(tmp_path))
    sentence = f": {tmp_path / LOG_NAME} is no log of a run: "
    assert sentence in ended.err
    assert reason in ended.err
    assert (ended.status, ended.out, ended.err.count("\n")) == (1, "", 1)
    assert list(tmp_path.iterdir()) == [tmp_path / LOG_NAME]


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    beginning = "`OUTPUT_DIR` is not the `output_dir` of a run:"
    with pytest.raises(InputError) as empty:
        read_run(tmp_path)
    with pytest.raises(InputError) as missing:
        read_run(tmp_path / "missing")
    assert str(empty.value) == f"{beginning} '{tmp_path}' has no adaptive_log.jsonl."
    assert str(missing.value) == f"{beginning} '{tmp_path}/missing' is not there."


# ---- pictures


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the command has written the files of the whole run."""
    directory = tmp_path_factory.mktemp("whole")
    run_in(directory, LINES)
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["report", str(directory), "--to", str(directory / "drawn")])
    return directory / "drawn"


def texts(svg: str) -> set[str]:
    return set(re.findall(r"<text[^>]*>([^<]+)</text>", svg))


@pytest.mark.slow
def test_the_picture_of_a_search_names_its_phases_limits_and_failures(drawn: Path) -> None:
    assert sorted(path.name for path in drawn.iterdir()) == ["report_search.svg", "report_steps.svg"]
    assert texts((drawn / "report_search.svg").read_text()) >= {
        *("before forward", "forward", "clip", "peak, fits", "did not fit", "forecast of the peak"),
        *("limit (2.0 GiB)", "usable (1.9 GiB)", "peak memory on rank 0 [GiB]"),
        *("batch size of the probe, rows of 1,024 tokens", "binary_search: 5 fits, rounded down to 4"),
    }


@pytest.mark.slow
def test_the_picture_of_steps_has_a_panel_for_each_figure_and_names_what_happened(drawn: Path) -> None:
    found = texts((drawn / "report_steps.svg").read_text())
    panels = {
        *("batch [samples per optimizer step]", "micro-batch [rows per rank]", "learning rate", "loss"),
        *("tokens per second, per rank", "padding [% of tokens]", "peak memory, rank 0 [GiB]", "optimizer step"),
    }
    events = {"first step of an epoch", "out of memory", "resumed", "checkpoint", "memory limit (2.0 GiB)"}
    assert found >= panels | events
    assert found.isdisjoint({"micro-batch [tokens per rank]", "allocator thrashing"})


# ---- the command


def test_the_command_prints_the_story_and_what_it_has_written(tmp_path: Path, program: Program) -> None:
    directory = run_in(tmp_path / "run", [START, *STEPS])
    ended = program("report", str(directory))
    assert ended.status == 0
    assert ended.out.startswith(f"Run in {directory}\n\nSearch\n  No search for a batch size is recorded.\n")
    assert ended.out.splitlines()[-1] == f"Written to {directory}/report_steps.svg"
    assert (directory / "report_steps.svg").read_text().count("<svg") == 1


def test_without_matplotlib_the_story_is_printed_and_a_line_says_what_is_left_out(
    tmp_path: Path, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = run_in(tmp_path / "run", LINES)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ended = program("report", str(directory))
    assert (ended.status, ended.err) == (0, "")
    assert ended.out.startswith(f"Run in {directory}\n")
    assert ended.out.splitlines()[-1] == (
        'Without matplotlib there are no pictures: `pip install "torchtune-adaptive[plot]"` adds it.'
    )
    assert sorted(path.name for path in directory.iterdir()) == [LOG_NAME]


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path, program: Program) -> None:
    directory = run_in(tmp_path / "run", [START, *STEPS])
    (tmp_path / "file").touch()
    ended = program("report", str(directory), "--to", str(tmp_path / "file"))
    sentence = f"`--to` cannot be written: file '{tmp_path}/file/report_steps.svg': "
    assert ended.err.startswith(f"tune-adaptive report: {sentence}")
