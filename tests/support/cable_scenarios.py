"""What becomes of a run on two machines when the cable between them is cut: one scenario each."""

import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tests.support.crash_runs import LONGEST_WAIT_S, ON_TWO_RANKS, Launch, launched, reference_of
from tests.support.recipe_runs import shallow_assets
from tests.support.two_machines import Cable, two_machines
from torchtune_adaptive.tiny import make_tiny_assets

HOLD = 5  # the run waits after this step, until what the scenario does has happened
_LAUNCHER = ["--nnodes", "2", "--nproc_per_node", "1"]
_LAUNCHER += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "node0:29500", "--rdzv_id", "7"]
_EACH = replace(ON_TWO_RANKS, ranks=1, is_distributed=True)


@dataclass(frozen=True)
class Outcome:
    """What became of a run.

    Attributes:
        seconds: for each machine, until its last process ended; None if the run goes on.
        statuses: of the launchers.
        sentences: the last one that each machine printed, "" if there is none.
        difference: from the run on one machine; "" if there is none. A run that has ended is started again.
    """

    seconds: list[float] | None
    statuses: list[int]
    sentences: list[str]
    difference: str


class Scenarios:
    """Runs on two machines.

    Args:
        directory: for all files.
    """

    def __init__(self, directory: Path) -> None:
        make_tiny_assets(directory / "tiny", num_samples=400)
        self._assets, self._directory = shallow_assets(directory / "tiny"), directory
        self.reference = reference_of(ON_TWO_RANKS, self._assets, directory / "whole")

    def undisturbed(self) -> Outcome:
        """The command as it stands."""
        return self._goes_on(lambda cable, runs: None)

    def slow(self) -> Outcome:
        """As between cities."""

        def slow_down(cable: Cable, _: list[Launch]) -> None:
            cable.delay_s = 0.05

        return self._goes_on(slow_down)

    def lossy(self) -> Outcome:
        """As over a bad link."""

        def lose(cable: Cable, _: list[Launch]) -> None:
            cable.loss = 0.01

        return self._goes_on(lose)

    def cut_for_a_moment(self) -> Outcome:
        """In the middle of training."""

        def cut(cable: Cable, runs: list[Launch]) -> None:
            cable.is_cut = True
            runs[0].release(HOLD)
            time.sleep(5)
            assert runs[0].step == HOLD  # the next step waits
            cable.is_cut = False

        return self._goes_on(cut)

    def unplugged_for_a_moment(self) -> Outcome:
        """The machines know that their link is down."""

        def unplug(cable: Cable, runs: list[Launch]) -> None:
            cable.unplug()
            runs[0].release(HOLD)
            time.sleep(5)
            cable.unplug(is_out=False)

        return self._goes_on(unplug)

    def cut_in_training(self) -> Outcome:
        """Nothing arrives any more."""
        return self._ends(_at_the_hold, _cut)

    def unplugged_in_training(self) -> Outcome:
        """The machines know that their link is down."""
        return self._ends(_at_the_hold, lambda cable, runs: cable.unplug())

    def cut_in_the_search(self) -> Outcome:
        """Before the first step."""
        return self._ends(_in_the_search, _cut)

    def cut_in_a_save(self) -> Outcome:
        """A checkpoint is being written."""
        return self._ends(_in_a_save, _cut)

    def rank_killed(self) -> Outcome:
        """SIGKILL to the rank on the second machine."""
        return self._ends(_at_the_hold, lambda _, runs: runs[1].ranks()[-1].send(signal.SIGKILL))

    def side_killed(self) -> Outcome:
        """SIGKILL to launcher and rank on the first machine, which has torchrun's store."""
        return self._ends(_at_the_hold, lambda _, runs: runs[0].kill())

    def _goes_on(self, disturb: Callable[[Cable, list[Launch]], object]) -> Outcome:
        with self._run() as (cable, runs):
            runs[0].wait_for_step(HOLD)
            disturb(cable, runs)
            if runs[0].is_held(HOLD):
                runs[0].release(HOLD)
            statuses = [run.wait() for run in runs]
        return Outcome(None, statuses, _said(runs), self.reference.difference(runs[0]))

    def _ends(
        self,
        wait: Callable[[list[Launch]], object],
        disturb: Callable[[Cable, list[Launch]], object],
    ) -> Outcome:
        directory = self._new_directory()
        with self._run(directory) as (cable, runs):
            wait(runs)
            disturb(cable, runs)
            started = time.monotonic()
            if runs[0].is_held(HOLD):
                runs[0].release(HOLD)
            seconds, statuses = _ends_of(runs, started)
        with self._run(directory, holds=()) as (_, again):
            for run in again:
                assert run.wait() == 0, run.output[-3000:]
        first = next((run for run in again if "Resuming from" in run.output), again[0])  # has rank 0
        return Outcome(seconds, statuses, _said(runs), self.reference.difference(first))

    def _new_directory(self) -> Path:
        return self._directory / f"run_{len(list(self._directory.iterdir()))}"

    @contextmanager
    def _run(
        self, directory: Path | None = None, holds: Sequence[int] = (HOLD,)
    ) -> Iterator[tuple[Cable, list[Launch]]]:
        directory = directory or self._new_directory()
        directory.mkdir(exist_ok=True)
        with two_machines(directory) as cable, ExitStack() as stack:
            runs = [
                launched(_EACH, self._assets, directory, options=_LAUNCHER, enter=enter, holds=holds)
                for enter in cable.enter
            ]
            yield cable, [stack.enter_context(run) for run in runs]


SCENARIOS = [
    Scenarios.undisturbed,
    Scenarios.slow,
    Scenarios.lossy,
    Scenarios.cut_for_a_moment,
    Scenarios.unplugged_for_a_moment,
    Scenarios.cut_in_training,
    Scenarios.unplugged_in_training,
    Scenarios.cut_in_the_search,
    Scenarios.cut_in_a_save,
    Scenarios.rank_killed,
    Scenarios.side_killed,
]


def _cut(cable: Cable, _: list[Launch]) -> None:
    cable.is_cut = True


def _at_the_hold(runs: list[Launch]) -> None:
    runs[0].wait_for_step(HOLD)


def _in_the_search(runs: list[Launch]) -> None:
    runs[0].wait_until(lambda: any("searching batch size: 1 probes" in run.output for run in runs))


def _in_a_save(runs: list[Launch]) -> None:
    runs[0].wait_until(lambda: any(runs[0].out.glob("unfinished_step_*")))


def _ends_of(runs: list[Launch], started: float) -> tuple[list[float], list[int]]:
    """Seconds until the last process of each run has ended, and the launchers' statuses."""
    seconds: dict[int, float] = {}
    while len(seconds) < len(runs):
        for number, run in enumerate(runs):
            if number not in seconds and not run.processes:
                seconds[number] = time.monotonic() - started
        assert time.monotonic() - started < LONGEST_WAIT_S, "".join(run.output[-2000:] for run in runs)
        time.sleep(0.05)
    return [seconds[number] for number in range(len(runs))], [run.wait() for run in runs]


def _said(runs: list[Launch]) -> list[str]:
    return [(re.findall(rf"{_EACH.recipe}: (.*)", run.output) or [""])[-1] for run in runs]
