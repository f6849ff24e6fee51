"""Does a run that is killed, or asked to end, give the same results after it is resumed?

    OMP_NUM_THREADS=1 python -m benchmarks.crashes

Kills forty launches with all their ranks at random moments, half of them while they write a checkpoint. Some are killed
again after they were resumed. Sends signals to fifteen more. Each is resumed by the same command and compared with the
uninterrupted run: every figure of every later step, and the last weights, bit for bit. Prints tables and writes them to
``results/crashes_cpu.md``.
"""

import tempfile
import time
from pathlib import Path

from benchmarks.provenance import provenance
from benchmarks.tables import publish
from tests.support.crash_runs import (
    CASES,
    SETUPS,
    SIGINT_CASES,
    SIGTERM_CASES,
    SIGUSR1_CASES,
    end_by_signal,
    markdown,
    reference_of,
    signals_markdown,
    strike,
)
from tests.support.recipe_runs import shallow_assets
from torchtune_adaptive.tiny import make_tiny_assets

RESULTS = Path(__file__).parent / "results" / "crashes_cpu.md"
COMMAND = "OMP_NUM_THREADS=1 python -m benchmarks.crashes"


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
            print(markdown(struck).splitlines()[-3], flush=True)
        for case in [*SIGTERM_CASES, *SIGUSR1_CASES, *SIGINT_CASES]:
            place = Path(directory) / f"signal_{case.number}"
            ended.append(end_by_signal(case, references[case.setup.name], assets, place))
            print(signals_markdown(ended).splitlines()[-1], flush=True)
    publish(
        RESULTS,
        "Runs that are killed or asked to end, CPU",
        provenance(COMMAND, seconds=time.monotonic() - started),
        "A tiny model with dropout; batches that grow by measured gradient noise, micro-batches left over at an epoch's"
        " end, or a token budget; checkpoints every two or three steps and after epochs, in the step or in the"
        " background. `kill -9` of launcher and ranks at the moment that is named; the same command is then launched"
        " again with `resume_from_checkpoint=auto`. Equal: every later loss, rate, size, gradient norm and padding, and"
        " the last weights, are those of the uninterrupted run, bit for bit.",
        markdown(struck),
        "Signals. Status 75 is that of a run that was asked to end; torchrun makes 1 of it. Seconds are from the signal"
        " to the end of the last process.",
        signals_markdown(ended),
    )


if __name__ == "__main__":
    main()
