"""Does a run that is killed, or asked to end, give the same results after it is resumed?

    OMP_NUM_THREADS=1 python -m benchmarks.crashes

Kills forty launches with all their ranks at random moments, half of them while they write a checkpoint. Some are killed
again after they were resumed. Sends signals to fifteen more. Each is resumed by the same command and compared with the
uninterrupted run: every figure of every later step, and the last weights, bit for bit. Prints tables and writes them to
``results/crashes_cpu.md``.
"""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.provenance import provenance
from benchmarks.tables import publish, table
from tests.support.crash_runs import (
    CASES,
    SETUPS,
    SIGINT_CASES,
    SIGTERM_CASES,
    SIGUSR1_CASES,
    SignalEnd,
    Struck,
    end_by_signal,
    reference_of,
    strike,
)
from tests.support.recipe_runs import shallow_assets
from torchtune_adaptive.tiny import make_tiny_assets

RESULTS = Path(__file__).parent / "results" / "crashes_cpu.md"
COMMAND = "OMP_NUM_THREADS=1 python -m benchmarks.crashes"


def struck_rows(struck: Sequence[Struck]) -> list[list[str]]:
    """The rows of the table of killed runs."""
    return [
        [
            str(one.case.number),
            one.case.setup.name,
            ", then ".join(one.moments),
            ", then ".join(one.resumed_from),
            "; ".join(one.problems) or "yes",
            f"{one.seconds:.0f}",
        ]
        for one in struck
    ]


def ended_rows(ended: Sequence[SignalEnd]) -> list[list[str]]:
    """The rows of the table of runs that were asked to end."""
    return [
        [
            one.case.signal.name,
            one.case.to,
            one.case.setup.name,
            str(one.status),
            f"{one.seconds:.1f}",
            str(one.step),
            one.resumed_from,
            one.difference or "yes",
        ]
        for one in ended
    ]


def main() -> None:
    """Kill or signal all runs, and write the tables."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        tiny_dir = Path(directory) / "tiny"
        make_tiny_assets(tiny_dir, num_samples=400)
        assets = shallow_assets(tiny_dir)
        references = {}
        for number, setup in enumerate(SETUPS):
            references[setup.name] = reference_of(setup, assets, Path(directory) / f"whole_{number}")
        struck, ended = [], []
        for case in CASES:
            struck.append(strike(case, references[case.setup.name], assets, Path(directory) / f"case_{case.number}"))
            print(struck_rows(struck)[-1], flush=True)
        for case in [*SIGTERM_CASES, *SIGUSR1_CASES, *SIGINT_CASES]:
            place = Path(directory) / f"signal_{case.number}"
            ended.append(end_by_signal(case, references[case.setup.name], assets, place))
            print(ended_rows(ended)[-1], flush=True)
    writing = sum(any(not moment.startswith("in step") for moment in one.moments) for one in struck)
    equal = sum(not one.problems for one in struck)
    publish(
        RESULTS,
        "Runs that are killed or asked to end, CPU",
        provenance(COMMAND, seconds=time.monotonic() - started),
        "A tiny model with dropout; batches that grow by measured gradient noise, micro-batches left over at an epoch's"
        " end, or a token budget; checkpoints every two or three steps and after epochs, in the step or in the"
        " background. `kill -9` of launcher and ranks at the moment that is named; the same command is then launched"
        " again with `resume_from_checkpoint=auto`. Equal: every later loss, rate, size, gradient norm and padding, and"
        " the last weights, are those of the uninterrupted run, bit for bit.",
        table(["Case", "Run", "Struck", "Resumed from", "Equal", "Seconds"], struck_rows(struck)),
        f"{equal} of {len(struck)} resumed as if they had not been struck; {writing} were struck in writing.",
        "Signals. Status 75 is that of a run that was asked to end; torchrun makes 1 of it. Seconds are from the signal"
        " to the end of the last process.",
        table(
            ["Signal", "To", "Run", "Status", "Seconds", "Last step", "Resumed from", "Equal"],
            ended_rows(ended),
        ),
    )


if __name__ == "__main__":
    main()
