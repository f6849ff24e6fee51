"""A run that is killed, ended by a signal, or out of disk space at any moment resumes like an uninterrupted one.

All runs are launched as users launch them. This takes minutes: ``make exhaustive`` runs these tests.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.crash_runs import (
    CASES,
    ON_ONE_DEVICE,
    ON_TWO_RANKS,
    SETUPS,
    SIGTERM_CASES,
    WITH_TENSOR_PARALLELISM,
    Case,
    Moment,
    Reference,
    Setup,
    SignalCase,
    end_by_signal,
    finished,
    launched,
    reference_of,
    strike,
)
from tests.support.recipe_runs import shallow_assets

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")

References = Callable[[Setup], Reference]


@pytest.fixture(scope="module")
def assets(tiny_dir: Path) -> Path:
    return shallow_assets(tiny_dir)


@pytest.fixture(scope="module")
def reference(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> References:
    """The uninterrupted run of a setup, launched once."""
    made: dict[str, Reference] = {}

    def of(setup: Setup) -> Reference:
        if setup.name not in made:
            made[setup.name] = reference_of(setup, assets, tmp_path_factory.mktemp("reference"))
        return made[setup.name]

    return of


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """The folder ``out`` of ``tmp_path``, with a file system of its own."""
    disk = tmp_path / "out"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512M", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a file system")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def fill(disk: Path, *, left_bytes: int) -> None:
    """Fill ``disk`` until only ``left_bytes`` are free."""
    space = os.statvfs(disk)
    with (disk / "filler").open("w") as file:
        os.posix_fallocate(file.fileno(), 0, space.f_bavail * space.f_frsize - left_bytes)


def size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.number))
def test_a_run_killed_at_any_moment_resumes_like_an_uninterrupted_one(
    case: Case, reference: References, assets: Path, tmp_path: Path
) -> None:
    whole = reference(case.setup)
    assert not case.setup.grows or len({step["global_batch_size"] for step in whole.steps}) > 1
    assert strike(case, whole, assets, tmp_path) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("setup", [ON_TWO_RANKS, SETUPS[3], WITH_TENSOR_PARALLELISM], ids=lambda setup: setup.name)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_with_one_killed_rank_resumes_like_an_uninterrupted_one(
    rank: int, setup: Setup, reference: References, assets: Path, tmp_path: Path
) -> None:
    """As the system does when it is out of memory."""
    whole = reference(setup)
    with launched(setup, assets, tmp_path) as run:
        run.wait_for_start()
        assert Moment(4, 0.0, "step").wait(run)
        run.ranks()[rank].send(signal.SIGKILL)
        assert run.wait() == 1
    assert whole.difference(finished(setup, assets, tmp_path)) == ""


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", SIGTERM_CASES, ids=lambda case: str(case.number))
def test_a_run_ended_by_sigterm_saves_its_step_first(
    case: SignalCase, reference: References, assets: Path, tmp_path: Path
) -> None:
    end = end_by_signal(case, reference(case.setup), assets, tmp_path)
    assert end.status == (75 if case.setup.ranks == 1 else 1)
    assert end.checkpoints[-1] == end.resumed_from == f"step_{end.step}"
    sentence = f"{case.setup.recipe}: a signal ended the run after step {end.step}, and a checkpoint is saved"
    assert end.output.count(sentence) == 1
    assert case.setup.ranks > 1 or "Traceback" not in end.output  # torchrun prints its own
    assert end.difference == ""


@pytest.mark.exhaustive
@pytest.mark.parametrize("step", [1, 6, 11])
def test_ranks_whose_launcher_is_killed_save_and_end(
    step: int, reference: References, assets: Path, tmp_path: Path
) -> None:
    """Another launch at the same moment is refused, or is late enough to resume the run."""
    with launched(ON_TWO_RANKS, assets, tmp_path) as run:
        run.wait_for_start()
        run.wait_for_step(step)
        run.send(signal.SIGKILL)
        with launched(ON_TWO_RANKS, assets, tmp_path) as second:
            second.wait_for_start()
            status = second.wait()
        run.wait_for_ranks()
    assert status == 0 or "`output_dir` is in use" in second.output
    assert (run.out / f"step_{run.step}").exists()
    assert f"a signal ended the run after step {run.step}, and a checkpoint is saved" in run.output
    assert "Traceback" not in run.output  # although torchrun's store is gone
    last = second if status == 0 else finished(ON_TWO_RANKS, assets, tmp_path)
    assert last.resumed_from == f"step_{run.step}"
    assert reference(ON_TWO_RANKS).difference(last) == ""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("setup", "share_left"),
    [(ON_ONE_DEVICE, 0.97), (ON_TWO_RANKS, 0.5), (SETUPS[4], 0.3)],
    ids=lambda value: value.name if isinstance(value, Setup) else str(value),
)
def test_a_run_goes_on_after_a_full_disk_and_logs_each_checkpoint_that_cannot_be_saved(
    setup: Setup, share_left: float, small_disk: Path, reference: References, assets: Path, tmp_path: Path
) -> None:
    every = int(str(setup.overrides["adaptive.save_every_n_steps"]))
    before, after = 2 * every + 1, 4 * every + 1
    with launched(setup, assets, tmp_path, holds=[before, after]) as run:
        run.wait_for_step(before)
        last = small_disk / f"step_{2 * every}"
        assert run.wait_until(last.exists)
        saved = run.checkpoints
        fill(small_disk, left_bytes=int(share_left * size_bytes(last)))
        run.release(before)
        run.wait_for_step(after)
        assert run.output.count(f"Checkpoint step_{3 * every} could not be saved: ") == 1
        assert run.checkpoints == saved
        (small_disk / "filler").unlink()
        run.release(after)
        assert run.wait() == 0
    assert "Traceback" not in run.output
    assert f"step_{5 * every}" in run.output
    assert reference(setup).difference(run) == ""


@pytest.mark.exhaustive
def test_a_disk_that_is_full_at_the_end_fails_the_run_which_can_be_resumed(
    small_disk: Path, reference: References, assets: Path, tmp_path: Path
) -> None:
    whole = reference(ON_ONE_DEVICE)
    hold = whole.last_step - 1
    with launched(ON_ONE_DEVICE, assets, tmp_path, holds=[hold]) as run:
        run.wait_for_step(hold)
        fill(small_disk, left_bytes=0)
        run.release(hold)
        assert run.wait() == 1
    assert run.output.count("the checkpoint of an epoch could not be saved: ") == 1
    assert "Traceback" not in run.output
    (small_disk / "filler").unlink()
    assert whole.difference(finished(ON_ONE_DEVICE, assets, tmp_path)) == ""
