"""What becomes of a run of two nodes under Slurm: one scenario each."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from tests.support.crash_runs import ON_TWO_RANKS, Reference, finished, last_weights, reference_of
from tests.support.recipe_runs import shallow_assets
from tests.support.slurm import Job, said_by
from torchtune_adaptive.tiny import make_tiny_assets

HOLD = 5  # the run waits after this step, until what the scenario does has happened
_SMALL = "--cpus-per-task=1"
ONE_NODE, TWO_NODES = [_SMALL, "--gpus-per-node=2"], [_SMALL, "--nodes=2", "--gpus-per-node=1"]
_SETUP = ON_TWO_RANKS
_SIGNALLED = "Received 15 death signal"  # says torchrun


@dataclass(frozen=True)
class Outcome:
    """What became of a job.

    Attributes:
        states: the job's, one after the other; the last with its exit status and signal.
        resumed_from: the checkpoint, or "the beginning".
        done: the last optimizer step before; 0 if the run was not disturbed.
        difference: from the undisturbed run; "" if there is none.
    """

    scenario: str
    command: str
    states: str
    resumed_from: str
    done: int
    difference: str

    @property
    def repeated_steps(self) -> int:
        """Optimizer steps that were done twice."""
        return self.done - int(self.resumed_from.rpartition("_")[2]) if self.done else 0

    @property
    def progress(self) -> list[str]:
        """Cells of the table."""
        return [str(self.done), self.resumed_from, str(self.repeated_steps)] if self.done else ["", "", ""]


class Scenarios:
    """Jobs on a running cluster.

    Args:
        directory: for all files.
    """

    def __init__(self, directory: Path) -> None:
        make_tiny_assets(directory / "tiny", num_samples=400)
        self._assets, self._directory = shallow_assets(directory / "tiny"), directory
        self.reference = reference_of(_SETUP, self._assets, directory / "whole")

    def one_node(self) -> Outcome:
        """Not disturbed."""
        return self._at_the_end(self._job(ONE_NODE), "one node", "sbatch train.sbatch ...")

    def two_nodes(self) -> Outcome:
        """Not disturbed; the figures are those of two ranks on one node."""
        return self._at_the_end(self._job(TWO_NODES), "two nodes", "sbatch --nodes=2 train.sbatch ...")

    def requeued(self) -> Outcome:
        """As a job with a higher priority does it."""
        return self._requeued(ONE_NODE, "one node, requeued")

    def requeued_on_two_nodes(self) -> Outcome:
        """Both launchers get the signal, and all ranks save."""
        return self._requeued(TWO_NODES, "two nodes, requeued")

    def signal_before_the_limit(self) -> Outcome:
        """The script passes the signal on, and puts the job back into the queue."""
        job = self._held(TWO_NODES)
        job.update("timelimit=2")  # minutes; it waits in its step until the signal has come
        job.wait_for_words(_SIGNALLED)
        job.update("timelimit=UNLIMITED")
        job.release(HOLD)
        job.wait_for_restart()
        return self._at_the_end(job, "two nodes, 120 s before the time limit", "#SBATCH --signal=B:TERM@120")

    def step_too_long(self) -> Outcome:
        """torchrun kills ranks that do not save in time; the job goes back into the queue."""
        with mock.patch.dict("os.environ", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="5"):  # in place of 100
            job = self._held(ONE_NODE)
        job.update("timelimit=2")
        job.wait_for_words(_SIGNALLED)
        job.update("timelimit=UNLIMITED")
        job.wait_for_restart()
        return self._at_the_end(job, "one node, time limit near in too long a step", "#SBATCH --signal=B:TERM@120")

    def node_down(self) -> Outcome:
        """Slurm puts the job back into the queue until both nodes are there again."""
        job = self._held(TWO_NODES)
        said_by("scontrol", "update", "nodename=n2", "state=down", "reason=test")
        job.wait_for("PENDING")
        said_by("scontrol", "update", "nodename=n2", "state=resume")
        job.wait_for_restart()
        return self._at_the_end(job, "two nodes, one set down", "scontrol update nodename=n2 state=down")

    def cancelled(self) -> Outcome:
        """The run saves, and the job does not come back; a new job continues."""
        job = self._held(ONE_NODE)
        said_by("scancel", job.number)
        job.wait_for_words(_SIGNALLED)
        job.release(HOLD)
        job.wait_for("CANCELLED")
        return self._continued(job, "one node, cancelled", "scancel; sbatch again")

    def out_of_memory(self) -> Outcome:
        """A rank of one node runs out of memory in the middle, and both run the step again."""
        plan = {"kind": "full", "strike": "out_of_memory", "faults": [[HOLD, 0, 1, 40]]}
        with mock.patch.dict("os.environ", FAULTY_RECIPE=json.dumps(plan)):
            alone = finished(_SETUP, self._assets, self._new_directory(), recipe="faulty_recipe")
            job = self._job(TWO_NODES, recipe="faulty_recipe")
            job.wait_for("COMPLETED")
        assert job.steps[-1]["oom_retries"] == 1, job.output
        reference = Reference(alone.steps, last_weights(alone.out, _SETUP.epochs), _SETUP.epochs)
        return self._at_the_end(job, "two nodes, a rank out of memory", "a fault in step 6", reference)

    def _requeued(self, options: list[str], scenario: str) -> Outcome:
        job = self._held(options)
        said_by("scontrol", "requeue", job.number)
        job.wait_for_words(_SIGNALLED)
        job.release(HOLD)
        job.wait_for_restart()
        return self._at_the_end(job, scenario, "scontrol requeue")

    def _new_directory(self) -> Path:
        return self._directory / f"run_{len(list(self._directory.iterdir()))}"

    def _job(self, options: list[str], **others: Any) -> Job:
        return Job(_SETUP, self._assets, self._new_directory(), options=options, **others)

    def _held(self, options: list[str]) -> Job:
        job = self._job(options, holds=[HOLD])
        job.wait_for_step(HOLD)
        return job

    def _continued(self, job: Job, scenario: str, command: str) -> Outcome:
        """The outcome of a new job in the place of one that has ended."""
        state, done = job.state, job.step
        again = Job(_SETUP, self._assets, job.out.parent, options=ONE_NODE)
        outcome = self._at_the_end(again, scenario, command)
        return replace(outcome, states=f"{state}, then {outcome.states}", done=done)

    def _at_the_end(self, job: Job, scenario: str, command: str, reference: Reference | None = None) -> Outcome:
        job.wait_for("COMPLETED")
        fields = job.fields
        states = "REQUEUED, then " * int(fields["Restarts"]) + f"COMPLETED, {fields['ExitCode']}"
        difference = (reference or self.reference).difference(job)
        return Outcome(scenario, command, states, job.resumed_from, job.done_before, difference)


SCENARIOS = [
    Scenarios.one_node,
    Scenarios.two_nodes,
    Scenarios.requeued,
    Scenarios.requeued_on_two_nodes,
    Scenarios.signal_before_the_limit,
    Scenarios.step_too_long,
    Scenarios.node_down,
    Scenarios.cancelled,
    Scenarios.out_of_memory,
]
