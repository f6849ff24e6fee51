"""The measurements for a GPU, as far as they can be tested without one."""

import time
from collections.abc import Mapping
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from benchmarks import gpu
from benchmarks.on_gpu import nccl
from benchmarks.on_gpu.nccl import group, launch
from benchmarks.on_gpu.nccl import recovery as recovery_by_phase
from benchmarks.on_gpu.stage import Section, Stage, stage_for
from tests.support.ranks import run_on_ranks


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return stage_for(tmp_path, seconds=60.0)


@pytest.mark.exhaustive
@pytest.mark.processes
def test_every_part_runs_to_its_end(tmp_path: Path) -> None:
    for part in gpu.PARTS:
        result = gpu._play(part, tmp_path, seconds=1200.0)
        assert result["ended"] == "done", part
        assert all(section["rows"] for section in result["sections"]), part


@pytest.mark.exhaustive
@pytest.mark.processes
@pytest.mark.parametrize("ends", [True, False], ids=["ends on SIGTERM", "ignores it"])
def test_a_part_that_does_not_end_is_killed_with_its_child_processes(
    ends: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu, "_GRACE_S", 1.0)  # time for a shell to start on a busy machine
    monkeypatch.setattr(gpu, "_ENDING_S", 30.0 if ends else 0.5)
    on_sigterm = f"echo > {tmp_path}/ended; exit" if ends else ""
    _play_instead(monkeypatch, f"(trap '{on_sigterm}' TERM; sleep 100 & wait) & echo $! > {tmp_path}/started; wait")
    result = gpu._play("loop", tmp_path, seconds=0.3)
    assert result["ended"].startswith("killed")
    assert (tmp_path / "ended").exists() == ends
    started = int((tmp_path / "started").read_text())
    deadline = time.monotonic() + 10.0  # the system may take a moment to remove it
    while Path(f"/proc/{started}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{started}").exists()


def test_a_part_that_fails_is_reported_and_keeps_its_sections(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "loop.json").write_text('[{"title": "so far"}]')
    _play_instead(monkeypatch, "exit 3")
    result = gpu._play("loop", tmp_path, seconds=5.0)
    assert result["ended"] == "failed with exit status 3"
    assert result["sections"] == [{"title": "so far"}]


# ---- ranks that share one card


def _measured(rank: int, directory: Path) -> dict[str, list[list[str]]]:
    """The rows that rank 0 has measured, by sub-part. Recovery with two kinds of training, and a few of the faults."""
    trainees = {name: make for name, make in recovery_by_phase.trainees(2).items() if name in ("FSDP2", "DDP")}
    started, chosen = mock.patch.object(group, "start"), mock.patch.object(recovery_by_phase, "trainees")
    found: dict[str, list[list[str]]] = {}
    with started, chosen as choose:
        choose.return_value = trainees
        for module, seconds in {"collectives": 60.0, "search": 60.0, "recovery": 60.0, "faults": 10.5}.items():
            stage = stage_for(directory, seconds=seconds)
            for (section,) in import_module(f"benchmarks.on_gpu.nccl.{module}").measure(stage):
                found[module] = section.rows
    return found


@pytest.mark.exhaustive
@pytest.mark.processes
def test_ranks_that_share_a_device_search_and_recover_bit_for_bit(tmp_path: Path) -> None:
    found, of_the_peer = run_on_ranks(_measured, 2, tmp_path)
    assert of_the_peer == {}
    assert all(row[3].startswith("0 of ") for row in found["collectives"])
    assert [row[2:4] for row in found["search"]] == [["210, 210", "not tried"], ["210, 210", "does not fit"]]
    assert all(row[-1].startswith("0 of ") for row in found["search"])
    assert [row[2] for row in found["recovery"]] == ["forward", "loss", "backward"] * 2
    for row in found["recovery"]:
        assert row[3].startswith(f"(1,) in {row[2]}: OutOfMemoryError")
        assert row[4] == "1 1"
        assert row[5].startswith("0 of ")
        assert row[6] == "0"
    (faults,) = found["faults"]
    assert faults[4] == faults[5] != "0"
    assert faults[6:8] == ["0", "0"]


def test_a_rank_that_fails_ends_its_launch_with_what_it_has_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(launch, "_GRACE_S", 0.2)
    printed = "echo starting; echo 'NCCL WARN Duplicate GPU detected'; echo more; exit 3"
    commands = [["/bin/sh", "-c", printed], ["sleep", "100"]]
    ended = launch.run(commands, [{}, {}], tmp_path, seconds=60.0)
    assert ended.ended == "process 0 ended with status 3; process 1 had to be stopped after 0 s"
    assert ended.last_words == ["process 0: NCCL WARN Duplicate GPU detected", "process 1: it printed nothing"]
    assert ended.statuses == [3, None]
    assert ended.seconds < 10


@pytest.mark.parametrize("works", ["with care", "never"])
def test_nccl_is_tried_with_other_settings_before_the_other_sub_parts(
    works: str, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[tuple[str, bool]] = []

    def run_ranks(_: Stage, module: str, ranks: int, *, seconds: float, settings: Mapping[str, str]) -> launch.Launch:
        is_careful = "NCCL_CUMEM_ENABLE" in settings
        launched.append((module, is_careful))
        fails = works == "never" or not is_careful
        if fails:
            return launch.Launch(ended="process 0 ended with status 1", seconds=1.0, last_words=["NCCL WARN"])
        return launch.Launch(ended="done", seconds=1.0)

    monkeypatch.setattr(Stage, "is_rehearsal", False)
    monkeypatch.setattr(nccl, "run_ranks", run_ranks)
    monkeypatch.setattr(nccl, "SUB_PARTS", nccl.SUB_PARTS[:2])
    seen: list[Section] = []
    try:
        for sections in nccl.measure(stage):
            seen = sections
    except SystemExit:
        assert works == "never"
    others = [] if works == "never" else [("search", True), ("recovery", True)]
    assert launched == [("collectives", False), ("collectives", True), *others]
    assert "collectives, 2 ranks, NCCL WARN." in seen[0].text
    assert [row[2] for row in seen[0].rows][-1] == ("process 0 ended with status 1" if works == "never" else "done")


# ---- results


def test_results_of_other_parts_are_kept_with_how_they_were_measured(tmp_path: Path) -> None:
    stem = tmp_path / "found"
    gpu._write([_result("loop", "abc"), _result("sizes", "abc")], stem, gpu="A")
    gpu._write([*gpu._earlier(stem, but=["loop"]), _result("loop", "def", ended="failed")], stem, gpu=None)
    written = stem.with_suffix(".md").read_text()
    assert "- sizes: commit abc.\n- loop: commit def." in written
    assert "No GPU was measured" in written
    assert "| a |\n| --- |\n| 1 |" in written
    assert "loop: not to its end\n\nfailed." in written
    assert [result["part"] for result in gpu._earlier(stem, but=[])] == ["sizes", "loop"]


def _result(part: str, commit: str, *, ended: str = "done") -> dict[str, Any]:
    section = asdict(Section(title=part, header=["a"], rows=[["1"]], text=["b"], data=[]))
    return {"part": part, "ended": ended, "seconds": 1.0, "sections": [section], "about": f"commit {commit}."}


def _play_instead(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.setattr(gpu, "_command", lambda *_: ["/bin/sh", "-c", script])
