"""Slurm with two nodes on this machine, and runs by ``examples/slurm/train.sbatch`` on it.

Each node has two pretended GPUs, so that the script runs as it stands; the ranks train on the processor.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.support.checkout import REPOSITORY
from tests.support.crash_runs import LONGEST_WAIT_S, Run, Setup

SCRIPT = REPOSITORY / "examples" / "slurm" / "train.sbatch"
NODES = ("n1", "n2")
_PROGRAMS = {"munged": "munge", "slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "sbatch": "slurm-wlm"}
_POLL_S = 0.1
_CONFIG = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=0
SlurmctldPort={port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SelectType=select/cons_tres
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
MinJobAge=86400
GresTypes=gpu
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={port_1} CPUs={cpus} Gres=gpu:2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={port_2} CPUs={cpus} Gres=gpu:2
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""
_PRETENDED_GPUS = "NodeName=n[1-2] Name=gpu File=/dev/tty[0-1]\n"


def missing() -> str:
    """What this machine lacks for Slurm, in one sentence; "" if nothing."""
    path = os.environ["PATH"] + ":/usr/sbin"
    packages = {package for program, package in _PROGRAMS.items() if not shutil.which(program, path=path)}
    if packages:
        return f"the packages {' and '.join(sorted(packages))} are not installed"
    return "" if os.geteuid() == 0 else "only root may start Slurm's daemons"


@contextmanager
def cluster(folder: Path) -> Iterator[None]:
    """Slurm with the ``NODES``, idle; its files are in ``folder``. Jobs that are left are killed at the end."""
    folder.mkdir(mode=0o755)
    (folder / "state").mkdir()
    port, port_1, port_2 = _free_ports(3)
    text = _CONFIG.format(
        host=socket.gethostname().partition(".")[0], user="root", folder=folder, cpus=os.cpu_count(),
        port=port, port_1=port_1, port_2=port_2,
    )  # fmt: skip
    (folder / "slurm.conf").write_text(text.lstrip())
    (folder / "gres.conf").write_text(_PRETENDED_GPUS)
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    before = os.environ.copy()
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{before['PATH']}:/usr/sbin"  # the script calls `tune`
    with ExitStack() as stack:
        stack.callback(os.environ.update, PATH=before["PATH"])
        stack.callback(os.environ.pop, "SLURM_CONF")
        places = {name: f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")}
        stack.enter_context(
            _daemon(folder, "munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *places.values())
        )
        _wait_until((folder / "munge.socket").exists, lambda: "munged does not start")
        stack.enter_context(_daemon(folder, "slurmctld", "-D"))
        for node in NODES:
            stack.enter_context(_daemon(folder, "slurmd", "-D", "-N", node))
        stack.callback(_end_jobs)
        _wait_until(
            lambda: [state_of_node(node) for node in NODES] == ["IDLE", "IDLE"], lambda: "the nodes are not idle"
        )
        yield


def said_by(*command: str) -> str:
    """What a command of Slurm prints."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def state_of_node(node: str) -> str:
    """For example IDLE."""
    done = subprocess.run(["sinfo", "-h", "-n", node, "-o", "%T"], capture_output=True, text=True, check=False)
    return done.stdout.strip().upper()


class Job(Run):
    """A ``Run`` by ``train.sbatch``.

    Args:
        options: of sbatch.
        others: of ``Run``.
    """

    def __init__(
        self, setup: Setup, assets: Path, directory: Path, *, options: Sequence[str] = (), **others: Any
    ) -> None:
        super().__init__(setup, assets, directory, **others)
        command = ["sbatch", "--parsable", f"--output={self._output_path}", *options, str(SCRIPT), *self._arguments]
        done = subprocess.run(command, cwd=directory, env=self._environment, capture_output=True, text=True, check=True)
        self.number = done.stdout.strip()

    @property
    def fields(self) -> dict[str, str]:
        """What Slurm knows of the job: JobState, ExitCode, Restarts, ..."""
        words = said_by("scontrol", "show", "job", "--oneliner", self.number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    @property
    def state(self) -> str:
        """For example COMPLETED."""
        return self.fields["JobState"]

    @property
    def output(self) -> str:
        """What all starts of the job have printed so far."""
        return self._output_path.read_text(errors="replace") if self._output_path.exists() else ""

    def update(self, change: str) -> None:
        """Change a field of the job, for example "timelimit=2" (minutes)."""
        said_by("scontrol", "update", f"jobid={self.number}", change)

    def wait_for(self, state: str) -> None:
        """Wait until the job is in ``state``."""
        self._wait_until(lambda: self.state == state)

    def wait_for_step(self, step: int) -> None:
        """Wait until ``step`` is logged."""
        self._wait_until(lambda: self.step >= step)

    def wait_for_words(self, words: str) -> None:
        """Wait until ``words`` are printed."""
        self._wait_until(lambda: words in self.output)

    def wait_for_restart(self) -> None:
        """Wait until the job, which was put back into the queue, trains again: ``steps`` are then those since."""
        self.wait_for("PENDING")
        time.sleep(2)  # Slurm counts in seconds, and refuses a start in the second in which the job was ended
        self.update("starttime=now")  # else Slurm waits for two minutes
        following = self._steps_path.with_name("steps_1.jsonl")
        self._wait_until(following.exists)
        self._steps_path = following

    def _wait_until(self, condition: Callable[[], object]) -> None:
        def is_so_or_failed() -> bool:
            return bool(condition()) or self.state == "FAILED"

        _wait_until(is_so_or_failed, lambda: f"{self.fields}\n{self.output[-3000:]}")
        assert condition(), self.output[-3000:]


def _end_jobs() -> None:
    subprocess.run(["scancel", "--user=root", "--signal=KILL", "--full"], check=False)
    subprocess.run(["scancel", "--user=root"], check=False)
    _wait_until(lambda: not said_by("squeue", "-h"), lambda: "jobs do not end")


@contextmanager
def _daemon(folder: Path, *command: str) -> Iterator[None]:
    name = "_".join([command[0], *(word for word in command if word in NODES)])
    with (folder / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield
    finally:
        process.terminate()
        process.wait(timeout=LONGEST_WAIT_S)


def _wait_until(condition: Callable[[], object], otherwise: Callable[[], str]) -> None:
    deadline = time.monotonic() + LONGEST_WAIT_S
    while not condition():
        assert time.monotonic() < deadline, otherwise()
        time.sleep(_POLL_S)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in servers]
