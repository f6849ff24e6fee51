"""What becomes of a job of Slurm: ended, requeued, out of time, without its node, cancelled, out of memory.

    OMP_NUM_THREADS=1 python -m benchmarks.slurm

Starts Slurm with two nodes on this machine, and submits ``examples/slurm/train.sbatch`` as it stands. Each run is
compared with one that was started by ``tune run`` and not disturbed: every figure of every later step, and the last
weights, bit for bit. Prints a table and writes it to ``results/slurm_cpu.md``. Needs root, and Debian's packages
slurm-wlm and munge, or their like.
"""

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.provenance import provenance
from benchmarks.tables import publish, table
from tests.support.slurm import cluster, missing, said_by
from tests.support.slurm_scenarios import SCENARIOS, Outcome, Scenarios

RESULTS = Path(__file__).parent / "results" / "slurm_cpu.md"
COMMAND = "OMP_NUM_THREADS=1 python -m benchmarks.slurm"


def lines_of(outcomes: Sequence[Outcome]) -> list[str]:
    """A table of the outcomes."""
    header = [
        "Scenario",
        "Command",
        "State, exit status",
        "Last step before",
        "Resumed from",
        "Steps done twice",
        "Equal",
    ]
    rows = [[one.scenario, f"`{one.command}`", one.states, *one.progress, one.difference or "yes"] for one in outcomes]
    return table(header, rows)


def main() -> None:
    """Run all scenarios, and write the table."""
    if missing():
        sys.exit(f"Slurm cannot be started: {missing()}.")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as name, cluster(Path(name) / "cluster"):
        scenarios, outcomes = Scenarios(Path(name)), []
        for scenario in SCENARIOS:
            outcomes.append(scenario(scenarios))
            print(lines_of(outcomes)[-1], flush=True)
        version = said_by("sbatch", "--version").strip()
    publish(
        RESULTS,
        "Jobs of Slurm, CPU",
        provenance(COMMAND, seconds=time.monotonic() - started),
        f"{version}, two nodes on one machine, two ranks on one node or one on each. The run is that of"
        " [killed runs](crashes_cpu.md): a tiny model with dropout whose batch grows by measured gradient noise, with a"
        " checkpoint every two steps. It waits after step 5 until the scenario has happened. Equal: every later figure"
        " of the log, and the last weights, are those of a run by `tune run` that was not disturbed, bit for bit; for"
        " the one out of memory, of a run with the same fault.",
        lines_of(outcomes),
    )


if __name__ == "__main__":
    main()
