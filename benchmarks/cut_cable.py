"""What becomes of training on two machines when the cable between them is slow, loses data, or is cut.

    OMP_NUM_THREADS=1 python -m benchmarks.cut_cable

Two networks of Linux with a cable between them act as two machines; the command is that of ``docs/checkpoints.md``.
Runs that go on are compared with one on one machine: every figure of every step, and the last weights, bit for bit.
Runs that end are started again by the same command and compared too. Prints a table and writes it to
``results/cut_cable_cpu.md``. Needs root.
"""

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.provenance import provenance
from benchmarks.tables import publish, table
from tests.support.cable_scenarios import SCENARIOS, Outcome, Scenarios
from tests.support.two_machines import missing

RESULTS = Path(__file__).parent / "results" / "cut_cable_cpu.md"
COMMAND = "OMP_NUM_THREADS=1 python -m benchmarks.cut_cable"


def lines_of(outcomes: Sequence[Outcome]) -> list[str]:
    """A table of the outcomes."""
    header = ["Scenario", "Until node 0, node 1 ended", "Status", "Node 0 says", "Node 1 says"]
    header += ["Started again from", "Equal"]
    rows = []
    for one in outcomes:
        seconds = ", ".join(f"{each:.0f} s" for each in one.seconds) if one.seconds else "goes on"
        statuses = ", ".join(map(str, one.statuses))
        rows.append([one.scenario, seconds, statuses, *one.sentences, one.resumed_from, one.difference or "yes"])
    return table(header, rows)


def main() -> None:
    """Run all scenarios, and write the table."""
    if missing():
        sys.exit(f"This machine cannot be divided in two: {missing()}.")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        scenarios, outcomes = Scenarios(Path(name)), []
        for scenario in SCENARIOS:
            outcomes.append(scenario(scenarios))
            print(lines_of(outcomes)[-1], flush=True)
    publish(
        RESULTS,
        "A cable that is cut, CPU",
        provenance(COMMAND, seconds=time.monotonic() - started),
        "Two networks of Linux, each with a host name of its own, joined by a cable whose frames a program carries, or"
        " loses: as two machines with a switch between them. One rank on each, gloo, and the command of"
        " [several nodes](../../docs/checkpoints.md#several-nodes). The run is that of [killed runs](crashes_cpu.md),"
        " with a checkpoint every two steps; most scenarios happen after step 5. Equal: every figure of the log, and"
        " the last weights, are those of two ranks on one machine, bit for bit; of a run that has ended, after it was"
        " started again by the same command. Status -9: a rank has killed its launcher, which would wait for torchrun's"
        " store.",
        lines_of(outcomes),
    )


if __name__ == "__main__":
    main()
