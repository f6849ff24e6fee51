"""A run that is killed, ended by a signal, or out of disk space at any moment resumes like an uninterrupted one.

All runs are launched as users launch them. This takes minutes: ``make exhaustive`` runs these tests.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.crash_runs import (
    CASES,
    ON_ONE_DEVICE,
    ON_TWO_RANKS,
    SETUPS,
    SIGHUP_CASES,
    SIGINT_CASES,
    SIGTERM_CASES,
    SIGUSR1_CASES,
    WITH_TENSOR_PARALLELISM,
    Case,
    Launch,
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
# The same samples in every step on any number of ranks, and nothing that draws random numbers.
_KEYS = ("model.num_layers", "tokenizer.max_seq_len", "lr_scheduler.num_warmup_steps", "dataset.split")
ON_ANY_RANKS = Setup(
    "full, 2 ranks, global batch",
    "full",
    2,
    {key: ON_TWO_RANKS.overrides[key] for key in _KEYS}
    | {
        "epochs": 2,
        "batch_size": 2,
        "adaptive.global_batch_size": 8,
        "adaptive.save_every_n_steps": 5,
        "adaptive.oom_recovery": False,  # its dry run reads rows too
        "collate_fn": "tests.support.crash_runs.recording_collate",
    },
)


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
def test_a_resumed_run_may_be_killed_in_its_set_up_again_and_again(
    reference: References, assets: Path, tmp_path: Path
) -> None:
    whole = reference(ON_ONE_DEVICE)
    with launched(ON_ONE_DEVICE, assets, tmp_path) as run:
        assert Moment(9, 0.0, "step").wait(run)
    chance = random.Random(0)
    for words in ("an incomplete checkpoint", "Model is initialized", "Resuming from", "probes"):
        with launched(ON_ONE_DEVICE, assets, tmp_path) as run:
            run.wait_for_words(words)
            time.sleep(chance.uniform(0, 0.2))
    last = finished(ON_ONE_DEVICE, assets, tmp_path)
    assert whole.difference(last) == ""


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
def test_a_run_resumed_from_an_older_checkpoint_continues_from_the_one_written_last(
    reference: References, assets: Path, tmp_path: Path
) -> None:
    """The newer checkpoints, which the run no longer uses, are still there."""
    whole, every = reference(SETUPS[7]), 3
    with launched(SETUPS[7], assets, tmp_path, holds=[4 * every + 1]) as run:
        run.wait_for_step(4 * every + 1)
        older, newer = (run.out / f"step_{saves * every}" for saves in (3, 4))
        assert newer.exists()
        run.kill()
    with launched(SETUPS[7], assets, tmp_path, resume=older, holds=[3 * every + 1]) as run:
        run.wait_for_step(3 * every + 1)
        run.send_all(signal.SIGTERM)
        run.release(3 * every + 1)
        run.wait()
    last = finished(SETUPS[7], assets, tmp_path)
    assert last.resumed_from == f"step_{3 * every + 2}" == f"step_{run.step}"
    assert whole.difference(last) == ""


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", [*SIGTERM_CASES, *SIGUSR1_CASES, *SIGHUP_CASES], ids=lambda case: str(case.number))
def test_a_run_asked_to_end_saves_its_step_first(
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
@pytest.mark.parametrize("case", SIGINT_CASES, ids=lambda case: str(case.number))
def test_an_interrupted_run_ends_at_once_and_its_last_checkpoint_is_whole(
    case: SignalCase, reference: References, assets: Path, tmp_path: Path
) -> None:
    end = end_by_signal(case, reference(case.setup), assets, tmp_path)
    if case.setup.ranks == 1:
        assert end.status == -signal.SIGINT
        assert "Traceback" not in end.output
    assert end.status != 0
    assert end.resumed_from == (end.checkpoints or ["the beginning"])[-1]
    assert end.difference == ""


def check_saved_without_launcher(run: Launch) -> None:
    """The ranks have saved the last step and logged it, although torchrun's store is gone."""
    assert (run.out / f"step_{run.step}").exists()
    assert f"a signal ended the run after step {run.step}, and a checkpoint is saved" in run.output
    assert "Traceback" not in run.output


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU], ids=lambda number: number.name)
def test_a_launcher_ended_by_another_signal_leaves_ranks_that_save_and_end(
    number: signal.Signals, reference: References, assets: Path, tmp_path: Path
) -> None:
    """torchrun does not know the signals. Ranks know the first of them."""
    with launched(ON_TWO_RANKS, assets, tmp_path) as run:
        run.wait_for_start()
        run.wait_for_step(3)
        (run.send_all if number == signal.SIGUSR1 else run.send)(number)
        assert run.wait() == -number
    check_saved_without_launcher(run)
    assert reference(ON_TWO_RANKS).difference(finished(ON_TWO_RANKS, assets, tmp_path)) == ""


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGQUIT, signal.SIGUSR2, signal.SIGXCPU], ids=lambda number: number.name)
@pytest.mark.parametrize("setup", [ON_ONE_DEVICE, ON_TWO_RANKS], ids=lambda setup: setup.name)
def test_other_signals_end_a_run_at_once(
    setup: Setup, number: signal.Signals, reference: References, assets: Path, tmp_path: Path
) -> None:
    with launched(setup, assets, tmp_path, holds=[3]) as run:
        run.wait_for_step(3)
        run.ranks()[0].send(number)
        assert run.wait() == (-number if setup.ranks == 1 else 1)
    last = finished(setup, assets, tmp_path)
    assert last.resumed_from == "step_2"
    assert reference(setup).difference(last) == ""


@pytest.mark.exhaustive
@pytest.mark.parametrize("setup", [ON_ONE_DEVICE, ON_TWO_RANKS], ids=lambda setup: setup.name)
def test_a_run_goes_on_after_signals_that_mean_nothing_to_it_and_after_a_stop(
    setup: Setup, reference: References, assets: Path, tmp_path: Path
) -> None:
    with launched(setup, assets, tmp_path) as run:
        run.wait_for_start()
        run.wait_for_step(2)
        for number in (signal.SIGPIPE, signal.SIGWINCH, signal.SIGSTOP):
            run.send(number)
        time.sleep(0.2)  # what is on its way is logged
        stopped_at = run.step
        if setup.ranks == 2:
            run.wait_for_step(stopped_at + 2)  # the ranks go on
        else:
            time.sleep(1)
            assert run.step == stopped_at
        run.send(signal.SIGCONT)
        assert run.wait() == 0
    assert reference(setup).difference(run) == ""


NO_HANG_UP = ["--nproc_per_node", "2", "--signals_to_handle", "SIGTERM,SIGINT,SIGQUIT"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("setup", "options", "status"),
    [(ON_ONE_DEVICE, [], 0), (ON_TWO_RANKS, [], 1), (ON_TWO_RANKS, NO_HANG_UP, 0)],
    ids=["one device", "torchrun", "torchrun without hang-ups"],
)
def test_nohup_protects_a_run_but_not_torchrun(
    setup: Setup, options: list[str], status: int, assets: Path, tmp_path: Path
) -> None:
    with launched(setup, assets, tmp_path, enter=["nohup"], options=options) as run:
        run.wait_for_start()
        run.wait_for_step(3)
        run.send(signal.SIGHUP)
        assert run.wait() == status
    assert (run.checkpoints[-1] == f"step_{run.step}") == (status == 1)
    assert ("a signal ended the run" in run.output) == (status == 1)


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
    check_saved_without_launcher(run)
    last = second if status == 0 else finished(ON_TWO_RANKS, assets, tmp_path)
    assert last.resumed_from == f"step_{run.step}"
    assert reference(ON_TWO_RANKS).difference(last) == ""


@pytest.mark.exhaustive
def test_a_folder_is_refused_while_a_rank_of_a_killed_launcher_lives(
    reference: References, assets: Path, tmp_path: Path
) -> None:
    with launched(ON_TWO_RANKS, assets, tmp_path, holds=[5]) as run:
        run.wait_for_start()
        run.wait_for_step(5)
        ranks = run.ranks()
        for rank in ranks:
            rank.send(signal.SIGSTOP)
        run.send(signal.SIGKILL)
        with launched(ON_TWO_RANKS, assets, tmp_path) as second:
            assert second.wait() == 1
        said = [line for line in second.output.splitlines() if line.startswith("adaptive_full_finetune_distributed: ")]
        for rank in ranks:
            rank.send(signal.SIGCONT)
        run.release(5)
        run.wait_for_ranks()
    (sentence,) = said  # torchrun's summary quotes it again
    assert "`output_dir` is in use" in sentence
    assert any(f"process {rank.pid} on " in sentence for rank in ranks)
    assert sentence.endswith(f"writes to {str(run.out)!r}.")
    check_saved_without_launcher(run)
    assert reference(ON_TWO_RANKS).difference(finished(ON_TWO_RANKS, assets, tmp_path)) == ""


class Disturbed:
    """A run whose folder is not writable between two of its steps.

    It is held after its second, fourth and fifth checkpoint of a step.
    """

    def __init__(self, setup: Setup) -> None:
        self.every = int(str(setup.overrides["adaptive.save_every_n_steps"]))
        self.in_background = bool(setup.overrides.get("adaptive.save_in_background"))
        self.holds = [2 * self.every + 1, 4 * self.every + 1, 5 * self.every + 1]
        self.failing = [3 * self.every, 4 * self.every]

    def check_resumes(self, run: Launch) -> None:
        """Run to the second hold; each checkpoint that cannot be saved is logged in one sentence."""
        run.release(self.holds[0])
        run.wait_for_step(self.holds[1])
        for step in self.failing[: 1 if self.in_background else 2]:  # the other is logged at the next one
            assert run.output.count(f"Checkpoint step_{step} could not be saved: ") == 1
        assert "Traceback" not in run.output

    def check_saves_again(self, run: Launch) -> None:
        """Run to the third hold, where a checkpoint is saved and the run is killed."""
        run.release(self.holds[1])
        run.wait_for_step(self.holds[2])
        last = f"step_{5 * self.every}"
        assert run.wait_until(lambda: (run.out / last).exists())
        assert run.output.count(f"Checkpoint {last} could not be saved: ") == 0
        assert run.output.count(f"Checkpoint step_{self.failing[1]} could not be saved: ") == 1
        run.kill()
        assert run.checkpoints[-1] == last


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("setup", "share_left"),
    [(ON_ONE_DEVICE, 0.0), (ON_ONE_DEVICE, 0.97), (ON_TWO_RANKS, 0.5), (SETUPS[4], 0.3), (SETUPS[5], 0.6)],
    ids=lambda value: value.name if isinstance(value, Setup) else str(value),
)
def test_a_full_disk_is_logged_in_one_sentence_for_each_checkpoint_that_cannot_be_saved(
    setup: Setup, share_left: float, small_disk: Path, reference: References, assets: Path, tmp_path: Path
) -> None:
    disturbed = Disturbed(setup)
    with launched(setup, assets, tmp_path, holds=disturbed.holds) as run:
        run.wait_for_step(disturbed.holds[0])
        last = small_disk / f"step_{2 * disturbed.every}"
        assert run.wait_until(last.exists)
        before = run.checkpoints
        fill(small_disk, left_bytes=int(share_left * size_bytes(last)))
        disturbed.check_resumes(run)
        assert run.checkpoints == before
        (small_disk / "filler").unlink()
        disturbed.check_saves_again(run)
    assert reference(setup).difference(finished(setup, assets, tmp_path)) == ""


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


@pytest.mark.exhaustive
def test_a_signal_with_a_full_disk_ends_the_run_with_a_sentence_and_status_one(
    small_disk: Path, reference: References, assets: Path, tmp_path: Path
) -> None:
    with launched(ON_ONE_DEVICE, assets, tmp_path, holds=[4]) as run:
        run.wait_for_step(4)
        fill(small_disk, left_bytes=0)
        run.send(signal.SIGTERM)
        run.release(4)
        assert run.wait() == 1
    assert run.output.count("a signal ended the run after step 5, but saving a checkpoint failed.") == 1
    assert "Traceback" not in run.output
    (small_disk / "filler").unlink()
    resumed = finished(ON_ONE_DEVICE, assets, tmp_path)
    assert resumed.resumed_from == "step_2"  # the disk was full at step 4 too
    assert reference(ON_ONE_DEVICE).difference(resumed) == ""


@pytest.mark.exhaustive
@pytest.mark.parametrize("setup", [ON_ONE_DEVICE, ON_TWO_RANKS, SETUPS[5]], ids=lambda setup: setup.name)
@pytest.mark.parametrize("by", ["nothing", "a file"])
def test_a_missing_folder_is_logged_in_one_sentence_for_each_checkpoint_until_it_is_back(
    by: str, setup: Setup, reference: References, assets: Path, tmp_path: Path
) -> None:
    disturbed, aside = Disturbed(setup), tmp_path / "aside"
    with launched(setup, assets, tmp_path, holds=disturbed.holds) as run:
        run.wait_for_step(disturbed.holds[0])
        assert run.wait_until((run.out / f"step_{2 * disturbed.every}").exists)
        run.out.rename(aside)
        if by == "a file":
            run.out.touch()
        disturbed.check_resumes(run)
        assert not run.out.is_dir()
        run.out.unlink(missing_ok=True)
        aside.rename(run.out)
        disturbed.check_saves_again(run)
    assert reference(setup).difference(finished(setup, assets, tmp_path)) == ""


@pytest.fixture(scope="module")
def on_two_ranks(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """The whole run."""
    return finished(ON_ANY_RANKS, assets, tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def killed(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on two ranks that was killed in mid-epoch."""
    directory = tmp_path_factory.mktemp("killed")
    with launched(ON_ANY_RANKS, assets, directory, holds=[7]) as run:
        run.wait_for_step(7)
        run.kill()
    return run.out


def rows_per_step(run: Launch) -> dict[int, list[int]]:
    """The rows of all ranks together, by step."""
    by_rank = run.rows()
    each = 8 // len(by_rank)
    steps = [int(step["step"]) for step in run.steps]
    assert {len(rows) for rows in by_rank} == {each * len(steps)}
    return {
        step: sorted(row for rows in by_rank for row in rows[each * place : each * (place + 1)])
        for place, step in enumerate(steps)
    }


@pytest.mark.exhaustive
@pytest.mark.parametrize(("ranks", "is_distributed"), [(1, False), (1, True), (2, True), (4, True)])
def test_a_run_resumed_on_another_number_of_ranks_has_the_same_samples_and_losses(
    ranks: int, is_distributed: bool, on_two_ranks: Launch, killed: Path, assets: Path, tmp_path: Path
) -> None:
    shutil.copytree(killed, tmp_path / "out")
    resumed = finished(replace(ON_ANY_RANKS, ranks=ranks, is_distributed=is_distributed), assets, tmp_path)
    rows, whole_rows = rows_per_step(resumed), rows_per_step(on_two_ranks)
    assert resumed.resumed_from == "step_5"
    assert list(rows) == list(range(6, 17))
    assert rows == {step: whole_rows[step] for step in rows}
    assert max(Counter(row for step in list(whole_rows)[:8] for row in whole_rows[step]).values()) == 1
    losses = [step["loss"] for step in on_two_ranks.steps[5:]]
    assert [step["loss"] for step in resumed.steps] == pytest.approx(losses, rel=1e-6)
