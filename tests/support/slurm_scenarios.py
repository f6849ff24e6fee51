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
        difference: from the undisturbed run; "" if there is none.
    """

    states: str
    resumed_from: str
    difference: str


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
        return self._at_the_end(self._job(ONE_NODE))

    def two_nodes(self) -> Outcome:
        """Not disturbed; the figures are those of two ranks on one node."""
        return self._at_the_end(self._job(TWO_NODES))

    def requeued(self) -> Outcome:
        """As a job with a higher priority does it."""
        return self._requeued(ONE_NODE)

    def requeued_on_two_nodes(self) -> Outcome:
        """Both launchers get the signal, and all ranks save."""
        return self._requeued(TWO_NODES)

    def signal_before_the_limit(self) -> Outcome:
        """The script passes the signal on, and puts the job back into the queue."""
        job = self._held(TWO_NODES)
        job.update("timelimit=2")  # minutes; it waits in its step until the signal has come
        job.wait_for_words(_SIGNALLED)
        job.update("timelimit=UNLIMITED")
        job.release(HOLD)
        job.wait_for_restart()
        return self._at_the_end(job)

    def step_too_long(self) -> Outcome:
        """torchrun kills ranks that do not save in time; the job goes back into the queue."""
        with mock.patch.dict("os.environ", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="5"):  # in place of 100
            job = self._held(ONE_NODE)
        job.update("timelimit=2")
        job.wait_for_words(_SIGNALLED)
        job.update("timelimit=UNLIMITED")
        job.wait_for_restart()
        return self._at_the_end(job)

    def node_down(self) -> Outcome:
        """Slurm puts the job back into the queue until both nodes are there again."""
        job = self._held(TWO_NODES)
        said_by("scontrol", "update", "nodename=n2", "state=down", "reason=test")
        job.wait_for("PENDING")
        said_by("scontrol", "update", "nodename=n2", "state=resume")
        job.wait_for_restart()
        return self._at_the_end(job)

    def cancelled(self) -> Outcome:
        """The run saves, and the job does not come back; a new job continues."""
        job = self._held(ONE_NODE)
        said_by("scancel", job.number)
        job.wait_for_words(_SIGNALLED)
        job.release(HOLD)
        job.wait_for("CANCELLED")
        return self._continued(job)

    def out_of_memory(self) -> Outcome:
        """A rank of one node runs out of memory in the middle, and both run the step again."""
        plan = {"kind": "full", "faults": [[HOLD, 0, 1, 40]]}
        with mock.patch.dict("os.environ", FAULTY_RECIPE=json.dumps(plan)):
            alone = finished(_SETUP, self._assets, self._new_directory(), recipe="faulty_recipe")
            job = self._job(TWO_NODES, recipe="faulty_recipe")
            job.wait_for("COMPLETED")
        assert job.steps[-1]["oom_retries"] == 1, job.output
        reference = Reference(alone.steps, last_weights(alone.out, _SETUP.epochs), _SETUP.epochs)
        return self._at_the_end(job, reference)

    def _requeued(self, options: list[str]) -> Outcome:
        job = self._held(options)
        said_by("scontrol", "requeue", job.number)
        job.wait_for_words(_SIGNALLED)
        job.release(HOLD)
        job.wait_for_restart()
        return self._at_the_end(job)

    def _new_directory(self) -> Path:
        return self._directory / f"run_{len(list(self._directory.iterdir()))}"

    def _job(self, options: list[str], **others: Any) -> Job:
        return Job(_SETUP, self._assets, self._new_directory(), options=options, **others)

    def _held(self, options: list[str]) -> Job:
        job = self._job(options, holds=[HOLD])
        job.wait_for_step(HOLD)
        return job

    def _continued(self, job: Job) -> Outcome:
        """The outcome of a new job in the place of one that has ended."""
        state = job.state
        outcome = self._at_the_end(Job(_SETUP, self._assets, job.out.parent, options=ONE_NODE))
        return replace(outcome, states=f"{state}, then {outcome.states}")

    def _at_the_end(self, job: Job, reference: Reference | None = None) -> Outcome:
        job.wait_for("COMPLETED")
        fields = job.fields
        states = "REQUEUED, then " * int(fields["Restarts"]) + f"COMPLETED, {fields['ExitCode']}"
        return Outcome(states, job.resumed_from, (reference or self.reference).difference(job))


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
